"""Hundreds of steps in tp_invariant on every number of ranks: one digest of weights and optimizer, a row per model.

    MKL_CBWR=AVX512,STRICT .venv/bin/python -m tests.soak.invariance --steps 200
    MKL_CBWR=AVX512,STRICT .venv/bin/python -m tests.soak.invariance --steps 200 --only "experts, bf16"

Each model trains with AdamW or Muon, dropout and clipping, on p = 1, 2, 3, 4 and 8 simulated ranks with and without
sequence parallelism, on one and on two threads, on processes over gloo and ``tp_shm``, and, saved after half of the
steps on one p, to its end on another. Loss and gradient norm of every step and the digest must have the same bits. It
prints a table, and ends with 1 if a bit differs.
"""

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tp_ext
from tests.helpers import ranks
from tests.helpers.invariant_model import Model, optimizer_of
from tp_ext.group import Group, parallel_group

MODELS: dict[str, dict[str, Any]] = {
    f"{name}, {dtype}": options | how
    for name, options in {
        "gpt": {"vocab": 50257},  # grouped-query heads, qk-norm, RoPE, dropout, tied head
        "experts": {"moe": {}, "layers": 1},
        "latent attention": {"latent": {}, "layers": 1, "muon": True},
        "llama by auto": {"by_auto": True},  # of transformers, unchanged
    }.items()
    for dtype, how in {
        "fp32": {},
        "bf16": {"dtype": torch.bfloat16},
        "autocast": {"autocast": True},
    }.items()
}
RANKS = (1, 2, 3, 4, 8)


def llama(dtype: torch.dtype) -> Any:
    import transformers

    sizes = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, attention_dropout=0.1, use_cache=False)
    return transformers.LlamaForCausalLM(config).to(dtype).train()


@functools.cache
def plan_of_llama(p: int, dtype: torch.dtype) -> tp_ext.auto.Plan:
    ids = torch.randint(101, (2, 13))
    return tp_ext.auto.plan(llama(dtype), {"input_ids": ids, "labels": ids}, p, invariant_blocks=8)


def train(
    group: Group,
    steps: int,
    first: int = 0,
    last: int | None = None,
    folder: Path | None = None,
    threads: int = 1,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    muon: bool = False,
    by_auto: bool = False,
    **options: Any,
) -> tuple[list[str], str]:
    """Loss and gradient norm of the steps [first, last) in hex, and the digest after them. From the checkpoint in
    ``folder`` on, where ``first`` is not 0; saved to it else."""
    torch.set_num_threads(threads)
    plan = plan_of_llama(parallel_group(group).size, dtype) if by_auto else None
    torch.manual_seed(0)
    if plan is not None:
        model: Any = tp_ext.auto.apply(plan, llama(dtype), group)
    else:
        with tp_ext.tp_invariant():
            model = Model(group, **options).to(dtype)
    optimizer = optimizer_of(model, muon, lr=1e-3)
    if first and folder is not None:
        tp_ext.load_checkpoint(folder / "checkpoint", model, optimizer)
    numbers = []
    for step in range(first, steps if last is None else last):
        torch.manual_seed(step)  # batch and masks by the step, not by what was drawn before
        ids, target = torch.randint(options.get("vocab", 101), (2, 2, 13))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=target).loss if by_auto else model(ids, target)
        loss.backward()
        norm = tp_ext.clip_grad_norm_(model, 0.5)
        numbers += [loss.item().hex(), norm.item().hex()]
        optimizer.step()
        optimizer.zero_grad()
    if not first and folder is not None:
        tp_ext.save_checkpoint(folder / "checkpoint", model, optimizer)
    return numbers, tp_ext.debug.sha256(model, optimizer)


def simulated(p: int, steps: int, **options: Any) -> Any:
    if p == 1:
        return train(None, steps, **options)
    results = tp_ext.debug.simulate(lambda rank, group: train(group, steps, **options), p)
    assert all(result == results[0] for result in results)
    return results[0]


def on_processes(group: dist.ProcessGroup, backend: str, steps: int, options: dict[str, Any]) -> Any:
    return train(group if backend == "gloo" else dist.new_group(backend=backend), steps, **options)


def runs(steps: int, options: dict[str, Any], p: tuple[int, ...] = RANKS) -> Iterator[tuple[str, Any]]:
    """A description of each run, and what it gave."""
    by_auto = "by_auto" in options  # which refuses sequence parallelism in blocks
    for size in p:
        for sequence_parallel in (False, True) if size > 1 and not by_auto else (False,):
            name = f"p = {size}{', SP' if sequence_parallel else ''}"
            how = {} if by_auto else {"sequence_parallel": sequence_parallel}
            yield name, simulated(size, steps, **how, **options)
    yield "p = 2, two threads", simulated(2, steps, threads=2, **options)
    for backend, size in (("gloo", 3), ("tp_shm", 2), ("tp_shm", 4)):
        results = ranks.run(on_processes, size, backend, steps, options, timeout=3600)
        yield f"{size} processes, {backend}", results[0] if results == results[:1] * size else results
    with tempfile.TemporaryDirectory() as name:
        folder, half = Path(name), steps // 2
        numbers, _ = simulated(4, steps, last=half, folder=folder, **options)
        how = {} if by_auto else {"sequence_parallel": True}
        others, digest = simulated(3, steps, first=half, folder=folder, **how, **options)
        yield f"p = 4, then 3{'' if by_auto else ' with SP'}", (numbers + others, digest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    arguments = parser.parse_args()
    wrong = []
    ranks._ENVIRONMENT.update(ranks.STRICT)
    for model in arguments.only:
        begin, all_runs = time.monotonic(), list(runs(arguments.steps, MODELS[model]))
        expected = all_runs[0][1]
        differing = [name for name, found in all_runs if found != expected]
        wrong += [f"{model}: {name}" for name in differing]
        loss = float.fromhex(expected[0][-2])
        print(
            f"| {model} | {len(all_runs) - len(differing)} of {len(all_runs)} | {loss:.4f} | {expected[1][:16]} | "
            f"{time.monotonic() - begin:.0f} s |",
            flush=True,
        )
    print("\n".join(wrong) if wrong else "all bits are the same")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
