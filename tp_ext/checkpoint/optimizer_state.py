"""The state of an optimizer by parameter, wherever it is kept: in the optimizer, or under ``ZeroRedundancyOptimizer``
(ZeRO-1) in an inner optimizer of each rank, which has the state of some of the parameters.
"""

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from tp_ext._object_collectives import all_gather_objects
from tp_ext.checkpoint.gather import as_bytes


class HeldTensor(NamedTuple):
    """A tensor of the state, for the ranks that do not hold it: ``owner`` is the rank in the group that does."""

    owner: int
    shape: torch.Size
    dtype: torch.dtype


class HeldState:
    """The state of an optimizer that this rank holds.

    Attributes:
        outer: the optimizer as given; its parameter groups have all parameters and the options that schedulers change.
        inner: the optimizer that has the state: the same, or the one inside of ``ZeroRedundancyOptimizer``.
        group: the ranks over which the state is distributed, a parameter's on one rank; None: it is all here.

    Raises:
        ValueError: the optimizer keeps its state in another one, which is not known. TypeError: ``optimizer`` is
            of another type.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        check_optimizer(optimizer)
        self.outer, self.inner = optimizer, optimizer
        self.group: ProcessGroup | None = None
        kind = type(optimizer)
        # By name, since importing torch.distributed.optim would cost every user time
        # [Note: the state of ZeRO-1 is read from its inner optimizers]
        if any(base.__name__ == "ZeroRedundancyOptimizer" for base in kind.__mro__):
            inner = getattr(optimizer, "optim", None)
            if not isinstance(inner, Optimizer):
                raise ValueError(
                    f"optimizer: {kind.__name__} must have overlap_with_ddp=False; else its state is in no optimizer"
                )
            self.inner, self.group = inner, optimizer.process_group  # type: ignore[attr-defined]
        # An optimizer with state of its own is no wrapper, whatever other ones it refers to
        elif not optimizer.state:
            for name, other in vars(optimizer).items():
                state = getattr(other, "state", None) if hasattr(other, "param_groups") else None
                if state is not None and state is not optimizer.state:
                    raise ValueError(
                        f"optimizer: {kind.__name__} must have state of its own, which is in its {name!r}, a "
                        f"{type(other).__name__}; pass that optimizer"
                    )
        self._here = {param for group in self.inner.param_groups for param in group["params"]}

    def of(self, param: Tensor) -> dict[str, Any]:
        """Returns the live state of a parameter; empty if it has none, or another rank holds it."""
        state: dict[str, Any] = self.inner.state.get(param, {})
        return state

    def holds(self, param: Tensor) -> bool:
        """Returns whether the state of a parameter of the optimizer is on this rank, once there is any."""
        return param in self._here

    def set(self, param: Tensor, state: dict[str, Any]) -> None:
        """Replaces the state of a parameter that this rank holds; an empty one is removed."""
        self.inner.state[param] = state
        if not state:
            del self.inner.state[param]

    def described(self, params: Iterable[Tensor]) -> list[dict[str, Any]]:
        """Returns the state of each parameter, wherever it is, with a :class:`HeldTensor` for each tensor that
        :meth:`fetch` has to communicate.

        Communicates: if the state is distributed, one exchange of keys, shapes and single numbers over the group.
        """
        states = [self.of(param) for param in params]
        if self.group is None:
            return states
        rank = self.group.rank()
        mine = [{key: _described(value, rank) for key, value in state.items()} for state in states]
        reports = all_gather_objects(mine, self.group)
        # One rank has the state of a parameter, the others of the group report none
        return [next((report[i] for report in reports if report[i]), {}) for i in range(len(mine))]

    def fetch(self, param: Tensor, key: str, value: Any) -> Any:
        """Returns a value of :meth:`described`, a tensor in place of a :class:`HeldTensor`.

        Communicates: one broadcast of this tensor from its owner, over the group.
        """
        if not isinstance(value, HeldTensor):
            return value
        assert self.group is not None
        if value.owner == self.group.rank():
            # as_bytes needs contiguous memory
            tensor = self.of(param)[key].detach().contiguous()
        else:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=param.device)
        if tensor.numel():
            dist.broadcast(as_bytes(tensor), group=self.group, group_src=value.owner)
        return tensor

    def load(self, states: Mapping[Tensor, dict[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the state by this rank's part of ``states``, and the options of each parameter group."""
        params = [param for group in self.inner.param_groups for param in group["params"]]
        numbers = {param: number for number, param in enumerate(params)}
        groups = [
            {**saved, "params": [numbers[param] for param in group["params"]]}
            for group, saved in zip(self.inner.param_groups, options, strict=True)
        ]
        # By the numbers of the inner optimizer, which under ZeRO-1 has some of the parameters
        kept = {numbers[param]: state for param, state in states.items() if param in numbers}
        self.inner.load_state_dict({"state": kept, "param_groups": groups})
        for param, state in states.items():  # torch casts numbers, such as NAdam's product, to the parameter's dtype
            for key, value in self.of(param).items():
                if isinstance(value, Tensor) and not value.dim() and value.dtype != state[key].dtype:
                    self.inner.state[param][key] = state[key].to(value.device)
        # Learning-rate schedulers change the outer groups, whose options each step copies to the inner ones
        if self.outer is not self.inner:
            for group, saved in zip(self.outer.param_groups, options, strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})


_NO_HYPERPARAMETERS = {
    *("params", "defaults", "foreach", "maximize", "capturable", "differentiable", "fused"),
    "decoupled_weight_decay",
}


@functools.cache
def _options_of_classes() -> tuple[frozenset[str], ...]:
    classes = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
    return tuple(frozenset(inspect.signature(kind).parameters) - _NO_HYPERPARAMETERS for kind in classes)


@functools.cache
def hyperparameters() -> frozenset[str]:
    """Returns the options that tell the classes of ``torch.optim`` apart. Options that say how to compute, which differ
    between versions of torch, are left out."""
    return frozenset().union(*_options_of_classes())


def check_class(state: HeldState, live: Iterable[str], saved: Iterable[str], where: str) -> None:
    """Raises ValueError if the options of a parameter group, which were saved, are those of another class of optimizer
    than this one: its state would then lack what a step reads. Only options that an optimizer of torch has count, and
    one that this class has not may be the user's own, unless they make another class of it.

    Args:
        live: the options of the group of this optimizer, those of the user, too.
    """
    current, other = (set(names) & hyperparameters() for names in (state.inner.defaults, saved))
    missing, foreign = current - other, other - current - set(live)
    if missing or any(current < options <= other and options & foreign for options in _options_of_classes()):
        more = "; ".join(
            f"{what} {sorted(names)}" for what, names in (("it has no", missing), ("it has", foreign)) if names
        )
        raise ValueError(
            f"optimizer: {type(state.inner).__name__} must be of the class of the one that was saved, whose options "
            f"are others: {more}; see {where}"
        )


def copy_of_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the state of a parameter, for another one."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _described(value: Any, rank: int) -> Any:
    """Returns a value for the other ranks: a single number itself, on the CPU."""
    if not isinstance(value, Tensor):
        return value
    return HeldTensor(rank, value.shape, value.dtype) if value.dim() else value.detach().cpu()


def check_optimizer(optimizer: Optimizer | None) -> None:
    """Raises TypeError if it is neither an optimizer nor None."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: {type(optimizer).__name__} must be a torch.optim.Optimizer")
