"""What torch says of its operators by tags."""

import functools

import torch


@functools.cache
def has_tag(name: str, tag: torch.Tag) -> bool:
    """Returns whether an overload of torch's operator of this name has the tag."""
    operator = None if name.startswith("__") or not name.isidentifier() else getattr(torch.ops.aten, name, None)
    overloads = operator.overloads() if operator is not None else ()
    return any(tag in getattr(operator, form).tags for form in overloads)


@torch.compiler.assume_constant_result  # torch.compile follows no tags
def finds_lengths_from_values(name: str) -> bool:
    """Returns whether an operator of torch of this name has results whose lengths depend on values. Operators of
    Python, as __and__, have none."""
    return has_tag(name, torch.Tag.dynamic_output_shape)
