"""The main promise: training loses the same numbers for every p, with dropout, whatever else is switched on.

The model is that of examples/gpt.py. In fp64 the ranks' sums differ from one process's by rounding only, 1e-16 a step
and growing with training; 1e-9 after 25 steps of AdamW is far below any mistake (a mask, a missing sum) and above that.
"""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import tp_ext
from tests.helpers.ranks import run
from tests.helpers.small_gpt import make, train

pytestmark = pytest.mark.core


def _train(group, dtype, **options):
    """Losses and gradient norms of the steps, and the full state after them."""
    losses, norms, model = train(group, dtype, **options)
    return losses, norms, tp_ext.full_state_dict(model, group=group)


@pytest.fixture(scope="module")
def dense():
    """The same training in one process without any group, by dtype."""
    with torch.random.fork_rng():
        return {dtype: _train(None, dtype) for dtype in (torch.float64, torch.float32)}


CASES = [(p, sp, checkpointing) for p in (1, 2, 4) for sp in (False, True) for checkpointing in (False, True)]
# Recomputation asks nothing of p, and without sequence parallelism four ranks do what two do
FEW = [(1, False, False), (1, True, True), (2, False, True), (2, True, True), (4, True, False)]


@pytest.mark.parametrize(
    "p, sequence_parallel, checkpointing",
    [pytest.param(*case, marks=[] if case in FEW else pytest.mark.exhaustive) for case in CASES],
    ids=[f"{p}-{'sp' * sp}-{'checkpointing' * checkpointing}" for p, sp, checkpointing in CASES],
)
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


# That four ranks compute the same is shown in fp64, to more digits
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["", "sp"])
@pytest.mark.parametrize("p", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_fp32_losses_agree_to_1e_4(p, sequence_parallel, dense):
    losses, _, _ = dense[torch.float32]
    for rank_losses, _, _ in run(_train, p, torch.float32, sequence_parallel=sequence_parallel):
        assert rank_losses == pytest.approx(losses, abs=1e-4, rel=0)


def _counts(group, sequence_parallel):
    # as many KV heads as ranks: no copies, whose gradients need a sum of their own
    model = make(group, num_kv_heads=4, sequence_parallel=sequence_parallel)
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
