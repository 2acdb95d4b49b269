"""Norms of every order: torch's clipping, and ours, of shards, one of which is empty, against torch on one process."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import utils

import tp_ext
from tp_ext.debug import simulate

ORDERS = (0, 0.0, 0.5, 1, 2, 2.5, 3, -0.5, -1, -2, math.inf, -math.inf, "inf", "-inf")
CLIPS = {
    "torch": lambda model, *args, **options: utils.clip_grad_norm_(model.parameters(), *args, **options),
    "total": lambda model, _, order, **options: utils.get_total_norm(
        [param.grad for param in model.parameters()], order, **options
    ),
    "ours": lambda model, *args, **options: tp_ext.clip_grad_norm_(model, *args, **options),
    "ours, norm": lambda model, _, order, **options: tp_ext.grad_norm(model, order, **options),
}
VALUES = {
    "dense": lambda grads: None,
    "sparse": lambda grads: [grad[1:].zero_() for grad in grads],
    "zero tensors": lambda grads: [grad.zero_() for grad in grads[::2]],
    "zero": lambda grads: [grad.zero_() for grad in grads],
    "nan": lambda grads: grads[0].view(-1)[0].fill_(math.nan),
    "inf": lambda grads: grads[1].view(-1)[-1:].fill_(math.inf),
}


class _Net(nn.Module):
    """Linears, one of which is empty on the last of three ranks, a table with padding, copies of a KV head."""

    def __init__(self, group):
        super().__init__()
        options = {"group": group, "dtype": torch.float64}
        self.table = tp_ext.VocabParallelEmbedding(5, 4, pad_to_multiple_of=2, **options)
        self.norm = tp_ext.RMSNorm(4, **options)
        self.down = tp_ext.RowParallelLinear(2, 3, **options)
        self.attention = tp_ext.ParallelAttention(6, 3, num_kv_heads=1, **options)
        self.whole = nn.Linear(2, 2, dtype=torch.float64)


def _gradients(values):
    generator = torch.Generator().manual_seed(3)
    full = tp_ext.full_state_dict(_Net(None))
    grads = {name: torch.randn(full[name].shape, generator=generator, dtype=torch.float64) for name in full}
    VALUES[values]([*grads.values()])
    return grads


def _with_gradients(group, grads):
    model = _Net(group)
    layouts = dict(tp_ext.layouts(model))
    for name, param in model.named_parameters():
        param.grad = layouts[name].shard(grads[name]).clone()
    return model, layouts


def _results(rank, group, grads, clip):
    """The norms, or errors, and what is left of the gradients, of each order, flag and way."""
    results = []
    for order, strict, foreach in itertools.product(ORDERS, (False, True), (None, True, False)):
        model, layouts = _with_gradients(group, grads)
        try:
            norm = CLIPS[clip](model, 0.25, order, error_if_nonfinite=strict, foreach=foreach)
        except RuntimeError as error:
            if "be finite" not in str(error) and "non-finite" not in str(error):
                raise
            norm = "not finite"
        params = dict(model.named_parameters())
        results.append((norm, [params[name].grad for name in grads]))
    return results, [layouts[name] for name in grads]


def _expected(grads, clip):
    """By torch, of plain parameters."""
    plain = nn.ParameterList(torch.zeros_like(grad) for grad in grads.values())
    results = []
    for order, strict, foreach in itertools.product(ORDERS, (False, True), (None, True, False)):
        for param, grad in zip(plain, grads.values(), strict=True):
            param.grad = grad.clone()
        try:
            norm = CLIPS[clip.replace("ours, norm", "total").replace("ours", "torch")](
                plain, 0.25, order, error_if_nonfinite=strict, foreach=foreach
            )
        except RuntimeError:
            norm = "not finite"
        results.append((norm, [param.grad.clone() for param in plain]))
    return results


@pytest.mark.thinned
@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("clip", CLIPS)
def test_every_order_is_that_of_torch(clip, values, p):
    gradients = _gradients(values)
    ranks = simulate(_results, p, gradients, clip)
    for number, (norm, grads) in enumerate(_expected(gradients, clip)):
        for results, layouts in ranks:
            got, shards = results[number]
            if isinstance(norm, str):
                assert got == norm
            else:
                torch.testing.assert_close(got, ranks[0][0][number][0], rtol=0, atol=0, equal_nan=True)
                torch.testing.assert_close(got, norm, rtol=1e-10, atol=0, equal_nan=True)
            expected = [layout.owned(layout.shard(grad)) for layout, grad in zip(layouts, grads, strict=True)]
            stored = [layout.owned(shard) for layout, shard in zip(layouts, shards, strict=True)]  # without padding
            torch.testing.assert_close(stored, expected, rtol=1e-10, atol=1e-300, equal_nan=True)
        assert p < 3 or any(shard.numel() == 0 for shard in ranks[2][0][number][1])


@pytest.mark.parametrize("order", [math.nan, "nan"])
@pytest.mark.parametrize("clip", ["torch", "ours"])
def test_no_number_is_refused(clip, order):
    def run(rank, group):
        with pytest.raises(ValueError, match="norm_type: nan must be a number"):
            CLIPS[clip](_with_gradients(group, _gradients("dense"))[0], 1.0, order)

    simulate(run, 2)


def test_lists_of_other_lengths_have_no_number_of_gradients():
    def run(rank, group):
        model, _ = _with_gradients(group, _gradients("dense"))
        params = [param for param in model.parameters() if param.numel()]
        with pytest.raises(ValueError, match="lists 9 to 10; list empty shards, too"):
            utils.clip_grad_norm_(params, 1.0, 0)

    simulate(run, 3)
