"""Masks by name: a small model with dropout everywhere has the losses and gradients of one process for every number of
ranks, replicas and microbatches, every order of them, cut over a context group, recomputed, and compiled."""

import functools

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tests.helpers.oracle import gathered, local_grads
from tp_ext import ContextLayout, random_scope
from tp_ext.random import at

pytestmark = pytest.mark.core

BATCH, SEQ, HIDDEN, VOCAB, STEP = 4, 6, 12, 17, 3
IDS = torch.arange(BATCH * SEQ).view(BATCH, SEQ) * 7 % VOCAB
TARGET = IDS.roll(3, 1)
PACKED = [5, 0, 13, 6]


@pytest.fixture(autouse=True)
def without_a_layout(monkeypatch):
    """As in a program that has none: one that was once given changes what is compiled."""
    monkeypatch.setattr(random_scope.base, "rows_in_use", False)


class Block(nn.Module):
    def __init__(self, group, sp, **context):
        super().__init__()
        o = {"group": group, "sequence_parallel": sp, "dtype": torch.float64}
        self.norm = tp_ext.RMSNorm(HIDDEN, **o)
        self.attention = tp_ext.ParallelAttention(HIDDEN, 6, dropout=0.3, **context, **o)
        self.mlp = tp_ext.ParallelMLP(HIDDEN, 18, **o)
        self.dropout = tp_ext.Dropout(0.4, group=group, sequence_parallel=sp)

    def forward(self, x, **tokens):
        total = tokens.get("total_tokens")
        x = self.dropout(self.attention(self.norm(x), **tokens), residual=x, total_tokens=total)
        if "layout" in tokens:
            total = tokens["layout"].sizes[tokens["layout"].group.rank]
        return self.dropout(self.mlp(x, total), residual=x, total_tokens=total)  # its second call


class Model(nn.Module):
    def __init__(self, group=None, sp=False, **context):
        super().__init__()
        self.group = group
        self.embedding = tp_ext.VocabParallelEmbedding(
            VOCAB, HIDDEN, group=group, sequence_parallel=sp, dtype=torch.float64
        )
        self.blocks = nn.ModuleList(Block(group, sp, **context) for _ in range(2))
        self.head = tp_ext.VocabParallelLMHead(HIDDEN, VOCAB, group=group, sequence_parallel=sp, dtype=torch.float64)
        tp_ext.add_lora(self, targets=["out", "up"], r=2, alpha=4, dropout=0.25)  # masks of cut and whole inputs
        self.requires_grad_(True)
        tp_ext.reset_parameters(self)
        with torch.no_grad():  # zeros at first, which would hide the masks
            for name, param in self.named_parameters():
                if "lora_B" in name:
                    param.fill_(0.1)

    def loss(self, ids, target, call=None, **tokens):
        """The sum over the tokens; ids ``[batch, seq]``, or ``[tokens]`` with lengths or a layout of sequences."""
        if "cu_seqlens" not in tokens and "layout" not in tokens:
            tokens["batch_size"] = len(ids)
        if self.blocks[0].norm.sequence_parallel and "layout" not in tokens:
            tokens["total_tokens"] = ids.numel()
        x = self.embedding(ids.flatten())
        for block in self.blocks:
            x = (call or (lambda block, x: block(x, **tokens)))(block, x)
        total = ids.numel() if self.blocks[0].norm.sequence_parallel else None
        return tp_ext.vocab_parallel_cross_entropy(
            self.head(x, total), target.flatten(), self.group, vocab_size=VOCAB, reduction="sum"
        )


def outcome(model, losses):
    return float(sum(losses)), local_grads(model), dict(tp_ext.shardings(model))


@functools.cache
def one_process(packed=False):
    tp_ext.manual_seed(5)
    model = Model()
    lengths = {"cu_seqlens": [0, *torch.tensor(PACKED).cumsum(0).tolist()]} if packed else {}
    with at(STEP, batch_offset=0, **({"token_offset": 0} if packed else {"seq": SEQ})):
        loss = model.loss(IDS.flatten() if packed else IDS, TARGET, **lengths)
    loss.backward()
    return outcome(model, [loss.detach()])


def assert_same(results, p=1, packed=False):
    """``results`` of dp or cp times p ranks: their losses and gradients sum to those of one process."""
    loss, grads, _ = one_process(packed)
    sums = {}
    for start in range(0, len(results), p):
        _, local, tables = zip(*results[start : start + p], strict=True)
        for name, grad in gathered(local, tables[0]).items():
            sums[name] = sums.get(name, 0) + grad
    assert abs(sum(result[0] for result in results[::p]) - loss) <= 1e-12 * loss
    assert sums.keys() == grads.keys()
    for name, want in grads.items():
        torch.testing.assert_close(sums[name], want, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def train(group, sp=False, order=(0,), microbatches=1, call=None, within=False):
    """Forward of all microbatches in an order, then backward of all."""
    tp_ext.manual_seed(5)
    model, losses = Model(group, sp), {}
    size = BATCH // microbatches
    for i in order:
        scope = at(STEP, i, batch_offset=i * size, seq=SEQ)
        rows = slice(i * size, (i + 1) * size)
        losses[i] = model.loss(IDS[rows], TARGET[rows], call and functools.partial(call, size))
        scope.__exit__()
    for i in range(microbatches):
        losses[i].backward()
    return outcome(model, [loss.detach() for loss in losses.values()])


def recomputed(size, block, x, reentrant=False):
    tokens = {"batch_size": size, "total_tokens": size * SEQ if block.norm.sequence_parallel else None}
    return checkpoint(lambda x: block(x, **tokens), x, use_reentrant=reentrant)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("sp", [False, True])
def test_every_number_of_ranks(p, sp):
    assert_same(ranks.run(train, p, sp), p)
    assert_same(ranks.run(train, p, sp, (2, 0, 3, 1), 4, recomputed), p)


@pytest.mark.parametrize("reentrant", [False, True])
def test_microbatches_in_any_order_and_recomputed(reentrant):
    assert_same([train(None, order=(1, 0), microbatches=2)])
    call = functools.partial(recomputed, reentrant=reentrant)
    assert_same([train(None, order=(1, 3, 0, 2), microbatches=4, call=call)])


def _replicas(group, lengths=None):
    tp_ext.manual_seed(5, init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")))
    model, half = Model(), BATCH // 2 * group.rank()
    if lengths is None:
        rows = slice(half, half + 2)
        with at(STEP, 7, batch_offset=half, seq=SEQ):
            loss = model.loss(IDS[rows], TARGET[rows])
    else:
        first, own = sum(lengths[:half]), lengths[half : half + 2]
        rows = slice(first, first + sum(own))
        with at(STEP, batch_offset=group.rank(), token_offset=first):  # however many sequences come before
            loss = model.loss(IDS.flatten()[rows], TARGET.flatten()[rows], cu_seqlens=[0, own[0], sum(own)])
    loss.backward()
    return outcome(model, [loss.detach()])


@pytest.mark.parametrize("packed", [False, True])
def test_replicas(packed):
    assert_same(ranks.run(_replicas, 2, PACKED if packed else None), 1, packed)


def _context(group, shape, packed, sp, context):
    mesh = init_device_mesh("cpu", (*shape,), mesh_dim_names=("cp", "tp"))
    tp_ext.manual_seed(5, mesh)
    model = Model(mesh["tp"], sp, context_group=mesh["cp"], context=context)
    cut = {"lengths": PACKED} if packed else {"batch": BATCH, "seq": SEQ}
    layout = ContextLayout(**cut, group=mesh["cp"])
    ids, target = (layout.shard(t.flatten()) for t in (IDS, TARGET))
    with at(STEP, batch_offset=0, layout=layout, **({"token_offset": 0} if packed else {})):
        loss = model.loss(ids, target, layout=layout)
    loss.backward()
    return outcome(model, [loss.detach()])


@pytest.mark.parametrize(
    "shape, packed, sp, context",
    [
        ((2, 1), False, False, "ring"),
        ((2, 1), False, True, "ulysses"),
        ((2, 1), True, False, "all_gather"),
        ((2, 2), False, True, "ring"),
        ((2, 2), True, True, "ulysses"),
    ],
)
def test_context_group(shape, packed, sp, context):
    if shape == (2, 2) and context == "ulysses":
        shape = (3, 1)  # 3 heads on a rank cannot be cut in two
    assert_same(ranks.run(_context, shape[0] * shape[1], shape, packed, sp, context), shape[1], packed)


# Masks themselves: of ones, what is kept


def _mask(group, x, *, sp=False, step=STEP, microbatch=0, name="drop", calls=1, **place):
    layer = tp_ext.Dropout(0.4, group=group, sequence_parallel=sp)
    tp_ext.name_modules(layer, prefix=name)
    with at(step, microbatch, **place):
        for _ in range(calls):
            y = layer(x)
    return y


def test_a_mask_depends_on_its_name_alone():
    tp_ext.manual_seed(5)
    x = torch.ones(12, 40)
    mask = _mask(None, x)
    torch.rand(3)
    assert torch.equal(mask, _mask(None, x))
    others = [{"step": 4}, {"microbatch": 1}, {"name": "other"}, {"calls": 2}, {"batch_offset": 0, "seq": 3}]
    drawn = [mask, *(_mask(None, x, **other) for other in others)]
    tp_ext.manual_seed(6)
    drawn.append(_mask(None, x))
    assert len({tuple(m.flatten().tolist()) for m in drawn}) == len(drawn)
    assert all(abs(float((m == 0).float().mean()) - 0.4) < 0.12 for m in drawn)


def test_every_shape_of_activations_has_the_rows_of_its_place():
    tp_ext.manual_seed(5)
    whole = _mask(None, torch.ones(4, 3, 8), batch_offset=0)
    for x, place in (
        (torch.ones(2, 3, 8), {"batch_offset": 2}),
        (torch.ones(2, 3, 8), {"batch_offset": 2, "seq": 3, "microbatch": 1}),
        (torch.ones(6, 8), {"batch_offset": 2, "seq": 3}),
        (torch.ones(6, 8), {"batch_offset": 1, "token_offset": 6}),
    ):
        assert torch.equal(_mask(None, x, **place).flatten(), whole[2:].flatten())
    of_encoder = _mask(None, torch.ones(4, 5, 8), batch_offset=0, seq=3)  # whose sequences have another length
    assert torch.equal(_mask(None, torch.ones(2, 5, 8), batch_offset=2, seq=3), of_encoder[2:])
    for sequence in (False, True):
        layout = ContextLayout(batch=2, seq=3, group=None)
        x = torch.ones(6, 8) if sequence else torch.ones(2, 3, 8)
        assert torch.equal(_mask(None, x, batch_offset=2, layout=layout).flatten(), whole[2:].flatten())


def test_without_names_or_without_a_scope_the_order_of_draws_is_as_ever():
    def draws(layer, scope):
        torch.manual_seed(9)
        with scope:
            return [layer(torch.ones(30)), torch.rand(3), layer(torch.ones(30))]

    tp_ext.manual_seed(5)
    layer = tp_ext.Dropout(0.4)
    torch.manual_seed(9)
    ever = [tp_ext.dropout(torch.ones(30), 0.4), torch.rand(3), tp_ext.dropout(torch.ones(30), 0.4)]
    outside = torch.inference_mode(False)
    assert all(map(torch.equal, draws(layer, outside), ever))
    tp_ext.name_modules(layer)
    assert all(map(torch.equal, draws(layer, outside), ever))
    compiled = torch.compile(layer, backend="aot_eager")
    assert all(map(torch.equal, draws(compiled, outside), ever))
    torch.manual_seed(9)
    state = torch.get_rng_state()
    with at(0):
        inner = torch.rand(2)
        with at(1):
            assert not torch.equal(torch.rand(2), inner)
        after = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), state)
    with at(0):
        assert torch.equal(torch.rand(4), torch.cat([inner, after]))
    at(0)  # holds until the next seed
    assert torch.equal(torch.rand(4), torch.cat([inner, after]))
    tp_ext.manual_seed(5)
    torch.manual_seed(9)
    assert torch.equal(layer(torch.ones(30)), ever[0])


def test_a_microbatch_that_is_entered_again_numbers_its_calls_anew():
    """As stages of one rank do; what was recorded before is still recomputed with its own masks."""
    tp_ext.manual_seed(5)
    a, b = (tp_ext.Dropout(0.4, group=None) for _ in range(2))
    tp_ext.name_modules(nn.ModuleDict({"a": a, "b": b}))
    x = torch.ones(40, requires_grad=True)
    with at(0):
        want = a(x), b(x)
    with at(0):
        late = checkpoint(b, x, use_reentrant=False)
        b(x), b(x)
    with at(0):
        again = a(x), b(x)
    assert torch.equal(late, want[1]) and all(map(torch.equal, again, want))
    (dx,) = torch.autograd.grad(late.sum(), x)
    assert torch.equal(dx, want[1])
    with at(1):
        b(x)
        late = checkpoint(b, x, use_reentrant=False)
    with at(1):
        a(x), b(x)  # now b's first call has the ticket that its second one had
    with pytest.raises(RuntimeError, match="entered twice with calls in another order"):
        late.sum().backward()


def test_draws_without_a_name_differ_by_stage(monkeypatch):
    tp_ext.manual_seed(5)
    layer = tp_ext.Dropout(0.4, group=None)
    tp_ext.name_modules(layer)
    x, found = torch.ones(40), {"named": [], "unnamed": []}
    for pipeline, stage in ((0, 0), (1, 0), (0, 1)):
        monkeypatch.setattr(random_scope.base, "pipeline", pipeline)
        monkeypatch.setattr(random_scope.base, "stage", stage)
        with at(0):
            found["unnamed"].append(tuple(tp_ext.dropout(x, 0.4).tolist()))
            found["named"].append(tuple(layer(x).tolist()))
    assert len(set(found["named"])) == 1 and len(set(found["unnamed"])) == 3


def test_under_fake_tensors():
    tp_ext.manual_seed(5)
    layer = tp_ext.Dropout(0.4, group=None)
    tp_ext.name_modules(layer)
    with FakeTensorMode(), at(0):
        assert layer(torch.ones(3, 4)).shape == (3, 4)


def test_a_step_that_is_too_old_is_not_recomputed_with_other_masks():
    tp_ext.manual_seed(5)
    layer = tp_ext.Dropout(0.4, group=None)
    tp_ext.name_modules(layer)
    x = torch.ones(40, requires_grad=True)
    late = []
    for step in range(3):
        with at(step):
            late.append(checkpoint(layer, x, use_reentrant=False))
    for y in late[1:]:
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)
    with pytest.raises(RuntimeError, match="recomputed after 2 more steps"):
        late[0].sum().backward()
    with at(3):
        late = checkpoint(layer, x, use_reentrant=False)
    for step in (4, 3, 5):  # step 3 was entered again before the last one
        with at(step):
            pass
    assert torch.equal(torch.autograd.grad(late.sum(), x)[0], late)


# Compiled code: one graph for all blocks, steps and microbatches, the masks of eager mode


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_has_the_masks_of_eager_mode(backend):
    """Recomputed from outside, and within."""
    torch._dynamo.reset()
    tp_ext.manual_seed(5)
    layers = nn.ModuleList(tp_ext.Dropout(0.4, group=None) for _ in range(2))
    tp_ext.name_modules(layers)

    same = torch.__version__ >= "2.15"  # torch 2.11 merges equal calls of a random operator of another library

    def call(x):  # two of the calls have the same input
        return layers[0](layers[1](x)) + layers[0](x) + layers[0](x if same else x + 1)

    def outcomes(call):
        losses = []
        for i in (0, 1):
            x = torch.full((6, 8), 1.0 + i, requires_grad=True)
            with at(STEP, i, batch_offset=2 * i, seq=3):
                losses.append((x, call(x)))
        for _, y in losses:
            y.square().sum().backward()
        return torch.stack([t for x, y in losses for t in (y.detach(), x.grad)])

    want = outcomes(call)
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    within = torch.compile(lambda x: checkpoint(call, x, use_reentrant=False), backend=backend, fullgraph=True)
    for way in (compiled, lambda x: checkpoint(compiled, x, use_reentrant=False), within):
        torch.testing.assert_close(outcomes(way), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [False, True])
def test_blocks_steps_and_microbatches_share_compiled_code(rows, monkeypatch):
    """With a table of rows, too."""
    monkeypatch.setattr(random_scope.base, "rows_in_use", rows)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tp_ext.manual_seed(5)
    blocks = nn.ModuleList(Block(None, False) for _ in range(3))
    tp_ext.name_modules(blocks)
    for step in (0, 1):
        for i, block in enumerate(blocks):
            block.compile(backend="aot_eager", fullgraph=True)
            with at(step, i, batch_offset=i, seq=SEQ):
                got = block(torch.ones(SEQ, HIDDEN, dtype=torch.float64), batch_size=1)
            with at(step, i, batch_offset=i, seq=SEQ):
                want = block.forward(torch.ones(SEQ, HIDDEN, dtype=torch.float64), batch_size=1)
            assert torch.equal(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# Errors


def _drawn(group, **place):
    tp_ext.manual_seed(5)
    layer = tp_ext.Dropout(0.4, group=group)
    tp_ext.name_modules(layer)
    with at(0, **place):
        layer(torch.ones(6, 4))


@pytest.mark.parametrize(
    "place, error, match",
    [
        ({"batch_offset": 1}, ValueError, "seq: must be given to tp_ext.random.at with batch_offset = 1"),
        ({"batch_offset": 1, "seq": 4}, ValueError, "seq: 4 must divide the 6 tokens"),
        ({"batch_offset": -1}, ValueError, "batch_offset: -1 must not be negative"),
        ({"seq": 3}, ValueError, "seq: 3 must be given together with batch_offset"),
        ({"batch_offset": 1.0}, TypeError, "batch_offset: 1.0 must be an integer"),
        ({"layout": 3}, TypeError, "layout: 3 must be a ContextLayout"),
        ({"layout": ContextLayout([7], group=None)}, ValueError, "layout: its 7 tokens on rank 0 of 1 must be the 6"),
        (
            {"layout": ContextLayout([6], group=None), "batch_offset": 1},
            ValueError,
            "token_offset: must be given with batch_offset = 1 and packed sequences",
        ),
    ],
    ids=str,
)
def test_arguments_without_the_place_of_a_token(place, error, match):
    with pytest.raises(error, match=match):
        _drawn(None, **place)


def test_packed_sequences_are_known_by_their_first_token():
    tp_ext.manual_seed(5)
    tp_ext.name_modules(layer := tp_ext.ParallelAttention(4, 2, dropout=0.3, group=None))
    with at(0, batch_offset=1), pytest.raises(ValueError, match=r"token_offset: must be given .* packed sequences"):
        layer(torch.ones(6, 4), cu_seqlens=[0, 2, 6])


def _without_layout(group):
    tp_ext.manual_seed(5, init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp")))
    layer = tp_ext.Dropout(0.4, group=None)
    tp_ext.name_modules(layer)
    with at(0):
        layer(torch.ones(6, 4))


def test_a_context_group_needs_a_layout():
    ranks.run_raises(_without_layout, 2, ValueError, "layout: must be given .* on a mesh with cp = 2", in_turns=False)


def test_without_a_seed(monkeypatch):
    monkeypatch.setattr(random_scope.base, "seed", None)
    with pytest.raises(RuntimeError, match=r"tp_ext.random.at: tp_ext.manual_seed\(seed\) must have been called"):
        at(0)
