"""Weights tied over the stages of a pipeline: a copy on each stage, equal at the beginning, with summed gradients."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from tp_ext.model.census import Census
from tp_ext.model.tied import declare_tied


class TiedWeight(NamedTuple):
    """A parameter of the whole model that several stages have.

    Attributes:
        original: its name in the whole model.
        home: the stage that has it under this name.
        names: stage -> the names under which it has the parameter.
    """

    original: str
    home: int
    names: dict[int, list[str]]


def _find_tied(model: Census, stages: Sequence[nn.Module]) -> list[TiedWeight]:
    """Returns the weights that are tied over several stages, from the modules of all stages.

    Raises:
        ValueError: a module with parameters is in several stages.
    """
    first = {id(entry.value): name for name, entry in model.parameters.items()}
    places: dict[int, dict[int, list[str]]] = {}
    owners: dict[int, tuple[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, module in stage.named_modules():
            # A module without parameters, such as an activation, may be in several stages
            if any(param is not None for param in module._parameters.values()):
                other = owners.setdefault(id(module), (index, name))
                if other[0] != index:
                    raise ValueError(
                        f"model: the module {name!r} must be in one stage, but it is used in the stages {other[0]} and "
                        f"{index}; only its parameters can be shared"
                    )
        for name, param in stage.named_parameters(remove_duplicate=False):
            places.setdefault(id(param), {}).setdefault(index, []).append(name)
    tied = []
    for key, names in places.items():
        if len(names) > 1:
            home = next((stage for stage, known in names.items() if first[key] in known), min(names))
            tied.append(TiedWeight(first[key] if first[key] in names[home] else names[home][0], home, names))
    return tied


class TiedWeights:
    """Keeps tied weights equal: their gradients are summed over the stages, once in each step.

    Args:
        model: the whole model.
        all_stages: the modules of all its stages.
        stages: stage -> module, for the stages of this rank.
        rank_of: stage -> the rank in the pipeline that has it.
        group: the pipeline.

    Raises:
        ValueError: a module with parameters is in several stages.
    """

    def __init__(
        self,
        model: Census,
        all_stages: Sequence[nn.Module],
        stages: Mapping[int, nn.Module],
        rank_of: Mapping[int, int],
        group: ProcessGroup,
    ) -> None:
        self._stages, self._group, self._rank = stages, group, group.rank()
        tied = _find_tied(model, all_stages)
        self._tied = [one for one in tied if any(stage in stages for stage in one.names)]
        self._ranks = {one.original: sorted({rank_of[stage] for stage in one.names}) for one in self._tied}
        self._home = {one.original: rank_of[one.home] for one in self._tied}
        self._before: list[tuple[nn.Parameter, dict[str, Tensor | None]]] = []

    def separate(self) -> None:
        """Replaces the parameter by a copy in the stages of this rank other than its home, and declares the copies."""
        for one in self._tied:
            for stage, names in one.names.items():
                if stage in self._stages and stage != one.home:
                    module = self._stages[stage]
                    param = module.get_parameter(names[0])
                    copy = nn.Parameter(param.detach().clone(), param.requires_grad)
                    # tp_layout, for example, says how the parameter is sharded
                    copy.__dict__.update(param.__dict__)
                    if isinstance(main := getattr(param, "main_grad", None), Tensor):
                        copy.main_grad = main.clone()  # type: ignore[attr-defined]
                    # Hooks are not in __dict__; without them the copy's gradient would not be that of the original
                    for hook in (getattr(param, "_backward_hooks", None) or {}).values():
                        copy.register_hook(hook)
                    for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
                        copy.register_post_accumulate_grad_hook(hook)
                    for path, _, local in (name.rpartition(".") for name in names):
                        module.get_submodule(path)._parameters[local] = copy
                    declare_tied(module, dict.fromkeys(names, one.original))

    @torch.no_grad()
    def equalise(self) -> None:
        """Copies the value of the original to all copies. Communicates: one message to each other rank that has one."""
        for one in self._tied:
            params, home = self._params(one), self._home[one.original]
            value = _local(params[one.home] if home == self._rank else next(iter(params.values()))).contiguous()
            others = [rank for rank in self._ranks[one.original] if rank != home]
            if self._rank == home:
                _exchange([(dist.isend, value, rank) for rank in others], self._group)
            elif self._rank in others:
                value = torch.empty_like(value)
                _exchange([(dist.irecv, value, home)], self._group)
            for param in params.values():
                _local(param).copy_(value)

    def states(self) -> list[tuple[str, bool, bool]]:
        """Returns, for each parameter of this rank that is a tied weight: the name of the original, whether it has
        ``main_grad``, whether it requires a gradient. They must be the same for all copies.
        """
        return [
            (one.original, isinstance(getattr(param, "main_grad", None), Tensor), param.requires_grad)
            for one in self._tied
            for param in self._params(one).values()
        ]

    @torch.no_grad()
    def begin(self) -> None:
        """Takes away the gradients of earlier steps, which are summed already."""
        self._before = []
        for one in self._tied:
            for param in self._params(one).values():
                main = getattr(param, "main_grad", None)
                kept = {"grad": param.grad, "main_grad": main.clone() if isinstance(main, Tensor) else None}
                param.grad = None
                if isinstance(main, Tensor):
                    # In place: the buffer is the user's, and layers with grad_accumulation_fusion add to it
                    main.zero_()
                self._before.append((param, kept))

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back the gradients of earlier steps, after an error in the step."""
        for param, earlier in self._before:
            param.grad = earlier["grad"]
            if earlier["main_grad"] is not None:
                param.main_grad.copy_(earlier["main_grad"])  # type: ignore[attr-defined]
        self._before = []

    @torch.no_grad()
    def finish(self, complete: bool = True) -> None:
        """Sums the gradients of a step over the stages. Communicates: one message of the gradient between each two
        ranks that have the weight.

        Args:
            complete: False if FSDP2 keeps the gradients for a later step.
        """
        before = iter(self._before)
        for one in self._tied:
            params = self._params(one)
            kept = [next(before)[1] for _ in params]
            if not complete or not next(iter(params.values())).requires_grad:
                for param, earlier in zip(params.values(), kept, strict=True):
                    param.grad = earlier["grad"] if param.grad is None else param.grad
                    if earlier["main_grad"] is not None:
                        param.main_grad += earlier["main_grad"]  # type: ignore[attr-defined]
                continue
            for name in ("grad", "main_grad"):
                parts = [getattr(param, name, None) for param in params.values()]
                # Whether another rank has a grad only the exchange says; states() has compared who has main_grad
                if name == "grad" or any(isinstance(part, Tensor) for part in parts):
                    total = self._sum(one, parts, next(iter(params.values())))
                    for param, earlier in zip(params.values(), kept, strict=True):
                        if total is not None:
                            _add(param, name, total, earlier[name])
                        elif earlier[name] is not None:
                            setattr(param, name, earlier[name])
        self._before = []

    def _sum(self, one: TiedWeight, parts: Sequence[Tensor | None], param: Tensor) -> Tensor | None:
        """Returns the sum over all stages; None if no stage has a gradient."""
        there = [_local(part) for part in parts if part is not None]
        like = there[0] if there else _local(param)
        own = like.new_zeros(like.numel() + 1)  # the last element: on how many ranks there is a gradient
        for part in there:
            own[:-1].view(like.shape).add_(part)
        if there:
            own[-1] = 1
        ranks = self._ranks[one.original]
        # Messages: [Note: a pipeline's schedule is torch's own, made a subclass]
        sums = {rank: own if rank == self._rank else torch.empty_like(own) for rank in ranks}
        others = [rank for rank in ranks if rank != self._rank]
        _exchange(
            [(dist.isend, own, rank) for rank in others] + [(dist.irecv, sums[rank], rank) for rank in others],
            self._group,
        )
        total = sums[ranks[0]].clone()
        for rank in ranks[1:]:  # in the same order everywhere: the same bits
            total += sums[rank]
        # there first: reading an element of total makes the host wait for a GPU
        return total[:-1].view(like.shape) if there or total[-1] > 0 else None

    def _params(self, one: TiedWeight) -> dict[int, nn.Parameter]:
        held = [stage for stage in one.names if stage in self._stages]
        return {stage: self._stages[stage].get_parameter(one.names[stage][0]) for stage in held}


def _add(param: nn.Parameter, name: str, total: Tensor, earlier: Tensor | None) -> None:
    """Makes a gradient the sum of the step, plus the sum of earlier steps."""
    if name == "main_grad":
        getattr(param, name).copy_(total if earlier is None else total + earlier)
        return
    grad = total.clone()
    if isinstance(param, DTensor):
        # With shape and stride: from_local would take all shards for as long as this one
        grad = DTensor.from_local(
            grad, param.device_mesh, param.placements, shape=param.shape, stride=param.stride(), run_check=False
        )
    param.grad = grad if earlier is None else earlier.add_(grad)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _exchange(messages: Sequence[tuple[Any, Tensor, int]], group: ProcessGroup) -> None:
    """Sends and receives: (``dist.isend`` or ``dist.irecv``, tensor, rank in the group)."""
    if messages and messages[0][1].numel():  # FSDP2 leaves some ranks without elements, of every copy the same
        ops = [dist.P2POp(op, tensor, group=group, group_peer=rank) for op, tensor, rank in messages]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
