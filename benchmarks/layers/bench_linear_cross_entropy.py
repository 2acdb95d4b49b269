"""The loss of a head with and without its logits, forward and backward with both gradients: ours, torch, and chunks.

"logits" is ours with all logits (``keep_logits=True``), "torch" ``F.linear`` and ``F.cross_entropy``, "torch chunked"
torch's ``F.linear_cross_entropy``, which chunks where it can, "Liger" Liger's way in torch: chunks of tokens of
Liger's size, with gradients in forward. Loss and gradients are compared with torch's before any measurement. Two ranks
are over tp_shm, one thread each; everything else has one thread. Memory: the most bytes at once of allocations of
torch, without the gradients, by those of the logits of a rank.
"""

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.report import Record

RANKS, TOKENS = 2, 2048
Results = list[Tensor]


@functools.cache
def operands(hidden: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, hidden, generator=generator) for n in (TOKENS, vocab))
    return x, weight * hidden**-0.5, torch.randint(vocab, (TOKENS,), generator=generator)


def liger(x: Tensor, weight: Tensor, target: Tensor) -> Results:
    """Liger's chunks: as many as the vocabulary is wider than the hidden size, of a power of two of tokens."""
    rows = 1 << (-(-TOKENS // -(-len(weight) // x.shape[1])) - 1).bit_length()
    dx, dw, loss = torch.empty_like(x), torch.zeros_like(weight), x.new_zeros(())
    for part, ids, out in zip(x.split(rows), target.split(rows), dx.split(rows), strict=True):
        logits = part @ weight.t()
        log_sum = logits.logsumexp(-1, keepdim=True)
        loss += (log_sum - logits.gather(-1, ids[:, None])).sum()
        dlogits = logits.sub_(log_sum).exp_()
        dlogits[torch.arange(len(ids)), ids] -= 1
        torch.mm(dlogits.div_(TOKENS), weight, out=out)
        dw.addmm_(dlogits.t(), part)
    return [loss / TOKENS, dx, dw]


@functools.cache
def step_of(name: str, hidden: int, vocab: int, group: str = "") -> Callable[[], Results]:
    """Forward and backward: the loss, and the gradients of x and weight."""
    x, weight, target = operands(hidden, vocab)
    if name == "Liger":
        return lambda: liger(x, weight, target)
    over = interleave.group_on(group) if group else None
    if group:
        weight = weight.tensor_split(RANKS)[torch.distributed.get_rank()]
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()

    def loss() -> Tensor:
        if name == "torch":
            return F.cross_entropy(F.linear(x, weight), target)
        if name == "torch chunked":
            return F.linear_cross_entropy(x, weight, target)
        if name == "logits":
            return tp_ext.vocab_parallel_cross_entropy(
                F.linear(tp_ext.copy_to_region(x, over), weight), target, over, vocab_size=vocab
            )
        fused = tp_ext.linear_cross_entropy(x, weight, target, over, vocab_size=vocab)
        assert isinstance(fused, Tensor)
        return fused

    def step() -> Results:
        value = loss()
        return [value.detach(), *torch.autograd.grad(value, (x, weight))]

    return step


def peak(step: Callable[[], Results]) -> float:
    """The most bytes at once without the gradients, by those of the logits."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        results = step()
    sizes = [one.nbytes() for one in events.profiler.kineto_results.events() if one.name() == "[memory]"]
    gradients = sum(one.nbytes for one in results)
    return (max(itertools.accumulate(sizes)) - gradients) / (TOKENS * len(results[2]) * results[2].element_size())


def peak_on_rank(_: Any, *case: Any) -> float:
    return peak(step_of(*case))


def results_on_rank(_: Any, *case: Any) -> Results:
    return step_of(*case)()


def compare(name: str, found: Results, want: Results) -> None:
    for one, other in zip(found, want, strict=True):
        apart = float((one - other).norm() / other.norm())
        assert apart <= 1e-5, f"{name}: a result differs from torch's by {apart:.1e} of its norm"


def measure(sizes: tuple[int, int], seconds: float, block: float) -> list[Record]:
    cores = interleave.cores()
    interleave.pin_ranks(RANKS, cores, len(cores) >= RANKS)
    names = ["ours", "logits", "torch", "Liger"] + ["torch chunked"] * hasattr(F, "linear_cross_entropy")
    want = step_of("torch", *sizes)()
    subjects: dict[str, interleave.Block] = {}
    peaks: dict[str, float] = {}
    for name in names:
        step = step_of(name, *sizes)
        compare(name, step(), want)
        peaks[name] = peak(step)
        subjects[name] = interleave.here(step, 1, cores[:1])
    for name in ("ours", "logits"):
        case, label = (name, *sizes, "tp_shm"), f"{name}, 2 ranks"
        found = interleave.ranks.run(results_on_rank, RANKS, *case)
        compare(label, [found[0][0], found[0][1], torch.cat([one[2] for one in found])], want)
        peaks[label] = max(interleave.ranks.run(peak_on_rank, RANKS, *case))
        subjects[label] = interleave.on_ranks(RANKS, step_of, *case)
    times = interleave.take(subjects, seconds, block, turns=3 if seconds else 1)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        {
            "case": name,
            "hidden": sizes[0],
            "vocab": sizes[1],
            "median_ms": medians[name] * 1e3,
            "min_ms": min(values) * 1e3,
            "to_logits": medians[name] / medians["logits, 2 ranks" if "ranks" in name else "logits"],
            "one_to_this": medians[name.split(",")[0]] / medians[name],
            "peak_to_logits": peaks[name],
            "steps": len(values),
        }
        for name, values in times.items()
    ]


def draw(figure: Any, records: list[Record]) -> None:
    panels: dict[str, dict[str, Any]] = {}
    for r in records:
        panels.setdefault(f"hidden {r['hidden']}, vocabulary {r['vocab']}", {})[str(r["case"])] = r["to_logits"]
    report.draw_bars(figure, panels, "time to that of ours with all logits, medians", mark=1.0)


def main() -> None:
    report.run(__file__, __doc__, lambda quick: [(64, 4096)] if quick else [(512, 131072)], measure, draw)


if __name__ == "__main__":
    main()
