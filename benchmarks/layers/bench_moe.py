"""A mixture of experts, forward and backward with the input's gradient: on one rank and on two, and its peers.

8 experts of hidden 256 and ffn 512 (swiglu), top 2 of softmax scores, 1024 tokens in fp32. "EP": the experts over 2
ranks, each of which has half of the tokens; "TP": the features of each expert over 2 ranks, which have the same tokens.
"dense" is an MLP of the same floating point operations, 2 x 512 features, without routing; "loop" a loop over the
experts in plain torch; "Mixtral" the block of transformers, "Megatron" the layer of Megatron-core. Output, input
gradient and the gradients of router and experts are compared with the loop before any measurement. "speedup" is over
the loop with one thread.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.harness import TOLERANCE
from benchmarks.lib.report import Record
from benchmarks.peers import megatron_moe

HIDDEN, FFN, EXPERTS, CHOICES, TOKENS, RANKS = 256, 512, 8, 2, 1024, 2
NAMES = ("y", "dx", "router.weight", "experts.up_weight", "experts.down_weight")
Results = list[Tensor]


@functools.cache
def weights() -> tuple[Tensor, ...]:
    """Router, up and down weights, then x and the gradient of y."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(EXPERTS, HIDDEN), (EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN), (TOKENS, HIDDEN), (TOKENS, HIDDEN)]
    scales = [HIDDEN**-0.5, HIDDEN**-0.5, FFN**-0.5, 1.0, 1.0]
    return tuple(torch.randn(shape, generator=generator) * scale for shape, scale in zip(shapes, scales, strict=True))


def step_of(layer: Callable[[Tensor], Tensor], parameters: list[Tensor], own: slice = slice(None)) -> Any:
    """Forward and backward of these tokens: y, dx, and the gradients of the parameters."""
    x, grad = weights()[3][own].clone().requires_grad_(), weights()[4][own]

    def step() -> Results:
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *parameters], grad)]

    return step


@functools.cache
def loop() -> Callable[[], Results]:
    router, up, down = (w.clone().requires_grad_() for w in weights()[:3])

    def layer(x: Tensor) -> Tensor:
        scores = F.linear(x, router).softmax(-1)
        chosen, experts = scores.topk(CHOICES, -1)
        chosen = chosen / chosen.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, choice = torch.where(experts == e)
            gate, value = F.linear(x[token], up[e]).chunk(2, -1)
            y = y.index_add(0, token, F.linear(F.silu(gate) * value, down[e]) * chosen[token, choice, None])
        return y

    return step_of(layer, [router, up, down])


@functools.cache
def dense() -> Callable[[], Results]:
    up = weights()[1][:CHOICES].flatten(0, 1).clone().requires_grad_()
    down = torch.cat(list(weights()[2][:CHOICES]), 1).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        gate, value = F.linear(x, up).chunk(2, -1)
        return F.linear(F.silu(gate) * value, down)

    return step_of(layer, [up, down])


@functools.cache
def mixtral() -> Callable[[], Results]:
    from transformers.models.mixtral import modeling_mixtral as module

    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_local_experts": EXPERTS}
    block = module.MixtralSparseMoeBlock(module.MixtralConfig(**sizes, num_experts_per_tok=CHOICES))
    parameters = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    with torch.no_grad():
        for param, value in zip(parameters, weights(), strict=False):
            param.copy_(value)
    return step_of(lambda x: block(x[None])[0], parameters)


def ours(way: str, group: Any) -> Callable[[], Results]:
    """A step of ParallelMoE, with the gradients as this rank has them."""
    groups = {"group": group if way == "TP" else None, "expert_group": group if way == "EP" else None}
    layer = tp_ext.ParallelMoE(HIDDEN, FFN, EXPERTS, CHOICES, gradient_reduction="sum", **groups)
    tp_ext.load_full_state_dict(layer, dict(zip(NAMES[2:], weights(), strict=False)))
    parameters = [layer.router.weight, layer.experts.up_weight, layer.experts.down_weight]
    own = slice(None)
    if way == "EP":
        own = slice(group.rank() * TOKENS // RANKS, (group.rank() + 1) * TOKENS // RANKS)
    step = step_of(layer, parameters, own)
    check(step(), way, dict(tp_ext.layouts(layer)))
    return step


def check(results: Results, way: str, layouts: dict[str, Any]) -> None:
    """This rank's results against those of the loop."""
    for name, got, want in zip(NAMES, results, loop()(), strict=True):
        if name in layouts:
            want = layouts[name].shard(want)
        elif way == "EP":
            want = want.chunk(RANKS)[dist.get_rank()]
        if name == "router.weight" and way == "EP":
            got = got.clone()
            dist.all_reduce(got)
        error = ((got - want).norm() / want.norm()).item()
        assert error <= TOLERANCE[torch.float32], f"{name} is off by {error:.1e} of its norm"


@functools.cache
def megatron() -> Callable[[], Results]:
    """A step of Megatron-core's layer over the ranks; the gradients of each expert on its own."""
    group = interleave.group_on("gloo")
    layer = megatron_moe.megatron_moe(group, HIDDEN, FFN, EXPERTS, CHOICES)
    held = megatron_moe.set_weights(layer, *weights()[:3], group.rank() * EXPERTS // RANKS)
    own = slice(group.rank() * TOKENS // RANKS, (group.rank() + 1) * TOKENS // RANKS)
    step = step_of(lambda x: layer(x[:, None])[0][:, 0], [param for params in held for param in params], own)
    y, dx, router, *others = step()
    ups, downs = others[: len(held[1])], others[len(held[1]) :]
    experts = tp_ext.Sharding(0, (EXPERTS,)), tp_ext.group.parallel_group(group)
    layouts = {NAMES[2]: tp_ext.Layout()} | dict.fromkeys(NAMES[3:], tp_ext.Layout(experts))
    check([y, dx, router, torch.stack(ups), torch.stack(downs)], "EP", layouts)
    return step


@functools.cache
def on_rank(way: str, backend: str) -> Callable[[], Results]:
    return ours(way, interleave.group_on(backend))


def subjects(cores: list[int]) -> dict[str, interleave.Block]:
    alone = {"loop": loop(), "dense": dense(), "Mixtral": mixtral(), "ours": ours("one", None)}
    check(mixtral()(), "one", {})
    result = {f"{name}, 1 thread": interleave.here(step, 1, cores[:1]) for name, step in alone.items()}
    for way in ("EP", "TP"):
        for backend in interleave.BACKENDS:
            result[f"ours {way}2, {backend}"] = interleave.on_ranks(RANKS, on_rank, way, backend)
    result["Megatron EP2, gloo"] = interleave.on_ranks(RANKS, megatron)
    return result


def measure(case: str, seconds: float, block: float) -> list[Record]:
    cores = interleave.cores()
    interleave.pin_ranks(RANKS, cores, len(cores) >= RANKS)
    times = interleave.take(subjects(cores), seconds, block, turns=3 if seconds else 1)
    return interleave.rows(
        times,
        {},
        lambda of, name: {
            "speedup": of["loop, 1 thread"] / of[name],
            "over_ours_alone": of["ours, 1 thread"] / of[name],
        },
    )


draw = report.bars(f"mixture of experts, {RANKS} ranks", "speedup", "times as fast as the loop")


def main() -> None:
    report.run(__file__, __doc__, lambda quick: ["experts"], measure, draw, "transformers", "megatron-core")


if __name__ == "__main__":
    main()
