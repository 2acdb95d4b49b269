"""The parameters of a model as a handle knows them, which it keeps while the model goes on."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class _Known(NamedTuple):
    name: str
    trained: bool
    dtype: torch.dtype


class KnownParameters:
    """The parameters of modules at one moment, by which a handle finds that the modules have others now.

    Args:
        handle: the function that made it, for the sentence.
        hooked: whether it has hooks on the parameters, as DDP: of one that was frozen it waits for the gradient, and
            a parametrization takes the hook away.
        sharded: whether FSDP2 has sharded the modules. It follows its own parameters, and knows no others.
    """

    def __init__(
        self, modules: Iterable[nn.Module], handle: str, *, hooked: bool = False, sharded: bool = False
    ) -> None:
        self._modules, self._handle, self._hooked, self._sharded = list(modules), handle, hooked, sharded
        self._known = self._now()
        self._state = self._ids()

    def check(self) -> None:
        """Raises ValueError if a parameter was replaced, added, removed, unfrozen, or converted to another dtype, or
        with ``hooked`` frozen or parametrized. Communicates nothing."""
        if self._ids() == self._state:
            return
        # Rarely: what has changed is described only where an id, a type or a flag has
        now, known = self._now(), self._known
        gone = [known[param].name for param in known if param not in now]
        new = [now[param].name for param in now if param not in known]
        same = [(known[param], of_param) for param, of_param in now.items() if param in known]
        changes = {
            "replaced": [name for name in new if name in gone],
            "added": [name for name in new if name not in gone],
            "removed": [name for name in gone if name not in new],
            "unfrozen": [after.name for before, after in same if after.trained and not before.trained],
            "converted": [after.name for before, after in same if after.dtype != before.dtype],
            "frozen": [after.name for before, after in same if self._hooked and before.trained and not after.trained],
            "parametrized": [
                after.name
                for before, after in same
                if self._hooked and "parametrizations." in after.name and after.name != before.name
            ],
        }
        texts = [f"{', '.join(map(repr, names))} {what}" for what, names in changes.items() if names]
        if texts:
            raise ValueError(
                f"model: it must have the parameters of the call of {self._handle}, and since then were "
                f"{'; '.join(texts)}: call it anew"
            )
        self._state = self._ids()

    def is_current(self) -> bool:
        """Returns whether :meth:`check` raises nothing."""
        try:
            self.check()
        except ValueError:
            return False
        return True

    def was_trained(self, param: nn.Parameter) -> bool:
        """Returns whether a parameter that is known required a gradient."""
        return self._known[param].trained

    def _ids(self) -> list[tuple[str, int, bool, torch.dtype]]:
        # By id: the references of _known keep them apart
        return [(name, id(param), param.requires_grad, param.dtype) for name, param in self._named()]

    def _now(self) -> dict[nn.Parameter, _Known]:
        return {param: _Known(name, param.requires_grad, param.dtype) for name, param in self._named()}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for module in self._modules:
            for name, param in module.named_parameters():
                if not (self._sharded and isinstance(param, DTensor)):
                    yield name, param
