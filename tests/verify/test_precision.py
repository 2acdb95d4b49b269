"""The bound of a report follows from the precision in which the layers of the model compute."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tp_ext
from tests.verify.models import HIDDEN, IDS, VOCAB, X
from tp_ext import low_precision
from tp_ext.low_precision import Float8

FP64, FP32, HALF = 1e-9, math.sqrt(torch.finfo(torch.float32).eps), math.sqrt(torch.finfo(torch.bfloat16).eps)
E4M3, E5M2 = (math.sqrt(torch.finfo(dtype).eps) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))


def mlp(group):
    return tp_ext.ParallelMLP(HIDDEN, 12, group=group)


def quantised(weights, lora=False):
    def make(group):
        model = nn.Sequential(mlp(group), nn.Linear(HIDDEN, HIDDEN))
        low_precision.quantize_(model, weights, block=2)
        if lora:
            tp_ext.add_lora(model, targets=["up", "down"], r=2, alpha=4)
        return model

    return make


def in_float8(recipe, dtype=torch.float32, depth=6):
    def make(group):
        model = nn.Sequential(*(mlp(group) for _ in range(depth)), nn.Linear(HIDDEN, HIDDEN)).to(dtype)
        low_precision.float8(model, recipe)
        return model

    return make


def experts(group):
    model = tp_ext.ParallelMoE(HIDDEN, 12, 4, 2, group=group)
    low_precision.float8(model, filter=lambda name, _: name.endswith("experts"))
    return model


class Then(nn.Module):
    """A function of the result of a parallel MLP."""

    def __init__(self, function, group, frozen=False):
        super().__init__()
        self.function, self.mlp = function, mlp(group)
        self.embedding = tp_ext.VocabParallelEmbedding(VOCAB, HIDDEN, group=group)
        self.requires_grad_(not frozen)

    def forward(self, x):
        return self.function(self.mlp(x if x.is_floating_point() else self.embedding(x)))


class WithinFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.float().exp().to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy


class WithinBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy.bfloat16().to(dy.dtype)


class OfConstants(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * torch.arange(HIDDEN).float().cos()

    @staticmethod
    def backward(ctx, dy):
        return dy * torch.arange(HIDDEN).float().cos()


@torch.no_grad()
def statistic(x):
    return x.float().std()


def hooked(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.float().double())
    return x


def then(function, **options):
    return lambda group: Then(function, group, **options)


CASES = {
    "int8": (quantised("int8"), X, FP64),
    "int4": (quantised("int4"), X, FP64),
    "int8 in bf16": (lambda group: quantised("int8")(group).bfloat16(), X.bfloat16(), FP64),
    "LoRA on int4": (quantised("int4", lora=True), X, FP64),
    "float8": (in_float8(Float8()), X, E5M2),
    "float8 by rows": (in_float8(Float8(scaling="row")), X, E5M2),
    "float8, e4m3 alone": (in_float8(Float8(gradient="e4m3")), X, E4M3),
    "float8 in bf16": (in_float8(Float8(), torch.bfloat16), X.bfloat16(), E5M2),
    "float8 experts": (experts, X, E5M2),
    "function of autograd": (then(WithinFunction.apply), X, FP32),
    "its backward": (then(WithinBackward.apply), X, HALF),
    "constants in fp32": (then(OfConstants.apply), X, FP64),
    "hook": (then(hooked), X, FP32),
    "without gradients": (then(lambda x: x / statistic(x)), X, FP32),
    "detached": (then(lambda x: x + (x.detach().bfloat16() - x).detach()), X, HALF),
    "frozen": (then(lambda x: x.float().double(), frozen=True), IDS, FP32),
    "zeros like it": (then(lambda x: x + x.new_zeros(1, dtype=torch.float32)), X, FP64),
    "softmax": (then(lambda x: F.softmax(x, -1, dtype=torch.float32).double()), X, FP32),
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_the_bound_is_that_of_the_layers(name, seed):
    make, x, bound = CASES[name]
    report = tp_ext.verify(make, (x,), p=(2, 3), seed=seed)
    assert report.ok, report
    assert f"relative bound {bound:.1e}".replace("1.0e-09", "1e-09") in report.bounds


@pytest.mark.parametrize("make", [quantised("int8"), in_float8(Float8(), depth=1)], ids=["int8", "float8"])
@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_a_mistake_is_above_the_bound(make, wrong):
    def broken(group):
        model = make(group)
        down = model[0].down
        if group.size() > 1 and wrong == "output":
            down.register_forward_hook(lambda *call: 2 * call[-1])
        elif group.size() > 1:
            down.bias.register_hook(lambda gradient: 2 * gradient)
        return model

    report = tp_ext.verify(broken, (X,), p=(2,))
    assert [(finding.module, finding.tensor) for finding in report.findings] == [
        ("0.down", "output" if wrong == "output" else "0.down.bias")
    ]
