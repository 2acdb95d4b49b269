"""What must be equal in all replicas: how each rank describes it, and the sentence that names what differs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tp_ext._checks import check_int, check_number, check_type
from tp_ext.elastic.board import Board, Replica
from tp_ext.model.census import census
from tp_ext.refit.contents import OPTIONS_OF_STATES

Fields = dict[str, str]
# Options that say how to compute, which hosts may choose differently, and lists of the parameters themselves
_NO_VALUES = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def check_arguments(
    optimizer: Any, store: Any, replica: Any, timeout: Any, min_replicas: Any, schedulers: Sequence[Any]
) -> None:
    """Raises TypeError or ValueError unless a replica takes these arguments."""
    check_type(Optimizer, "a torch.optim.Optimizer", optimizer=optimizer)
    check_type(dist.Store, "a torch.distributed.Store", store=store)
    if not isinstance(replica, str):
        raise TypeError(f"replica: {replica!r} must be a string, the name of this replica")
    check_number(above=0, timeout=timeout)
    check_int(least=1, min_replicas=min_replicas)
    for scheduler in schedulers:
        if not hasattr(scheduler, "state_dict") or not hasattr(scheduler, "load_state_dict"):
            raise TypeError(f"schedulers: {type(scheduler).__name__} must have state_dict and load_state_dict")


class Fit:
    """The description of this rank's part of a replica, published in the store so that others can name what differs.

    Two parts: one of the model and the optimizer's groups, which a replica that joins must have; and the options of the
    groups, which it gets.

    Attributes:
        number: of all of it; that of all replicas if they fit.

    Args:
        replica: the id of the replica.
        schedulers: objects whose states a replica that joins gets.
        settings: further values that must be equal.
    """

    def __init__(
        self,
        board: Board,
        replica: str,
        rank: int,
        modules: nn.Module,
        optimizer: Optimizer,
        schedulers: Sequence[Any],
        settings: Mapping[str, object],
    ) -> None:
        self._board, self._id, self._rank = board, replica, rank
        self._modules, self._optimizer, self._schedulers = modules, optimizer, schedulers
        self._settings = {name: repr(value) for name, value in settings.items()}
        self._key: object = None
        self._model: Fields = {}
        self._options: Fields = {}
        self._published: dict[str, str] = {}
        self.number = 0

    def publish(self) -> None:
        """Describes this rank anew, and writes to the store what has changed.

        Raises:
            ValueError: the optimizer has a parameter that is not the model's.
        """
        changed = []
        if (key := self._key_of_model()) != self._key:
            self._model, self._key = self._model_now(), key
            changed.append(("model", self._model))
        if (options := options_of(self._optimizer)) != self._options:
            self._options = options
            changed.append(("options", options))
        for what, part in changed:
            self._published[what] = json.dumps(part)
            self._board.set(f"{what}/{self._id}/{self._rank}", self._published[what])
        if changed:
            digest = hashlib.sha256(json.dumps(self._published, sort_keys=True).encode()).digest()
            # 48 bits, which an fp64 holds
            self.number = int.from_bytes(digest[:6], "big")

    def family(self, ranks: int) -> str:
        """Returns a word that all replicas have whose ranks describe the same model."""
        texts = [self._board.read(f"model/{self._id}/{rank}") for rank in range(ranks)]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]

    def all_fit(self, replicas: Sequence[str], numbers: Sequence[float], name: str) -> bool:
        """Returns whether all replicas have the same :attr:`number`; notes those that differ from most, if this one
        does not: of as many the first ones count.

        Args:
            replicas: their ids.
            name: of this rank's replica.
        """
        usual = max(numbers, key=numbers.count)
        for replica, number in zip(replicas, numbers, strict=True):
            if number != usual and self.number == usual:
                self._board.first(f"unfit/{replica}", self._difference_of(replica, name))
        return all(number == usual for number in numbers)

    def _difference_of(self, replica: str, name: str) -> str:
        for what, mine in (("model", self._model), ("options", self._options)):
            if text := _difference(_read(self._board, what, replica, self._rank), mine, name, self._rank):
                return text
        return f"rank {self._rank} must be as that of {name!r}"

    def _key_of_model(self) -> object:
        params = [
            (name, id(param), param.requires_grad, param.shape, param.dtype)
            for name, param in self._modules.named_parameters(remove_duplicate=False)
        ]
        groups = [[id(param) for param in group["params"]] for group in self._optimizer.param_groups]
        return params, groups, [(name, buffer.shape, buffer.dtype) for name, buffer in persistent(self._modules)]

    def _model_now(self) -> Fields:
        description = self._settings | {
            "optimizer": type(self._optimizer).__name__,
            "schedulers": repr([type(scheduler).__name__ for scheduler in self._schedulers]),
            "parameter groups": str(len(self._optimizer.param_groups)),
        }
        for number, group in enumerate(self._optimizer.param_groups):
            of_states = [name for name in OPTIONS_OF_STATES if group.get(name)]
            description[f"options with states of parameter group {number}"] = repr(of_states)
        layouts = {entry.value: entry.layout for entry in census(self._modules).parameters.values()}
        group_of = {param: n for n, group in enumerate(self._optimizer.param_groups) for param in group["params"]}
        if foreign := [param for param in group_of if param not in layouts]:
            raise ValueError(
                f"optimizer: a parameter of shape {tuple(foreign[0].shape)} must be one of the model's: its gradients "
                "would not be those of all replicas"
            )
        first: dict[Tensor, str] = {}
        for name, param in self._modules.named_parameters(remove_duplicate=False):
            if (other := first.setdefault(param, name)) != name:
                description[f"parameter {name!r}"] = f"tied to {other!r}"
                continue
            # Sizes and not global ranks: replicas may be parts of one job
            sharded = [f"{sharding} as rank {group.rank} of {group.size}" for sharding, group in layouts[param]]
            if isinstance(param, DTensor):
                mesh = param.device_mesh
                sharded.append(f"{param.placements} at {mesh.get_coordinate()} of {tuple(mesh.shape)}")
            description |= {
                f"parameter {name!r}": _kind(param),
                f"requires_grad of {name!r}": str(param.requires_grad),
                f"parameter group of {name!r}": str(group_of.get(param)),
                f"layout of {name!r}": ", ".join(sharded),
            }
        for name, buffer in persistent(self._modules):
            description[f"buffer {name!r}"] = _kind(buffer)
        return description


def difference(board: Board, joiner: Replica, reference: Replica) -> str:
    """Returns what of a replica differs from another one, on any rank, as both were described last; "" if nothing
    does."""
    if reference.ranks != joiner.ranks:
        return f"it must have {reference.ranks} ranks as {reference.name!r} has, and has {joiner.ranks}"
    for rank in range(joiner.ranks):
        description, other = (_read(board, "model", replica.id, rank) for replica in (joiner, reference))
        if text := _difference(description, other, reference.name, rank):
            return text
    return ""


def persistent(modules: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns the persistent buffers, each once, by name."""
    buffers: dict[Tensor, str] = {}
    for path, module in modules.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers.setdefault(buffer, f"{path}.{name}".lstrip("."))
    return [(name, buffer) for buffer, name in buffers.items()]


def options_of(optimizer: Optimizer) -> Fields:
    """Returns the options of the parameter groups as text."""
    return {
        f"option {name!r} of parameter group {number}": _shown(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in _NO_VALUES
    }


def states_to_give(optimizer: Optimizer, schedulers: Sequence[Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns the options of the parameter groups and the states of the schedulers, for other processes."""
    options = [
        {name: _on_cpu(value) for name, value in group.items() if name not in _NO_VALUES}
        for group in optimizer.param_groups
    ]
    return options, [scheduler.state_dict() for scheduler in schedulers]


def take_states(given: tuple[list[dict[str, Any]], list[Any]], optimizer: Optimizer, schedulers: Sequence[Any]) -> None:
    """Takes over the options of the parameter groups and the states of the schedulers from another replica."""
    options, states = given
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for name, value in values.items():
            if isinstance(value, Tensor) and isinstance(current := group.get(name), Tensor):
                current.copy_(value)  # a compiled step may hold it
            else:
                group[name] = value
    for scheduler, state in zip(schedulers, states, strict=True):
        scheduler.load_state_dict(state)


def _difference(description: Fields, reference: Fields, name: str, rank: int) -> str:
    """Returns a sentence about the first difference from the description of a replica; "" without one."""
    for what in [*reference, *description]:
        if (value := description.get(what, "not there")) != (other := reference.get(what, "not there")):
            return f"{what} on rank {rank} must be as in {name!r}, {other}, and is {value}"
    return ""


def _read(board: Board, what: str, replica: str, rank: int) -> Fields:
    description: Fields = json.loads(board.read(f"{what}/{replica}/{rank}") or "{}")
    return description


def _kind(tensor: Tensor) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return f"shape {tuple(local.shape)}, {tensor.dtype}"


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return repr(value.tolist())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)).join("()")
    plain = value is None or isinstance(value, bool | int | float | str | torch.dtype)
    # Others may show an address
    return repr(value) if plain else type(value).__name__
