"""Traps of our own: hooks, Functions, gradients taken inside of forward, weights that are functions of weights."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from tests.auto.traps.trap import (
    INNER,
    WIDTH,
    Mlp,
    Raw,
    add,
    mlp,
    raw,
    trap,
    two_vectors,
)

# Gradients that are changed, read, or taken within forward


class Custom(torch.autograd.Function):
    """Twice x; subclasses change the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class Signed(Custom):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.sign()


class Thresholded(Custom):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (g.abs() > 0.01)


class Rolled(Custom):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.roll(1, -1)


class Reversed(Custom):
    """Gradient reversal, linear: as good as none."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -0.5 * g


class Projected(Custom):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g - x * (g * x).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True)


class Added(Custom):
    """An auxiliary gradient: of sum of squares."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g + 0.1 * ctx.saved_tensors[0]


class MeanOverWidth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(-1, keepdim=True)


class Matmul(torch.autograd.Function):
    """A linear with a backward of its own, which divides by the width."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.mT

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w / w.shape[0], g.flatten(0, 1).mT @ x.flatten(0, 1) / w.shape[0]


FUNCTIONS = (Signed, Thresholded, Rolled, Reversed, Projected, Added, MeanOverWidth)
for function in FUNCTIONS:
    name = f"function_{function.__name__.lower()}"
    mlp(f"{name}_on_hidden", "shards of the gradient", lambda s, x, h, f=function: s.down(f.apply(h)))
    raw(
        f"{name}_on_input",
        "parts of the gradient",
        lambda s, x, h, f=function: s.down(F.relu(F.linear(f.apply(x), s.w1))),
    )
raw("function_linear", "a linear of its own", lambda s, x, h: s.down(Matmul.apply(x, s.w1).relu()))


def hooked(x: Tensor, hook: Any) -> Tensor:
    if x.requires_grad:
        x.register_hook(hook)
    return x


raw(
    "hook_on_partial_gradient",
    "a sign of a part",
    lambda s, x, h: s.down(F.linear(hooked(x * 1, torch.sign), s.w1).relu()),
)
raw("hook_on_hidden", "a norm over a part", lambda s, x, h: s.down(hooked(h * 1, lambda g: g / (1 + g.norm()))))
raw("hook_scales", "linear, as good as none", lambda s, x, h: s.down(hooked(h * 1, lambda g: g * 0.5)))


class Hooked(Mlp):
    """An MLP with a hook that `attach(self)` registers."""

    def __init__(self, attach: Any) -> None:
        super().__init__()
        attach(self)


def norm_of(gradients: tuple) -> tuple:
    return tuple(g if g is None else g / (1e-3 + g.norm()) for g in gradients)


def clamp_gradient(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


HOOKS = {
    "forward_replaces": lambda s: s.up.register_forward_hook(lambda m, a, y: y * (torch.arange(y.shape[-1]) % 3)),
    "forward_norms": lambda s: s.up.register_forward_hook(lambda m, a, y: F.layer_norm(y, y.shape[-1:])),
    "forward_on_row": lambda s: s.down.register_forward_hook(lambda m, a, y: y + 1.0),
    "forward_with_kwargs": lambda s: s.up.register_forward_hook(lambda m, a, k, y: y.tanh(), with_kwargs=True),
    "pre_changes": lambda s: s.down.register_forward_pre_hook(lambda m, a: (a[0] - a[0].mean(-1, keepdim=True),)),
    "pre_on_column": lambda s: s.up.register_forward_pre_hook(lambda m, a: (a[0].cumsum(-1),)),
    "backward_clips": lambda s: s.up.register_full_backward_hook(lambda m, gi, go: norm_of(gi)),
    "backward_of_row": lambda s: s.down.register_full_backward_hook(lambda m, gi, go: norm_of(gi)),
    "backward_pre": lambda s: s.up.register_full_backward_pre_hook(lambda m, go: norm_of(go)),
    "on_parameter": lambda s: s.up.weight.register_hook(lambda g: g / (1e-3 + g.norm())),
    "on_parameter_column": lambda s: s.down.weight.register_hook(lambda g: g - g.mean(1, keepdim=True)),
    "on_bias": lambda s: s.down.bias.register_hook(torch.sign),
    "after_accumulate": lambda s: s.up.weight.register_post_accumulate_grad_hook(clamp_gradient),
}
for name, attach in HOOKS.items():
    add(f"hook_{name}", functools.partial(Hooked, attach), "a hook sees a part")


@trap("the gradient of an energy is the result", two_vectors)
class Energy(Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = (self.down(self.hidden(x)) * y).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


@trap("a gradient penalty in forward", bare=True)
class GradientPenalty(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            score = self.down(self.hidden(z)).tanh().sum()
            gradient = torch.autograd.grad(score, z, create_graph=True)[0]
        return self.down(self.hidden(x)) + (gradient.norm(dim=-1, keepdim=True) - 1) ** 2


@trap("an inner step of gradient descent: MAML")
class InnerStep(Raw):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = self.down(F.linear(x, self.w1).tanh()).square().mean()
            step = torch.autograd.grad(loss, self.w2, create_graph=True)[0]
        return F.linear(F.linear(x, self.w1).tanh(), self.w2 - 0.5 * step)


@trap("a Jacobian by torch.func")
class Jacobian(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        jacobian = torch.func.vmap(torch.func.jacrev(lambda z: self.down(torch.tanh(self.up(z)))))(x.flatten(0, 1))
        return super().forward(x) + jacobian.diagonal(0, -1, -2).sum(-1).view(*x.shape[:2], 1)


@trap("vmap over the batch")
class Mapped(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(super().forward)(x)


@trap("functional_call with other weights")
class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: weight * 0.5 for name, weight in self.mlp.named_parameters()}
        return torch.func.functional_call(self.mlp, weights, (x,))


def ensemble(s: Raw, x: Tensor, h: Tensor) -> Tensor:
    return torch.func.vmap(lambda a: F.linear(F.linear(x, s.w1 * a).relu(), s.w2))(torch.arange(3.0)).mean(0)


raw("vmap_over_scales", "members share the weights", ensemble)
raw(
    "jvp",
    "a directional derivative",
    lambda s, x, h: torch.func.jvp(lambda z: s.down(F.linear(z, s.w1).tanh()), (x,), (x * 2,))[1],
)


@trap("recomputation of a part", share=0.9)
class Recomputed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=False)


@trap("recomputation of a part with dropout", random=True)
class RecomputedDropout(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda z: F.dropout(self.hidden(z), 0.4, self.training), x, use_reentrant=False)
        return self.down(h)


mlp(
    "detached_gate",
    "a gate without gradient",
    lambda s, x, h: s.down(h * (h.detach() > h.detach().mean(-1, keepdim=True))),
)
mlp(
    "stopped_statistics",
    "statistics without gradient",
    lambda s, x, h: s.down(h / h.detach().abs().amax(-1, keepdim=True)),
)
raw(
    "straight_through",
    "a quantized sum",
    lambda s, x, h: s.down(h) + ((s.down(h) * 4).round() / 4 - s.down(h)).detach(),
)

# Weights that are functions of weights


def parametrized(make: Any) -> Any:
    def build() -> nn.Module:
        model = Mlp()
        make(model)
        return model

    return build


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w - w.flip(0) / w.shape[0]


class Unit(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / w.norm()


class Quantized(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        scale = w.detach().abs().max() / 7
        return w + ((w / scale).round() * scale - w).detach()


PARAMETRIZATIONS = {
    "weight_norm": lambda s: parametrizations.weight_norm(s.up),
    "weight_norm_of_row": lambda s: parametrizations.weight_norm(s.down),
    "weight_norm_dim_1": lambda s: parametrizations.weight_norm(s.up, dim=1),
    "spectral_norm": lambda s: parametrizations.spectral_norm(s.up),
    "orthogonal": lambda s: parametrizations.orthogonal(s.up),
    "mirrored": lambda s: parametrize.register_parametrization(s.up, "weight", Symmetric()),
    "of_unit_norm": lambda s: parametrize.register_parametrization(s.down, "weight", Unit()),
    "quantized": lambda s: parametrize.register_parametrization(s.up, "weight", Quantized()),
    "bias": lambda s: parametrize.register_parametrization(s.up, "bias", Unit()),
    "pruned": lambda s: prune.l1_unstructured(s.up, "weight", amount=0.5),
    "old_weight_norm": lambda s: torch.nn.utils.weight_norm(s.up),
}
for name, make in PARAMETRIZATIONS.items():
    add(f"parametrized_{name}", parametrized(make), "a weight from all of a parameter")

WEIGHTS = {
    "softmax_of_weight": lambda s, x, h: F.linear(F.linear(x, s.w1.softmax(0)), s.w2),
    "softmax_of_rows": lambda s, x, h: F.linear(h, s.w2.softmax(1)),
    "orthogonality": lambda s, x, h: s.down(h) + (s.w1 @ s.w1.mT - torch.eye(INNER)).square().mean(),
    "orthogonality_of_columns": lambda s, x, h: s.down(h) + (s.w1.mT @ s.w1).square().sum() * 1e-3,
    "weight_decay_inside": lambda s, x, h: s.down(h) + 1e-2 * (s.w1.norm() + s.w2.norm()),
    "max_of_weight": lambda s, x, h: s.down(h) / s.w1.abs().max(),
    "sum_of_weight": lambda s, x, h: s.down(h) + s.w2.sum(),
    "sorted_weight": lambda s, x, h: F.linear(h, s.w2.sort(1).values),
    "demodulated": lambda s, x, h: s.down(h * torch.rsqrt(s.w1.square().sum(1) + 1e-4)),
    "demodulated_outputs": lambda s, x, h: s.down(h) * torch.rsqrt(s.w2.square().sum(1) + 1e-4),
    "weight_with_transpose": lambda s, x, h: F.linear(h, s.w2 + s.w1.mT),
    "weight_with_flipped": lambda s, x, h: F.linear(h, s.w2 + s.w2.flip(1)),
    "weight_dropout": lambda s, x, h: F.linear(h, s.w2 * (s.w2.abs() > s.w2.abs().median())),
    "low_rank_sum": lambda s, x, h: F.linear(x, s.w2 @ s.w1 + torch.eye(WIDTH)),
    "kron": lambda s, x, h: F.linear(h, torch.kron(s.w2[:4, :4], s.w2[4:8, 4:12])),
    "determinant": lambda s, x, h: s.down(h) * torch.linalg.slogdet(s.w2 @ s.w2.mT + torch.eye(WIDTH)).logabsdet,
    "svd": lambda s, x, h: s.down(h) + torch.linalg.svdvals(s.w1).amax(),
    "detached_weight": lambda s, x, h: s.down(h) + F.linear(x, s.w1.detach()).mean(-1, keepdim=True),
    "weight_as_input": lambda s, x, h: s.down(h) + (x @ s.w1.mT @ s.w1.softmax(-1)),
    "in_place_weight": lambda s, x, h: F.linear(h, s.w2.clone().mul_(2).add_(0.1)),
    "row_of_weight": lambda s, x, h: s.down(h) * s.w1[3],
    "grouped_weights": lambda s, x, h: s.down(h * s.w1.view(4, 8, WIDTH).mean((0, 2)).repeat(4)),
}
for name, f in WEIGHTS.items():
    raw(f"weights_{name}", "all of a weight is read", f)


# One sum for all uses of a tensor in a module


class Adapted(nn.Linear):
    """A linear with an adapter of low rank, as loralib has it."""

    def __init__(self, features: int, results: int, dropout: float) -> None:
        super().__init__(features, results)
        self.a = nn.Parameter(torch.randn(4, features) / 4)
        self.b = nn.Parameter(torch.randn(results, 4) / 2)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.drop(x) @ self.a.mT @ self.b.mT


class AdaptedMlp(Mlp):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Adapted(WIDTH, INNER, dropout), Adapted(INNER, WIDTH, dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(self.norm(x))


add(
    "Adapters",
    lambda: AdaptedMlp(0.2),
    "both x and its dropout are used, where a sum would be too early",
    random=True,
    share=0.85,
    p=(2, 3),
)
add("AdaptersWithoutDropout", lambda: AdaptedMlp(0.0), "a dropout of 0 returns x itself", share=0.85)
add(
    "AdaptersOfTokens",
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), AdaptedMlp(0.2), AdaptedMlp(0.2), nn.LayerNorm(WIDTH)),
    "the same while tokens are sharded",
    random=True,
    share=0.75,
    plan={"sequence_parallel": True},
)


@trap("an intermediate result is returned, and used before that", bare=True, share=0.9)
class ReturnsIntermediate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.after = Intermediate(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.inner(x)
        return z + self.after(y)


class Intermediate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, self.mlp(y)
