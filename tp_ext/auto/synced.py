"""The unsharded structure of a model with the changes that the sharded model has had since its plan was applied."""

from __future__ import annotations

import ast
import collections
from typing import Any

from torch import Tensor, nn

from tp_ext.auto.module_state import HOOKS, Baseline, Path, StateWatch, hook_text, unwrapped
from tp_ext.auto.proof.copies import copied_value

GONE = object()


class Synced:
    """The unsharded structure with the changes that the sharded model has had since the plan was applied."""

    def __init__(self, structure: nn.Module, watch: StateWatch, changes: dict[Path, str], base: Baseline) -> None:
        self.structure, self.watch, self.changes, self.base = structure, watch, changes, base
        self.kept: list[tuple[Any, Any, Any]] = []
        self.memo: dict[int, Any] = {}
        self.targets = dict(structure.named_modules(remove_duplicate=False))

    def __enter__(self) -> None:
        for name, mode in self.watch.modes.items():
            if name in self.targets:
                self.put(vars(self.targets[name]), "training", mode)
        # Also where a new module has them inside of it
        for name, module in self.watch.modules.items():
            if name in self.targets:
                self.memo[id(module)] = self.targets[name]
                # Forwards of ours, which code of the user may have wrapped
                if "forward" in vars(module) and (name, "forward") not in self.changes:
                    self.memo[id(vars(module)["forward"])] = self.targets[name].forward
        for path, text in self.changes.items():
            if path[0] in self.targets and path[1] != "_modules" and path[-1] != "training":
                self.change(path, text)
        for name in {path[0] for path in self.changes if path[1] == "_modules" and path[0] in self.targets}:
            self.put(vars(self.targets[name]), "_modules", self.children(name))

    def children(self, name: str) -> dict[str, nn.Module | None]:
        """The modules inside of one, in their order: those that were there, moved, and copies of new ones."""
        before, children = self.targets[name]._modules, dict[str, nn.Module | None]()
        for child, module in self.watch.modules[name]._modules.items():
            if (name, "_modules", child) not in self.changes:
                children[child] = before.get(child)
            elif module is not None:
                children[child] = copied_value(unwrapped(module), self.memo)
        return children

    def __exit__(self, *_: object) -> None:
        for holder, key, value in reversed(self.kept):
            if key == "requires_grad":
                holder.requires_grad_(value)
            elif value is GONE:
                holder.pop(key, None)
            else:
                holder[key] = value
        self.kept.clear()

    def put(self, holder: Any, key: Any, value: Any) -> None:
        self.kept.append((holder, key, holder.get(key, GONE)))
        if value is GONE:
            holder.pop(key, None)
        else:
            holder[key] = value

    def change(self, path: Path, text: str) -> None:
        target = self.targets[path[0]]
        if path[-1] == "requires_grad":
            parameter = target._parameters[path[1]]
            assert parameter is not None
            self.kept.append((parameter, "requires_grad", parameter.requires_grad))
            parameter.requires_grad_()
            return
        place = self.watch.places.get(path)
        if path[1] in HOOKS:
            self.put(vars(target), path[1], self.hooks(path, target))
            return
        holder: Any = vars(target)
        for step in path[1:-1]:
            holder = next(value for key, value in holder.items() if str(key) == step)
            holder = holder if isinstance(holder, dict) else vars(holder)
        key = place.key if place is not None else next(k for k in holder if str(k) == path[-1])
        value = GONE if place is None else copied_value(place.holder[key], self.memo)
        self.put(holder, key, value.to("meta") if isinstance(value, Tensor) else value)

    def hooks(self, path: Path, target: nn.Module) -> collections.OrderedDict[Any, Any]:
        """The hooks of a module of the structure: without those that are gone, with the new ones."""
        module = self.watch.modules[path[0]]
        old = collections.Counter(ast.literal_eval(self.base.texts.get(path, "[]")))
        gone = old - collections.Counter(map(hook_text, vars(module)[path[1]].values()))
        hooks: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        for number, hook in vars(target)[path[1]].items():
            if gone[hook_text(hook)] > 0:
                gone[hook_text(hook)] -= 1
            else:
                hooks[number] = hook
        for number, hook in vars(module)[path[1]].items():
            text = hook_text(hook)
            old[text] -= 1
            if not text or old[text] >= 0:
                continue
            hooks[f"new {number}"] = copied_value(hook, self.memo)
            flags = f"{path[1]}_with_kwargs"
            if number in vars(module).get(flags, ()):
                self.put(vars(target)[flags], f"new {number}", True)
        return hooks
