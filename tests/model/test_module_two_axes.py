"""Layers with ``weight_group`` and ``activations="hidden"`` against the same layers on one process: a whole GPT, every
gradient, on meshes of two axes."""

import contextlib
import functools
import random

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.dtypes import default_dtype
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.core

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class Block(nn.Module):
    def __init__(self, hidden, norm, attention, mlp, dropout, options):
        super().__init__()
        full = {"hidden_size": hidden} if options.get("activations") == "hidden" else {}
        self.dropout = tp_ext.Dropout(dropout, **options, **full)
        self.norm1 = norm(hidden, **options)
        self.attention = tp_ext.ParallelAttention(hidden, **attention, **options)
        self.norm2 = norm(hidden, **options)
        self.mlp = tp_ext.ParallelMLP(hidden, 14, **mlp, **options)

    def forward(self, x, batch):
        given = {"batch_size": batch} if x.dim() == 2 else {}
        h, x = self.norm2(self.dropout(self.attention(self.norm1(x), **given)), x)
        return self.dropout(self.mlp(h), x)


class GPT(nn.Module):
    def __init__(
        self,
        hidden=12,
        norm=tp_ext.RMSNorm,
        tied=False,
        kv_heads=2,
        mlp=None,
        attention=None,
        pad=None,
        dropout=0.0,
        blocks=2,
        **options,
    ):
        super().__init__()
        given = attention or {"rope": 100.0, "qk_norm": True}
        attention = {"num_heads": 4, "num_kv_heads": kv_heads, "head_dim": 4, "dropout": dropout, **given}
        mlp = mlp or {"activation": "swiglu"}
        vocabulary = {"pad_to_multiple_of": pad, **options}
        self.embedding = tp_ext.VocabParallelEmbedding(31, hidden, padding_idx=3, **vocabulary)
        self.blocks = nn.ModuleList(Block(hidden, norm, attention, mlp, dropout, options) for _ in range(blocks))
        self.norm = norm(hidden, **options)
        self.head = tp_ext.VocabParallelLMHead(hidden, 31, bias=not tied, **vocabulary)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, len(ids))
        return self.norm(x)

    def loss(self, ids, target):
        return self.head.loss(self(ids), target.reshape(self.loss_shape(ids)), reduction="sum")

    def loss_shape(self, ids):
        return (-1,) if self.head.sequence_parallel else ids.shape


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(31, (2, 6, 4), generator=generator)


def _model(mesh, seed=5, **options):
    with default_dtype(torch.float64):
        tp_ext.manual_seed(seed)
        if mesh is None:
            return GPT(**options, group=None)
        return GPT(**options, group=mesh["y"], weight_group=mesh["x"])


def _own_rows(tensor, mesh):
    return tensor.tensor_split(mesh["x"].size())[mesh["x"].get_local_rank()]


def _masks(model, mesh, ids, names):
    """Dropout masks by name, those of the rows of this rank."""
    if not names:
        return contextlib.nullcontext()
    tp_ext.name_modules(model)
    rows = [] if mesh is None else ids.tensor_split(mesh["x"].size())[: mesh["x"].get_local_rank()]
    return tp_ext.random.at(0, 0, batch_offset=sum(map(len, rows)), seq=ids.shape[1])


def _like_one_process(group, x, y, layer_options, **shared):
    mesh = mesh_of(x, y, names=("x", "y"))
    dense, model = _model(None, **shared | {"pad": None}), _model(mesh, **shared, **layer_options)
    ids, target = batch()
    names = shared.get("dropout", 0.0) > 0
    with _masks(dense, None, ids, names):
        want = dense.loss(ids, target)
    want.backward()
    with _masks(model, mesh, ids, names):
        loss = model.loss(_own_rows(ids, mesh), _own_rows(target, mesh))
    loss.backward()
    total = tp_ext.reduce_from_region(loss.detach(), mesh["x"])
    torch.testing.assert_close(total, want.detach(), **CLOSE)
    layouts = dict(tp_ext.layouts(model))
    for name, full in dense.named_parameters():
        local = model.get_parameter(name)
        layout = layouts[name]
        assert torch.equal(local, layout.shard(full.detach())), name
        torch.testing.assert_close(
            local.grad, layout.shard(full.grad), msg=lambda text, n=name: f"{n}: {text}", **CLOSE
        )
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    for _ in range(2):  # with prefetch, now that the order of the weights is known
        model.zero_grad()
        with _masks(model, mesh, ids, names):
            model.loss(_own_rows(ids, mesh), _own_rows(target, mesh)).backward()
        for name, p in model.named_parameters():
            assert torch.equal(p.grad, first[name]), name


HIDDEN, SP, REPLICATED = {"activations": "hidden"}, {"sequence_parallel": True}, {}
LAYER = {"norm": tp_ext.LayerNorm, "mlp": {"activation": "gelu"}}


@pytest.mark.parametrize(
    ("x", "y", "options", "shared"),
    [
        (1, 1, HIDDEN, {}),
        (2, 1, HIDDEN, {}),
        (1, 2, HIDDEN, LAYER),
        (2, 2, HIDDEN, {"hidden": 13, "dropout": 0.3}),
        (2, 2, HIDDEN, {"attention": {"reshard_after_forward": False}}),
        (2, 2, HIDDEN, {"hidden": 13, "kv_heads": 1, **LAYER}),
        (2, 2, SP, {"kv_heads": 1, "mlp": {"reshard_after_forward": False}}),
        (2, 2, REPLICATED, {"tied": True}),
        (1, 3, HIDDEN, {"hidden": 13, "kv_heads": 1, "tied": True}),
        (3, 1, REPLICATED, LAYER),
        (4, 1, HIDDEN, {"hidden": 13}),
    ],
)
def test_a_gpt_is_that_of_one_process(x, y, options, shared):
    ranks.run(_like_one_process, x * y, x, y, options, **shared)


def draw(seed):
    """A mesh, options of the axes, and a model."""
    r = random.Random(seed)
    x, y = r.choice([(1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (1, 4), (4, 1)])
    heads, kv_heads = r.choice([pair for pair in HEADS if pair[1] >= y or y % pair[1] == 0])
    shared = {
        "hidden": r.randint(1, 17),
        "norm": r.choice((tp_ext.RMSNorm, tp_ext.LayerNorm)),
        "tied": r.random() < 0.5,
        "kv_heads": kv_heads,
        "pad": r.choice((None, 4)),
        "dropout": r.choice((0.0, 0.3)),
        "mlp": {
            "activation": r.choice(("gelu", "relu", "swiglu", "geglu")),
            "bias": r.random() < 0.5,
            "reshard_after_forward": r.random() < 0.5,
        },
        "attention": {
            "num_heads": heads,
            "head_dim": r.choice((2, 4)),
            "bias": r.random() < 0.5,
            "rope": r.choice((None, 100.0)),
            "qk_norm": r.random() < 0.5,
            "reshard_after_forward": r.random() < 0.5,
        },
    }
    return x, y, r.choice((HIDDEN, HIDDEN, SP, REPLICATED)), shared


HEADS = [(4, 4), (4, 2), (4, 1), (6, 3), (5, 5), (8, 1)]


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n < 6 else pytest.mark.exhaustive) for n in range(100)])
def test_a_random_gpt_is_that_of_one_process(seed):
    x, y, options, shared = draw(seed)
    ranks.run(_like_one_process, x * y, x, y, options, **shared)


def _mlp(mesh, seed=2, dtype=torch.float64, **options):
    """An MLP, this rank's x as a leaf, and the mesh: rows over x, features over y."""
    tp_ext.manual_seed(seed)
    options = {"activations": "hidden", **options}
    mlp = tp_ext.ParallelMLP(6, 10, group=mesh["y"], weight_group=mesh["x"], dtype=dtype, **options)
    full = torch.randn(8, 6, generator=torch.Generator().manual_seed(3), dtype=dtype)
    x = _own_rows(full, mesh)
    if options["activations"] == "hidden":
        x = x.tensor_split(mesh["y"].size(), -1)[mesh["y"].get_local_rank()]
    return mlp, x.clone().requires_grad_()


def _collectives(group, reshard_after_forward):
    mesh = mesh_of(2, 2, names=("x", "y"))
    mlp, x = _mlp(mesh, reshard_after_forward=reshard_after_forward)
    for _ in range(3):  # the first finds the forward, the second learns the order
        mlp(x).sum().backward()
    with contextlib.ExitStack() as counting:
        first = counting.enter_context(tp_ext.debug.count_collectives())
        second = []

        def between(*_):
            counting.close()
            second.append(counting.enter_context(tp_ext.debug.count_collectives()))

        hook = mlp.up.register_forward_hook(between)
        y = mlp(x)
    hook.remove()
    (second,) = second
    with tp_ext.debug.count_collectives() as backward:
        y.sum().backward()
    return [
        [(counts.select(group=mesh[axis]).by_kind(), counts.select(group=mesh[axis]).wire_bytes) for axis in "xy"]
        for counts in (first, second, backward)
    ]


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_collectives(reshard_after_forward):
    """On (2, 2), 8 rows of 6 features and 10 hidden ones, each rank sends half of what a collective moves: of a weight
    [5, 6] or [6, 5], of activations [4, 6], of a bias padded to the longest shard. The weight of ``down`` is gathered
    during the GEMM of ``up``, and in backward the other way round."""
    weight, activations, up_bias, down_bias = (8 * n / 2 for n in (30, 24, 6, 4))
    up = [({"all_gather": 3}, 2 * weight + up_bias), ({"all_gather": 1}, activations)]
    down = [({"all_gather": 1}, down_bias), ({"reduce_scatter": 1}, activations)]
    backward = [
        ({"all_gather": 2, "reduce_scatter": 4}, 4 * weight + up_bias + down_bias),
        ({"all_gather": 2, "reduce_scatter": 1}, 3 * activations),
    ]
    if not reshard_after_forward:
        backward = [
            ({"reduce_scatter": 4}, 2 * weight + up_bias + down_bias),
            ({"all_gather": 1, "reduce_scatter": 1}, 2 * activations),
        ]
    assert ranks.run(_collectives, 4, reshard_after_forward) == [[up, down, backward]] * 4


ROWS = torch.ones(3, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("make", "x", "over_x", "over_y"),
    [
        (
            functools.partial(tp_ext.RMSNorm, 8),
            ROWS,
            [[("all_gather", 32)], [("reduce_scatter", 32)]],
            [[("all_reduce", 24)], [("all_reduce", 24)]],
        ),
        (
            functools.partial(tp_ext.LayerNorm, 8),
            ROWS,
            [[("all_gather", 32)], [("reduce_scatter", 32)]],
            [[("all_gather", 96)], [("all_reduce", 48)]],
        ),
        (
            functools.partial(tp_ext.VocabParallelEmbedding, 6, 8),
            torch.arange(3),
            [[("all_gather", 192)], [("reduce_scatter", 192)]],
            [[("reduce_scatter", 192)], [("all_gather", 192)]],
        ),
    ],
    ids=["RMSNorm", "LayerNorm", "embedding"],
)
@on_ranks(4)
def test_collectives_of_norms_and_embedding(group, make, x, over_x, over_y):
    """Of 3 rows of 8 features and a table of 6 rows, in fp64; equal rows of the result are counts of several calls."""
    # Those of a layer, forward and backward: over x and over y, as (kind, payload in bytes).
    mesh = mesh_of(2, 2, names=("x", "y"))
    layer = make(group=mesh["y"], weight_group=mesh["x"], dtype=torch.float64, **HIDDEN)
    if x.is_floating_point():
        x = x[..., : x.shape[-1] // 2].clone().requires_grad_()
    with tp_ext.debug.count_collectives() as forward:
        y = layer(x)
    with tp_ext.debug.count_collectives() as backward:
        y.sum().backward()
    assert [
        [(row.kind, row.payload) for row in counts.select(group=mesh[axis]).rows]
        for axis in "xy"
        for counts in (forward, backward)
    ] == [*over_x, *over_y]


class _InOrder(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, order):
        for i in order:
            x = self.layers[i](x)
        return x


@on_ranks(4)
def test_another_order_of_layers(group):
    mesh = mesh_of(2, 2, names=("x", "y"))
    x = _mlp(mesh)[1]
    model = _InOrder(_mlp(mesh, seed)[0] for seed in range(3))
    for _ in range(3):
        model(x, (0, 1, 2))
    want = x
    for i in (0, 2, 1):  # each by itself, where nothing is gathered ahead
        want = model.layers[i](want)
    assert torch.equal(model(x, (0, 2, 1)), want)  # under the first one, weights of the second are gathered


STEPS = 20


def _trained(mesh, options):
    model = _model(mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, target = batch()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(*((ids, target) if mesh is None else (_own_rows(ids, mesh), _own_rows(target, mesh))))
        loss.backward()
        norm = tp_ext.clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.detach() if mesh is None else tp_ext.reduce_from_region(loss.detach(), mesh["x"]))
    return model, optimizer, torch.stack(losses), norm


@pytest.mark.parametrize("options", [HIDDEN, SP], ids=["hidden", "sequence parallel"])
@on_ranks(4)
def test_a_training_is_that_of_one_process(group, options, tmp_path):
    folder = str(tmp_path / "checkpoint")
    mesh = mesh_of(2, 2, names=("x", "y"))
    dense, _, wants, want_norm = _trained(None, {})
    model, optimizer, losses, norm = _trained(mesh, options)
    assert losses[-1] < losses[0] / 3
    torch.testing.assert_close(losses, wants, rtol=1e-10, atol=0)
    torch.testing.assert_close(norm, want_norm, rtol=1e-9, atol=0)
    full = tp_ext.full_state_dict(model)
    if group.rank() == 0:
        for name, tensor in dense.state_dict().items():
            torch.testing.assert_close(full[name], tensor, rtol=1e-8, atol=1e-10)
    for name, layout in tp_ext.layouts(model):
        own, whole = model.get_parameter(name), dense.get_parameter(name)
        shape = layout.local_shape(whole.shape)
        held = [own, own.grad, *(v for v in optimizer.state[own].values() if v.dim())]
        assert [tensor.shape for tensor in held] == [shape] * 4, name
        if options and whole.dim() == 2:  # q | k | v by heads, 31 rows of a vocabulary: as even as they come
            assert own.numel() <= whole.numel() / 4 * 1.04, name
    tp_ext.debug.check(model, optimizer=optimizer)
    ids, target = batch()
    before = model.loss(_own_rows(ids, mesh), _own_rows(target, mesh))
    tp_ext.save_checkpoint(folder, model, optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    tp_ext.load_checkpoint(folder, model, optimizer)
    assert torch.equal(model.loss(_own_rows(ids, mesh), _own_rows(target, mesh)), before)


def _saved(mesh, options):
    model = _model(mesh, **options)
    ids, target = batch()
    if mesh is not None:
        ids, target = _own_rows(ids, mesh), _own_rows(target, mesh)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids).square().sum()
    del loss
    return sum(storages.values())


@on_ranks(4)
def test_saved_activations_are_a_quarter(group):
    """But for the statistics of norms, a number per row on every rank of y, and the tables of RoPE."""
    mesh = mesh_of(2, 2, names=("x", "y"))
    full = _saved(None, {})
    assert full / 4 <= _saved(mesh, HIDDEN) <= full / 4 * 1.1
