"""Mapping of the tensors of files to those of a model: the conversions that transformers knows for its class.

Most are one tensor under one name, or under another. Others join or split tensors, such as the experts of Mixtral:
transformers converts those, all of a group at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import core_model_loading as core
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import remove_tied_weights_from_state_dict


@dataclass
class TensorGroup:
    """Tensors on one side and what they become on the other.

    Attributes:
        sources: names of the tensors that are converted, in order.
        targets: name -> shape of the tensors that they become, on meta.
        transform: how; None: one tensor under the same or another name.
    """

    sources: list[str]
    targets: dict[str, Tensor] = field(default_factory=dict)
    transform: Any = None
    _patterns: list[str] = field(default_factory=list)
    _first: str = ""
    _renamings: list[Any] = field(default_factory=list)

    def convert(self, model: transformers.PreTrainedModel, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Converts the tensors of ``sources``."""
        if self.transform is None:
            return dict(zip(self.targets or self.sources, tensors, strict=True))
        # It collects the tensors that it is given; a group is converted on meta first, then with data
        transform = copy.deepcopy(self.transform)
        for name, pattern, tensor in zip(self.sources, self._patterns, tensors, strict=True):
            transform.add_tensor(self._first, name, pattern, tensor)
        converted = transform.convert(self._first, model=model, config=model.config)
        return {
            core.apply_renamings(name, self._renamings): value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }


def groups_to_load(
    model: transformers.PreTrainedModel, files: Mapping[str, Tensor]
) -> tuple[list[TensorGroup], list[Any]]:
    """Groups the tensors of files by what they become in the model.

    Args:
        files: name -> shape of each tensor of the files, on meta.

    Returns:
        The groups, and the conversions that were used: transformers reverts them when it saves.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [transform for transform in mapping if isinstance(transform, core.WeightRenaming)]
    converters = [transform for transform in mapping if isinstance(transform, core.WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names = dict.fromkeys(model.state_dict())
    wanted = {name: torch.empty(0) for name in names}
    by_target: dict[str, TensorGroup] = {}
    # Numbers as numbers: expert 2 before expert 10, as they are stacked
    for name in sorted(files, key=core.dot_natural_key):
        target, pattern = core.rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        # A renaming for other classes: the model has the name of the file
        if target not in wanted and name in wanted:
            target, pattern = core.rename_source_key(name, [], [], model.base_model_prefix, wanted)
        if pattern is None:
            # With the name in the files, so that of two tensors with one target none is lost
            by_target.setdefault(f"{target}\0{name}", TensorGroup([name], {target: files[name]}))
            continue
        group = by_target.setdefault(target, TensorGroup([], transform=of_pattern[pattern], _first=target))
        group.sources.append(name)
        group._patterns.append(pattern)
    for group in by_target.values():
        if group.transform is not None:
            group.targets = group.convert(model, [files[name] for name in group.sources])
    return list(by_target.values()), [transform for transform in mapping if transform.was_used()]


class _TiedModel:
    """A model of which transformers asks for the tensors by name, to see which are one; other attributes are the
    model's."""

    def __init__(self, model: Any, tensors: Mapping[str, object]) -> None:
        self._model, self._tensors = model, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter_or_buffer(self, name: str) -> object:
        return self._tensors[name]


def groups_of_model(
    model: transformers.PreTrainedModel, full: Mapping[str, Tensor], tied: Mapping[str, object]
) -> list[TensorGroup]:
    """Groups the tensors of a model by what they become in files, tied ones once, under the name that transformers
    gives them.

    Args:
        full: name -> shape of each tensor of the model, on meta. Transformers decides by names, shapes and ties alone.
        tied: name -> an object that is the same for tensors that are one.
    """
    ignored = model._keys_to_ignore_on_save or ()
    kept: Any = {name: tensor for name, tensor in full.items() if name not in ignored}
    return groups_to_save(model, remove_tied_weights_from_state_dict(kept, cast(Any, _TiedModel(model, tied))))


def groups_to_save(model: transformers.PreTrainedModel, tensors: Mapping[str, Tensor]) -> list[TensorGroup]:
    """Groups the tensors of a model by what they become in files: those of ``PreTrainedModel.save_pretrained``.

    Args:
        tensors: name -> shape of each tensor to be saved, on meta.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # as transformers: of a model that no files made
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [transform for transform in mapping if not isinstance(transform, core.PrefixChange)] or None
    # What was done last is undone first, as transformers does: conversions of submodels are listed later
    reverse = [transform.reverse_transform() for transform in (conversions or [])[::-1]]
    renamings = [transform for transform in reverse if isinstance(transform, core.WeightRenaming)]
    converters = [transform for transform in reverse if isinstance(transform, core.WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    by_target: dict[str, TensorGroup] = {}
    # Without conversions transformers writes the tensors in the order of the model, else by numbers
    for name in tensors if conversions is None else sorted(tensors, key=core.dot_natural_key):
        # Results get their new names in convert(): renamings may act on the patterns by which a converter names them
        target, pattern = core.apply_converters(name, converters)
        if pattern is None:
            target = core.apply_renamings(name, renamings)
            by_target[f"{target}\0{name}"] = TensorGroup([name], {target: tensors[name]})
            continue
        group = by_target.setdefault(
            target, TensorGroup([], transform=of_pattern[pattern], _first=target, _renamings=renamings)
        )
        group.sources.append(name)
        group._patterns.append(pattern)
    for group in by_target.values():
        if group.transform is not None:
            group.targets = group.convert(model, [tensors[name] for name in group.sources])
    return list(by_target.values())
