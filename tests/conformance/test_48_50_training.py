"""Conformance cases 48 to 50: training that repeats to the last bit, ranks that agree, states for any p
(docs/reference/correctness.md). The model is that of examples/gpt.py, with dropout, grouped queries and a tied head."""

import random
import time

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import gathered
from tests.helpers.small_gpt import CONFIG, batches, make, train
from tp_ext.sharding import split_sizes

pytestmark = pytest.mark.core

SP = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])


def _late(model, seed):
    """Makes every module of the model, forward and backward, begin up to 3 ms late."""
    uneven = random.Random(seed)

    def sleep(*_):
        time.sleep(uneven.random() * 3e-3)

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(sleep)
            module.register_full_backward_pre_hook(sleep)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@SP
@on_ranks(backend="gloo")
def test_case_48_delays_change_no_bit(group, sp):
    """Losses, gradients and parameters of two steps, with the overlap of the column layers' backward and the fused
    cross-entropy, which are always on."""
    runs = []
    for attempt in range(3):  # the first in step, the others each with delays of their own
        model = make(group, sequence_parallel=sp)
        if attempt:
            _late(model, 100 * attempt + group.rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        bits = []
        for ids, target in batches(2):
            optimizer.zero_grad()
            loss = model.loss(ids, target)
            loss.backward()
            optimizer.step()
            bits += [loss.detach(), *(param.grad.clone() for param in model.parameters())]
        runs.append(bits + [param.detach() for param in model.parameters()])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def _trained(group, sp):
    losses, norms, model = train(group, torch.float32, 6, sequence_parallel=sp)
    params = {name: param.detach() for name, param in model.named_parameters()}
    return losses, norms, params, dict(tp_ext.shardings(model))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [2, 3, 4])
@SP
def test_case_49_ranks_agree_bitwise_on_everything_replicated(sp, p):
    """Losses and gradient norms; of the parameters each rank's own, as they are: `gathered` asserts that norms, and KV
    heads that several ranks hold, are the same bits on all of them."""
    losses, norms, params, tables = zip(*ranks.run(_trained, p, sp), strict=True)
    assert all(one == losses[0] for one in losses) and all(one == norms[0] for one in norms)
    copies = max(part.copies for cut in tables[0].values() if cut is not None for part in cut.parts)
    assert copies == {2: 1, 3: 3, 4: 2}[p] and None in tables[0].values()
    gathered(params, tables[0])


def _norm_steps(group, name):
    torch.manual_seed(4)
    norm = getattr(tp_ext, name)(8, group=group, sequence_parallel=True, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(norm.parameters(), 0.1)
    torch.manual_seed(group.rank())
    for _ in range(10):
        optimizer.zero_grad()
        norm(torch.randn(5, 8, dtype=torch.bfloat16)).sin().sum().backward()
        optimizer.step()
    return [param.detach() for param in norm.parameters()]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_case_49_norms_are_the_same_bits_after_steps_on_different_tokens(name, p):
    for params in zip(*ranks.run(_norm_steps, p, name), strict=True):
        assert all(torch.equal(t, params[0]) for t in params)
        assert not torch.equal(params[0], torch.ones_like(params[0]))


# States


def _logits(model, group):
    """Of all columns, on every rank."""
    sizes = split_sizes(CONFIG["vocab_size"], model.head.tp_group.size)
    with torch.no_grad():
        return tp_ext.gather_from_region(model.eval()(batches(1)[0][0]), group, -1, sizes)


def _saved(group, options):
    _, _, model = train(group, torch.float64, 3, **options)
    return tp_ext.full_state_dict(model, group=group), _logits(model, group)


def _loaded(group, state, options):
    model = make(group, **options).double()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    tp_ext.load_full_state_dict(model, state, group=group)
    again = tp_ext.full_state_dict(model, group=group)
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)
    return _logits(model, group)


@pytest.mark.parametrize(
    ("p", "q", "kv", "sp"),
    [
        pytest.param(
            p, q, kv, sp, id=f"{p}-{q}-{kv}_kv{'-sp' * sp}", marks=[] if number < 3 else pytest.mark.exhaustive
        )
        for number, (p, q, kv, sp) in enumerate(
            [(4, 8, 2, 0), (4, 3, 8, 1), (1, 4, 2, 1), (4, 1, 2, 0), (4, 2, 2, 1), (3, 8, 8, 0)]
        )
    ],
)
def test_case_50_saved_by_p_ranks_and_loaded_by_q(p, q, kv, sp):
    """SwiGLU, q | k | v and a tied vocabulary of 61; 2 KV heads have copies at 4 and 8 ranks, 8 are uneven at 3. The
    state is the same to the last bit; the logits, sums over ranks, within rounding. With `sp` the savers are sequence
    parallel, else the loaders."""
    options = {"hidden_size": 32, "num_heads": 8, "num_kv_heads": kv, "sequence_parallel": bool(sp)}
    state, want = ranks.run(_saved, p, options)[0]
    for logits in ranks.run(_loaded, q, state, options | {"sequence_parallel": not sp}):
        torch.testing.assert_close(logits, want, rtol=1e-12, atol=1e-12)
