"""Wrapped models from the meta device, in mixed precision, with unused parameters and with adapters."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import tp_ext
from tests.helpers.data_parallel import dense_training, loss_of, make, mesh, wrap, wrapped_training
from tests.helpers.ranks import run

# From the meta device


def _from_meta(group, kind, data_parallel):
    """Made on meta, wrapped, to_empty, tied again, reset."""
    axes = mesh(2, 2) if data_parallel else None
    tensor_group = axes["tp"] if data_parallel else group
    with torch.device("meta"):
        model = make(kind, tensor_group, False)
    if data_parallel:
        model = wrap(model, "fsdp", axes["dp"])
    model.to_empty(device="cpu")
    if kind == "gpt" and not data_parallel:  # FSDP2 keeps what is tied, to_empty of a plain model does not
        model.head.weight = model.embedding.weight
    tp_ext.manual_seed(11)
    for module in model.modules():
        if isinstance(module, tp_ext.ParallelModule):
            module.reset_parameters()
    with torch.no_grad():
        for param in model.parameters():
            assert isinstance(param, DTensor) == data_parallel and not param.is_meta
            if param.numel() == 1:  # the model's own
                (param.to_local() if data_parallel else param).fill_(1)
        for buffer in model.buffers():
            buffer.zero_()
    if group is not None:
        tp_ext.debug.check(model, group=tensor_group)
    full = tp_ext.full_state_dict(model)
    return full, None if group is None else loss_of(model, tensor_group, 0, 0).item()


@pytest.mark.parametrize("kind", ["gpt", "rich"])
def test_reset_parameters_draws_the_slices_of_fsdp2(kind):
    """A DTensor is a slice of this rank's shard: it gets that slice of the unsharded model's numbers, bit by bit."""
    with torch.random.fork_rng():
        want, _ = _from_meta(None, kind, False)
    (_, loss), _ = run(_from_meta, 2, kind, False)
    for full, one_loss in run(_from_meta, 4, kind, True):
        assert full.keys() == want.keys() and all(torch.equal(full[name], want[name]) for name in want)
        assert one_loss == pytest.approx(loss, rel=1e-6)


# Training

STEPS = 2


def _adapters(model):
    tp_ext.add_lora(model, targets="*", r=2, alpha=4, dropout=0.2)


def _unused(model):
    group = model.embedding.tp_group.name or None
    model.unused = tp_ext.ColumnParallelLinear(3, 4, group=group)
    model.frozen = tp_ext.RowParallelLinear(4, 3, group=group).requires_grad_(False)


def _compare(dense, ranks, tolerance):
    losses, state = dense
    for rank_losses, rank_state in ranks:
        for step, part, loss in rank_losses:
            assert loss == pytest.approx(losses[step * 2 + part], abs=tolerance, rel=0)
        assert rank_state.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(rank_state[name], value, rtol=0, atol=tolerance)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["gpt", "rich"])
def test_adapters(kind, how, sp):
    with torch.random.fork_rng():
        dense = dense_training(kind, 2, STEPS, _adapters)
    assert any("lora_A" in name for name in dense[1])
    _compare(dense, run(wrapped_training, 4, kind, how, 2, 2, sp, 1, STEPS, _adapters), 1e-12)


@pytest.mark.parametrize(
    ("how", "tp"), [("ddp", 2), ("fsdp", 1), pytest.param("fsdp", 2, marks=pytest.mark.exhaustive)]
)
def test_unused_and_frozen_parameters(how, tp):
    with torch.random.fork_rng():
        dense = dense_training("rich", 2, STEPS, _unused)
    options = {"find_unused_parameters": True} if how == "ddp" else {}
    _compare(dense, run(wrapped_training, 2 * tp, "rich", how, 2, tp, tp > 1, 1, STEPS, _unused, **options), 1e-12)


@pytest.mark.parametrize(
    ("kind", "sp"),
    [("rich", True), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("gpt", False), ("gpt", True)))],
)
def test_mixed_precision(kind, sp):
    """Computed in bf16, whose roundings (2^-9) stand against losses of ln 31 = 3.4 and steps of 1e-2; kept and averaged
    in more."""
    with torch.random.fork_rng():
        dense = dense_training(kind, 2, STEPS)
    # The blocks of the GPT are given RoPE's fp32 table, which FSDP2 must not round
    cast = {"cast_forward_inputs": kind != "gpt"}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **cast)
    ranks = run(wrapped_training, 4, kind, "fsdp", 2, 2, sp, 1, STEPS, mp_policy=policy)
    _compare(dense, ranks, 0.03)
    for rank_losses, rank_state in ranks:
        assert all(value.dtype == torch.float64 for value in rank_state.values())
        assert all(loss != dense[0][step * 2 + part] for step, part, loss in rank_losses), "nothing was in bf16"
