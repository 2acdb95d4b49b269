"""Names of the weights of expert layers in published files, which have one entry for each expert."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _PublishedNames(NamedTuple):
    """The names of gate, up and down of an expert, and of the shared experts."""

    gate: str
    up: str
    down: str
    shared: str


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_FAMILIES = {
    "mixtral": _PublishedNames("w1", "w3", "w2", ""),
    "qwen3_moe": _PublishedNames(*_PROJECTIONS, ""),
    "deepseek_v3": _PublishedNames(*_PROJECTIONS, "shared_experts"),
}
_ROUTER = {"router.weight": "gate.weight", "router.e_score_correction_bias": "gate.e_score_correction_bias"}
_EXPERT = re.compile(r"((?:.*\.)?)experts\.(\d+)\.(\w+)\.weight")


class PublishedEntry(NamedTuple):
    """An entry of a published file as a part of an entry of ours.

    Attributes:
        name: its name in the file.
        expert: its index in the first dim of ours; None if ours has no dim of experts.
        part: 0: the gate, 1: the up projection, of rows gate | up; None: all rows.
    """

    name: str
    expert: int | None = None
    part: int | None = None

    def of(self, full: Tensor) -> Tensor:
        """Returns this part of our full tensor, a view."""
        value = full if self.expert is None else full[self.expert]
        return value if self.part is None else value.chunk(2)[self.part]

    def shape(self, full_shape: Sequence[int]) -> torch.Size:
        """Returns the shape of the entry, from that of our full tensor."""
        shape = list(full_shape if self.expert is None else full_shape[1:])
        shape[:1] = [size if self.part is None else size // 2 for size in shape[:1]]
        return torch.Size(shape)


def check_family(family: str | None, argument: str) -> None:
    """Raises ValueError unless it is None or the name of a family; ``argument`` is the name of the argument."""
    if family is not None and family not in _FAMILIES:
        raise ValueError(f"{argument}: {family!r} must be one of {tuple(_FAMILIES)}")


def published_entries(
    shapes: Mapping[str, Sequence[int]], family: str, argument: str
) -> dict[str, list[PublishedEntry]]:
    """Returns the published entries of each entry of expert layers; other entries are not in the result.

    Args:
        shapes: name -> shape of each full tensor of a state dict.

    Raises:
        ValueError: another family; an entry of an expert layer that the family has no name for.
    """
    check_family(family, argument)
    names, result = _FAMILIES[family], dict[str, list[PublishedEntry]]()
    layers = _prefixes(shapes, "experts.up_weight")
    if unnamed := [key for prefix in layers for key in _unnamed(shapes, prefix, names)]:
        raise ValueError(
            f"{argument}: {family!r} has no name for {min(unnamed)!r}; experts must be gated and without bias"
            f"{'' if names.shared else ', and none shared'}"
        )
    for key, shape in shapes.items():
        prefix, local = _split(key, layers)
        if local in _ROUTER:
            result[key] = [PublishedEntry(prefix + _ROUTER[local])]
        elif local == "experts.up_weight":
            result[key] = [
                PublishedEntry(f"{prefix}experts.{e}.{name}.weight", e, part)
                for e in range(shape[0])
                for part, name in enumerate((names.gate, names.up))
            ]
        elif local == "experts.down_weight":
            result[key] = [PublishedEntry(f"{prefix}experts.{e}.{names.down}.weight", e) for e in range(shape[0])]
        elif local == "shared.up.weight":
            rows = enumerate((names.gate, names.up))
            result[key] = [PublishedEntry(f"{prefix}{names.shared}.{name}.weight", None, part) for part, name in rows]
        elif local == "shared.down.weight":
            result[key] = [PublishedEntry(f"{prefix}{names.shared}.{names.down}.weight")]
    return result


def _unnamed(shapes: Mapping[str, Sequence[int]], prefix: str, names: _PublishedNames) -> list[str]:
    """Returns the entries of an expert layer that published files have no names for."""
    up, down = f"{prefix}experts.up_weight", shapes.get(f"{prefix}experts.down_weight")
    # Published files of these families have no biases
    lacking = [f"{prefix}experts.up_bias", f"{prefix}experts.down_bias"]
    if not names.shared:
        lacking.append(f"{prefix}shared.up.weight")
    # up has 2 ffn rows (gate | up) and down ffn columns, unless the experts are not gated
    return [key for key in lacking if key in shapes] + ([up] if down and shapes[up][1] != 2 * down[2] else [])


def to_published_experts(state: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Returns a full state dict in which expert layers have the names of published files.

    ``router.weight`` becomes ``gate.weight``; ``experts.up_weight`` ``[E, 2 ffn, hidden]`` and ``experts.down_weight``
    become ``experts.0.w1.weight``, .. for each expert; of deepseek_v3 ``shared.up.weight`` becomes
    ``shared_experts.gate_proj.weight`` and ``.up_proj.weight``. The prefix of these names stays, and so do all
    other entries. The tensors are views. :func:`tp_ext.save_safetensors` with ``expert_names=`` writes such names
    without a full state dict.

    Args:
        state: of :func:`tp_ext.full_state_dict`, of a layer or a model whose experts are swiglu without bias.
        family: ``"mixtral"``, ``"qwen3_moe"`` or ``"deepseek_v3"``.

    Communicates nothing.

    Raises:
        ValueError: another family; an entry of an expert layer that the family has no name for: biases, experts that
            are not gated, shared experts except those of deepseek_v3.
    """
    shapes = {key: value.shape for key, value in state.items() if isinstance(value, Tensor)}
    published = published_entries(shapes, family, "family")
    result = dict[str, Tensor]()
    for key, value in state.items():
        result |= {entry.name: entry.of(value) for entry in published.get(key, [PublishedEntry(key)])}
    return result


def from_published_experts(state: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Returns a full state dict for :func:`tp_ext.load_full_state_dict`, the inverse of :func:`to_published_experts`.
    :func:`tp_ext.load_safetensors` with ``expert_names=`` reads files without a full state dict.

    Communicates nothing. ValueError: another family. KeyError: an expert that lacks one of its weights.
    """
    check_family(family, "family")
    names, result = _FAMILIES[family], dict[str, Tensor]()
    ours = {published: local_name for local_name, published in _ROUTER.items()}
    if names.shared:
        ours |= {
            f"{names.shared}.{names.gate}.weight": "shared.up.weight",
            f"{names.shared}.{names.up}.weight": "",  # joined with the gate
            f"{names.shared}.{names.down}.weight": "shared.down.weight",
        }
    # Only names next to experts are renamed: other layers may have a gate.weight, too
    layers = {match.group(1) for key in state if (match := _EXPERT.fullmatch(key))}
    for key, value in state.items():
        if match := _EXPERT.fullmatch(key):
            prefix, expert, name = match.groups()
            # The first expert stands for all, whose entries _stacked finds
            if name == names.down and expert == "0":
                result[f"{prefix}experts.down_weight"] = _stacked(state, prefix, (names.down,))
            elif name == names.gate and expert == "0":
                result[f"{prefix}experts.up_weight"] = _stacked(state, prefix, (names.gate, names.up))
            continue
        prefix, tail = _split(key, layers, ours)
        if not tail or ours[tail]:
            joined = ours.get(tail) == "shared.up.weight"
            up = [state[f"{prefix}{names.shared}.{names.up}.weight"]] if joined else []
            result[prefix + ours.get(tail, "")] = torch.cat([value, *up]) if joined else value
    return result


def _stacked(state: Mapping[str, Tensor], prefix: str, names: tuple[str, ...]) -> Tensor:
    """Returns ``[E, rows, ..]``: for each expert the weights of these names, one below the other."""
    pattern = re.compile(rf"{re.escape(prefix)}experts\.\d+\.{names[0]}\.weight")
    # Counted, so that a gap in the numbers is a KeyError and no smaller layer
    number = sum(pattern.fullmatch(key) is not None for key in state)
    return torch.stack(
        [torch.cat([state[f"{prefix}experts.{e}.{name}.weight"] for name in names]) for e in range(number)]
    )


def _prefixes(keys: Iterable[str], tail: str) -> set[str]:
    """Returns the prefixes of the names that end in this name of a weight."""
    return {key.removesuffix(tail) for key in keys if key == tail or key.endswith("." + tail)}


def _split(key: str, layers: set[str], tails: Iterable[str] = ()) -> tuple[str, str]:
    """Returns the prefix of an expert layer's name and the name of a weight in it; the name and "" if it is in none."""
    layer_tails = ("experts.up_weight", "experts.down_weight", "shared.up.weight", "shared.down.weight")
    for tail in tails or (*_ROUTER, *layer_tails):
        prefix = key.removesuffix(tail)
        if prefix != key and prefix in layers:
            return prefix, tail
    return key, ""
