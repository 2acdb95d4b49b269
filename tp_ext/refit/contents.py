"""The contents of a model on this rank: the chunks of its entries, as all ranks know them and as live tensors."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tp_ext.checkpoint.chunked_tensor import ChunkedTensor
from tp_ext.checkpoint.optimizer_state import HeldState, copy_of_state, hyperparameters
from tp_ext.checkpoint.sharded import LocalChunks, shard_optimizer_state, sharded_state
from tp_ext.checkpoint.sharded_load import check_writable, state_to_load
from tp_ext.model.census import OptimizedParameter, census, device_of
from tp_ext.model.fqn import Entry
from tp_ext.model.stages import Stages, joined
from tp_ext.refit.rectangles import Ints, Rectangle

SIDES = "source", "target"
# Options that say which states there are, by an optimizer that makes all of a parameter in its first step
OPTIONS_OF_STATES = "amsgrad", "centered", "momentum", "use_muon"


class Item(NamedTuple):
    """A tensor of a model as a rank has it.

    Attributes:
        name: its name in the unsharded model.
        key: of the state of an optimizer for the parameter of that name; "" for a parameter or buffer.
        shape, dtype: of the full tensor.
        chunks: the rectangles of the full tensor that the rank holds.
        parts: the dim and the sizes of the parts, if there are several (q, k, v).
        names: all names of a tensor that has several.
    """

    name: str
    key: str
    shape: Ints
    dtype: torch.dtype
    chunks: tuple[Rectangle, ...]
    parts: tuple[int, Ints] | None = None
    names: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Its name in messages."""
        return f"{self.name}.{self.key}" if self.key else self.name


class Optimized(NamedTuple):
    """A parameter whose state an optimizer holds on this rank: the parameter as an :class:`Item`, and the dtypes of the
    state that there is."""

    item: Item
    dtypes: dict[str, torch.dtype]


class Description(NamedTuple):
    """The contents of a model on one rank for the other ranks.

    Attributes:
        items: its parameters and buffers; of a source also the states of its optimizer.
        optimized: of a target: what its optimizer holds.
        ties: pairs of names of one tensor.
        optimizer: the class of the optimizer, and its options by which classes differ; None without one.
        device: the type of the device on which its tensors are communicated.
        options: pairs of the name of a parameter of the optimizer and its options by which there are more states, or
            others.
    """

    items: list[Item]
    optimized: list[Optimized]
    ties: list[tuple[str, str]]
    optimizer: tuple[str, frozenset[str]] | None
    device: str
    options: tuple[tuple[str, frozenset[str]], ...] = ()


class Place(NamedTuple):
    """A rectangle of a chunk on a rank: the index of the item and of its chunk there, and its first index in it."""

    item: int
    chunk: int
    start: Ints


class Views:
    """Rectangles of the contents of a model, each a place and its sizes, for :meth:`Contents.of`."""

    def __init__(self, places: Iterable[tuple[Place, Ints]]) -> None:
        self.places = list(places)


class Contents:
    """The contents of a model on this rank at one moment.

    Attributes:
        description: for the other ranks.
        views: of each item its chunks, in the order of the description.
        parameters: the live parameters, by name.

    Args:
        side: ``"source"`` or ``"target"``.
        planned: the parameters that there must be.

    Raises:
        ValueError, TypeError: see :func:`tp_ext.sharded_state_dict`; a state of the optimizer that is no tensor; an
            entry of a target that is expanded; a parameter that is not the planned one.
    """

    def __init__(
        self,
        model: Stages,
        optimizer: Optimizer | None,
        buffers: bool,
        side: str,
        planned: Mapping[str, Tensor] | None,
    ) -> None:
        self._tensors = live_tensors(model)
        known, target = census(model), side == "target"
        entries = known.state()
        self.parameters = {name: entry.value for name, entry in entries.items() if _is_parameter(entry)}
        for name, param in {} if planned is None else planned.items():
            if self.parameters.get(name) is not param:
                raise ValueError(
                    f"{side}: {name!r} must be the parameter for which the plan was made, and was replaced"
                )
        # The states of the target may not be there yet: make_states() makes them, of the shapes of the source's
        state = sharded_state(known, None if target else optimizer)[0]
        items: list[Item] = []
        self.views: list[list[Tensor]] = []
        ties = [(name, entry.copy_of) for name, entry in entries.items() if entry.copy_of]
        names: dict[int, list[str]] = {}
        for name, entry in entries.items():
            if not entry.extra:
                names.setdefault(id(entry.value), []).append(name)
        for name, entry in entries.items():
            if entry.extra or not (buffers or _is_parameter(entry)):
                continue
            # A tensor with several names moves once, under the first of them
            first, *others = names[id(entry.value)]
            if first != name:
                continue
            ties += [(first, other) for other in others]
            value = state["model"][name]
            # The source is only read
            if target:
                check_writable({name: value})
            items.append(_item(name, "", value, entry, tuple(names[id(entry.value)])))
            self.views.append(_chunks(value))
        for key, value in state.get("optimizer", {}).items():
            if not key.startswith("state."):
                continue
            name, _, key = key.removeprefix("state.").rpartition(".")
            if not isinstance(value, Tensor):
                raise ValueError(f"optimizer: state {key!r} of {name!r}, {value!r}, must be a tensor")
            items.append(_item(name, key, value))
            self.views.append(_chunks(value))
        self._known, self._optimizer = known, optimizer
        self._of: dict[Views, list[Tensor]] = {}
        self.states = None if optimizer is None else HeldState(optimizer)
        kind = None
        if self.states is not None:
            kind = type(self.states.inner).__name__, frozenset(self.states.inner.defaults) & hyperparameters()
        optimized = [param for _, param in self._optimized()] if target else []
        device = next((device_of(tensor).type for tensor in known.tensors), "cpu")
        options = tuple(
            (param.name, frozenset(name for name in OPTIONS_OF_STATES if param.options.get(name)))
            for param in (known.optimized(optimizer) if optimizer is not None else ())
        )
        self.description = Description(items, optimized, ties, kind, device, options)

    def is_of(self, tensors: list[Any] | None) -> bool:
        """Returns whether it belongs to a model with these :func:`live_tensors`."""
        return tensors is not None and tensors == self._tensors

    def of(self, views: Views) -> list[Tensor]:
        """Returns the live tensors of these rectangles."""
        if views not in self._of:
            self._of[views] = [self.view(place, sizes) for place, sizes in views.places]
        return self._of[views]

    def view(self, place: Place, sizes: Ints) -> Tensor:
        """Returns the live tensor of a rectangle."""
        return Rectangle(place.start, sizes).of(self.views[place.item][place.chunk])

    @property
    def storages(self) -> Iterator[tuple[int, str]]:
        """Yields the address of the memory of each tensor, with its name."""
        for item, views in zip(self.description.items, self.views, strict=True):
            for view in views:
                yield view.untyped_storage().data_ptr(), item.text

    def _optimized(self) -> Iterator[tuple[OptimizedParameter, Optimized]]:
        """Yields the parameters whose state is on this rank, copies of others that are here left out."""
        if self._optimizer is None or self.states is None:
            return
        params, chunks = self._known.optimized(self._optimizer), LocalChunks(self._known.groups)
        originals = {param.name for param in params if not param.copy}
        for param in params:
            # A copy next to its original needs no state of its own: copy_states() copies it
            if self.states.holds(param.param) and not (param.copy and param.name in originals):
                shape, local = chunks.of(param.param, param.layout)
                places = tuple(Rectangle(chunk.offsets, tuple(chunk.tensor.shape)) for chunk in local)
                states = {key: v.dtype for key, v in self.states.of(param.param).items() if isinstance(v, Tensor)}
                yield param, Optimized(Item(param.name, "*", tuple(shape), param.param.dtype, places), states)

    def make_states(self, items: list[list[Item]]) -> None:
        """Gives each parameter of a target's optimizer the state of these items, one list per parameter: the tensors
        that are there, else new ones of zeros, whose chunks are added to :attr:`views`."""
        if self.states is None or self._optimizer is None:
            return
        chunks, originals = LocalChunks(self._known.groups), dict[str, Tensor]()
        for (param, _), of_param in zip(list(self._optimized()), items, strict=True):
            states = {}
            for item in of_param:
                metadata = TensorStorageMetadata(TensorProperties(item.dtype), torch.Size(item.shape), [])
                value = state_to_load(item.key, metadata, param, self.states)
                states[item.key] = value
                self.views.append(_chunks(shard_optimizer_state(item.key, value, param, chunks)))
            self.states.set(param.param, states)
            originals[param.name] = param.param
        self._originals = originals

    def copy_states(self) -> None:
        """Gives the copies of parameters, where the original is here, too, the state of the original."""
        if self.states is None or self._optimizer is None:
            return
        for param in self._known.optimized(self._optimizer):
            if param.copy and param.name in self._originals and self._originals[param.name] is not param.param:
                self.states.set(param.param, copy_of_state(self.states.of(self._originals[param.name])))


def live_tensors(model: Stages) -> list[Any] | None:
    """Returns a fingerprint of a model's tensors. It changes when a parameter or buffer, or its memory, is replaced,
    while the old ones still exist. None: the memory of some tensor is not known."""
    tensors: list[Any] = []
    for path, module in joined(model).named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                try:
                    address = local.data_ptr()
                except RuntimeError:  # a subclass without memory of its own
                    return None
                tensors.append((path, name, id(tensor), address, local.shape, local.stride(), local.dtype))
    return tensors


def _is_parameter(entry: Entry) -> bool:
    return entry.local in entry.owner._parameters


def _item(name: str, key: str, value: Tensor, entry: Entry | None = None, names: tuple[str, ...] = ()) -> Item:
    chunked = value.local_chunks if isinstance(value, ChunkedTensor) else [((0,) * value.dim(), value, True)]
    places = tuple(Rectangle(offsets, tuple(view.shape)) for offsets, view, _ in chunked if view.numel())
    fused = None
    for sharding, _ in entry.layout if entry is not None else ():
        if len(sharding.parts) > 1:
            fused = sharding.dim % value.dim(), tuple(part.size for part in sharding.parts)
    return Item(name, key, tuple(value.shape), value.dtype, places, fused, names)


def _chunks(value: Any) -> list[Tensor]:
    if isinstance(value, ChunkedTensor):
        return [view for _, view, _ in value.local_chunks if view.numel()]
    local = value.to_local() if isinstance(value, DTensor) else value
    return [local.detach()] if local.numel() else []
