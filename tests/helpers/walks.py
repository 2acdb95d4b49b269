"""Lengths of the walks of a reader who follows an argument of a public call through the package.

``python -m tests.helpers.walks [root of a source tree]`` prints them. It parses the sources, and neither imports nor
runs them.

The reader has one argument of the call in mind and reads the body of the function in the order of evaluation. Where it
calls another function of the package by its name, and hands it the argument or a value computed from it, the reader
enters that function and reads it before the rest of the caller. All branches are read, each body once: a later call of
the same function enters its file again, and reads nothing. Constructors are functions, and so are methods that an
object calls of itself. Methods and properties of other values are not entered, since their docstring says what they
return; neither are operators (``tp_ext._ops``).

A *stay* is a sequence of entered functions of one file, a *room* a file, a *return* a stay in a room that was left
before, a *name* a function. By hand, the stays, rooms, returns and names at commit da43580 were 19, 11, 8, 38 for
``save_checkpoint`` and 46, 19, 27, 43 for ``parallelize``; by this rule they are 21, 12, 9, 42 and 48, 18, 30, 71.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.helpers.paths import ROOT

WALKS = {  # module of the package, function or method, argument
    "ColumnParallelLinear.forward": ("nn.linear", "x"),
    "vocab_parallel_cross_entropy": ("nn.loss", "logits_local"),
    "save_checkpoint": ("checkpoint.directory", "module"),
    "ParallelMoE.forward": ("nn.moe.moe", "x"),
    "plan": ("auto.planner", "model"),
    "_decided": ("auto.planner", "planner"),  # a plan that has been traced
    "apply": ("auto.apply_plan", "model"),
    "parallelize": ("parallel.run", "model"),
    "from_pretrained": ("huggingface.load", "path"),
    "spmd": ("mesh_program.spmd", "mesh"),
}


class Function(NamedTuple):
    """A function, or a method of the class ``owner``."""

    module: str
    owner: str
    name: str


class Walk(NamedTuple):
    """The functions that are entered, in order."""

    entered: list[Function]

    @property
    def stays(self) -> list[str]:
        modules = [function.module for function in self.entered]
        return [module for i, module in enumerate(modules) if i == 0 or modules[i - 1] != module]

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        """The numbers of stays, rooms, returns and names."""
        stays, rooms = len(self.stays), len(set(self.stays))
        return stays, rooms, stays - rooms, len(set(self.entered))


class Package:
    """The functions of the package in a source tree."""

    def __init__(self, root: Path) -> None:
        self._functions: dict[Function, ast.FunctionDef] = {}
        self._classes: set[tuple[str, str]] = set()
        self._imports: dict[tuple[str, str], tuple[str, str]] = {}
        for file in sorted((root / "tp_ext").rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if not module.startswith("tp_ext._ops"):
                self._read(module, ast.parse(file.read_text()))

    def _read(self, module: str, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in node.names:
                    self._imports[module, name.asname or name.name] = node.module, name.name
            elif isinstance(node, ast.FunctionDef):
                self._functions[Function(module, "", node.name)] = node
            elif isinstance(node, ast.ClassDef):
                self._classes.add((module, node.name))
                methods = (part for part in node.body if isinstance(part, ast.FunctionDef))
                self._functions |= {Function(module, node.name, method.name): method for method in methods}

    def walk(self, function: Function, argument: str) -> Walk:
        """Returns the walk that begins at a function with one of its arguments."""
        walk = Walk([])
        self._enter(function, {argument}, walk)
        return walk

    def _enter(self, function: Function, followed: set[str], walk: Walk) -> None:
        read_before = function in walk.entered
        walk.entered.append(function)
        if read_before:
            return
        node = self._functions[function]
        names = _computed_from(node, followed)
        for call in _calls(node):
            callee = self._callee(function, call)
            if callee is None:
                continue
            parameters = [parameter.arg for parameter in self._functions[callee].args.args]
            if handed := _handed(call, parameters[1:] if callee.owner else parameters, names):
                self._enter(callee, handed, walk)

    def _callee(self, caller: Function, call: ast.Call) -> Function | None:
        """Returns the function of the package that is called, if the text names it."""
        called = call.func
        if isinstance(called, ast.Attribute):
            of_self = isinstance(called.value, ast.Name) and called.value.id == "self"
            function = Function(caller.module, caller.owner, called.attr) if of_self and caller.owner else None
        elif isinstance(called, ast.Name):
            module, name = self._origin(caller.module, called.id)
            constructs = (module, name) in self._classes
            function = Function(module, name, "__init__") if constructs else Function(module, "", name)
        else:
            return None
        return function if function in self._functions else None

    def _origin(self, module: str, name: str) -> tuple[str, str]:
        """Returns the module that defines what another module imports under a name."""
        while (module, name) in self._imports:
            module, name = self._imports[module, name]
        return module, name


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yields the calls in the order of evaluation: an argument before the call."""
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)
    if isinstance(node, ast.Call):
        yield node


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _computed_from(function: ast.FunctionDef, arguments: set[str]) -> set[str]:
    """Returns the local names that hold one of the arguments, or a value computed from it."""
    names = set(arguments)
    bindings = [pair for node in ast.walk(function) for pair in _bindings(node)]
    while True:  # a value may be computed from a name that is bound further below, in a loop
        computed = [target for target, value in bindings if _names(value) & names]
        more = {name for target in computed for name in _names(target)} - names - {"self"}
        if not more:
            return names
        names |= more


def _bindings(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yields the targets and values of an assignment or a loop."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.target, node.iter


def _handed(call: ast.Call, parameters: list[str], names: set[str]) -> set[str]:
    """Returns those of the parameters, and of the keywords, that get a value with one of the names."""
    handed = {keyword.arg for keyword in call.keywords if keyword.arg and _names(keyword.value) & names}
    for i, argument in enumerate(call.args):
        if _names(argument) & names:
            handed |= set(parameters if isinstance(argument, ast.Starred) else parameters[i : i + 1])
    return handed


def walk_of(call: str, package: Package) -> Walk:
    """Returns one of :data:`WALKS`."""
    module, argument = WALKS[call]
    owner, _, name = call.rpartition(".")
    return package.walk(Function(f"tp_ext.{module}", owner, name), argument)


def main(root: Path = ROOT) -> None:
    package = Package(root)
    for call in WALKS:
        print("{}: {} stays, {} rooms, {} returns, {} names".format(call, *walk_of(call, package).lengths))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
