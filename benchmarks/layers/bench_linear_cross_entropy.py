"""The loss of a head with and without its logits, forward and backward with both gradients: ours, torch, and chunks.

"logits" is ours with all logits (``keep_logits=True``), "torch" ``F.linear`` and ``F.cross_entropy``, "torch chunked"
torch's ``F.linear_cross_entropy``, which chunks where it can, "Liger" Liger's way in torch: chunks of tokens of
Liger's size, with gradients in forward. Loss and gradients are compared before any measurement, with torch's or, in
``--full``, which measures hidden sizes from 256 to 2048 without peers, with those of "logits". Two ranks are over
tp_shm, one thread each; everything else has one thread. Memory: the most bytes at once of allocations of torch, without
the gradients, by those of the logits of a rank. In bf16, measured where the processor has instructions for it, the sum
of the weight's gradient in fp32 is part of that memory.
"""

import functools
import itertools
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
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # of the norm of a result; measured in bf16 4e-3, its rounding
Results = list[Tensor]


def dtypes() -> list[str]:
    # Without instructions a product in bf16 takes 17 times as long as in fp32
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return list(DTYPES) if fast else ["fp32"]


def operands(hidden: int, vocab: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, hidden, generator=generator) for n in (TOKENS, vocab))
    weight.mul_(hidden**-0.5)
    return x.to(DTYPES[dtype]), weight.to(DTYPES[dtype]), torch.randint(vocab, (TOKENS,), generator=generator)


@functools.lru_cache(maxsize=1)
def leaves(hidden: int, vocab: int, dtype: str, rank: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and target; with a rank, its rows of the weight. A step of any case finds its memory in the process."""
    x, weight, target = operands(hidden, vocab, dtype)
    if rank is not None:
        weight = weight.tensor_split(RANKS)[rank].clone()
    tp_ext.keep_memory()
    return x.requires_grad_(), weight.requires_grad_(), target


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


def step_of(name: str, hidden: int, vocab: int, dtype: str, group: str = "") -> Callable[[], Results]:
    """Forward and backward: the loss, and the gradients of x and weight."""
    over = interleave.group_on(group) if group else None
    x, weight, target = leaves(hidden, vocab, dtype, torch.distributed.get_rank() if group else None)
    if name == "Liger":
        return lambda: liger(x.detach(), weight.detach(), target)

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


def results_and_peak(step: Callable[[], Results]) -> tuple[Results, float]:
    """Loss, gradients of x and of some rows of the weight; the most bytes at once but for the gradients, by those of
    the logits."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        loss, dx, dw = step()
    sizes = [one.nbytes() for one in events.profiler.kineto_results.events() if one.name() == "[memory]"]
    gradients = sum(one.nbytes for one in (loss, dx, dw))
    logits = TOKENS * len(dw) * dw.element_size()
    return [loss, dx, dw[::64].clone()], (max(itertools.accumulate(sizes)) - gradients) / logits


def on_rank(_: Any, *case: Any) -> tuple[Results, float]:
    return results_and_peak(step_of(*case))


def compare(name: str, found: Results, want: Results, tolerance: float) -> None:
    for one, other in zip(found, want, strict=True):
        apart = float((one.double() - other.double()).norm() / other.double().norm())
        assert apart <= tolerance, f"{name}: a result differs by {apart:.1e} of its norm"


def measure(sizes: tuple[int, int, str, bool], seconds: float, block: float) -> list[Record]:
    case, peers = sizes[:3], sizes[3]
    hidden, vocab, dtype = case
    cores = interleave.cores()
    interleave.pin_ranks(RANKS, cores, len(cores) >= RANKS)
    torch.set_num_threads(1)
    names = ["logits", "ours"]
    if peers:
        # Liger's kernels compute the softmax in fp32, as operators of torch in bf16 do not
        names = ["torch", *names] + ["Liger"] * (dtype == "fp32")
        names += ["torch chunked"] * hasattr(F, "linear_cross_entropy")
    found, subjects, peaks = {}, {}, {}
    for name in names:
        step = step_of(name, *case)
        found[name], peaks[name] = results_and_peak(step)
        compare(name, found[name], found[names[0]], TOLERANCE[dtype])
        subjects[name] = interleave.here(step, 1, cores[:1])
    for name in ("ours", "logits"):
        label = f"{name}, 2 ranks"
        (first, one), (second, other) = interleave.ranks.run(on_rank, RANKS, name, *case, "tp_shm")
        compare(label, [first[0], first[1], torch.cat([first[2], second[2]])], found[names[0]], TOLERANCE[dtype])
        peaks[label] = max(one, other)
        subjects[label] = interleave.on_ranks(RANKS, step_of, name, *case, "tp_shm")
    times = interleave.take(subjects, 0.0, turns=3 if seconds else 1, count=1)
    return interleave.rows(
        times,
        {"hidden": hidden, "vocab": vocab, "dtype": dtype},
        lambda of, name: {
            "to_logits": of[name] / of["logits, 2 ranks" if "ranks" in name else "logits"],
            "one_to_this": of[name.split(",")[0]] / of[name],
            "peak_to_logits": peaks[name],
        },
    )


draw = report.bars(
    "hidden {hidden}, vocabulary {vocab}, {dtype}", "to_logits", "time to that of ours with all logits, medians"
)


def main() -> None:
    def cases(quick: bool) -> list[tuple[int, int, str, bool]]:
        sizes = (64, 4096) if quick else (512, 32768)
        return [(*sizes, dtype, True) for dtype in dtypes()]

    full = [(hidden, 131072, dtype, False) for dtype in dtypes() for hidden in (256, 512, 1024, 2048)]
    report.run(__file__, __doc__, cases, measure, draw, full=full)


if __name__ == "__main__":
    main()
