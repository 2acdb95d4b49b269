"""Full state dicts and checkpoints: the same for every number of ranks, loaded at any other, whole or not at all."""

import itertools
import os

import pytest
import ranks
import torch
from reference import talk
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import tp_ext

pytestmark = pytest.mark.core

SIZES = (1, 2, 3, 4)
SMALL = {"dtype": torch.float64}


class Model(nn.Module):
    """Every kind of layer, of sharding and of entry: uneven, copied, padded, gated, replicated, tied; a buffer."""

    def __init__(self, group=None, sequence_parallel=False, pad=None):
        super().__init__()
        options = SMALL | {"group": group, "sequence_parallel": sequence_parallel}
        self.pad, self.sequence_parallel = pad, sequence_parallel
        self.embedding = tp_ext.VocabParallelEmbedding(13, 8, pad_to_multiple_of=pad, **options)
        self.norm = tp_ext.LayerNorm(8, **options)
        self.attention = tp_ext.ParallelAttention(8, 4, num_kv_heads=1, head_dim=2, qk_norm=True, rope=100.0, **options)
        self.mlp = tp_ext.ParallelMLP(8, 11, activation="swiglu", **options)
        self.last = tp_ext.RMSNorm(8, 1e-6, **options)
        self.column = tp_ext.ColumnParallelLinear(8, 7, parts=(3, 4), gather_output=True, **options)
        self.back = tp_ext.RowParallelLinear(7, 8, input_is_parallel=False, **SMALL, group=group)
        self.head = tp_ext.VocabParallelLMHead(8, 13, pad_to_multiple_of=pad, bias=True, **options)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, ids):
        n = ids.numel()
        x = self.embedding(ids.flatten())
        x = x + self.attention(self.norm(x), batch_size=len(ids), total_tokens=n)
        x = x + self.mlp(x, n)
        if not self.sequence_parallel:
            x = x + self.back(self.column(x))
        self.steps += 1
        return self.head(self.last(x), n)


def train(model, optimizer, group, steps):
    """The losses of some steps on the same made-up tokens."""
    ids, losses = torch.arange(14).view(2, 7) * 5 % 13, []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = tp_ext.vocab_parallel_cross_entropy(model(ids), ids.roll(1).flatten(), group, vocab_size=13)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def made(group, seed=7, **options):
    torch.manual_seed(seed)
    model = Model(group, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def assert_same(a, b, exact=True):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)


def _state(group, options, rank0_only):
    return tp_ext.full_state_dict(made(group, **options)[0], group=group, rank0_only=rank0_only)


OPTIONS = [{}, {"sequence_parallel": True}, {"pad": 4}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("p", SIZES)
def test_full_state_is_that_of_one_process_to_the_last_bit(p, options):
    want = tp_ext.full_state_dict(made(None)[0])
    assert want["attention.qkv.weight"].shape == (12, 8) and want["embedding.weight"].shape == (13, 8)
    for state in ranks.run(_state, p, options, False):
        assert_same(state, want)
    first, *others = ranks.run(_state, p, options, True)
    assert_same(first, want)
    assert others == [{}] * (p - 1)


def _load_and_read(group, state, options):
    model, _ = made(group, seed=8, **options)
    tp_ext.load_full_state_dict(model, state, group=group)
    return tp_ext.full_state_dict(model, group=group)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("p", "q"), [(1, 4), (2, 3), (3, 2), (4, 1)])
def test_what_p_ranks_gathered_q_ranks_load(p, q, options):
    saved = ranks.run(_state, p, {}, False)[0]
    for state in ranks.run(_load_and_read, q, saved, options):
        assert_same(state, saved)


def test_plain_modules_load_it():
    """Keys, shapes and layout are those of the unsharded module."""
    state = ranks.run(_state, 2, {}, False)[0]
    plain = nn.ModuleDict({"embedding": nn.Embedding(13, 8), "norm": nn.LayerNorm(8), "back": nn.Linear(7, 8)})
    wanted = plain.state_dict().keys()
    plain.load_state_dict({k: v for k, v in state.items() if k in wanted})
    made(None)[0].load_state_dict(state)


def _count(group):
    model = made(group)[0]
    with CommDebugMode() as counts:
        tp_ext.full_state_dict(model, group=group)
    return talk(counts), sum(s is not None for s in model.state_dict() and dict(tp_ext.shardings(model)).values())


def test_one_all_gather_per_sharded_entry():
    heard, sharded = ranks.run(_count, 2)[0]
    assert heard == {"all_gather": sharded + 1}  # the tied weight is two entries


# Checkpoints


def _save(group, path, options, steps, **more):
    model, optimizer = made(group, **options)
    train(model, optimizer, group, steps)
    tp_ext.save_checkpoint(path, model, optimizer, group=group, epoch=3, **more)
    # Every rank finds the file as soon as it is back from saving
    model, optimizer = made(group, seed=8, **options)
    assert tp_ext.load_checkpoint(path, model, optimizer, group=group) == {"epoch": 3, **more}
    return train(model, optimizer, group, steps)


def _resume(group, path, options, steps):
    model, optimizer = made(group, seed=9, **options)
    tp_ext.load_checkpoint(path, model, optimizer, group=group)
    before = tp_ext.full_state_dict(model, group=group), tp_ext.full_optimizer_state_dict(model, optimizer, group=group)
    return *before, train(model, optimizer, group, steps)


@pytest.mark.parametrize(("p", "q"), [(1, 2), (2, 1), (2, 4), (3, 2), (4, 3)])
def test_training_goes_on_at_another_p_as_if_nothing_had_happened(p, q, tmp_path):
    """fp64 bound 1e-12: the sums over ranks run in another order."""
    model, optimizer = made(None)
    want = train(model, optimizer, None, 6)[3:]
    path = tmp_path / "new" / "model.pt"
    for losses in ranks.run(_save, p, path, {}, 3):
        torch.testing.assert_close(losses, want, rtol=1e-12, atol=1e-12)
    assert os.listdir(path.parent) == ["model.pt"]
    content = torch.load(path, weights_only=True)
    assert content["optimizer"]["state"]["embedding.weight"]["exp_avg"].shape == (13, 8)
    for options in OPTIONS[::2]:
        for state, optimizer_state, losses in ranks.run(_resume, q, path, options, 3):
            assert_same(state, content["model"])
            assert_same(
                {f"{a}.{b}": v for a, entry in optimizer_state["state"].items() for b, v in entry.items()},
                {f"{a}.{b}": v for a, entry in content["optimizer"]["state"].items() for b, v in entry.items()},
            )
            torch.testing.assert_close(losses, want, rtol=1e-12, atol=1e-12)


def _crash(group, path, where):
    def fail(*args, **kwargs):
        if where == "save":
            args[1].write(b"half a checkpoint")
        raise OSError("no space left on device")

    model, optimizer = made(group)
    original = torch.save, os.fsync
    try:
        torch.save = fail if where == "save" else torch.save
        os.fsync = fail if where == "fsync" else os.fsync
        tp_ext.save_checkpoint(path, model, optimizer, group=group)
    finally:
        torch.save, os.fsync = original


@pytest.mark.parametrize("where", ["save", "fsync"])
@pytest.mark.parametrize("p", [1, 2])
def test_a_crash_while_saving_leaves_the_old_file_and_nothing_else(p, where, tmp_path):
    path = tmp_path / "model.pt"
    ranks.run(_save, p, path, {}, 1)
    before = path.read_bytes()
    # in_turns=False: that the others learn of it takes a collective
    ranks.run_raises(_crash, p, OSError, "path: .*model.pt' could not be written", path, where, in_turns=False)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.pt"]


def _load_wrong(group, what, how):
    model, optimizer = made(group)
    train(model, optimizer, group, 1)
    state = tp_ext.full_state_dict(model, group=group)
    whole = tp_ext.full_optimizer_state_dict(model, optimizer, group=group)
    before = [p.detach().clone() for p in model.parameters()]
    tp_ext.all_gather_region(torch.ones(1), group)
    state = {k: v + 1 for k, v in state.items()}
    if what == "shape":
        state["last.weight"] = torch.ones(9)
    elif what == "sharded shape":
        state["mlp.up.weight"] = torch.ones(24, 8)
    elif what == "optimizer":
        whole["state"]["mlp.up.weight"]["exp_avg"] = torch.ones(3, 8)
    else:
        del state["mlp.up.weight"]
        state["mlp.sideways.weight"] = torch.ones(1)
    try:
        if what == "optimizer":
            tp_ext.load_full_optimizer_state_dict(model, optimizer, whole, group=group)
        tp_ext.load_full_state_dict(model, state, group=group, strict=how != "loosely")
    finally:
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert how == "loosely" or all(same)
    assert not all(same)  # what was there has been loaded


WRONG = {
    "shape": (ValueError, r"last.weight.*\(9,\).*\(8,\)"),
    "sharded shape": (ValueError, r"mlp.up.weight.*\(24, 8\).*\(22, 8\)"),
    "keys": (KeyError, "missing.*mlp.up.weight.*unexpected.*mlp.sideways.weight"),
    "optimizer": (ValueError, r"mlp.up.weight.exp_avg.*\(3, 8\).*\(22, 8\)"),
}


@pytest.mark.parametrize(("p", "what"), list(itertools.product([1, 2], WRONG)))
def test_what_does_not_fit_is_told_and_nothing_is_loaded(p, what):
    ranks.run_raises(_load_wrong, p, WRONG[what][0], WRONG[what][1], what, "strictly", in_turns=False)


def test_loosely_the_keys_that_fit_are_loaded():
    ranks.run(_load_wrong, 2, "keys", "loosely")
