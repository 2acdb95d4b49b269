"""Forty errors, each put into one of six models at p > 1: a forgotten or doubled collective, a wrong slice, a wrong
seed, a local number. Each row says what a report has to name."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import tp_ext
from tests.fuzz.mistakes import MISTAKES
from tests.verify.models import HIDDEN
from tp_ext import _ops


class Error(NamedTuple):
    """An error: ``put(model, group)`` changes a right model of one rank; ``patch`` is one around the whole run."""

    model: str
    put: Callable[[Any, Any], None] | None
    module: str
    tensor: str
    word: str
    patch: Callable[[], Any] | None = None


def replaced(path: str, make: Callable[[nn.Module, Any], Callable[..., Any]]) -> Callable[[Any, Any], None]:
    """Gives the module at ``path`` another forward."""

    def put(model, group):
        module = model.get_submodule(path)
        module.forward = make(module, group)

    return put


def after(path: str, change: Callable[[Tensor, Any], Tensor]) -> Callable[[Any, Any], None]:
    """Changes the output of the module."""

    def make(module, group):
        forward = module.forward
        return lambda *args, **kwargs: change(forward(*args, **kwargs), group)

    return replaced(path, make)


def before(path: str, change: Callable[[Tensor, Any], Tensor]) -> Callable[[Any, Any], None]:
    """Changes the first input of the module, within it."""

    def make(module, group):
        forward = module.forward
        return lambda x, *args, **kwargs: forward(change(x, group), *args, **kwargs)

    return replaced(path, make)


def plain_linear(path: str) -> Callable[[Any, Any], None]:
    """A column or row linear without its collectives, forward and backward."""

    def make(module, group):
        def forward(x, *args):
            y = F.linear(x, module.weight, None if module.skip_bias_add else module.bias)
            return (y, module.bias) if module.skip_bias_add else y

        return forward

    return replaced(path, make)


def parameter(path: str, change: Callable[[Tensor, Any], Tensor]) -> Callable[[Any, Any], None]:
    """Changes a parameter."""

    def put(model, group):
        with torch.no_grad():
            target = model.get_parameter(path)
            target.copy_(change(target.clone(), group))

    return put


def neighbours(x: Tensor, group: Any) -> Tensor:
    """The shard of the next rank."""
    shards = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(shards, x, group=group)
    return shards[(group.rank() + 1) % group.size()]


def hooked(path: str, change: Callable[[Tensor, Any], Tensor]) -> Callable[[Any, Any], None]:
    """Changes the gradient of a parameter."""
    return lambda model, group: model.get_parameter(path).register_hook(lambda g: change(g, group)) and None


def summed(x: Tensor, group: Any) -> Tensor:
    return tp_ext.reduce_from_region(x, group)


def entered(x: Tensor, group: Any) -> Tensor:
    return tp_ext.copy_to_region(x, group)


def summed_gradient(gradient: Tensor, group: Any) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total


def own_mask(module: nn.Module, group: Any) -> Callable[..., Tensor]:
    """Dropout of replicated tokens by a generator of the rank."""

    def forward(x, residual=None, total_tokens=None):
        if module.training:
            generator = torch.Generator().manual_seed(group.rank())
            x = x * (torch.rand(x.shape, generator=generator) < 0.75) / 0.75
        return x if residual is None else x + residual

    return forward


def same_mask_on_all_shards(model: Any, group: Any) -> None:
    model.masked = lambda h: F.dropout(h, 0.25, model.training)


def sliced_without_sum(module: nn.Module, group: Any) -> Callable[..., Tensor]:
    return lambda x: tp_ext.scatter_to_region(F.linear(x, module.weight), group, dim=0) + module.bias


def embedded_without_sum(module: nn.Module, group: Any) -> Callable[..., Tensor]:
    """Zeros for words of other ranks, which nothing sums."""

    def forward(ids):
        own = ids - module.vocab_start
        known = (own >= 0) & (own < module.vocab_local)
        return F.embedding(own.where(known, 0), module.weight) * known[:, None]

    return forward


def loss_of_own_words(module: nn.Module, group: Any) -> Callable[..., Tensor]:
    def forward(logits, target):
        return F.cross_entropy(logits, target % logits.shape[-1], label_smoothing=0.1)

    return forward


def rows_of_local_size(router: nn.Module, group: Any) -> Callable[..., Any]:
    forward = router.forward

    def changed(*args, **kwargs):
        routed = forward(*args, **kwargs)
        return routed._replace(weights=routed.weights * (1 + 1 / group.size()) / 2)

    return changed


def of_width(x: Tensor, group: Any) -> Tensor:
    """Divides by the local width what must be divided by the full one."""
    return x * HIDDEN / x.shape[-1]


def of_rows(x: Tensor, group: Any) -> Tensor:
    return x / x.shape[0]


def local_rms(x: Tensor, group: Any) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def of_local_heads(model: Any, group: Any) -> None:
    model.attention.scale = (model.attention.head_dim / group.size()) ** -0.5


def random_by_rank(x: Tensor, group: Any) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(group.rank())).to(x)


def on_rank_0(change: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    return lambda x, group: change(x, group) if group.rank() == 0 else x


def without(name: str) -> Callable[[], Any]:
    """Makes a region the identity."""
    return lambda: patch.object(_ops, name, lambda x, *rest: x)


ERRORS = {
    # Forgotten collectives
    "out_without_sum": Error(
        "gpt", plain_linear("blocks.1.attention.out"), "blocks.1.attention.out", "output", "partial"
    ),
    "embedding_without_sum": Error(
        "gpt", replaced("embedding", embedded_without_sum), "embedding", "output", "partial"
    ),
    "up_without_entry": Error(
        "gpt", plain_linear("blocks.1.mlp.up"), "blocks.1.mlp.up", "blocks.1.mlp_norm.weight", "missing a sum"
    ),
    "down_without_sum": Error("mlp", plain_linear("down"), "down", "output", "partial"),
    "gate_without_entry": Error("mlp", plain_linear("gate"), "gate", "norm.weight", "missing a sum"),
    "copies_unsummed": Error(
        "attention",
        None,
        "attention.qkv",
        "attention.qkv.weight",
        "missing a sum",
        MISTAKES["copied_heads_unsummed"],
    ),
    "mask_unsummed": Error("attention", None, "", "mask", "missing a sum", MISTAKES["mask_gradient_unsummed"]),
    "column_unsummed": Error(
        "attention", None, "attention.qkv", "norm.weight", "missing a sum", MISTAKES["column_gradient_unsummed"]
    ),
    "experts_without_sum": Error("experts", None, "moe", "output", "local", without("reduce_from_region")),
    "experts_without_entry": Error("experts", None, "moe", "moe.router.weight", "sum", without("copy_to_region")),
    "head_without_entry": Error(
        "words",
        replaced("head", lambda head, group: lambda x: F.linear(x, head.weight)),
        "head",
        "mix.weight",
        "missing a sum",
    ),
    "loss_of_own_words": Error("words", replaced("criterion", loss_of_own_words), "criterion", "output", "local"),
    "norms_unsummed": Error(
        "sequence", None, "norm", "norm.weight", "missing a sum", MISTAKES["norm_gradients_unsummed"]
    ),
    "slice_without_sum": Error("sequence", replaced("down", sliced_without_sum), "down", "output", "local"),
    "sum_on_one_rank": Error("words", after("mix", on_rank_0(summed)), "mix", "all_reduce of rank 0", "local"),
    # Doubled ones
    "down_twice": Error("gpt", after("blocks.0.mlp.down", summed), "blocks.0.mlp.down", "output", "twice"),
    "head_entered_twice": Error("gpt", before("head", entered), "head", "norm.weight", "twice"),
    "linear_twice": Error("mlp", after("down", summed), "down", "output", "twice"),
    "scale_twice": Error("mlp", hooked("scale", summed_gradient), "", "scale", "twice"),
    "attention_entered_twice": Error("attention", before("attention", entered), "attention", "norm.weight", "twice"),
    "experts_twice": Error("experts", after("moe", summed), "moe", "output", "twice"),
    "embedding_twice": Error("words", after("embedding", summed), "embedding", "output", "twice"),
    "loss_twice": Error("words", after("criterion", summed), "criterion", "output", "twice"),
    "norm_twice": Error("sequence", hooked("norm.weight", summed_gradient), "norm", "norm.weight", "twice"),
    "bias_of_each_rank": Error("attention", None, "attention.out", "output", "twice", MISTAKES["row_bias_p_times"]),
    # Wrong slices
    "qkv_of_neighbour": Error(
        "gpt",
        parameter("blocks.0.attention.qkv.weight", neighbours),
        "blocks.0.attention.qkv",
        "blocks.0.attention.qkv.weight",
        "local slice of rank",
    ),
    "up_of_neighbour": Error("mlp", parameter("up.weight", neighbours), "up", "up.weight", "local slice of rank"),
    "heads_rolled": Error(
        "attention", after("attention.qkv", lambda x, group: x.roll(1, -1)), "attention.qkv", "output", "local"
    ),
    "experts_of_neighbour": Error(
        "experts",
        parameter("moe.experts.down_weight", neighbours),
        "moe.experts",
        "moe.experts.down_weight",
        "local slice of rank",
    ),
    "head_of_neighbour": Error(
        "words", after("head", lambda x, group: neighbours(x.detach(), group)), "head", "output", "local slice of rank"
    ),
    "tokens_of_neighbour": Error(
        "sequence", before("norm", lambda x, group: neighbours(x.detach(), group)), "norm", "output", "local slice"
    ),
    # Wrong seeds
    "mask_by_rank": Error("gpt", replaced("blocks.0.dropout", own_mask), "blocks.0.dropout", "output", "mask"),
    "same_mask": Error("mlp", same_mask_on_all_shards, "", "output", "mask"),
    "mask_of_local_index": Error("sequence", None, "dropout", "output", "mask", MISTAKES["masks_of_the_local_index"]),
    "router_by_rank": Error(
        "experts", parameter("moe.router.weight", random_by_rank), "moe.router", "moe.router.weight", "local"
    ),
    "linear_by_rank": Error("words", parameter("mix.weight", random_by_rank), "mix", "mix.weight", "local"),
    # Local numbers
    "logits_by_local_words": Error("gpt", after("head", of_width), "head", "output", "local"),
    "local_rms": Error("mlp", before("down", local_rms), "down", "output", "local"),
    "scale_of_local_heads": Error("attention", of_local_heads, "attention", "output", "local"),
    "smoothing_of_local_words": Error(
        "words", None, "criterion", "output", "local", MISTAKES["smoothing_over_the_local_vocabulary"]
    ),
    "weights_of_local_size": Error(
        "experts", replaced("moe.router", rows_of_local_size), "moe.router", "output", "local"
    ),
    "mean_of_local_tokens": Error("sequence", after("up", of_rows), "up", "output", "local"),
}
