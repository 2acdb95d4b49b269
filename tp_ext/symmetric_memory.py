"""Symmetric memory of torch for a tensor-parallel group on CUDA: small all-reduces and fused GEMMs, where available.

Symmetric memory is memory of each GPU that the other GPUs of the host read and write directly. :func:`enable` checks
whether a group supports it, sets it up, and returns the group under a name that encodes it. Layers and regions made
with that group use it; all others are unaffected. Where it is unavailable (a CPU, a torch without the kernels, GPUs
without access to each other, several hosts) the group is returned unchanged, with the reason. The contracts of regions
and linears still hold: the same values to rounding, fresh outputs, inputs unwritten, CUDA graphs.

It is used, in eager code (under ``torch.compile`` Inductor decides, see docs/reference/performance.md), for:

- an all-reduce that the next operation waits for (``reduce_from_region``, the forward of a row linear, the backward of
  ``copy_to_region``) of fp32 or bf16 whose bytes are a multiple of 16. Up to ``one_shot_bytes`` every rank reads all
  partial sums and adds them in rank order; up to ``max_bytes``, for p = 2, 4 and 8, each rank sums one block in this
  way and then reads the blocks of the others. All ranks get the same bits, every time. An all-reduce that overlaps a
  GEMM stays with the group's backend, where it is hidden.
- with ``fused_matmul``, under sequence parallelism and with lengths that p divides: all-gather and GEMM of the column
  forward and of the row backward, GEMM and reduce-scatter of the row forward, which transfer one block while
  they multiply another.

Sources: the operators ``torch.ops.symm_mem`` and ``torch.distributed._symmetric_memory``. The default sizes are those
of torch's own ``IntraNodeComm``.
"""

import hashlib
import itertools
import os
import socket
from typing import NamedTuple

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

from tp_ext._build import load
from tp_ext._object_collectives import all_gather_objects, call_and_gather
from tp_ext.group import Group, ParallelGroup, group_name, parallel_group, process_group

MAX_RANKS = 8  # one-shot reads p times the bytes; torch chose the sizes, and tests its kernels, up to 8 ranks
OPERATORS = ("one_shot_all_reduce_copy", "two_shot_all_reduce_out")
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
# Without the first torch refuses ranks that share a device, without the second it waits for a multicast over two
SHARING = ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
_numbers = itertools.count()  # numbers the buffers that this process has allocated


class Enabled(NamedTuple):
    """The result of :func:`enable`: ``group`` for layers and regions; ``why_not``: None, or why it is unchanged."""

    group: str
    why_not: str | None


class _RankReport(NamedTuple):
    """The report of a rank to the others."""

    why_not: str | None
    options: tuple[int, int, bool]
    host: str
    device: str
    may_share: bool


def enable(
    group: Group,
    *,
    one_shot_bytes: int = 256 * 1024,
    max_bytes: int = 10 * 1024**2,
    fused_matmul: bool = False,
) -> Enabled:
    """Returns the group with symmetric memory, or unchanged and why: ``group, why_not = enable(mesh["tp"])``.

    Every rank of the group calls it, on its own current CUDA device, with the same sizes, outside of graph capture;
    all get the same answer. The buffer of ``max_bytes`` stays until the process ends: enable a group once. A pickled
    module is unpickled with the plain group.

    Args:
        group: process group, 1-D mesh or name, of up to 8 ranks.
        one_shot_bytes: the largest all-reduce in which every rank reads all partial sums.
        max_bytes: the largest all-reduce through symmetric memory, and its buffer on each rank.
        fused_matmul: enables the fused GEMMs, too. torch keeps their workspace, as large as the largest shard.

    Communicates: two all-gathers of objects and torch's exchange of handles; nothing at p = 1.

    Raises:
        TypeError, ValueError: see :func:`tp_ext.group.group_name`; sizes that are no multiples of 16 or out of order,
            or not the same on all ranks.
    """
    tp = parallel_group(group).plain()
    options = (one_shot_bytes, max_bytes, bool(fused_matmul))
    if tp.size == 1:
        _check_sizes(one_shot_bytes, max_bytes)
        return Enabled(tp.name, "p = 1 communicates nothing")

    def report() -> _RankReport:
        _check_sizes(one_shot_bytes, max_bytes)
        return _report(tp, options)

    reports = call_and_gather(process_group(tp.name), report)
    if len({report.options for report in reports}) > 1:
        listed = ", ".join(str(report.options) for report in reports)
        raise ValueError(f"one_shot_bytes, max_bytes, fused_matmul: {listed} must be the same on all ranks")
    why_not = _first_reason([report.why_not for report in reports]) or _why_not_connected(reports)
    if why_not is None:
        number = next(_numbers)
        buffer = int.from_bytes(hashlib.sha256(f"tp_ext {tp.name} {number}".encode()).digest()[:8], "little")
        why_not = _first_reason(all_gather_objects(_exchange(tp, max_bytes, buffer), process_group(tp.name)))
    if why_not is not None:
        return Enabled(tp.name, why_not)
    return Enabled("/".join(map(str, (tp.name, one_shot_bytes, max_bytes, buffer, int(fused_matmul)))), None)


def algorithm(numel: int, dtype: torch.dtype, group: Group) -> str:
    """Returns how a CUDA tensor of ``numel`` elements is summed over the group: "one_shot", "two_shot" or "backend".

    Raises:
        TypeError, ValueError: see :func:`tp_ext.group.group_name`.
    """
    chosen: str = load().all_reduce_algorithm(dtype, numel, group_name(group))
    return chosen


def _check_sizes(one_shot_bytes: int, max_bytes: int) -> None:
    for name, value in (("one_shot_bytes", one_shot_bytes), ("max_bytes", max_bytes)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0 or value % 16:
            raise ValueError(f"{name}: {value!r} must be a multiple of 16, of at least 0")
    if max_bytes < max(one_shot_bytes, 16):
        raise ValueError(f"max_bytes: {max_bytes} must be at least 16 and one_shot_bytes = {one_shot_bytes}")


def _report(tp: ParallelGroup, options: tuple[int, int, bool]) -> _RankReport:
    why_not = _unavailable(tp.size, options[2])
    may_share = all(os.environ.get(name) == "1" for name in SHARING)
    return _RankReport(why_not, options, socket.gethostname(), "" if why_not else _device(), may_share)


def _device() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _unavailable(p: int, fused_matmul: bool) -> str | None:
    """Returns why this rank cannot use symmetric memory, as far as is known without communication; None if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if p > MAX_RANKS:
        return f"p = {p} is more than {MAX_RANKS} ranks"
    for name in OPERATORS + (FUSED if fused_matmul else ()):
        if not _has_kernel(name):
            return f"torch {torch.__version__} has no CUDA kernel of symm_mem::{name}"
    backend = symm_mem.get_backend(torch.device("cuda"))
    if backend != "CUDA":
        return f"torch's symmetric memory is set to the backend {backend}, not CUDA"
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return None


def _has_kernel(name: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CUDA")
    except RuntimeError:  # no such operator
        return False


def _first_reason(reasons: list[str | None]) -> str | None:
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), None)


def _why_not_connected(reports: list[_RankReport]) -> str | None:
    """Returns why the ranks, by their hosts and devices, cannot access each other's memory or synchronise in it."""
    hosts = sorted({report.host for report in reports})
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts: {', '.join(hosts)}"
    shared = len({report.device for report in reports}) < len(reports)
    if shared and not all(report.may_share for report in reports):
        return f"several ranks are on one device, and {' and '.join(SHARING)} are not 1 on all of them"
    return None


def _exchange(tp: ParallelGroup, max_bytes: int, buffer: int) -> str | None:
    """Allocates the buffer and maps the other ranks' buffers; returns why that failed. C++ finds it by its number."""
    name, device = tp.torch_name, torch.device("cuda", torch.cuda.current_device())
    try:
        memory = _SymmetricMemory.empty_strided_p2p(
            (max_bytes,), (1,), torch.uint8, device, group_name=name, alloc_id=buffer
        )
        _SymmetricMemory.rendezvous(memory, name)
    except RuntimeError as error:  # no access from GPU to GPU, no memory, no handles in this container, ..
        return str(error).partition("\n")[0]
    return None
