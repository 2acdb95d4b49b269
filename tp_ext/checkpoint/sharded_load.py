"""Loading what torch.distributed.checkpoint saved of a sharded state dict, checked before anything is written."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tp_ext._object_collectives import RetryError, gathered, outcomes, plain_failures, together
from tp_ext.checkpoint.full import StateDict, entries_of
from tp_ext.checkpoint.reader import PlainPlanner
from tp_ext.checkpoint.sharded import Optimized, optimized_params, sharded_state, sharded_state_dict
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.nn.module import model_group

T = TypeVar("T")
_ATTEMPTS = 20  # to read one checkpoint, while others take its place


def load_sharded_state_dict(
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    storage_reader: StorageReader,
    group: Group = NOT_GIVEN,
    process_group: ProcessGroup | None = None,
) -> None:
    """Loads what ``torch.distributed.checkpoint`` saved of :func:`sharded_state_dict`, at any number of ranks, straight
    into the live shards: no rank ever holds a full tensor. Every rank of ``process_group`` calls it.

    The optimizer may be new: its state is made of what the checkpoint holds. Of entries that are no tensors (options of
    parameter groups, extra state) nothing but plain values is unpickled.

    Args:
        module, optimizer, group: as for :func:`sharded_state_dict`; ranks, shards and data axes may be others.
        storage_reader: of the checkpoint; :class:`CheckpointReader` for a directory that need not be trusted.
        process_group: all ranks that take part; None: all there are.

    Communicates: plans and outcomes, no tensors.

    Raises:
        KeyError: missing or unexpected keys, all of them named. ValueError, TypeError: an entry has another shape than
            the unsharded tensor (both are named), or one is a tensor and the other none; the parameters of a group were
            saved with different options. On every rank, and nothing has been loaded then.
        OSError: a file could not be read, on every rank, whichever it was; some tensors may have been loaded then. The
            checkpoint was replaced again and again before all ranks had read it; once is no error, they read the new
            one then. pickle.UnpicklingError: an entry is more than plain values; no tensor has been loaded then.
    """
    load_from(storage_reader, module, optimizer, group, process_group, lambda: None)


@torch.no_grad()
def load_from(
    reader: StorageReader,
    module: nn.Module,
    optimizer: Optimizer | None,
    group: Group,
    process_group: ProcessGroup | None,
    before: Callable[[], T],
) -> T:
    """Loads as :func:`load_sharded_state_dict`, and returns what ``before`` has read of the same checkpoint.

    A checkpoint that is replaced before all ranks have opened it, or while they read it, is left for the new one.
    """
    replaced: Exception | None = None
    for _ in range(_ATTEMPTS):
        try:
            metadata, found = _opened(reader, process_group, before)
            _load(reader, metadata, module, optimizer, group, process_group)
            return found
        except RetryError as error:  # on all ranks
            replaced = error
            reader.reset()
    raise OSError(f"{replaced}; {_ATTEMPTS} attempts") from replaced


def _opened(reader: StorageReader, process_group: ProcessGroup | None, before: Callable[[], T]) -> tuple[Metadata, T]:
    """Metadata of one checkpoint, the same on all ranks."""
    metadata: Metadata | None = None
    found: T | None = None

    def read() -> str:
        nonlocal metadata, found
        metadata, found = reader.read_metadata(), before()
        return getattr(reader, "identity", "")

    if len(set(outcomes(process_group, read))) > 1:
        path = os.fspath(getattr(reader, "path", ""))
        raise RetryError(f"path: {path!r} must be one checkpoint on all ranks, and was replaced while they opened it")
    return metadata, found  # type: ignore[return-value]


def _load(
    reader: StorageReader,
    metadata: Metadata,
    module: nn.Module,
    optimizer: Optimizer | None,
    group: Group,
    process_group: ProcessGroup | None,
) -> None:
    into = together(process_group, lambda: _Destination(module, optimizer, metadata, group))
    flat: StateDict = into.flat
    parts = ("model.", "optimizer.") if optimizer is not None else ("model.",)
    saved = {key for key in metadata.state_dict_metadata if key.startswith(parts)}
    _check_keys(set(flat), saved, process_group)
    together(process_group, lambda: _check_entries(flat, metadata))
    # First entries that are no tensors: should one be refused, no tensor has been written
    plain = {key: value for key, value in flat.items() if not isinstance(value, Tensor)}
    tensors = {key: value for key, value in flat.items() if isinstance(value, Tensor)}
    _read(plain, reader, process_group)
    flat |= plain
    together(process_group, into.check_options)
    _read(tensors, reader, process_group)
    together(process_group, into.put_back)


def _check_keys(wanted: set[str], saved: set[str], process_group: ProcessGroup | None) -> None:
    """Missing is what one rank misses, unexpected what no rank expects: the stages of a pipeline have other names."""
    reports = gathered((wanted - saved, saved - wanted), process_group)
    missing = set[str]().union(*(one for one, _ in reports))
    unexpected = set[str].intersection(*(other for _, other in reports))
    if missing or unexpected:
        raise KeyError(f"checkpoint: missing keys {sorted(missing)}, unexpected keys {sorted(unexpected)}")


def _check_entries(flat: StateDict, metadata: Metadata) -> None:
    for key, value in flat.items():
        entry = metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata) != isinstance(value, Tensor):
            saved, own = ("a tensor", "none") if isinstance(entry, TensorStorageMetadata) else ("no tensor", "one")
            raise TypeError(f"checkpoint: {key!r} is {saved} and must be {own}")
        if isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
            raise ValueError(
                f"checkpoint: {key!r} has shape {tuple(entry.size)} and must have {tuple(value.shape)}, "
                "that of the unsharded module"
            )


def _read(flat: StateDict, reader: StorageReader, process_group: ProcessGroup | None) -> None:
    """Fills the tensors of a flat state dict and replaces its other values."""
    with plain_failures():
        dcp.load(flat, storage_reader=reader, planner=PlainPlanner(), process_group=process_group)


class _Destination:
    """Where the entries of a checkpoint go."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None, metadata: Metadata, group: Group) -> None:
        group = model_group(module, group)
        self.flat, self.paths = flatten_state_dict(sharded_state_dict(module, group=group))
        self.extra = {name: entry.owner for name, entry in entries_of(module).items() if entry.extra}
        self.optimizer = optimizer
        self.options: list[dict[str, list[str]]] = []  # of each group of the optimizer: where its parameters say so
        self.states: dict[Tensor, dict[str, tuple[str, Tensor | None]]] = {}  # of each parameter: the entries
        if optimizer is None:
            return
        saved_states, saved_options = (
            _by_name(metadata, "optimizer.state."),
            _by_name(metadata, "optimizer.param_groups."),
        )
        params = iter(optimized_params(module, optimizer))
        for param_group in optimizer.param_groups:
            keys: dict[str, list[str]] = {}
            for _ in param_group["params"]:
                one = next(params)
                for key, entry in saved_options.get(one.name, {"lr": None}).items():
                    flat_key = f"optimizer.param_groups.{one.name}.{key}"
                    keys.setdefault(key, []).append(flat_key)
                    self.flat[flat_key] = _option(entry)
                states = self.states[one.param] = {}
                for key, entry in saved_states.get(one.name, {}).items():
                    flat_key = f"optimizer.state.{one.name}.{key}"
                    value = _state(key, entry, one, optimizer)
                    states[key] = flat_key, value
                    self.flat[flat_key] = None if value is None else sharded_state(key, value, one, group)
            self.options.append(keys)

    def check_options(self) -> None:
        """All parameters of a group must have been saved with the same options; tensors, not read yet, are trusted."""
        for index, keys in enumerate(self.options):
            for key, places in keys.items():
                first = self.flat[places[0]]
                for place in places[1:]:
                    if not isinstance(first, Tensor) and self.flat[place] != first:
                        raise ValueError(
                            f"optimizer: the parameters of its group {index} must have been saved with one {key}: "
                            f"{places[0]!r} is {first!r}, {place!r} is {self.flat[place]!r}"
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
            loaded = {key: self.flat[place] if value is None else value for key, (place, value) in states.items()}
            self.optimizer.state[param] = loaded
            if not loaded:
                del self.optimizer.state[param]
        for param_group, keys in zip(self.optimizer.param_groups, self.options, strict=True):
            for key, places in keys.items():
                value, current = self.flat[places[0]], param_group.get(key)
                if isinstance(value, Tensor) and isinstance(current, Tensor):
                    current.copy_(value)  # in place: captured graphs read it there
                else:
                    param_group[key] = value


def _by_name(metadata: Metadata, prefix: str) -> dict[str, dict[str, Any]]:
    """The entries below a prefix, by parameter and key."""
    found: dict[str, dict[str, Any]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(prefix):
            name, _, last = key.removeprefix(prefix).rpartition(".")
            found.setdefault(name, {})[last] = entry
    return found


def _option(entry: Any) -> Tensor | None:
    """A place for a tensor, a learning rate on the device, say."""
    return torch.zeros(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None


def _state(key: str, entry: Any, of: Optimized, optimizer: Optimizer) -> Tensor | None:
    """The optimizer's tensor, or a new one, as torch.optim would make it; None for what is no tensor."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    param, dtype = of.param, entry.properties.dtype
    current = optimizer.state.get(param, {}).get(key)
    if isinstance(current, Tensor) and (current.dim() == 0) == (len(entry.size) == 0):
        return current
    if len(entry.size) == 0 and param.dim() > 0:
        on_device = of.options.get("capturable") or of.options.get("fused") or key != "step"
        return torch.zeros((), dtype=dtype, device=param.device if on_device else "cpu")
    if of.sharding is None and not isinstance(param, DTensor):
        return torch.zeros(entry.size, dtype=dtype, device=param.device)
    return torch.zeros_like(param, dtype=dtype, requires_grad=False)
