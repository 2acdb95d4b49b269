"""Loading of sharded state dicts that torch.distributed.checkpoint saved, checked before anything is written."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tp_ext._object_collectives import (
    RetryError,
    all_gather_objects,
    call_and_gather,
    call_on_all_ranks,
    unwrap_checkpoint_errors,
)
from tp_ext.checkpoint.chunked_tensor import ChunkedTensor
from tp_ext.checkpoint.files.reader import PlainPlanner
from tp_ext.checkpoint.files.saved_dtypes import check_saved_dtype
from tp_ext.checkpoint.optimizer_state import HeldState, check_class, check_optimizer, copy_of_state
from tp_ext.checkpoint.sharded import LocalChunks, shard_optimizer_state, sharded_state
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.mesh import MeshAxes, mesh_axes
from tp_ext.model.census import Census, OptimizedParameter, census
from tp_ext.model.fqn import StateDict
from tp_ext.model.stages import Stages, joined

T = TypeVar("T")
_ATTEMPTS = 20  # to read one checkpoint while others replace it


def load_sharded_state_dict(
    module: Stages,
    optimizer: Optimizer | None = None,
    *,
    storage_reader: StorageReader,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    process_group: ProcessGroup | None = None,
) -> None:
    """Loads a :func:`sharded_state_dict` that ``torch.distributed.checkpoint`` saved, at any number of ranks, directly
    into the live shards: no rank ever holds a full tensor. Every rank of ``process_group`` calls it.

    The optimizer may be new: its state is created from the checkpoint. Entries that are no tensors (options of
    parameter groups, extra state) are unpickled as plain values only.

    Args:
        module, optimizer, group, mesh: as for :func:`sharded_state_dict`; ranks, shards and data axes may differ.
        storage_reader: a reader of the checkpoint; :class:`CheckpointReader` for a directory that need not be trusted.
        process_group: all participating ranks; None: all ranks of the job.

    Communicates: plans and outcomes, no tensors.

    Raises:
        KeyError: missing or unexpected keys, all of them named. ValueError, TypeError: an entry has another shape than
            the unsharded tensor (both are named), or one is a tensor and the other none; the parameters of a group were
            saved with different options, or by another class of optimizer; tied entries differ; a buffer is expanded.
            Raised on every rank; nothing has been loaded then.
        OSError: a file could not be read on some rank, raised on every rank; some tensors may have been loaded then.
            Or the checkpoint was replaced repeatedly before all ranks had read it; a single replacement is no error,
            the ranks then read the new one. pickle.UnpicklingError: an entry is more than plain values; no tensor has
            been loaded then.
    """
    load_from(storage_reader, joined(module), optimizer, mesh_axes(group, mesh), process_group, lambda: None)


@torch.no_grad()
def load_from(
    reader: StorageReader,
    module: nn.Module,
    optimizer: Optimizer | None,
    axes: MeshAxes,
    process_group: ProcessGroup | None,
    before: Callable[[], T],
) -> T:
    """Loads as :func:`load_sharded_state_dict`; returns the result of ``before``, which reads the same checkpoint.

    If a checkpoint is replaced before all ranks have opened it, or while they read it, they start over with the new
    one.
    """
    check_optimizer(optimizer)
    replaced: Exception | None = None
    for _ in range(_ATTEMPTS):
        try:
            metadata, result = _open(reader, process_group, before)
            _load(reader, metadata, module, optimizer, axes, process_group)
            return result
        except RetryError as error:  # on all ranks
            replaced = error
            # Opens the path anew
            reader.reset()
    raise OSError(f"{replaced}; {_ATTEMPTS} attempts") from replaced


def _open(reader: StorageReader, process_group: ProcessGroup | None, before: Callable[[], T]) -> tuple[Metadata, T]:
    """Opens one checkpoint, the same on all ranks; returns its metadata and the result of ``before``."""
    metadata: Metadata | None = None
    result: T | None = None

    def read() -> str:
        nonlocal metadata, result
        metadata, result = reader.read_metadata(), before()
        # Other readers than ours have none: nothing to compare
        return getattr(reader, "identity", "")

    # Before anything is loaded: weights of two steps would be no error of any rank
    if len(set(call_and_gather(process_group, read))) > 1:
        path = os.fspath(getattr(reader, "path", ""))
        raise RetryError(f"path: {path!r} must be one checkpoint on all ranks, and was replaced while they opened it")
    return metadata, result  # type: ignore[return-value]


def _load(
    reader: StorageReader,
    metadata: Metadata,
    module: nn.Module,
    optimizer: Optimizer | None,
    axes: MeshAxes,
    process_group: ProcessGroup | None,
) -> None:
    into = call_on_all_ranks(process_group, lambda: _Destination(census(module, axes), optimizer, metadata))
    flat: StateDict = into.flat
    parts = ("model.", "optimizer.") if optimizer is not None else ("model.",)
    saved = {key for key in metadata.state_dict_metadata if key.startswith(parts)}
    tied = _tied_keys(flat)
    any_tied = _check_keys(set(flat), saved, bool(tied), process_group)
    # Each rank sees its own entries, so what one finds all raise
    call_on_all_ranks(process_group, lambda: _check_entries(flat, metadata))
    if any_tied:
        _check_tied(flat, tied, reader, process_group)
    read_values(flat, reader, process_group, into.check_options)
    call_on_all_ranks(process_group, into.put_back)


def read_values(
    flat: StateDict, reader: StorageReader, process_group: ProcessGroup | None, check: Callable[[], None]
) -> None:
    """Reads the tensors of a flat state dict in place, after it has replaced the other values and called ``check``: if
    one of these is refused, no tensor has been written."""
    plain = {key: value for key, value in flat.items() if not isinstance(value, Tensor)}
    tensors = {key: value for key, value in flat.items() if isinstance(value, Tensor)}
    _read(plain, reader, process_group)
    flat |= plain
    call_on_all_ranks(process_group, check)
    _read(tensors, reader, process_group)


def _check_keys(wanted: set[str], saved: set[str], tied: bool, process_group: ProcessGroup | None) -> bool:
    """Returns whether any rank has tied entries. Raises KeyError on every rank if a rank misses a key, or if no rank
    expects one (pipeline stages have different keys)."""
    reports = all_gather_objects((wanted - saved, saved - wanted, tied), process_group)
    missing = set[str]().union(*(names for names, _, _ in reports))
    unexpected = set[str].intersection(*(other for _, other, _ in reports))
    if missing or unexpected:
        raise KeyError(f"checkpoint: missing keys {sorted(missing)}, unexpected keys {sorted(unexpected)}")
    return any(has_tied for _, _, has_tied in reports)


def _tied_keys(flat: StateDict) -> list[list[str]]:
    """Returns the keys of each tensor that has several, of which a load would leave the values of one."""
    keys: dict[tuple[object, ...], list[str]] = {}
    for key, value in flat.items():
        if isinstance(value, ChunkedTensor) and any(chunk.numel() for _, chunk, _ in value.local_chunks):
            places = tuple((chunk.data_ptr(), chunk.shape, chunk.stride()) for _, chunk, _ in value.local_chunks)
            keys.setdefault(places, []).append(key)
    return [names for names in keys.values() if len(names) > 1]


def _check_tied(
    flat: StateDict, tied: list[list[str]], reader: StorageReader, process_group: ProcessGroup | None
) -> None:
    """Raises ValueError on every rank if entries that are one tensor of the module differ in the checkpoint."""
    copies: StateDict = {key: torch.zeros_like(flat[key]) for keys in tied for key in keys}
    _read(copies, reader, process_group)

    def check() -> None:
        for first, other in ((keys[0], key) for keys in tied for key in keys[1:]):
            # Bits: a NaN that both have is no difference
            chunks = [[c.contiguous().view(torch.uint8) for _, c, _ in copies[k].local_chunks] for k in (first, other)]
            if not all(map(torch.equal, *chunks)):
                names = f"{first.removeprefix('model.')!r} and {other.removeprefix('model.')!r}"
                raise ValueError(f"checkpoint: {names} are one tensor in the module and must be equal")

    call_on_all_ranks(process_group, check)


def _check_entries(flat: StateDict, metadata: Metadata) -> None:
    for key, value in flat.items():
        entry = metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata) != isinstance(value, Tensor):
            saved, wanted = ("a tensor", "none") if isinstance(entry, TensorStorageMetadata) else ("no tensor", "one")
            raise TypeError(f"checkpoint: {key!r} is {saved} and must be {wanted}")
        if isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
            raise ValueError(
                f"checkpoint: {key!r} has shape {tuple(entry.size)} and must have {tuple(value.shape)}, "
                "that of the unsharded module"
            )
        # A step, a single number, may have been an integer
        if isinstance(entry, TensorStorageMetadata) and len(entry.size):
            check_saved_dtype(key, entry.properties.dtype, value.dtype, "checkpoint")


def _read(flat: StateDict, reader: StorageReader, process_group: ProcessGroup | None) -> None:
    """Reads the tensors of a flat state dict in place and replaces its other values."""
    with unwrap_checkpoint_errors():
        dcp.load(flat, storage_reader=reader, planner=PlainPlanner(), process_group=process_group)


class _Destination:
    """The destination of the entries of a checkpoint: the live shards, and the values that are set afterwards."""

    def __init__(self, model: Census, optimizer: Optimizer | None, metadata: Metadata) -> None:
        self.flat, self.paths = flatten_state_dict(sharded_state(model, None)[0])
        check_writable(self.flat)
        self.extra: dict[str, Any] = {name: entry.owner for name, entry in model.state().items() if entry.extra}
        self.optimizer = optimizer
        self.options: list[dict[str, list[str]]] = []  # per group of the optimizer: flat keys by option
        self.states: dict[Tensor, dict[str, tuple[str, Tensor | None]]] = {}  # per parameter: its entries
        if optimizer is None:
            return
        self.held = optimizer_state = HeldState(optimizer)
        chunks = LocalChunks(model.groups)
        saved_states, saved_options = (
            _by_name(metadata, "optimizer.state."),
            _by_name(metadata, "optimizer.param_groups."),
        )
        optimized = model.optimized(optimizer)
        originals = {parameter.name: parameter for parameter in optimized if not parameter.copy}
        self.copied: list[tuple[Tensor, Tensor]] = []  # copies of parameters that are here, too
        params = iter(optimized)
        for param_group in optimizer.param_groups:
            keys: dict[str, list[str]] = {}
            for _ in param_group["params"]:
                parameter = next(params)
                if parameter.name in saved_options:
                    where = f"optimizer.param_groups.{parameter.name}"
                    check_class(optimizer_state, param_group, saved_options[parameter.name], where)
                # Of a parameter that was not saved one option is expected, so that it is reported as missing
                for key, entry in saved_options.get(parameter.name, {"lr": None}).items():
                    flat_key = f"optimizer.param_groups.{parameter.name}.{key}"
                    keys.setdefault(key, []).append(flat_key)
                    self.flat[flat_key] = _option(entry)
                # Under ZeRO-1 each rank loads the state of its own parameters
                if not optimizer_state.holds(parameter.param):
                    continue
                if parameter.copy and parameter.name in originals:
                    self.copied.append((parameter.param, originals[parameter.name].param))
                    continue
                states = self.states[parameter.param] = {}
                for key, entry in saved_states.get(parameter.name, {}).items():
                    flat_key = f"optimizer.state.{parameter.name}.{key}"
                    value = state_to_load(key, entry, parameter, optimizer_state)
                    states[key] = flat_key, value
                    # DCP fills these chunks in place; other values are set by put_back
                    self.flat[flat_key] = (
                        None if value is None else shard_optimizer_state(key, value, parameter, chunks)
                    )
            self.options.append(keys)

    def check_options(self) -> None:
        """Raises unless all parameters of a group were saved with the same options; tensors are not compared."""
        for index, keys in enumerate(self.options):
            for key, flat_keys in keys.items():
                first = self.flat[flat_keys[0]]
                for other in flat_keys[1:]:
                    if not isinstance(first, Tensor) and self.flat[other] != first:
                        raise ValueError(
                            f"optimizer: the parameters of its group {index} must have been saved with one {key}: "
                            f"{flat_keys[0]!r} is {first!r}, {other!r} is {self.flat[other]!r}"
                        )

    def put_back(self) -> None:
        """Sets values that cannot be filled in place: state of the optimizer, options of its groups, extra state."""
        nested = unflatten_state_dict({key: self.flat[key] for key in self.paths}, self.paths)
        for name, module in self.extra.items():
            if name in nested["model"]:
                module.set_extra_state(nested["model"][name])
        if self.optimizer is None:
            return
        for param, states in self.states.items():
            loaded = {key: self.flat[flat] if value is None else value for key, (flat, value) in states.items()}
            self.held.set(param, loaded)
        for param, original in self.copied:
            self.held.set(param, copy_of_state(self.held.of(original)))
        for param_group, keys in zip(self.optimizer.param_groups, self.options, strict=True):
            for key, flat_keys in keys.items():
                value, current = self.flat[flat_keys[0]], param_group.get(key)
                if isinstance(value, Tensor) and isinstance(current, Tensor):
                    current.copy_(value)  # in place: captured graphs read it there
                else:
                    param_group[key] = value


def check_writable(flat: StateDict) -> None:
    """Raises ValueError if two elements of a tensor are at one place in memory, as in an expanded buffer."""
    for key, value in flat.items():
        for _, chunk, _ in value.local_chunks if isinstance(value, ChunkedTensor) else ():
            # copy_ refuses to write into such memory, which would be in the middle of the load
            if any(size > 1 and stride == 0 for size, stride in zip(chunk.shape, chunk.stride(), strict=True)):
                name = key.removeprefix("model.")
                raise ValueError(f"module: {name!r} is expanded and must have memory for each element; see clone()")


def _by_name(metadata: Metadata, prefix: str) -> dict[str, dict[str, Any]]:
    """Returns the entries below a prefix, by parameter and key."""
    by_name: dict[str, dict[str, Any]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(prefix):
            name, _, last = key.removeprefix(prefix).rpartition(".")
            by_name.setdefault(name, {})[last] = entry
    return by_name


def _option(entry: Any) -> Tensor | None:
    """Returns an empty tensor to load an option into that is a tensor, such as a learning rate; else None."""
    return torch.zeros(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None


def state_to_load(key: str, entry: Any, of: OptimizedParameter, optimizer_state: HeldState) -> Tensor | None:
    """Returns the optimizer's tensor, or a new one as torch.optim would make it; None if the entry is no tensor."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    param, dtype = of.param, entry.properties.dtype
    current = optimizer_state.of(param).get(key)
    # In place, unless the optimizer keeps a single number where the file has a tensor
    if isinstance(current, Tensor) and (current.dim() == 0) == (len(entry.size) == 0):
        return current
    if len(entry.size) == 0 and param.dim() > 0:
        # Where torch.optim keeps a step: on the CPU unless its kernels or a graph read it
        on_device = of.options.get("capturable") or of.options.get("fused") or key != "step"
        return torch.zeros((), dtype=dtype, device=param.device if on_device else "cpu")
    if not of.layout and not isinstance(param, DTensor):
        return torch.zeros(entry.size, dtype=dtype, device=param.device)
    return torch.zeros_like(param, dtype=dtype, requires_grad=False)
