"""A layout of a training: numbers of ranks along the axes of a mesh, schedule, ZeRO, recomputation, dtypes."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import DeviceMesh

from tp_ext._checks import check_bool, check_choice, check_int
from tp_ext.mesh import AXES, init_mesh
from tp_ext.parallel.schedules import SCHEDULES, check_schedule
from tp_ext.planner.machine import CLASSES
from tp_ext.planner.values import Value
from tp_ext.share_sizes import Weights, checked_weights

RECOMPUTE = (None, "selective", "full", "attention", "half")
STORED = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of an element of parameters and gradients."""


def shares_of_ranks(shares: Any, tp: int) -> Weights:
    """Returns the shares of the ranks of tp, or raises as :func:`tp_ext.shares`."""
    try:
        weights = checked_weights(shares)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("weights", "shares", 1)) from None
    if len(weights) != tp:
        raise ValueError(f"shares: {list(weights)} must be one weight for each rank, tp = {tp}")
    return weights


@dataclass(frozen=True, kw_only=True)
class Layout(Value):
    """The layout in which a cluster trains a model.

    Attributes:
        pp, dp, ep, cp, tp: ranks along each axis; ``dp`` None: what remains. The data ranks are dp ep: each has the
            microbatches global_batch / (dp ep micro_batch), rounded up. ZeRO shards over dp ep cp, experts over dp cp.
        virtual: stages of each rank of the pipeline. schedule: of :func:`tp_ext.parallel.pipeline_stages`; 1F1B with
            ``virtual`` > 1 is Interleaved1F1B.
        micro_batch: sequences of a microbatch. zero: the stage of ZeRO, 0 to 3.
        sequence_parallel: activations between blocks are sharded along their tokens over tp.
        recompute: None, ``"selective"`` or ``"full"`` of :func:`tp_ext.parallelize`; ``"attention"``, the scores and
            softmax again (Korthikanti et al., arXiv:2205.05198); ``"half"``, as selective and every second product
            again (torchtitan's selective checkpointing per operator).
        offload: the states of the optimizer are in the host's memory, where it runs. overlap_tp: collectives of tp run
            next to their GEMMs, in chunks.
        shares: of :func:`tp_ext.shares`, a weight for each rank of tp; None: equal ones.
        dtype: of the GEMMs of blocks: ``fp32``, ``fp16``, ``bf16``, ``fp8``, ``mxfp8``, ``nvfp4``; attention and head
            of the last three are in bf16. param_dtype, grad_dtype: of parameters and of their gradients.
    """

    pp: int = 1
    dp: int | None = None
    ep: int = 1
    cp: int = 1
    tp: int = 1
    virtual: int = 1
    schedule: str = "1F1B"
    micro_batch: int = 1
    zero: int = 0
    sequence_parallel: bool = True
    recompute: str | None = None
    offload: bool = False
    overlap_tp: bool = False
    dtype: str = "bf16"
    param_dtype: str = "fp32"
    grad_dtype: str = "fp32"
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_int(least=1, pp=self.pp, ep=self.ep, cp=self.cp, tp=self.tp, virtual=self.virtual)
        check_int(least=1, micro_batch=self.micro_batch)
        check_int(least=1, or_none=True, dp=self.dp)
        check_bool(sequence_parallel=self.sequence_parallel, offload=self.offload, overlap_tp=self.overlap_tp)
        check_schedule(self.schedule)
        check_choice((0, 1, 2, 3), zero=self.zero)
        check_choice(RECOMPUTE, recompute=self.recompute)
        check_choice(CLASSES, dtype=self.dtype)
        check_choice(STORED, param_dtype=self.param_dtype, grad_dtype=self.grad_dtype)
        if self.shares is not None:
            self._set("shares", shares_of_ranks(self.shares, self.tp))
        known = SCHEDULES[self.torch_schedule]
        if self.virtual > 1 and self.pp == 1:
            raise ValueError(f"virtual: {self.virtual} must be 1 without a pipeline, pp = 1")
        if self.pp > 1 and known.v and self.virtual != 2:
            raise ValueError(f"virtual: {self.virtual} must be 2 with {self.schedule}")
        if self.virtual > 1 and not known.looped and not known.v:
            raise ValueError(f"virtual: {self.virtual} must be 1 with {self.schedule}")

    @property
    def torch_schedule(self) -> str:
        """The schedule that is run: Interleaved1F1B for 1F1B of several stages a rank."""
        return "Interleaved1F1B" if self.schedule == "1F1B" and self.virtual > 1 else self.schedule

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        if self.dp is None:
            raise ValueError("dp: None must be resolved first, by layout.resolve(count)")
        return self.pp * self.dp * self.ep * self.cp * self.tp

    def resolve(self, count: int) -> "Layout":
        """Returns the layout with the ``dp`` of ``count`` devices.

        Raises:
            ValueError: the other axes do not divide ``count``, or all of them are not its number.
        """
        check_int(least=1, count=count)
        others = self.pp * self.ep * self.cp * self.tp
        shown = ", ".join(f"{name} = {getattr(self, name)}" for name in AXES)
        if count % others or (self.dp is not None and others * self.dp != count):
            raise ValueError(f"{', '.join(AXES)}: {shown} must multiply to count, {count}")
        return dataclasses.replace(self, dp=count // others)

    def microbatches(self, global_batch: int) -> int:
        """Returns the number of microbatches of a data rank in a step, of the rank that has most.

        Raises:
            ValueError: ``global_batch`` is no integer of at least 1, or ``dp`` is None.
        """
        check_int(least=1, global_batch=global_batch)
        each = self.ranks // (self.pp * self.cp * self.tp) * self.micro_batch
        return -(-global_batch // each)

    def arguments(self, global_batch: int) -> dict[str, Any]:
        """Returns the keyword arguments of :func:`tp_ext.parallelize`: ``parallelize(model, mesh, loss=loss,
        **layout.arguments(global_batch))``.

        Raises:
            ValueError: what ``parallelize`` does not do: ``recompute`` ``"attention"`` or ``"half"``, a dtype of 8 or 4
                bits, ``overlap_tp``, ``offload`` without ZeRO 2 or 3, other numbers of stages than 2 of schedules that
                have several.
        """
        if self.recompute in ("attention", "half"):
            raise ValueError(f"recompute: {self.recompute!r} must be None, 'selective' or 'full' for parallelize")
        if self.dtype not in STORED:
            raise ValueError(f"dtype: {self.dtype!r} must be one of {', '.join(STORED)} for parallelize")
        if self.overlap_tp:
            raise ValueError("overlap_tp: True must be False for parallelize")
        if self.offload and self.zero < 2:
            raise ValueError(f"offload: True needs zero = 2 or 3 for parallelize, and zero is {self.zero}")
        if SCHEDULES[self.torch_schedule].looped and self.virtual != 2 and self.pp > 1:
            raise ValueError(f"virtual: {self.virtual} must be 2 with {self.torch_schedule} for parallelize")
        autocast = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}[self.dtype]
        return {
            "schedule": self.torch_schedule if self.pp > 1 else None,
            "microbatches": self.microbatches(global_batch),
            "zero": self.zero,
            "offload": self.offload,
            "recompute": self.recompute,
            "autocast": None if self.param_dtype == self.dtype else autocast,
        }

    def mesh(self, device_type: str) -> DeviceMesh:
        """Makes the mesh of all ranks: :func:`tp_ext.init_mesh`, which communicates; with the axis ``ep`` if it has
        several ranks."""
        dp = -1 if self.dp is None else self.dp
        return init_mesh(device_type, pp=self.pp, dp=dp, ep=self.ep if self.ep > 1 else None, cp=self.cp, tp=self.tp)

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in AXES if getattr(self, name) not in (1, None)]
        if self.pp > 1:
            parts.append(self.torch_schedule + (f" x{self.virtual}" if self.virtual > 1 else ""))
        parts.append(f"micro_batch={self.micro_batch}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in (*AXES, "virtual", "schedule", "micro_batch") and value != field.default:
                parts.append(f"{field.name}={value}")
        return " ".join(parts)
