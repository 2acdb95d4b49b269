"""Packages of AOTInductor, as csrc/api/exported_package.cpp runs them."""

from typing import Protocol

import torch
from torch import Tensor


class ExportedPackage(Protocol):
    """A compiled graph of lists of tensors."""

    def weight_names(self) -> list[str]:
        """Returns the names of the weights that it needs."""

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Gives it all weights; it reads them where they are."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Returns the outputs."""


def exported_package(path: str) -> ExportedPackage:
    """Loads the package in a file."""
    package: ExportedPackage = torch.classes.tp_ext.ExportedPackage(path)
    return package
