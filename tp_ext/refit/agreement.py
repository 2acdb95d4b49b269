"""Checks that the ranks of a refit agree: on arguments, on models, and that nothing has changed since the plan."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tp_ext.refit.contents import Description


class RefitReport(NamedTuple):
    host: str
    arguments: str
    token: str
    source: Description | None
    target: Description | None


def checked_names(names: Mapping[str, Any] | None) -> dict[str, Any]:
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        raise TypeError(f"names: {names!r} must be a dict, from names of the target to names of the source")
    for name, value in names.items():
        for part in value if isinstance(value, list) and value else [value]:
            is_pair = (
                isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str) and isinstance(part[1], int)
            )
            if not isinstance(name, str) or not (isinstance(part, str) or is_pair):
                raise TypeError(
                    f"names: {name!r}: {value!r} must be a name, a pair of a name and the index of a part, or a list"
                )
    return dict(names)


def check_reports(reports: Sequence[RefitReport]) -> None:
    for rank, report in enumerate(reports):
        if report.arguments != reports[0].arguments:
            raise ValueError(
                f"refit.plan: its arguments must be the same on all ranks, and are {reports[0].arguments} on rank 0, "
                f"{report.arguments} on rank {rank}"
            )
    for side in ("source", "target"):
        if all(getattr(report, side) is None for report in reports):
            raise ValueError(f"{side}: None on all ranks; it must be a model on some rank of process_group")
    kinds = [
        {of.optimizer for report in reports if (of := getattr(report, side)) is not None and of.optimizer is not None}
        for side in ("source", "target")
    ]
    if kinds[1] and not kinds[0]:
        raise ValueError("optimizers: the source's is None on all ranks, and must be an optimizer, as the target's")
    # Classes with the same options, such as Adam and AdamW, have states that mean the same
    options = {names for of_side in kinds for _, names in of_side} if kinds[1] else set()
    if len(options) > 1:
        shown = [", ".join(sorted(name for name, _ in of_side)) for of_side in kinds]
        raise ValueError(
            f"optimizers: the target's, {shown[1]}, must be of the class of the source's, {shown[0]}, "
            "whose options are others"
        )


def check_unchanged(before: Description, now: Description, side: str) -> None:
    """Raises ValueError if a model has other entries than when the plan was made."""
    if before.items != now.items:
        item = min({*before.items}.symmetric_difference(now.items), key=lambda item: item.text)
        raise ValueError(f"{side}: {item.text!r} must be as it was when the plan was made: make a new plan")
    if [param.item for param in before.optimized] != [param.item for param in now.optimized]:
        raise ValueError(
            f"optimizers: the {side}'s must hold the parameters that it held when the plan was made: make a new plan"
        )
    if before.options != now.options:
        raise ValueError(
            f"optimizers: the options of the {side}'s that add states, such as amsgrad, must be as "
            "when the plan was made: make a new plan"
        )


def host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{boot} {socket.gethostname()}"


def device(group: ProcessGroup | None, reports: Sequence[RefitReport]) -> torch.device:
    """Returns the device of the buckets: CUDA if tensors are there and the group communicates there by NCCL."""
    types = {of.device for report in reports for of in (report.source, report.target) if of is not None}
    if "cuda" in types and group is not None and "nccl" in str(dist.get_backend_config(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
