"""Weights that are quantised as they are read, one layer after the other."""

from typing import Any

import torch
from torch import Tensor, nn

from tp_ext.checkpoint.files.safetensors_slices import SlicedTensor
from tp_ext.checkpoint.gather import write_full
from tp_ext.low_precision.quantize import form_of, largest_of_all, linears, put
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
    """The layers of a model whose weights are quantised when they have been read.

    Args:
        forms: by layer.
        device: where the weights are.
    """

    def __init__(self, forms: dict[Any, LowBits], device: torch.device) -> None:
        self._forms, self._device = forms, device
        self._problem: Exception | None = None

    def takes(self, entry: Entry) -> bool:
        """Returns whether it is the weight of one of the layers."""
        return entry.owner in self._forms and entry.local == "weight"

    def read(self, name: str, tensor: Tensor | SlicedTensor, entry: Entry) -> None:
        """Reads a weight and puts its form into its place.

        A rank that cannot read it takes part in the collective over the group nevertheless, with a number that is not
        finite: so all ranks end at the same layer.

        Raises:
            ValueError, on all ranks: the weight of a rank has a NaN or an Inf. What the rank raises that cannot read.
        """
        layer, form = entry.owner, self._forms[entry.owner]
        weight = torch.empty_like(entry.value, device=self._device, requires_grad=False)
        problem: Exception | None = None
        try:
            write_full(tensor, weight, entry.layout)
            largest = form.largest(weight)
        except Exception as error:
            problem = error
            largest = torch.full((weight.shape[0], 1), torch.inf, device=self._device)
        try:
            largest = largest_of_all(form, largest)
        except ValueError as error:
            raise problem or ValueError(f"path: {name!r} {error}") from error
        put(layer, form, *form.pack(weight, largest))
