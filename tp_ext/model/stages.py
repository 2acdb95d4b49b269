"""Several stages of a pipeline that one rank holds, as one module with the names of the whole model."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

Stages = nn.Module | Sequence[nn.Module]
"""Type of the module that functions of whole models take: one module, or the stages that this rank holds."""


class JoinedStages(nn.Module):
    """Several modules under the names that each of them gives, without prefixes; it has no state of its own.

    Raises:
        ValueError: two of the modules have different tensors of one name.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = tuple(stages)  # in a tuple torch does not register them, which would give prefixes
        self._stage_of: dict[str, int] = {}
        tensors: dict[str, Any] = {}
        for index, stage in enumerate(stages):
            for name, tensor in (*stage.named_parameters(remove_duplicate=False), *stage.named_buffers()):
                key = _unwrapped(name)
                if tensors.setdefault(key, tensor) is not tensor:
                    raise ValueError(
                        f"module: {key!r} is in the stages {self._stage_of[key]} and {index} of this rank, and must be "
                        "in one: stages keep the names of the whole model"
                    )
                self._stage_of.setdefault(key, index)

    def stage_of(self, key: str) -> nn.Module:
        """Returns the module that has the parameter, buffer or state-dict entry ``key``."""
        return self.stages[self._stage_of[_unwrapped(key)]]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules of all stages, as torch traverses them to find parameters and buffers."""
        memo = set() if memo is None else memo
        for stage in self.stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the entries of all stages."""
        state: dict[str, Any] = {}
        for index, stage in enumerate(self.stages):
            for key, value in stage.state_dict(*args, **options).items():
                state.setdefault(key, value)
                self._stage_of.setdefault(_unwrapped(key), index)
        return state

    def get_parameter(self, target: str) -> nn.Parameter:
        return self.stage_of(target).get_parameter(target)


def _unwrapped(name: str) -> str:
    """Returns a name as torch's CheckpointWrapper has it in state dicts, without its prefix."""
    return name.replace("_checkpoint_wrapped_module.", "")


def joined(module: Stages) -> nn.Module:
    """Returns a module itself, several stages as :class:`JoinedStages`.

    Raises:
        TypeError: neither a module nor a list of modules. ValueError: see :class:`JoinedStages`.
    """
    if isinstance(module, nn.Module):
        return module
    stages = list(module) if isinstance(module, list | tuple) else []
    if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
        raise TypeError(f"module: {module!r} must be a module, or a list of the stages that this rank holds")
    return stages[0] if len(stages) == 1 else JoinedStages(stages)
