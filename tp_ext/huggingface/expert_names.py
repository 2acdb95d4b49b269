"""Names of the weights of expert layers in published files, which have one entry for each expert."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class _Names(NamedTuple):
    """The names of gate, up and down of an expert, and of the shared experts."""

    gate: str
    up: str
    down: str
    shared: str


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_FAMILIES = {
    "mixtral": _Names("w1", "w3", "w2", ""),
    "qwen3_moe": _Names(*_PROJECTIONS, ""),
    "deepseek_v3": _Names(*_PROJECTIONS, "shared_experts"),
}
_ROUTER = {"router.weight": "gate.weight", "router.e_score_correction_bias": "gate.e_score_correction_bias"}


def to_published_experts(state: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Returns a full state dict in which expert layers have the names of published files.

    ``router.weight`` becomes ``gate.weight``; ``experts.up_weight`` ``[E, 2 ffn, hidden]`` and ``experts.down_weight``
    become ``experts.0.w1.weight``, .. for each expert; of deepseek_v3 ``shared.up.weight`` becomes
    ``shared_experts.gate_proj.weight`` and ``.up_proj.weight``. What stands before these names stays, and so do all
    other entries. The tensors are views.

    Args:
        state: of :func:`tp_ext.full_state_dict`, of a layer or a model whose experts are swiglu without bias.
        family: ``"mixtral"``, ``"qwen3_moe"`` or ``"deepseek_v3"``.

    Communicates nothing. ValueError: another family.
    """
    names, result = _names_of(family), dict[str, Tensor]()
    for key, value in state.items():
        prefix, local = _split(key)
        if local in _ROUTER:
            result[prefix + _ROUTER[local]] = value
        elif local == "experts.up_weight":
            for e, (gate, up) in enumerate(one.chunk(2) for one in value):
                result[f"{prefix}experts.{e}.{names.gate}.weight"] = gate
                result[f"{prefix}experts.{e}.{names.up}.weight"] = up
        elif local == "experts.down_weight":
            result |= {f"{prefix}experts.{e}.{names.down}.weight": one for e, one in enumerate(value)}
        elif local == "shared.up.weight" and names.shared:
            gate, up = value.chunk(2)
            result |= {
                f"{prefix}{names.shared}.{names.gate}.weight": gate,
                f"{prefix}{names.shared}.{names.up}.weight": up,
            }
        elif local == "shared.down.weight" and names.shared:
            result[f"{prefix}{names.shared}.{names.down}.weight"] = value
        else:
            result[key] = value
    return result


def from_published_experts(state: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Returns a full state dict for :func:`tp_ext.load_full_state_dict`, the inverse of :func:`to_published_experts`.

    Communicates nothing. ValueError: another family. KeyError: an expert that lacks one of its weights.
    """
    names, result = _names_of(family), dict[str, Tensor]()
    ours = {published: own for own, published in _ROUTER.items()}
    shared = f"{names.shared}." if names.shared else "shared_experts_of_no_name."
    for key, value in state.items():
        if found := re.fullmatch(r"(.*?)experts\.(\d+)\.(\w+)\.weight", key):
            prefix, expert, name = found.groups()
            if name == names.down and expert == "0":
                result[f"{prefix}experts.down_weight"] = _stacked(state, prefix, (names.down,))
            elif name == names.gate and expert == "0":
                result[f"{prefix}experts.up_weight"] = _stacked(state, prefix, (names.gate, names.up))
        elif found := re.fullmatch(rf"(.*?){re.escape(shared)}(\w+)\.weight", key):
            prefix, name = found.groups()
            if name == names.down:
                result[f"{prefix}shared.down.weight"] = value
            elif name == names.gate:
                result[f"{prefix}shared.up.weight"] = torch.cat([value, state[f"{prefix}{shared}{names.up}.weight"]])
        else:
            tail = next((one for one in ours if key == one or key.endswith("." + one)), "")
            result[key.removesuffix(tail) + ours.get(tail, "")] = value
    return result


def _stacked(state: Mapping[str, Tensor], prefix: str, names: tuple[str, ...]) -> Tensor:
    """Returns ``[E, rows, ..]``: for each expert the weights of these names, one below the other."""
    number = sum(
        re.fullmatch(rf"{re.escape(prefix)}experts\.\d+\.{names[0]}\.weight", key) is not None for key in state
    )
    return torch.stack(
        [torch.cat([state[f"{prefix}experts.{e}.{name}.weight"] for name in names]) for e in range(number)]
    )


def _names_of(family: str) -> _Names:
    if family not in _FAMILIES:
        raise ValueError(f"family: {family!r} must be one of {tuple(_FAMILIES)}")
    return _FAMILIES[family]


def _split(key: str) -> tuple[str, str]:
    """Returns what stands before the name of a weight in its expert layer, and that name."""
    known = [*_ROUTER, "experts.up_weight", "experts.down_weight", "shared.up.weight", "shared.down.weight"]
    tail = next((one for one in known if key == one or key.endswith("." + one)), "")
    return (key.removesuffix(tail), tail) if tail else (key, "")
