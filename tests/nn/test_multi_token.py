"""Multi-token prediction against plain torch on the whole batch: losses and all gradients, over all axes."""

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import tp_ext
from tests.helpers import oracle, ranks, simulated
from tests.helpers.dtypes import default_dtype
from tests.helpers.meshes import mesh_of
from tests.helpers.models import Block
from tests.helpers.on_ranks import on_ranks

VOCAB, HIDDEN, SEQ, IGNORED, WEIGHT = 13, 8, 6, -100, 0.7
HEADS = {"num_heads": 4, "num_kv_heads": 1}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Last(nn.Module):
    """The last part of the model: the sums of the losses of the next token and of later ones."""

    def __init__(self, embedding, depth, block, tied, **parallel):
        super().__init__()
        self.norm = tp_ext.RMSNorm(HIDDEN, **parallel)
        self.head = tp_ext.VocabParallelLMHead(HIDDEN, VOCAB, bias=not tied, **parallel)
        if tied:
            self.head.weight = embedding.weight
        layers = {"embedding": embedding, "head": self.head}
        self.mtp = tp_ext.MultiTokenPrediction(HIDDEN, block, depth=depth, loss_weight=WEIGHT, **layers, **parallel)

    def forward(self, x, next_ids, labels, layout):
        hidden = self.norm(x)
        total = labels[..., 0].numel() if self.norm.sequence_parallel else None
        loss = self.head.loss(hidden, labels[..., 0].flatten(), total, reduction="sum")
        predicted = self.mtp(hidden, next_ids, layout=layout)
        return torch.cat([loss.reshape(1), self.mtp.loss(predicted, labels[..., 1:], reduction="sum")])


class Model(nn.Module):
    def __init__(self, depth, tied=True, dropout=0.0, context_group=None, **parallel):
        super().__init__()
        attention = HEADS | {"rope": 100.0, "dropout": dropout, "context_group": context_group}
        block = functools.partial(Block, HIDDEN, attention, {"ffn_hidden_size": 10}, dropout=dropout, **parallel)
        self.embedding = tp_ext.VocabParallelEmbedding(VOCAB, HIDDEN, **parallel)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.last = Last(self.embedding, depth, block, tied, **parallel)

    def pipeline_parts(self):
        return [torch.flatten, self.embedding], self.blocks, [self.last]

    def forward(self, ids, next_ids, labels, layout):
        x = self.embedding(ids.flatten())
        for block in self.blocks:
            x = block(x, layout=layout)
        return self.last(x, next_ids, labels, layout)


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


def plain_block(x, weights, name, lengths):
    own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
    attention = {key.removeprefix("attention."): value for key, value in own.items() if "attention" in key}
    x = x + oracle.attention(rms(x, own["norms.0.weight"]), attention, lengths, rope={"base": 100.0}, **HEADS)
    up = F.gelu(F.linear(rms(x, own["norms.1.weight"]), own["mlp.up.weight"], own["mlp.up.bias"]))
    return x + F.linear(up, own["mlp.down.weight"], own["mlp.down.bias"])


def shifted(tokens, lengths, k, fill):
    return [
        tokens[begin + i + k].item() if i + k < n else fill
        for begin, n in zip([sum(lengths[:j]) for j in range(len(lengths))], lengths, strict=True)
        for i in range(n)
    ]


def plain_loss(weights, depth, ids, labels, lengths):
    """The loss of all tokens, by a loop over the depths, from the weights of the whole model."""
    x = weights["embedding.weight"][ids]
    for name in ("blocks.0", "blocks.1"):
        x = plain_block(x, weights, name, lengths)
    hidden = rms(x, weights["last.norm.weight"])
    head = weights["last.head.weight"], weights.get("last.head.bias")
    loss = F.cross_entropy(F.linear(hidden, *head), labels, ignore_index=IGNORED)
    for k in range(1, depth + 1):
        name = f"last.mtp.depths.{k - 1}"
        looked_up = weights["embedding.weight"][shifted(ids, lengths, k, 0)]
        pair = [
            rms(hidden, weights[f"{name}.hidden_norm.weight"]),
            rms(looked_up, weights[f"{name}.embedding_norm.weight"]),
        ]
        hidden = plain_block(
            torch.cat(pair, -1) @ weights[f"{name}.projection.weight"].T, weights, f"{name}.block", lengths
        )
        own = torch.tensor(shifted(labels, lengths, k, IGNORED))
        logits = F.linear(rms(hidden, weights[f"{name}.norm.weight"]), *head)
        loss = loss + WEIGHT / depth * F.cross_entropy(logits, own, ignore_index=IGNORED, reduction="sum") / max(
            1, (own != IGNORED).sum()
        )
    return loss


def leaves(state):
    """Tensors that require gradients; those of one parameter under several names are one."""
    found, result = {}, {}
    for name, value in state.items():
        key = "embedding.weight" if name == "last.mtp.embedding.weight" else name
        key = key.replace("last.mtp.head.", "last.head.")
        if key == "last.head.weight" and "last.head.bias" not in state:
            key = "embedding.weight"  # tied
        if key not in found:
            found[key] = value.detach().clone().requires_grad_()
        result[name] = found[key]
    return result


def plain_gradients(state, depth, *batch):
    weights = leaves(state)
    loss = plain_loss(weights, depth, *batch)
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in weights.items()}


def rows(number, seed):
    """``number`` rows of ids and labels, some ignored, and the lengths of the documents in each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (number, SEQ), generator=generator)
    labels = torch.randint(VOCAB, (number, SEQ), generator=generator)
    labels[:, ::5] = IGNORED
    labels[0, : 1 + seed % 4] = IGNORED  # unequal numbers of tokens
    return ids, labels, [[SEQ - 1 - (seed + row) % 4, 0, 1 + (seed + row) % 4] for row in range(number)]


def prepared(ids, labels, depth, lengths=None):
    """next_ids and labels of all depths of rows; with ``lengths`` packed."""
    layouts = [None] * len(ids) if lengths is None else [tp_ext.ContextLayout(one, group=None) for one in lengths]

    def of(tokens, fill):
        each = [tp_ext.next_tokens(row, depth, layout=one, fill=fill) for row, one in zip(tokens, layouts, strict=True)]
        return torch.stack(each)

    return of(ids, 0), torch.cat([labels[..., None], of(labels, IGNORED)], -1)


def gradients_of(modules, mesh=None, group=None):
    """The full gradients, by name."""
    with torch.no_grad():
        for param in {id(p): p for module in modules for p in module.parameters()}.values():
            param.copy_(param.grad)
    state = modules if mesh is not None else modules[0]
    return dict(tp_ext.full_state_dict(state, mesh=mesh) if mesh is not None else tp_ext.full_state_dict(state))


@pytest.mark.thinned
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(("p", "sp"), [(1, False), (2, False), (2, True), (3, True)])
@pytest.mark.parametrize(("depth", "tied", "training"), [(1, True, False), (2, False, True), (3, True, True)])
@on_ranks()
def test_losses_and_gradients_are_those_of_plain_torch(group, sp, depth, tied, training, packed):
    """3 ranks share neither 8 features, 13 words nor 6 tokens evenly; in evaluation mode no mask is drawn."""
    with default_dtype(torch.float64):
        tp_ext.manual_seed(3)
        model = Model(depth, tied, 0.0 if training else 0.3, group=group, sequence_parallel=sp).train(training)
        ids, labels, lengths = rows(3, 2)
        where = {"batch": 3, "seq": SEQ}
        if packed:
            ids, labels, lengths = ids.view(1, -1), labels.view(1, -1), [[n for row in lengths for n in row]]
            where = {"lengths": lengths[0]}
        layout = tp_ext.ContextLayout(**where, group=None)
        state = dict(tp_ext.full_state_dict(model))
        next_ids, all_labels = prepared(ids, labels, depth, lengths if packed else None)
        counts = (all_labels != IGNORED).flatten(0, -2).sum(0).clamp(min=1)
        loss = (model(ids, next_ids, all_labels, layout) / counts).sum()
        loss.backward()
        want = plain_gradients(state, depth, ids.flatten(), labels.flatten(), layout.lengths)
        torch.testing.assert_close(loss.detach(), want[0], **CLOSE)
        tp_ext.debug.check(model)
        torch.testing.assert_close(gradients_of([model]), want[1], **CLOSE)


def count(labels):
    return (labels != IGNORED).flatten(0, -2).sum(0)


def _all_axes(group, sizes, depth, sp, tied, options):
    """Two microbatches on each data rank, packed rows, of which one has no label at all."""
    with default_dtype(torch.float64):
        mesh = mesh_of(*sizes)
        parallel = {"group": mesh["tp"], "sequence_parallel": sp, "context_group": mesh["cp"]}
        with torch.device("meta"):
            model = Model(depth, tied, **parallel)
        run = tp_ext.parallelize(
            model, mesh, microbatches=2, loss=lambda sums, _: sums, reduction="sum", count=count, seed=5, **options
        )
        state = dict(tp_ext.full_state_dict(run.state, mesh=mesh))
        _check_initial(state, depth, tied)
        data = [rows(2, 7 + k) for k in range(run.data_size)]
        data[0][1][1] = IGNORED
        ids, labels, lengths = data[run.data_rank]
        next_ids, all_labels = prepared(ids, labels, depth, lengths)
        layouts = [tp_ext.ContextLayout(one, group=mesh["cp"]) for one in lengths]
        ids, next_ids, all_labels = (
            torch.stack([layout.shard(row) for layout, row in zip(layouts, full, strict=True)])
            for full in (ids, next_ids, all_labels)
        )
        call = {"next_ids": next_ids, "labels": all_labels, "layout": layouts}
        evaluated = run.evaluate(ids, all_labels, **call)
        loss = run.step(ids, all_labels, **call)
        whole = (torch.cat([one[i].flatten() for one in data]) for i in (0, 1))
        want = plain_gradients(state, depth, *whole, [n for one in data for row in one[2] for n in row])
        torch.testing.assert_close(loss, want[0], **CLOSE)
        torch.testing.assert_close(evaluated, want[0], **CLOSE)
        tp_ext.debug.check(run.state, mesh=mesh)
        modules = run.state if isinstance(run.state, list) else [run.state]
        torch.testing.assert_close(gradients_of(modules, mesh), want[1], **CLOSE)


def _check_initial(state, depth, tied):
    tp_ext.manual_seed(5)
    model = Model(depth, tied, group=None)
    tp_ext.reset_parameters(model)
    torch.testing.assert_close(state, model.state_dict(), rtol=0, atol=0)


AXES = {
    "data": ((1, 2, 1, 1), 2, False, False, {}),
    "data, sharded": ((1, 2, 1, 2), 1, True, True, {"zero": 3}),
    "context": ((1, 1, 2, 1), 2, False, True, {}),
    "pipeline": ((2, 1, 1, 1), 3, False, True, {}),
    "pipeline, not tied": ((2, 1, 1, 1), 1, False, False, {}),
    "three axes": ((2, 2, 1, 2), 2, True, True, {}),
    "three axes, sharded": ((2, 2, 1, 2), 1, True, True, {"zero": 2}),
}


# Of two cases that differ in what another one has, too, the smaller
REPEATED = ("data", "pipeline", "three axes, sharded")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in REPEATED)) for name in AXES]
)
def test_training_over_all_axes_is_that_of_plain_torch(case):
    sizes, *options = AXES[case]
    ranks.run(_all_axes, torch.Size(sizes).numel(), sizes, *options, timeout=240)


def _with_masks(group, sp):
    with default_dtype(torch.float64):
        tp_ext.manual_seed(3)
        model = Model(2, True, 0.3, group=group, sequence_parallel=sp)
        tp_ext.name_modules(model)
        ids, labels, _ = rows(3, 2)
        with tp_ext.random.at(1, batch_offset=0, seq=SEQ):
            layout = tp_ext.ContextLayout(batch=3, seq=SEQ, group=None)
            sums = model(ids, *prepared(ids, labels, 2), layout)
        sums.sum().backward()
        return sums.detach(), gradients_of([model])


def test_masks_are_those_of_one_process():
    want = ranks.run(_with_masks, 1, False)[0]
    for got in (*ranks.run(_with_masks, 2, False), *ranks.run(_with_masks, 2, True)):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("lengths", [None, [4, 0, 1, 7], [12], [1] * 12, [0]])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_next_tokens_stop_at_the_end_of_a_sequence(lengths, depth):
    tokens = torch.arange(sum(lengths) if lengths else 12) + 20
    layout = None if lengths is None else tp_ext.ContextLayout(lengths, group=None)
    found = tp_ext.next_tokens(tokens, depth, layout=layout, fill=-7)
    want = [shifted(tokens, lengths or [12], k, -7) for k in range(1, depth + 1)]
    assert found.shape == (len(tokens), depth) and found.mT.tolist() == want


def test_next_tokens_of_rows():
    tokens, layout = torch.arange(12).view(3, 4), tp_ext.ContextLayout(batch=3, seq=4, group=None)
    want = [[[1, 2], [2, 3], [3, 0], [0, 0]], [[5, 6], [6, 7], [7, 0], [0, 0]], [[9, 10], [10, 11], [11, 0], [0, 0]]]
    assert tp_ext.next_tokens(tokens, 2, fill=0).tolist() == want
    assert tp_ext.next_tokens(tokens, 2, layout=layout, fill=0).tolist() == want
    assert tp_ext.next_tokens(tokens.float(), 2, fill=0).dtype == torch.float32
    assert tp_ext.next_tokens(torch.empty(0, 4), 2, fill=0).shape == (0, 4, 2)


def _kept(group):
    """The number of elements of the logits, were they kept, and of the largest tensor that is saved."""
    with default_dtype(torch.float64):
        tokens = 512
        embedding = tp_ext.VocabParallelEmbedding(4096, HIDDEN, group=group)
        head = tp_ext.VocabParallelLMHead(HIDDEN, 4096, group=group)
        mtp = tp_ext.MultiTokenPrediction(HIDDEN, nn.Identity(), embedding=embedding, head=head, group=group)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            ids = torch.arange(tokens) % 4096
            next_ids = tp_ext.next_tokens(ids, 1, fill=0)
            mtp.loss(mtp(torch.ones(tokens, HIDDEN), next_ids), next_ids).backward()
        return max(sizes), tokens * 4096 // group.size()


def test_no_logits_are_kept():
    largest, logits = ranks.run(_kept, 2)[0]
    assert largest < logits / 8


def _refused(group, change):
    parallel = {"group": group}
    embedding = tp_ext.VocabParallelEmbedding(VOCAB, change.pop("width", HIDDEN), **parallel)
    head = tp_ext.VocabParallelLMHead(HIDDEN, VOCAB, **parallel)
    options = {"block": nn.Identity, "depth": 2, "embedding": embedding, "head": head} | parallel
    call = {name: change.pop(name) for name in ("hidden", "next_ids", "labels", "hiddens") if name in change}
    mtp = tp_ext.MultiTokenPrediction(HIDDEN, **options | change)
    hiddens = mtp(call.get("hidden", torch.ones(4, HIDDEN)), call.get("next_ids", torch.ones(4, 2).long()))
    mtp.loss(hiddens[: call.get("hiddens")], call.get("labels", torch.ones(4, 2).long()))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"depth": 0}, ValueError, "depth: 0 must be an integer of at least 1"),
        ({"width": 6}, ValueError, "embedding: its width 6 must be hidden_size = 8"),
        ({"head": nn.Linear(8, 13)}, TypeError, "head: Linear must be a VocabParallelLMHead"),
        ({"sequence_parallel": True}, ValueError, "embedding: its sequence_parallel = False must be that of this"),
        ({"group": None}, ValueError, r"embedding: its group, ranks \[0, 1\], must be group, ranks \[\]"),
        ({"block": nn.Identity()}, ValueError, "block: 1 blocks must be 2"),
        ({"block": [nn.Identity()] * 2}, ValueError, "block: its 2 blocks must be different modules"),
        ({"block": 3}, TypeError, "block: 3 must be a module, a list"),
        ({"block": lambda: 3}, TypeError, "block: int must be a module"),
        ({"loss_weight": "much"}, TypeError, "loss_weight: 'much' must be a number"),
        ({"hidden": torch.ones(4, 7)}, ValueError, r"hidden: shape \(4, 7\) must end in hidden_size = 8"),
        ({"next_ids": torch.ones(4).long()}, ValueError, r"next_ids: shape \(4,\) must end in depth = 2"),
        ({"next_ids": torch.ones(3, 2).long()}, ValueError, "next_ids: 3 tokens must be those of hidden, .* 4 and"),
        ({"labels": torch.ones(5, 2).long()}, ValueError, "labels: 5 tokens must be those of hidden"),
        ({"hiddens": 1}, ValueError, "hiddens: 1 must be 2, those of all depths"),
    ],
)
def test_errors_come_before_any_collective(change, error, match):
    if callable(change.get("block")) and not isinstance(change["block"], nn.Module):
        change = {"block": _no_module}
    ranks.run_raises(_refused, 2, error, match, change, in_turns="hiddens" not in change and "labels" not in change)


def _no_module():
    return 3


def _batch():
    ids, labels, lengths = rows(1, 2)
    next_ids, all_labels = prepared(ids, labels, 2, lengths)
    return ids[0], next_ids[0], all_labels[0], tp_ext.ContextLayout(lengths[0], group=None)


def _assigned(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model


def _from_meta(model):
    with torch.device("meta"):
        other = Model(2, group=model.embedding.tp_group.name or None)
    other.to_empty(device="cpu")
    tp_ext.load_full_state_dict(other, tp_ext.full_state_dict(model))
    return other


def _overwritten(model):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def _replaced(model):
    for layer in (model.embedding, model.last.head):
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    model.last.head.weight = model.embedding.weight
    return model


CONVERSIONS = {
    "nothing": lambda model: model,
    "assign": _assigned,
    "to_empty": _from_meta,
    "overwritten": _overwritten,
    "deepcopy": copy.deepcopy,
    "copy of what was assigned": lambda model: copy.deepcopy(_assigned(model)),
    "assigned copy": lambda model: _assigned(copy.deepcopy(model)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "assigned pickle": lambda model: _assigned(pickle.loads(pickle.dumps(model))),
    "replaced": _replaced,
}


def _converted(group, how):
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = CONVERSIONS[how](Model(2, group=group))
        model(*_batch()).sum().backward()
    mtp = model.last.mtp
    assert mtp.embedding.weight is model.embedding.weight and mtp.head.weight is model.last.head.weight
    return len(list(model.parameters())), model.embedding.weight.grad, model.last.head.weight.grad


@pytest.mark.parametrize("how", CONVERSIONS)
def test_the_parameters_are_those_of_the_model_after_conversions(how):
    expected = simulated.run(_converted, 2, "nothing")
    for (number, *grads), (_, *want) in zip(simulated.run(_converted, 2, how), expected, strict=True):
        # to_empty and assign untie the model's own head from its embedding, as torch does: the two grads are the parts
        untied = how in (
            "assign",
            "to_empty",
            "overwritten",
            "copy of what was assigned",
            "assigned copy",
            "assigned pickle",
        )
        assert number == expected[0][0] + untied
        torch.testing.assert_close(sum(grads) if untied else grads[0], want[0], rtol=1e-12, atol=1e-12)


def test_an_embedding_that_was_parametrized_by_itself_is_refused():
    model = Model(2, group=None)
    parametrize.register_parametrization(model.embedding, "weight", nn.Identity())
    with pytest.raises(RuntimeError, match=r"embedding.weight: is not that of the model's embedding any more"):
        model(*_batch())


@on_ranks(2)
def test_fsdp_shards_them_as_one(group):
    model = fully_shard(Model(2, group=None), mesh=tp_ext.init_mesh("cpu", dp=2)["dp"])
    model(*_batch()).sum().backward()
    assert model.last.mtp.embedding.weight is model.embedding.weight
