"""The main promise: training loses the same numbers for every p, with dropout, whatever else is switched on.

The model is that of examples/gpt.py. In fp64 the ranks' sums differ from one process's by rounding only, 1e-16 a step
and growing with training; 1e-9 after 25 steps of AdamW is far below any mistake (a mask, a missing sum) and above that.
"""

import sys
from pathlib import Path

import pytest
import torch
from ranks import run
from torch.distributed.tensor.debug import CommDebugMode

import tp_ext

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

pytestmark = pytest.mark.core

CONFIG = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 44,
    "dropout": 0.2,
}
BATCH, SEQ, STEPS = 3, 7, 25


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    windows = torch.randint(61, (STEPS, BATCH, SEQ + 1), generator=generator)
    windows[..., 1::2] = windows[..., ::2]  # something to learn
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


def _train(group, dtype, steps=STEPS, **options):
    """Losses and gradient norms of the steps, and the full state after them."""
    torch.set_default_dtype(dtype)
    try:
        tp_ext.manual_seed(7)
        model = GPT(GPTConfig(**CONFIG, **options), group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses, norms = [], []
        for ids, target in _batches()[:steps]:
            loss = model.loss(ids, target)
            optimizer.zero_grad()
            loss.backward()
            norms.append(tp_ext.clip_grad_norm_(model, 1.0, group=group).item())
            optimizer.step()
            losses.append(loss.item())
        return losses, norms, tp_ext.full_state_dict(model, group=group)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def dense():
    """The same training in one process without any group, by dtype."""
    with torch.random.fork_rng():
        return {dtype: _train(None, dtype) for dtype in (torch.float64, torch.float32)}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_fp64_losses_norms_and_weights_are_those_of_one_process(p, sequence_parallel, checkpointing, dense):
    """21 tokens are cut unevenly under SP; 61 bytes of vocabulary and 2 KV heads at p = 4 are too."""
    options = {"sequence_parallel": sequence_parallel, "activation_checkpointing": checkpointing}
    losses, norms, state = dense[torch.float64]
    assert losses[-1] < losses[0] - 0.2
    for rank_losses, rank_norms, rank_state in run(_train, p, torch.float64, **options):
        assert rank_losses == pytest.approx(losses, abs=1e-9, rel=0)
        assert rank_norms == pytest.approx(norms, abs=1e-9, rel=0)
        assert rank_state.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(rank_state[name], value, atol=1e-8, rtol=0)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("p", [2, 4])
def test_fp32_losses_agree_to_1e_4(p, sequence_parallel, dense):
    losses, _, _ = dense[torch.float32]
    for rank_losses, _, _ in run(_train, p, torch.float32, sequence_parallel=sequence_parallel):
        assert rank_losses == pytest.approx(losses, abs=1e-4, rel=0)


@pytest.mark.parametrize("p", [2, 4])
def test_case_49_ranks_agree_bitwise_on_everything_replicated(p):
    """Losses and norms are replicated outputs; norm weights replicated parameters; all under SP with dropout."""
    first, *others = run(_train, p, torch.float32, sequence_parallel=True)
    for other in others:
        assert other[0] == first[0] and other[1] == first[1]
        for name, value in first[2].items():
            assert torch.equal(other[2][name], value), name


def _local_replicated(group, steps):
    tp_ext.manual_seed(7)
    model = GPT(GPTConfig(**CONFIG, sequence_parallel=True), group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids, target in _batches()[:steps]:
        optimizer.zero_grad()
        model.loss(ids, target).backward()
        optimizer.step()
    table = dict(tp_ext.shardings(model))
    rank, p = group.rank(), group.size()
    replicated = {n: q.detach() for n, q in model.named_parameters() if table[n] is None}
    copied = {}
    for name, param in model.named_parameters():
        pieces = table[name].copied_pieces(rank, p) if table[name] is not None else None
        for i, (start, length, full) in enumerate(zip(*pieces[:3], strict=True) if pieces else ()):
            copied[name, i, full] = param.detach().narrow(0, start, length)
    return replicated, copied


def test_case_49_replicated_and_copied_parameters_stay_bitwise_equal():
    """The own tensors of each rank, not the gathered ones: norms on all, KV heads on the neighbours that copy them."""
    results = run(_local_replicated, 4, STEPS)
    assert results[0][0] and results[0][1]
    for replicated, _ in results[1:]:
        for name, value in replicated.items():
            assert torch.equal(value, results[0][0][name]), name
    for a, b in ((0, 1), (2, 3)):
        assert results[a][1].keys() == results[b][1].keys()
        for key, value in results[a][1].items():
            assert torch.equal(value, results[b][1][key]), key


def _counts(group, sequence_parallel):
    config = CONFIG | {"num_kv_heads": 4}  # no copies, whose gradients need a sum of their own
    model = GPT(GPTConfig(**config, sequence_parallel=sequence_parallel), group)
    x = torch.randn(8 if sequence_parallel else 8 * group.size(), 24, requires_grad=True)
    block, counts = model.blocks[0], []
    tokens = 8 * group.size()
    for layer in (lambda: block.mlp(x, tokens), lambda: block.attention(x, batch_size=2, total_tokens=tokens)):
        with CommDebugMode() as forward:
            y = layer()
        with CommDebugMode() as backward:
            y.sum().backward()
        counts.append([{str(k): n for k, n in mode.get_comm_counts().items() if n} for mode in (forward, backward)])
    return counts


@pytest.mark.parametrize("p", [2, 4])
def test_collectives_per_block_are_megatrons(p):
    """One all-reduce each way; SP turns each into an all-gather and a reduce-scatter, and gathers the saved shard."""
    for mlp, attention in run(_counts, p, False):
        for forward, backward in (mlp, attention):
            assert forward == backward == {"c10d_functional.all_reduce": 1}
    pair = {"c10d_functional.all_gather_into_tensor": 1, "c10d_functional.reduce_scatter_tensor": 1}
    for mlp, attention in run(_counts, p, True):
        for forward, backward in (mlp, attention):
            assert forward == pair
            assert backward == pair | {"c10d_functional.all_gather_into_tensor": 2}
