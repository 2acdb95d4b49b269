"""TRL's fused head, which multiplies with a head's weight itself, for a weight that is sharded."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tp_ext._imports import after_import
from tp_ext.outside.live_shards import layouts_by_id
from tp_ext.regions import copy_to_region, gather_from_region, reduce_from_region

MODULE, NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"
PARAMETERS = (
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip
STATISTICS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # the results, in this order
TOKENS = 4096  # whose logits a rank holds at once, as in TRL


def replace_fused_head() -> None:
    """Puts :func:`log_probs` in the place of TRL's autograd function for weights that are sharded."""
    module = sys.modules[MODULE]
    theirs: Any = getattr(module, NAME, None)
    found = tuple(inspect.signature(theirs.forward).parameters)[1:] if theirs is not None else ()

    class FusedHead:
        """What TRL calls in place of its autograd function."""

        @staticmethod
        def apply(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
            layout = layouts_by_id([weight]).get(id(weight))
            if layout is None:
                return theirs.apply(hidden, weight, bias, *rest)
            ((sharding, group),) = layout
            places = sharding.slices(group.rank, group.size)
            if sharding.dim == 0 and len(places) == 1 and weight.shape[0] == places[0].stop - places[0].start:
                return log_probs(hidden, weight, bias, *rest, first=places[0].start, group=group.name)
            if sharding.dim == 0 or layout.has_padding:
                raise ValueError(f"lm_head.weight: a fused head does not know of its layout {layout}")
            whole = gather_from_region(weight, group.name, 1, sharding.local_sizes(group.size))
            return theirs.apply(hidden, whole, bias, *rest)

    # Of another version: trainer_for refuses it
    if found == PARAMETERS:
        setattr(module, NAME, FusedHead)


def check_replaced() -> None:
    """Raises TypeError if the installed TRL has another function, which would take a slice for the whole weight."""
    if getattr(getattr(sys.modules.get(MODULE), NAME, None), "__name__", "") != "FusedHead":
        version = sys.modules["trl"].__version__
        raise TypeError(f"cls: {MODULE}.{NAME} of TRL {version} must take {PARAMETERS}, as in TRL 1.15 and 1.16")


after_import(MODULE, replace_fused_head)


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None,
    scale: float,
    outputs: tuple[str, ...],
    *,
    first: int,
    group: str,
) -> tuple[Tensor | None, ...]:
    """Returns TRL's statistics of each row's distribution over the whole vocabulary, from this rank's columns.

    Args:
        hidden: ``[N, H]``, the same on all ranks. weight, bias: this rank's rows, from row ``first`` on.
        targets: ``[N]``, in the whole vocabulary. outputs: which of :data:`STATISTICS` besides the first.

    Returns:
        ``[N]`` each, the same on all ranks; None for those that are not in ``outputs``.

    Communicates: for each 4096 rows an all-gather of two numbers per row (the maxima) and an all-reduce of six; the
    same again in backward, which computes the logits anew, and there one all-reduce of hidden's gradient.
    """

    def statistics(rows: Tensor, ids: Tensor) -> Tensor:
        rows = copy_to_region(rows, group)
        logits = F.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)).float() * scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return _statistics(logits / temperature, ids - first, group)

    chunks = []
    for start in range(0, max(len(hidden), 1), TOKENS):
        chunk = hidden[start : start + TOKENS], targets[start : start + TOKENS]
        kept = not torch.is_grad_enabled()
        chunks.append(statistics(*chunk) if kept else checkpoint(statistics, *chunk, use_reentrant=False))
    values = dict(zip(STATISTICS, torch.cat(chunks, dim=1), strict=True))
    values |= {name: values[name].detach() for name in STATISTICS[2:]}
    values["is_top1"] = values["is_top1"] > 0
    return tuple(value if name == "log_probs" or name in outputs else None for name, value in values.items())


def _statistics(logits: Tensor, targets: Tensor, group: str) -> Tensor:
    """Returns ``[5, N]``: :data:`STATISTICS` of rows of logits of which this rank has some columns.

    Args:
        targets: numbers of columns, counted from this rank's first one."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    with torch.no_grad():
        before = logits.masked_fill(columns >= targets[:, None], -torch.inf)
        tops = gather_from_region(torch.stack([logits.amax(-1), before.amax(-1)])[None], group, 0).amax(0)
    exponentials = (logits - tops[0][:, None]).exp()
    here = (targets >= 0) & (targets < logits.shape[1])
    local = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0].masked_fill(~here, 0.0)
    terms = [exponentials.sum(-1), local, (exponentials * logits).sum(-1), (exponentials**2).sum(-1), logits.sum(-1)]
    width = torch.full_like(local, logits.shape[1])
    total, target, weighted, squares, sums, vocabulary = reduce_from_region(torch.stack([*terms, width]), group)
    log_total = tops[0] + total.log()
    is_top1 = (target >= tops[0]) & (target > tops[1])
    entropy = log_total - weighted / total
    log_squares = squares.log() - 2 * total.log()
    return torch.stack([target - log_total, entropy, log_squares, sums / vocabulary, is_top1.to(total.dtype)])
