"""Every module of ours under DDP and FSDP2 on a data axis: AdamW steps are those of one process on the joined batch.

In fp64, with dropout: each data-parallel rank draws the masks that the one process draws for its part of the batch.
1e-12 is some hundred roundings; a step moves a weight by 1e-2.
"""

import functools

import pytest
import torch

from tests.helpers.data_parallel import dense_training, wrapped_training
from tests.helpers.ranks import run

close = {"rtol": 0, "atol": 1e-12}
STEPS = 2

WRAPS = {
    "ddp": ("ddp", {}),
    "ddp static graph, bucket views": ("ddp", {"static_graph": True, "gradient_as_bucket_view": True}),
    "ddp unused, tiny buckets": ("ddp", {"find_unused_parameters": True, "bucket_cap_mb": 1e-4}),
    "fsdp": ("fsdp", {"reshard_after_forward": True}),
    "fsdp kept": ("fsdp", {"reshard_after_forward": False}),
}


@functools.cache
def _dense(kind, parts):
    with torch.random.fork_rng():
        return dense_training(kind, parts, STEPS)


def _compare(dense, ranks, parts):
    losses, state = dense
    for rank_losses, rank_state in ranks:
        for step, part, loss in rank_losses:
            assert loss == pytest.approx(losses[step * parts + part], abs=1e-12, rel=0)
        assert rank_state.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(rank_state[name], value, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.thinned(1)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("how", WRAPS)
@pytest.mark.parametrize("kind", ["gpt", "rich"])
def test_training_is_that_of_one_process(kind, how, tp, sp):
    wrapper, options = WRAPS[how]
    ranks = run(wrapped_training, 2 * tp, kind, wrapper, 2, tp, sp, 1, STEPS, **options)
    _compare(_dense(kind, 2), ranks, 2)


# By default the others in test_training_is_that_of_one_process alone
ACCUMULATING = (("rich", "ddp unused, tiny buckets"), ("gpt", "fsdp"))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(kind, how, marks=[] if (kind, how) in ACCUMULATING else pytest.mark.exhaustive)
        for kind in ("gpt", "rich")
        for how in ("ddp", "ddp unused, tiny buckets", "fsdp", "fsdp kept")
    ],
)
def test_gradients_accumulate_without_synchronisation(kind, how):
    """no_sync of DDP (which with static_graph refuses to begin with it, whatever the module is) and
    set_requires_gradient_sync of FSDP2; two microbatches of each rank."""
    wrapper, options = WRAPS[how]
    _compare(_dense(kind, 4), run(wrapped_training, 4, kind, wrapper, 2, 2, True, 2, STEPS, **options), 4)
