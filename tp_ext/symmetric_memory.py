"""torch's symmetric memory for a tensor-parallel group on CUDA: small all-reduces and fused GEMMs, where there is any.

Symmetric memory is memory of each GPU that the others of the host read and write directly. :func:`enable` asks whether
a group can have it, sets it up, and gives the group back under a name that says so. Layers and regions made with that
group use it, all others go on as before. Where it cannot be had (a CPU, a torch without the kernels, GPUs without
access to each other, several hosts) the group comes back as it was, with the reason. What holds of regions and linears
stays: the same values to rounding, fresh outputs, inputs unwritten, CUDA graphs.

What uses it, in eager code (under ``torch.compile`` Inductor decides, see docs/reference/performance.md):

- an all-reduce that the next operation waits for (``reduce_from_region``, the forward of a row linear, the backward of
  ``copy_to_region``) of fp32 or bf16 whose bytes are a multiple of 16. Up to ``one_shot_bytes`` every rank reads all
  addends and adds them in the order of the ranks; up to ``max_bytes``, for p = 2, 4 and 8, each rank so adds up its
  part and then reads those of the others. All ranks get the same bits, every time. An all-reduce that runs beside a
  GEMM stays with the group's backend: it is hidden there.
- with ``fused_matmul``, under sequence parallelism and with lengths that p divides: all-gather and GEMM of the column
  forward and of the row backward, GEMM and reduce-scatter of the row forward, which transfer one part while they
  multiply another.

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
from tp_ext._object_collectives import gathered
from tp_ext.group import Group, ParallelGroup, group_name, parallel_group, process_group

MOST_RANKS = 8  # one-shot reads p times the bytes; torch chose the sizes, and tests its kernels, up to 8 ranks
OPERATORS = ("one_shot_all_reduce_copy", "two_shot_all_reduce_out")
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
# Without the first torch refuses ranks that share a device, without the second it waits for a multicast over two
SHARING = ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
_numbers = itertools.count()  # of the buffers that this process has made


class Enabled(NamedTuple):
    """``group``: what to give to layers and regions. ``why_not``: None, or why it is the group as it was."""

    group: str
    why_not: str | None


class _Place(NamedTuple):
    """What a rank tells the others."""

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
    """The group with symmetric memory, or as it was and why: ``group, why_not = enable(mesh["tp"])``.

    Every rank of the group calls it, on its own current CUDA device, with the same sizes, outside of graph capture;
    all get the same answer. The buffer of ``max_bytes`` stays until the process ends: enable a group once. A pickled
    module comes back with the group as it was.

    Args:
        group: process group, 1-D mesh or name, of up to 8 ranks.
        one_shot_bytes: the largest all-reduce in which every rank reads everything.
        max_bytes: the largest all-reduce through symmetric memory, and its buffer on each rank.
        fused_matmul: also the fused GEMMs. torch keeps their workspace, as large as the largest shard.

    Communicates: two all-gathers of objects and torch's exchange of handles; nothing at p = 1.

    Raises:
        TypeError, ValueError: see :func:`tp_ext.group.group_name`; sizes that are no multiples of 16 or out of order,
            or not the same on all ranks.
    """
    for name, value in (("one_shot_bytes", one_shot_bytes), ("max_bytes", max_bytes)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0 or value % 16:
            raise ValueError(f"{name}: {value!r} must be a multiple of 16, of at least 0")
    if max_bytes < max(one_shot_bytes, 16):
        raise ValueError(f"max_bytes: {max_bytes} must be at least 16 and one_shot_bytes = {one_shot_bytes}")
    tp = parallel_group(group).plain()
    if tp.size == 1:
        return Enabled(tp.name, "p = 1 communicates nothing")
    options = (one_shot_bytes, max_bytes, bool(fused_matmul))
    places = gathered(_place(tp, options), process_group(tp.name))
    if len({place.options for place in places}) > 1:
        told = ", ".join(str(place.options) for place in places)
        raise ValueError(f"one_shot_bytes, max_bytes, fused_matmul: {told} must be the same on all ranks")
    why_not = _first([place.why_not for place in places]) or _apart(places)
    if why_not is None:
        number = next(_numbers)
        buffer = int.from_bytes(hashlib.sha256(f"tp_ext {tp.name} {number}".encode()).digest()[:8], "little")
        why_not = _first(gathered(_exchange(tp, max_bytes, buffer), process_group(tp.name)))
    if why_not is not None:
        return Enabled(tp.name, why_not)
    return Enabled("/".join(map(str, (tp.name, one_shot_bytes, max_bytes, buffer, int(fused_matmul)))), None)


def algorithm(numel: int, dtype: torch.dtype, group: Group) -> str:
    """How a CUDA tensor of ``numel`` elements is summed over the group: "one_shot", "two_shot" or "backend".

    Raises:
        TypeError, ValueError: see :func:`tp_ext.group.group_name`.
    """
    chosen: str = load().all_reduce_algorithm(dtype, numel, group_name(group))
    return chosen


def _place(tp: ParallelGroup, options: tuple[int, int, bool]) -> _Place:
    why_not = _unavailable(tp.size, options[2])
    may_share = all(os.environ.get(name) == "1" for name in SHARING)
    return _Place(why_not, options, socket.gethostname(), "" if why_not else _device(), may_share)


def _device() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _unavailable(p: int, fused_matmul: bool) -> str | None:
    """Why this rank cannot, as far as it can tell alone."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if p > MOST_RANKS:
        return f"p = {p} is more than {MOST_RANKS} ranks"
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


def _first(reasons: list[str | None]) -> str | None:
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), None)


def _apart(places: list[_Place]) -> str | None:
    """Why the ranks, as they are placed, cannot reach each other's memory, or wait for each other in it."""
    hosts = sorted({place.host for place in places})
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts: {', '.join(hosts)}"
    shared = len({place.device for place in places}) < len(places)
    if shared and not all(place.may_share for place in places):
        return f"several ranks are on one device, and {' and '.join(SHARING)} are not 1 on all of them"
    return None


def _exchange(tp: ParallelGroup, max_bytes: int, buffer: int) -> str | None:
    """Allocates the buffer and maps that of the others; why that failed. The C++ side finds it again by its number."""
    name, device = tp.name.rpartition("@")[0], torch.device("cuda", torch.cuda.current_device())
    try:
        memory = _SymmetricMemory.empty_strided_p2p(
            (max_bytes,), (1,), torch.uint8, device, group_name=name, alloc_id=buffer
        )
        _SymmetricMemory.rendezvous(memory, name)
    except RuntimeError as error:  # no access from GPU to GPU, no memory, no handles in this container, ..
        return str(error).partition("\n")[0]
    return None
