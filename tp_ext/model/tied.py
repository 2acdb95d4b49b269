"""Weights tied over the stages of a pipeline: a parameter of a stage that is a copy of another stage's."""

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import nn


# [Note: the copy of a tied weight says of what it is a copy]
def declare_tied(stage: nn.Module, copies: Mapping[str, str]) -> None:
    """Declares that parameters of a stage are copies of parameters of another stage, kept equal by the training: those
    of an LM head on the last stage, ``{"head.weight": "embedding.weight"}``, whose embedding is on the first.

    The model is then the one in which both are one parameter. Norms count it once. Full states have one tensor under
    both names, an export one entry, a checkpoint both names; all of them load where the two are one parameter, and the
    other way. The state of the optimizer is under the name of the original. The two have the same gradient, summed over
    both stages, and the same options of the optimizer; then they stay equal, which ``tp_ext.debug.check(mesh=mesh)``
    compares.

    Args:
        stage: the stage that holds the copies, before any wrapper renames its parameters.
        copies: the name of a parameter of the stage -> the name in the whole model of that which it is a copy of. Both
            may be the same, for a copy that has no name of its own in the whole model. A parameter that is the
            original itself, as in a stage that holds both ends and ties them, is no copy.

    Communicates nothing.

    Raises:
        ValueError: the stage has no such parameter. TypeError: the original is not given by its name.
    """
    for name, original in copies.items():
        if not isinstance(original, str):
            raise TypeError(f"copies: {name!r} is {type(original).__name__} and must be the name of a parameter")
        path, _, local = name.rpartition(".")
        owner: Any = None
        with contextlib.suppress(AttributeError):  # by its name: a walk over modules shares what is tied again
            owner = stage.get_submodule(path)
        if owner is None or owner._parameters.get(local) is None:
            known = [parameter for parameter, _ in stage.named_parameters()]
            raise ValueError(f"copies: {name!r} must be a parameter of the stage, one of {known}")
        owner.tp_copies = {**owner.__dict__.get("tp_copies", {}), local: original}
