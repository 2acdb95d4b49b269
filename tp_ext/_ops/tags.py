"""What torch says of its operators by tags."""

import torch

_known: dict[str, bool] = {}


@torch.compiler.assume_constant_result  # torch.compile follows no tags
def finds_lengths_from_values(name: str) -> bool:
    """Returns whether an operator of torch of this name has results whose lengths depend on values."""
    if name not in _known:
        # Operators of Python, as __and__, have no values in their lengths
        operator = None if name.startswith("__") or not name.isidentifier() else getattr(torch.ops.aten, name, None)
        overloads = operator.overloads() if operator is not None else ()
        _known[name] = any(torch.Tag.dynamic_output_shape in getattr(operator, form).tags for form in overloads)
    return _known[name]
