"""Simpler configurations that still fail: options left out one by one, lists shortened, numbers made smaller."""

import copy

from tests.fuzz.config import valid
from tests.helpers import registry

# The value that leaves an option out; numbers that are not here shrink
OFF = registry.OFF | {
    "sp": False, "tell": False, "embedding": None, "input_grad": False, "strided": False, "loops": 1, "norm": None,
    "head": None, "loss": None, "frozen": 0, "checkpointing": None, "micro": 1, "backwards": 1, "clip": None,
    "optimizer": {"kind": "SGD", "how": None, "momentum": False}, "residual": False, "tensor": False, "foreach": None,
    "type": 2.0, "bare": False, "made": None, "reload": False, "full_states": False, "main_grad": False,
    "coalesce": None,
}  # fmt: skip
FIXED = ("seed", "plain", "eps", "base", "interleaved", "max", "how", "kind", "momentum")
FIXED += ("rope_type", "original_max_position_embeddings")


def simpler(config):
    """Configurations one step simpler, the largest steps first; valid ones only."""
    steps = [copy.deepcopy(config) for _ in range(2)]
    if config["head"]:
        steps[0] |= {"head": None, "loss": None}
        steps[1]["loss"] = {name: OFF[name] for name in config["loss"]}
    for path, value in _walk(config):
        for new in _simpler_values(path[-1], value):
            changed = copy.deepcopy(config)
            at = changed
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = new
            if "parts" in path or path[-1] == "parts":
                block = changed["blocks"][path[1]]
                block["inner"] = sum(part["size"] for part in block["parts"]) if block["parts"] else block["inner"]
                block["row_parts"] = None if "row_parts" in block else ()
                if block["row_parts"] == ():
                    del block["row_parts"]
            steps.append(changed)
    return [step for step in steps if step != config and valid(step)]


def _walk(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key), inner
        yield from _walk(inner, (*path, key))


def _simpler_values(name, value):
    if isinstance(value, list):
        yield from ([*value[:i], *value[i + 1 :]] for i in range(len(value)))
    if name in OFF:
        if value != OFF[name]:
            yield OFF[name]
    elif name not in FIXED and type(value) is int:
        yield from sorted({n for n in (1, 2, value // 2, value - 1) if 0 < n < value})
