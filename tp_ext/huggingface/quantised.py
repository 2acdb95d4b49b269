"""Weights that are quantised as they are read, one layer after the other."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tp_ext.checkpoint.files.safetensors_slices import SlicedTensor
from tp_ext.checkpoint.gather import write_full
from tp_ext.group import process_group
from tp_ext.low_precision.quantize import form_of, largest_of, linears, put
from tp_ext.model.fqn import Entry
from tp_ext.nn.low_bits import LowBits


def forms_of(model: nn.Module, weights: str, block: int) -> dict[Any, LowBits]:
    """Returns the forms that the weights of a model's linears will have, by layer.

    Raises:
        ValueError: see :func:`tp_ext.low_precision.quantize_`.
    """
    chosen = linears(model)
    if not chosen:
        raise ValueError("quantize: the model must have a linear that is no head")
    return {layer: form_of(name, layer, weights, block) for name, layer in chosen.items()}


class Quantised:
    """The layers of a model whose weights are quantised when they have been read; the context in which that happens,
    which an error on one rank ends on all.

    Args:
        forms: by layer.
        device: where the weights are.
    """

    def __init__(self, forms: dict[Any, LowBits], device: torch.device) -> None:
        self._forms, self._device = forms, device
        # At these layers the ranks meet, in the order of reading, which is the same on all
        shared = [form.groups() for form in forms.values() if form.groups()]
        self._meetings, self._groups = len(shared), shared[0] if shared else []

    def takes(self, entry: Entry) -> bool:
        """Returns whether it is the weight of one of the layers."""
        return entry.owner in self._forms and entry.local == "weight"

    def read(self, name: str, tensor: Tensor | SlicedTensor, entry: Entry) -> bool:
        """Reads a weight and puts its form into its place; returns False if another rank has failed.

        Raises:
            ValueError: the weight has a NaN or an Inf. What reading raises.
        """
        layer, form = entry.owner, self._forms[entry.owner]
        weight = torch.empty_like(entry.value, device=self._device, requires_grad=False)
        write_full(tensor, weight, entry.layout)
        largest = largest_of(form, weight, f"path: {name!r}")
        if form.groups():
            if self._another_has_failed(False):
                return False
            self._meetings -= 1
        put(layer, form, largest, weight)
        return True

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # The other ranks wait for this one at the next layer that all share
        if error is not None and self._meetings:
            self._another_has_failed(True)

    def _another_has_failed(self, this: bool) -> bool:
        failed = torch.tensor(int(this), device=self._device)
        for group in self._groups:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=process_group(group.name))
        return bool(failed)
