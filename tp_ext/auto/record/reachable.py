"""The places outside of modules in which the code of a model can keep tensors: globals, class attributes, closures,
defaults, and caches of functions.

It is read from the code: the functions of the modules' classes, the names that these refer to, and so on from function
to function. Code of torch, of Python and of this package is left out."""

from __future__ import annotations

import collections
import functools
import gc
import operator
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from tp_ext.auto.record.kept import while_used

CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, list, set, collections.deque)
FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "tp_ext"}
MAX_VISITED = 20_000  # a library of any size may be reachable: what comes later is not looked at
NAMING = {"getattr", "__dict__", "vars", "attrgetter", "__getattribute__"}  # by these code reads any attribute
LOADED = (types.ModuleType, types.FunctionType, type)
_ABSENT = object()


class CodePlaces:
    """Places in which code can keep things.

    Attributes:
        containers: dicts, lists and the like, and the attributes of plain objects, by id. caches: those of
            ``functools.lru_cache``, by id. names: namespace and name of each global and class attribute.
            cells: variables of closures, by id. classes: those to which code may add attributes, by id.
    """

    def __init__(self) -> None:
        self.containers: dict[int, Any] = {}
        self.caches: dict[int, Any] = {}
        self.names: dict[tuple[int, str], tuple[Any, str]] = {}
        self.cells: dict[int, types.CellType] = {}
        self.classes: dict[int, type] = {}


class Reachable(CodePlaces):
    """The places that functions and the forwards of classes can reach."""

    def __init__(self, roots: Iterable[Any]) -> None:
        super().__init__()
        self._seen: set[int] = set()
        self._members: dict[str, list[type]] = {}  # name -> the classes that have it, not yet visited
        self._mentioned = {"forward", "__call__"}  # by the code
        self._next: list[Any] = list(roots)
        while self._next and len(self._seen) < MAX_VISITED:
            self._visit(self._next.pop())

    @property
    def attributes(self) -> Collection[str] | None:
        """The names of attributes that the code can read; None: of any."""
        is_whole = len(self._seen) < MAX_VISITED and not self._mentioned & NAMING
        return self._mentioned if is_whole else None

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, str | bytes | int | float | complex | Tensor | None):
            return
        self._seen.add(id(value))
        if isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.caches[id(value)] = value
            self._next.append(value.__wrapped__)
        elif isinstance(value, CONTAINERS):
            if type(value) in CONTAINERS:
                self.containers[id(value)] = value
        elif isinstance(value, functools.partial):
            self._next += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, staticmethod | classmethod | types.MethodType):
            self._next.append(value.__func__)
        elif isinstance(value, property):
            self._next += [value.fget, value.fset]
        elif isinstance(value, functools.cached_property):
            self._next.append(value.func)
        elif not isinstance(value, types.ModuleType) and not _is_foreign(type(value)):
            # An object that keeps things, such as a cache of the model's own class
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict:
                self.containers[id(attributes)] = attributes
                self._next += [type(value), *attributes.values()]

    def _visit_class(self, cls: type) -> None:
        """Visits the members that code mentions; of classes that are no modules, whose objects it makes, special
        methods, too."""
        for base in cls.__mro__:
            if _is_foreign(base) or (id(base) in self._seen and base is not cls):
                continue
            self._seen.add(id(base))
            self.classes[id(base)] = base
            special = not issubclass(base, nn.Module)
            for name, value in list(vars(base).items()):
                is_special = special and name.startswith("__") and isinstance(value, types.FunctionType)
                if name in self._mentioned or is_special:
                    self._visit_member(base, name)
                else:
                    self._members.setdefault(name, []).append(base)

    def _visit_member(self, cls: type, name: str) -> None:
        self._add_name(cls, name)
        self._next.append(vars(cls).get(name))

    def _visit_function(self, function: types.FunctionType) -> None:
        if _is_foreign(function):
            return
        self.containers[id(vars(function))] = vars(function)
        self._next += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._next += vars(function).values()
        for cell in function.__closure__ or ():
            self.cells[id(cell)] = cell
            self._next.append(_content(cell))
        names = set(names_in(function.__code__))
        for name in names - self._mentioned:
            for cls in self._members.pop(name, ()):
                self._visit_member(cls, name)
        self._mentioned |= names
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            self._add_name(function.__globals__, name)
            self._next.append(value)
            # `tables.rotary(n)`: the name of a module, and some other name of the same code in it
            if isinstance(value, types.ModuleType) and not _is_foreign_name(value.__name__):
                for inner in names & vars(value).keys():
                    self._add_name(vars(value), inner)
                    self._next.append(vars(value)[inner])
        # A name that a function will make global
        for name in names - function.__globals__.keys():
            self._add_name(function.__globals__, name)

    def _add_name(self, namespace: Any, name: str) -> None:
        if not name.startswith("__"):
            self.names[id(namespace), name] = namespace, name


@while_used
def of_classes(classes: frozenset[type]) -> Reachable:
    """Returns what the code of classes can reach, which a plan asks for in each of its runs."""
    return Reachable(classes)


def keeps_data(cache: Any) -> bool:
    """Returns whether a cache of a function holds anything but truth values, text, functions and classes: clearing that
    of a library, such as which packages are installed, costs its next call more than a run on fakes."""
    inside = [x for x in gc.get_referents(cache) if type(x) not in (object, type(cache)) and x is not vars(cache)]
    return any(_is_data(x) for x in inside)


def _is_data(value: Any) -> bool:
    if isinstance(value, bool | str | None | type | types.FunctionType | types.ModuleType):
        return False
    if isinstance(value, dict | list | tuple):
        return any(_is_data(x) for x in (value.values() if isinstance(value, dict) else value))
    return type(value).__name__ != "_lru_list_elem" and not callable(value)


def reads_by_name(cls: type) -> bool:
    """True if no code of torch, and none that makes names of attributes, reads attributes of this class of modules."""
    bases = [base for base in cls.__mro__ if base not in (nn.Module, object)]
    return not any(_is_foreign(base) or {"__getattr__", "__getattribute__"} & {*vars(base)} for base in bases)


def _is_foreign(value: Any) -> bool:
    return _is_foreign_name(getattr(value, "__module__", None) or "builtins")


def _is_foreign_name(module: str) -> bool:
    return module.partition(".")[0] in FOREIGN


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in code and in functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


class Notes:
    """What places hold, as it is now."""

    def __init__(self, places: CodePlaces) -> None:
        self.places = places
        self._contents = [(container, container.copy()) for container in places.containers.values()]
        self._values = [(space, name, _value_of(space, name)) for space, name in places.names.values()]
        self._cells = [(cell, _content(cell)) for cell in places.cells.values()]
        self._members = [(cls, {*vars(cls)}) for cls in places.classes.values()]

    def put_back(self) -> None:
        """Puts data back, and empties caches that hold any; containers keep their identity. Modules, classes and
        functions that a library has loaded meanwhile stay."""
        for container, contents in self._contents:
            if not _same(container, contents):
                container.clear()
                container.extend(contents) if hasattr(container, "extend") else container.update(contents)
        for space, name, value in self._values:
            if _is_other(_value_of(space, name), value):
                _bind(space, name, value)
        for cls, names in self._members:
            for name in vars(cls).keys() - names:
                if not isinstance(vars(cls)[name], LOADED):
                    delattr(cls, name)
        for cell, value in self._cells:
            if _is_other(_content(cell), value):
                if value is _ABSENT:
                    del cell.cell_contents
                else:
                    cell.cell_contents = value
        self.empty_caches()

    def empty_caches(self) -> None:
        """Empties the caches of functions that hold data."""
        for cache in self.places.caches.values():
            if cache.cache_info().currsize and keeps_data(cache):
                cache.cache_clear()

    def changed(self) -> CodePlaces | None:
        """Returns the places that hold other things by now; None: there is none."""
        other = CodePlaces()
        other.containers = {id(holder): holder for holder, contents in self._contents if not _same(holder, contents)}
        other.names = {
            (id(space), name): (space, name)
            for space, name, value in self._values
            if _is_other(_value_of(space, name), value)
        }
        other.cells = {id(cell): cell for cell, value in self._cells if _is_other(_content(cell), value)}
        other.classes = {id(cls): cls for cls, names in self._members if {*vars(cls)} != names}
        other.caches = {i: c for i, c in self.places.caches.items() if c.cache_info().currsize and keeps_data(c)}
        return other if any(vars(other).values()) else None


def _is_other(now: Any, before: Any) -> bool:
    return now is not before and not isinstance(now, LOADED)


def _same(holder: Any, contents: Any) -> bool:
    if len(holder) != len(contents):
        return False
    # By identity: tensors have no truth value of ==, and a fake that equals the tensor must go, too
    same = all(map(operator.is_, holder, contents))
    return same and (not isinstance(holder, dict) or all(map(operator.is_, holder.values(), contents.values())))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value yet
        return _ABSENT


def _value_of(space: Any, name: str) -> Any:
    return (space if isinstance(space, dict) else vars(space)).get(name, _ABSENT)


def _bind(space: Any, name: str, value: Any) -> None:
    if isinstance(space, dict):
        if value is _ABSENT:
            del space[name]
        else:
            space[name] = value
    elif value is _ABSENT:
        delattr(space, name)
    else:
        setattr(space, name, value)
