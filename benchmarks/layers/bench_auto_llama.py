"""A Llama decoder block of transformers on two ranks, forward and backward with the input's gradient: sharded by
``tp_ext.auto``, written by hand with ``ParallelAttention`` and ``ParallelMLP``, by transformers' own ``tp_plan``, and
in one process.

Hidden 1024, intermediate 2816, 16 heads, 8 KV heads, 2 x 256 tokens in fp32 (``--quick``: hidden 256). "auto" is the
unchanged block of transformers after ``tp_ext.auto.apply``; "by hand" has the same weights; "transformers" is its
``from_pretrained(tp_plan="auto")``, whose layers have DTensors. "dense" is the unchanged block in one process while the
ranks wait. Output, input gradient and all weights' gradients are compared with dense before any measurement.
"""

import copy
import functools
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.harness import TOLERANCE
from benchmarks.lib.llama import LlamaBlock, block_weights
from benchmarks.lib.report import Record

RANKS, BATCH, SEQ = 2, 2, 256
Results = dict[str, Tensor]


def config_of(hidden: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=1,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=SEQ,
    )


@functools.cache
def model_of(hidden: int) -> transformers.LlamaModel:
    """The model around the block, the same in every process."""
    torch.manual_seed(0)
    model = transformers.LlamaModel(config_of(hidden)).train()
    with torch.no_grad():
        for parameter in model.parameters():  # norms are not ones
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


@functools.cache
def inputs(hidden: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """x, the gradient of y, and the tables of the rotary embedding."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(BATCH, SEQ, hidden, generator=generator) for _ in range(2))
    return x, grad, model_of(hidden).rotary_emb(x, torch.arange(SEQ)[None])


def step_of(block: Callable[[Tensor], Tensor], module: nn.Module, hidden: int) -> Callable[[], Results]:
    """Forward and backward: y, dx, and the gradients of the parameters by name."""
    x, grad = inputs(hidden)[0].clone().requires_grad_(), inputs(hidden)[1]
    names, parameters = zip(*module.named_parameters(), strict=True)

    def step() -> Results:
        y = block(x)
        return dict(zip(("y", "x", *names), [y.detach(), *torch.autograd.grad(y, [x, *parameters], grad)], strict=True))

    return step


def of_transformers(layer: nn.Module, hidden: int) -> Callable[[], Results]:
    tables = inputs(hidden)[2]
    return step_of(lambda x: layer(x, position_embeddings=tables), layer, hidden)


@functools.cache
def dense(hidden: int) -> Callable[[], Results]:
    return of_transformers(model_of(hidden).layers[0], hidden)


def by_hand(hidden: int, group: Any) -> tuple[Callable[[], Results], nn.Module]:
    model = model_of(hidden)
    block = LlamaBlock(model.config, group)
    tp_ext.load_full_state_dict(block, block_weights(model.layers[0].state_dict()))
    assert block.attention.rope is not None
    tables = block.attention.rope.cos_sin(torch.arange(SEQ), torch.float32)
    return step_of(lambda x: block(x, tables), block, hidden), block


def auto(hidden: int, group: Any) -> tuple[Callable[[], Results], nn.Module]:
    model = copy.deepcopy(model_of(hidden))
    example = {"inputs_embeds": torch.zeros(3, 5, hidden), "use_cache": False}
    layer = tp_ext.auto.apply(tp_ext.auto.plan(model, example, RANKS), model, group).layers[0]
    return of_transformers(layer, hidden), layer


def by_transformers(hidden: int, group: Any) -> tuple[Callable[[], Results], nn.Module]:
    from transformers.distributed import DistributedConfig

    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(RANKS)}
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if rank == "0":
        model_of(hidden).save_pretrained(folder[0])
    dist.barrier()
    layout = DistributedConfig(tp_size=RANKS, tp_plan="auto")
    model = transformers.LlamaModel.from_pretrained(folder[0], distributed_config=layout).train()
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return of_transformers(model.layers[0], hidden), model.layers[0]


WAYS = {"auto": auto, "by hand": by_hand, "transformers": by_transformers}


@functools.cache
def on_rank(name: str, backend: str, hidden: int) -> Callable[[], Results]:
    """On a rank: a step, checked."""
    step, block = WAYS[name](hidden, interleave.group_on(backend))
    expected = dense(hidden)()
    if name == "by hand":
        expected = {"y": expected["y"], "x": expected["x"], **block_weights(expected)}
    shardings = dict(tp_ext.shardings(block)) if name != "transformers" else {}
    for key, got in step().items():
        want, sharding = expected[key], shardings.get(key)
        got = got.full_tensor() if isinstance(got, DTensor) else got
        want = want if sharding is None else sharding.shard(want, dist.get_rank(), RANKS)
        error = ((got - want).norm() / want.norm()).item()
        assert error <= TOLERANCE[torch.float32], f"{name}: {key} is off by {error:.1e} of its norm"
    return step


def measure(case: tuple[bool, int], seconds: float, block: float) -> list[Record]:
    pinned, hidden = case
    cores = interleave.cores()
    interleave.pin_ranks(RANKS, cores, pinned)
    subjects = {
        "dense, 1 thread": interleave.here(dense(hidden), 1, cores[:1] if pinned else cores),
        "dense, 2 threads": interleave.here(dense(hidden), 2, cores),
        "transformers, gloo": interleave.on_ranks(RANKS, on_rank, "transformers", "gloo", hidden),
    }
    for backend in interleave.BACKENDS:
        for name in ("auto", "by hand"):
            subjects[f"{name}, {backend}"] = interleave.on_ranks(RANKS, on_rank, name, backend, hidden)
    times = interleave.take(subjects, seconds, block, turns=3 if seconds else 1)
    medians = {name: statistics.median(values) for name, values in times.items()}
    minima = {name: min(values) for name, values in times.items()}

    def of_by_hand(name: str, of: dict[str, float]) -> float | None:
        return of[name] / of[name.replace("auto", "by hand")] if name.startswith("auto") else None

    return [
        {
            "case": name,
            "hidden": hidden,
            "pinned": "pinned" if pinned else "not pinned",
            "median_ms": medians[name] * 1e3,
            "min_ms": minima[name] * 1e3,
            "of_by_hand": of_by_hand(name, medians),
            "min_of_by_hand": of_by_hand(name, minima),
            "times_transformers": medians["transformers, gloo"] / medians[name],
            "min_times_transformers": minima["transformers, gloo"] / minima[name],
            "times_dense": medians["dense, 1 thread"] / medians[name],
            "steps": len(times[name]),
        }
        for name in times
    ]


draw = report.bars(
    f"Llama block, hidden {{hidden}}, {RANKS} ranks, {{pinned}}",
    "times_transformers",
    "times as fast as transformers' own tp_plan, medians",
)


def main() -> None:
    def cases(quick: bool) -> list[tuple[bool, int]]:
        if quick:
            return [(False, 256)]
        return [(pinned, 1024) for pinned in ([True, False] if len(interleave.cores()) >= RANKS else [False])]

    report.run(__file__, __doc__, cases, measure, draw, "transformers")


if __name__ == "__main__":
    main()
