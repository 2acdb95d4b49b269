"""Debug mode, in which the ranks of a tensor-parallel group compare the ids and targets passed to them.

Ranks of one group must read the same batch. A DataLoader that shuffles by the global rank gives each rank another one;
then nothing raises, and the model learns noise. The comparison costs an exchange per call, so it is off by default.
"""

import os
import warnings
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from tp_ext._checksum import bits_of, checksum
from tp_ext.common_generator import DrawObserver
from tp_ext.group import ParallelGroup, process_group


class DebugMode:
    """The state of the debug mode: layers compare inputs if ``on`` is set."""

    on = os.environ.get("TP_EXT_DEBUG", "0") not in ("", "0")


class compare_inputs:
    """Turns the debug mode on, from now on or for a ``with`` block: :class:`VocabParallelEmbedding`, and embeddings
    whose rows a plan of ``tp_ext.auto`` shards, compare their ids over the group, :func:`vocab_parallel_cross_entropy`
    its targets, and layers with dropout in training, and such models of a plan, the states of the generators of their
    masks. ``TP_EXT_DEBUG=1`` in the environment turns it on from the start.

    It must be on on every rank of the group. Communicates one all-gather of 80 bytes per rank and call, and waits for
    it.
    In code compiled by ``torch.compile`` nothing is compared.

    Args:
        on: False turns it off.

    Raises, in those calls, on every rank of the group:
        ValueError: the ranks that differ, the first index, both values.
    """

    def __init__(self, on: bool = True) -> None:
        self._before = DebugMode.on
        DebugMode.on = on

    def __enter__(self) -> Self:
        _entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        place = _entered.index(self)
        del _entered[place]
        if place < len(_entered):  # of simulated ranks, which leave in any order
            _entered[place]._before = self._before
        else:
            DebugMode.on = self._before


_entered: list[compare_inputs] = []


def enable(on: bool = True) -> compare_inputs:
    """Turns the debug mode on under the old name of :class:`compare_inputs`."""
    warnings.warn("debug.enable: use debug.compare_inputs, its new name", DeprecationWarning, stacklevel=2)
    return compare_inputs(on)


def check_same_input(name: str, tensor: Tensor, group: ParallelGroup) -> None:
    """Raises on every rank unless ``tensor``, an integer tensor, has the same values on all ranks of the group."""
    if group.size == 1 or torch.compiler.is_compiling():
        return
    ranks, values = process_group(group.name), tensor.detach().long()
    # As long on all ranks, whatever their shapes: an exchange of unequal lengths would fail and not say why
    shape = [*values.shape, *[-1] * 8][:8]
    mine = torch.cat([torch.tensor(shape, device=values.device), checksum(bits_of(values))])
    everyone = _all_gather_values(mine, ranks).tolist()
    if all(row == everyone[0] for row in everyone):
        return
    rule = "must be the same on all ranks of a tensor-parallel group, which read one batch"
    shapes = [[n for n in row[:8] if n >= 0] for row in everyone]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{name}: {rule}; the shapes are {shapes}, p = {group.size}")
    # Only here, where the shapes agree and there is an error to explain, do values travel
    flat = _all_gather_values(values.flatten(), ranks)
    others = [rank for rank in range(group.size) if everyone[rank] != everyone[0]]
    first = int((flat[others[0]] != flat[0]).nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), values.shape))
    raise ValueError(
        f"{name}: {rule}; ranks {others} differ from rank 0, rank {others[0]} first at index {index}: "
        f"{int(flat[others[0], first])}, not {int(flat[0, first])}, p = {group.size}"
    )


def _check_draws(group: ParallelGroup, generator: torch.Generator) -> None:
    """Raises on every rank unless masks are drawn from the same state of a generator on all ranks of the group."""
    if not DebugMode.on:
        return
    ranks, state = process_group(group.name), generator.get_state()
    device = "cpu" if torch.device("cpu") in ranks._device_types else generator.device
    everyone = _all_gather_values(checksum(bits_of(state)).to(device), ranks).tolist()
    differing = [rank for rank in range(group.size) if everyone[rank] != everyone[0]]
    if differing:
        raise ValueError(
            f"masks of dropout: must be drawn from one state of torch's generator of the {generator.device.type}; "
            f"ranks {differing} differ from rank 0, p = {group.size}: draw on all ranks or on none between the layers "
            "of a forward"
        )


DrawObserver.compare = _check_draws


def _all_gather_values(tensor: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    gathered = tensor.new_empty((ranks.size(), *tensor.shape))
    dist.all_gather_into_tensor(gathered.view(-1), tensor.contiguous().view(-1), group=ranks)
    return gathered
