"""Column and row linears against ``nn.Linear``: output, input and parameter gradients, however they are cut."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import (
    full_gradients,
    gradients,
    own_tokens,
    partial_slice,
    results,
    small_input,
    small_layer,
    small_linear,
)
from tp_ext import ColumnParallelLinear, Part, RowParallelLinear, Sharding, full_state_dict

pytestmark = pytest.mark.core

SIZES = (1, 2, 3, 4)
NUMBERS = {  # of conformance cases, docs/reference/correctness.md: whether of a column, and an option
    (True, "gather_output"): 19,
    (True, ""): 20,
    (True, "sequence_parallel"): 21,
    (False, ""): 22,
    (False, "input_is_parallel"): 23,
    (False, "sequence_parallel"): 24,
}


@dataclass(frozen=True)
class Case:
    """A layer, with the shape of its full input. The methods run on the ranks."""

    column: bool
    features: tuple[int, int]
    leading: tuple[int, ...] = (6,)
    bias: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def sp(self) -> bool:
        return self.options.get("sequence_parallel", False)

    def __str__(self) -> str:
        options = [k if v is True else f"{k}={v}" for k, v in self.options.items() if k != "parts"]
        if "parts" in self.options:
            options.append(f"{len(self.options['parts'])}parts")
        number = NUMBERS.get((self.column, next(iter(self.options), "")))
        kind = (f"case_{number}-" if number else "") + ("column" if self.column else "row")
        return "-".join([kind, *map(str, self.features), *map(str, self.leading), *options]) + (
            "" if self.bias else "-nobias"
        )

    def dense(self, dtype=torch.float64) -> nn.Linear:
        return nn.Linear(*self.features, self.bias, dtype=dtype)

    def layer(self, dense: nn.Linear, group):
        return (ColumnParallelLinear if self.column else RowParallelLinear).from_linear(
            dense, group=group, **self.options
        )

    def local(self, x, group, sharding: Sharding, features: bool, tokens: bool):
        """This rank's part of a full activation, of which the features or the tokens may be sharded."""
        if features:
            return partial_slice(x, sharding, group.rank(), group.size()).contiguous()
        return own_tokens(x, group) if tokens else x.clone()

    def local_input(self, x, group, sharding):
        parallel = not self.column and self.options.get("input_is_parallel", True)
        return self.local(x, group, sharding, parallel, self.column and self.sp).requires_grad_()

    def local_output(self, y, group, sharding):
        parallel = self.column and not self.options.get("gather_output", False)
        return self.local(y, group, sharding, parallel, not self.column and self.sp)

    def __call__(self, layer, x):
        """y, with the bias that was skipped added."""
        tokens = self.leading[0] if self.sp else None
        y = layer(x, tokens) if tokens else layer(x)
        if self.options.get("skip_bias_add"):
            y, bias = y
            assert (bias is None) == (not self.bias)
            y = y if bias is None else y + bias
        return y


def cases(p: int) -> list[Case]:
    sp = {"sequence_parallel": True}
    qkv = (Part(8, groups=2), Part(2, copies=2), Part(2, copies=2)) if p % 4 == 0 else (Part(8, unit=2), 2, 2)
    result = [Case(True, (5, 7)), Case(True, (5, 2), (2, 1, 3)), Case(True, (5, 9), options={"unit": 3})]
    result += [Case(True, (3, 12), options={"parts": qkv, **o}) for o in ({}, sp, {"gather_output": True})]
    result += [Case(True, (4, 5), (7,), options={"gather_output": True, **o}) for o in ({}, sp)]
    result += [Case(True, (4, 6), (5, 2), options=sp)]
    result += [Case(True, (4, 3), (2,), options=sp), Case(True, (4, 3), (0,)), Case(True, (4, 3), ())]
    result += [Case(True, (4, 6), options={"parts": (2, Part(4, padding=4 * p - 4))})]
    result += [Case(False, (7, 5)), Case(False, (2, 5), (2, 1, 3)), Case(False, (9, 5), options={"unit": 3})]
    result += [Case(False, (8, 3), options={"parts": (5, 3), **o}) for o in ({}, sp, {"input_is_parallel": False})]
    result += [Case(False, (6, 4), (5, 2), options=sp), Case(False, (3, 4), (2,), options=sp)]
    result += [Case(False, (5, 4), options={"input_is_parallel": False}), Case(False, (3, 4), (0,))]
    for column in (True, False):
        result += [Case(column, (6, 5), (7,), options={"skip_bias_add": True, **o}) for o in ({}, sp)]
        result += [Case(column, (6, 5), (7,), False, {"skip_bias_add": skip, **o}) for o in ({}, sp) for skip in (0, 1)]
    return [c for c in result if c.leading or c.column]


EVERY = [pytest.param(p, case, id=f"p{p}-{case}") for p in SIZES for case in cases(p)]
FEW = [
    Case(column, (6, 8), (5, 2), options={"sequence_parallel": sp}) for column in (True, False) for sp in (False, True)
]


def _first_order(group, case, dense, x, dy):
    layer = case.layer(dense, group)
    x = case.local_input(x, group, layer.tp_shardings["weight"])
    y = case(layer, x)
    y.backward(case.local_output(dy, group, layer.tp_shardings["weight"]))
    return y, x.grad, gradients(layer), layer.tp_shardings["weight"]


class _Rank:
    """A group as far as cutting needs it, in the parent."""

    def __init__(self, rank, p):
        self.rank, self.size = lambda: rank, lambda: p


def _assert_as_dense(p, case, dtype, rtol, atol):
    dense = case.dense(dtype)
    x = torch.randn(*case.leading, case.features[0], dtype=dtype, requires_grad=True)
    dy = torch.randn(*case.leading, case.features[1], dtype=dtype)
    y = dense(x)
    y.backward(dy)

    def same(got, want, what):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}")

    firsts = ranks.run(_first_order, p, case, dense, x.detach(), dy)
    for rank, (got_y, got_dx, _, sharding) in enumerate(firsts):
        g, sharded = _Rank(rank, p), case.column and not case.options.get("gather_output", False)
        # copies of a part of y hold the same values, while their gradients are partial: see `partial_slice`
        want = Sharding(-1, sharding.parts).shard(y, rank, p) if sharded else case.local_output(y, g, sharding)
        same(got_y, want, f"y of rank {rank}")
        same(got_dx, case.local_input(x.grad, g, sharding).detach(), f"dx of rank {rank}")
    got = full_gradients([g for _, _, g, _ in firsts])
    assert got.keys() == dict(dense.named_parameters()).keys()
    for name, param in dense.named_parameters():
        same(got[name], param.grad, f"gradient of {name}")


@pytest.mark.parametrize(("p", "case"), EVERY)
def test_forward_and_every_gradient(p, case):
    """Within the rounding of sums of 12 products in fp64."""
    _assert_as_dense(p, case, torch.float64, 1e-12, 1e-12)


@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.parametrize("p", [2, 4])
def test_fp32(p, case):
    """The order of the same few sums is another one: 16 roundings of fp32."""
    _assert_as_dense(p, case, torch.float32, 1e-6, 1e-6)


# Strides


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@on_ranks(2)
def test_any_strides_of_input_and_gradient(group, kind, sp):
    layer = small_layer(group, kind, sp)
    x = small_input(layer, group).detach()
    for shape in ((4,), (2, 2), (1, 2, 2)):
        shape = (x.shape[0], 1) if shape == (4,) else shape
        plain = x.reshape(*(shape if x.shape[0] == 4 else (2, 1)), -1).requires_grad_()
        odd = plain.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        assert not odd.is_contiguous()
        y, odd_y = layer(plain), layer(odd)
        g = torch.randn(y.shape[::-1], dtype=y.dtype).permute(*range(y.dim())[::-1])
        for first, second in ((g.contiguous(), g), (torch.ones_like(y), torch.ones((), dtype=y.dtype).expand_as(y))):
            inputs = [layer.weight, layer.bias]
            want = torch.autograd.grad(y, [plain, *inputs], first, retain_graph=True)
            got = torch.autograd.grad(odd_y, [odd, *inputs], second, retain_graph=True)
            torch.testing.assert_close([odd_y, *got], [y, *want], rtol=1e-12, atol=1e-12)


# One rank, and to and from nn.Linear


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@on_ranks(1)
def test_one_rank_is_nn_linear_bit_for_bit(group, dtype):
    dense = small_linear(dtype)
    x = torch.randn(3, 2, 6, dtype=dtype)
    x.requires_grad_()
    want = results(dense, x)
    for g in (group, None):
        for kind in (ColumnParallelLinear, RowParallelLinear):
            for options in ({}, {"sequence_parallel": True}, {"skip_bias_add": True}):
                layer = kind.from_linear(dense, group=g, **options)

                def call(x, layer=layer):
                    y = layer(x)
                    return torch.add(*y) if layer.skip_bias_add else y

                got = results(layer, x, call)
                exact = not layer.skip_bias_add  # else bias is added after rounding
                for a, b in zip(got, want, strict=True):
                    assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-2, atol=1e-2)


def _round_trip(group, dense, kind, options):
    before = {k: v.clone() for k, v in dense.state_dict().items()}
    layer = kind.from_linear(dense, group=group, **options)
    assert all(torch.equal(v, before[k]) for k, v in dense.state_dict().items())
    assert not layer.weight.requires_grad and layer.bias.requires_grad
    return full_state_dict(layer, group=group)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_from_linear_and_back(p):
    dense = small_linear(torch.bfloat16)
    dense.weight.requires_grad_(False)
    q = {1: Part(8), 4: Part(4, copies=2)}.get(p, Part(8))
    parts = (q, 8 - q.size) if q.size < 8 else (q,)
    for kind, options in ((ColumnParallelLinear, {"parts": parts}), (RowParallelLinear, {"unit": 2})):
        for state in ranks.run(_round_trip, p, dense, kind, options):
            assert state.keys() == dense.state_dict().keys()
            assert all(torch.equal(v, dense.state_dict()[k]) for k, v in state.items())
