"""Refuses tensors of files whose numbers differ from the model's: codes of quantised weights, whose scales are in
other tensors."""

import re
from collections.abc import Collection, Iterable

import torch

_ADVICE = "dequantise the weights by the program that quantised them, and save them in bf16 or fp32"
# Of compressed-tensors, block FP8, ModelOpt, AWQ, GPTQ, bitsandbytes: names that no plain module has
_ALWAYS = re.compile(
    r"(.*\.)?(weight_scale(_inv|_2)?|weight_packed|weight_zero_point|input_scale|qweight|qzeros|g_idx|SCB"
    r"|(nested_)?(absmax|quant_map)|quant_state\..*)"
)
# Such a name belongs to a weight: layer.experts.up_scale_inv, gate_up_proj_blocks and gate_up_proj_scales of MXFP4
_OF_A_WEIGHT = re.compile(r"(.+?)(\.|_)(scale_inv|scales|scale|zero_point|packed|blocks)")


def is_plain_float(dtype: torch.dtype) -> bool:
    """Returns whether a dtype is of floats whose values need no scale."""
    return dtype.is_floating_point and dtype.itemsize > 1


def check_saved_dtype(name: str, saved: torch.dtype, dtype: torch.dtype, where: str) -> None:
    """Raises ValueError if a cast of a saved tensor to the model's dtype would change what its numbers mean: floats of
    8 bits are codes without their scale, and so are integers in place of floats."""
    kinds = [(one.is_floating_point, one.is_complex) for one in (saved, dtype)]
    narrow = kinds[0][0] and not (is_plain_float(saved) and is_plain_float(dtype))
    if kinds[0] != kinds[1] or (narrow and saved != dtype):
        raise ValueError(f"{where}: {name!r} has dtype {saved} and must be of the kind of {dtype}; {_ADVICE}")


def refuse_quantised(saved: Iterable[str], model: Collection[str], where: str) -> None:
    """Raises ValueError if a file has tensors of quantised weights that the model does not have.

    Args:
        saved: names of the tensors of the file. model: those of the model.
    """
    saved, lasts = set(saved), {name.rpartition(".")[2] for name in model}
    known = saved.union(model)
    for name in sorted(saved - set(model)):
        # A module that has such a tensor itself, under another prefix
        if name.rpartition(".")[2] in lasts:
            continue
        match = _OF_A_WEIGHT.fullmatch(name)
        bases = (match[1], f"{match[1]}_blocks", f"{match[1]}_packed") if match else ()
        if _ALWAYS.fullmatch(name) or any(base in known and base != name for base in bases):
            raise ValueError(f"{where}: {name!r} is a part of a quantised weight, which would be dropped; {_ADVICE}")
