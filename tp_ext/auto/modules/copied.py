"""Copies of a sharded model: its edits are in them, or their first call is refused.

A module that says itself how it is copied or pickled, by ``__getstate__``, ``__reduce__``, ``__deepcopy__`` and the
like, keeps what its class knows, and drops hooks, classes and attributes that a plan has put on it. Its class gets a
subclass that copies it as its own class does, and then adds the edits."""

from __future__ import annotations

import collections
import copy
import copyreg
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from tp_ext.auto.modules.block_functions import BlockFunctions
from tp_ext.auto.modules.direct_calls import Conversions, DirectlyCalled, Outermost, with_direct_calls
from tp_ext.auto.modules.leaves import RowsOfTable, with_lookup
from tp_ext.auto.modules.random_draws import Masks
from tp_ext.auto.modules.token_lengths import TokenLengths
from tp_ext.auto.record.boundary import BeforeForward, EndOfForward
from tp_ext.auto.record.edits import NAME
from tp_ext.auto.record.forwards import EnteredForward, InstanceForward
from tp_ext.auto.record.kept import while_used
from tp_ext.auto.search.sizes import SizedForward

HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
         "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks")  # fmt: skip
PROTOCOL = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__deepcopy__", "__copy__", "__getnewargs__",
            "__getnewargs_ex__")  # fmt: skip
STATES = (Outermost, Conversions, Masks, BlockFunctions, TokenLengths, SizedForward)
"""Classes of the objects that hooks of several modules share, through which they know of each other's calls."""
Expected = tuple[dict[str, tuple[str, ...]], dict[str, int], list[list[str]]]
Before = dict[nn.Module, tuple[type[nn.Module], dict[str, Any]]]


def says_how_it_is_copied(cls: type) -> bool:
    """True if a class of a user has a method by which ``copy`` or ``pickle`` copies it."""
    if cls in copyreg.dispatch_table:
        return True
    owners = {next((c for c in cls.__mro__ if name in vars(c)), object) for name in PROTOCOL}
    return any(not owner.__module__.startswith(("torch.nn.", "tp_ext.", "builtins")) for owner in owners)


class CopiedWithEdits(nn.Module):
    """A module whose copies have its edits. It becomes a base of an existing module's class, before what that is."""

    tp_class: type[nn.Module]  # the class that the module had when it was sharded
    tp_edited: frozenset[str]  # names in __dict__ that the plan has set

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls, made = self.tp_class, type(self)
        reducer = copyreg.dispatch_table.get(cls)
        reduced = reducer(self) if reducer is not None else cls.__reduce_ex__(self, protocol)
        if isinstance(reduced, str) or len(reduced) > 5:
            raise RuntimeError(f"{cls.__name__}: is sharded by tp_ext.auto, and its __reduce__ cannot be followed")
        function, arguments, state, *items = (*reduced, None, None, None)[:5]
        # The class is made while the program runs: pickle would not find it by its name
        function, *arguments = (cls if value is made else value for value in (function, *arguments))
        recipe = function, tuple(arguments), cls, issubclass(made, RowsOfTable), issubclass(made, DirectlyCalled)
        return _anew, recipe, (state, self.tp_edits()), *items

    def __setstate__(self, state: Any) -> None:
        state_of_class, edits = state
        if state_of_class is not None:
            self.tp_class.__setstate__(self, state_of_class)
        self.tp_edit(*edits)

    def tp_edits(self) -> tuple[dict[str, Any], dict[str, dict[int, Any]]]:
        """The edited attributes, and the hooks in their order, with None for those of users."""
        values = {name: vars(self)[name] for name in (*sorted(self.tp_edited), "tp_edited") if name in vars(self)}
        tables = {table: getattr(self, table) for table in HOOKS}
        edits = {i for hooks in tables.values() for i, hook in hooks.items() if _is_edit(hook)}
        return values, {t: {i: h if i in edits else None for i, h in hooks.items()} for t, hooks in tables.items()}

    def tp_edit(self, values: dict[str, Any], tables: dict[str, dict[int, Any]]) -> None:
        """Puts what :meth:`tp_edits` of another module has returned into this one."""
        forward = values.get("forward")
        # By copy.copy, or where the arguments of __reduce__ lead to hooks that know the module. In a pickle of such a
        # module the forward may have no attributes yet, and will get the right one
        if isinstance(forward, InstanceForward) and getattr(forward, "module", self) is not self:
            clone = copy.copy(forward)
            clone.module = self
            values = {**values, "forward": clone}
            tables = {t: {i: _of_forward(h, forward, clone) for i, h in hooks.items()} for t, hooks in tables.items()}
        vars(self).update(values)
        for table, hooks in tables.items():
            kept = getattr(self, table)
            edited = {i: kept.get(i) if hook is None else hook for i, hook in hooks.items()}
            merged = {i: hook for i, hook in {**edited, **kept, **edited}.items() if hook is not None}
            vars(self)[table] = collections.OrderedDict(merged)


def _of_forward(hook: Any, forward: Any, clone: Any) -> Any:
    if not isinstance(hook, BeforeForward | EndOfForward):
        return hook
    # Of its own forward alone: an edit for that of a module around this one stays
    return type(hook)([EnteredForward(clone) if getattr(e, "forward", 0) is forward else e for e in hook.edits])


def _anew(make: Callable[..., Any], arguments: tuple[Any, ...], cls: Any, has_rows: bool, is_direct: bool) -> Any:
    """A module that is being copied, made as its class makes it, with the class that it has in a sharded model."""
    made: Any = with_lookup(cls) if has_rows else cls
    made = with_direct_calls(made) if is_direct else made
    module = make(*arguments)
    module.__class__ = _with_edits(cls, made)
    return module


@while_used
def _with_edits(own: type[Any], cls: type[Any]) -> type[nn.Module]:
    """The subclass of a module's class whose copies have the edits.

    Args:
        own: the class that the user gave it. cls: the class that a plan has made of that.
    """

    def deepcopied(self: Any, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = own.__deepcopy__(self, memo)
        return _edited(self, copied, lambda edits: copy.deepcopy(edits, memo))

    def copied(self: Any) -> Any:
        return _edited(self, own.__copy__(self), lambda edits: edits)

    names: dict[str, Any] = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "tp_class": own,
    }
    # Only where the user's class has them: without, copy.copy and copy.deepcopy go by __reduce_ex__
    methods = {"__deepcopy__": deepcopied, "__copy__": copied}
    names |= {name: method for name, method in methods.items() if hasattr(own, name)}
    return type(own.__name__, (CopiedWithEdits, cls), names)


def _edited(module: CopiedWithEdits, copied: Any, clone: Callable[[Any], Any]) -> Any:
    """Puts the edits of a module into the copy of it that a method of the user has made."""
    if copied is not module and isinstance(copied, module.tp_class):
        copied.__class__ = type(module)
        cast(CopiedWithEdits, copied).tp_edit(*clone(module.tp_edits()))
    return copied


# ------------------------------------------------------------ what a copy must have


def _is_edit(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("tp_ext.auto.")


def _edits_of(module: nn.Module) -> tuple[str, ...]:
    """The edits of a module, as text that is the same for a copy of it."""
    edits = [cls.__qualname__ for cls in type(module).__mro__ if _is_edit(cls)]
    for table in HOOKS:
        hooks = [hook for hook in getattr(module, table).values() if _is_edit(hook)]
        edits += [type(edit).__qualname__ for hook in hooks for edit in getattr(hook, "edits", (hook,))]
    for name in sorted({*vars(module).get("tp_edited", ())} - {NAME}):
        value = vars(module).get(name)
        edits.append(f"{name}={value if isinstance(value, int | str) else name in vars(module)}")
    return tuple(edits)


def _states_of(model: nn.Module) -> dict[str, int]:
    """The number of objects of each class of STATES that the edits of a model know."""
    values = [value for module in model.modules() for value in vars(module).values() if _is_edit(value)]
    values += [h for module in model.modules() for t in HOOKS for h in getattr(module, t).values() if _is_edit(h)]
    seen: dict[int, Any] = {}
    while values:
        value = values.pop()
        if isinstance(value, list | tuple):
            values += value
        elif id(value) not in seen and _is_edit(value) and not isinstance(value, type | nn.Module | PresentEdits):
            seen[id(value)] = value
            values += getattr(value, "__dict__", {}).values()
    # Two forwards of one module, of which one is a copy, have one list of what runs
    states = {id(getattr(value, "running", value)): value for value in seen.values() if isinstance(value, STATES)}
    return dict(collections.Counter(type(value).__name__ for value in states.values()))


class PresentEdits:
    """A forward pre-hook of a sharded model, and of modules inside that say themselves how they are copied: the edits
    below it are there. Of a copy it compares them with those of the original at the first call.

    Attributes:
        root: the module whose edits were found. live: where they are. expected: of a copy, the edits of the original by
            the name of a module, the number of the states that these share, and the names of tied parameters.
    """

    def __init__(self) -> None:
        self.root: weakref.ref[nn.Module] | None = None
        self.live: list[tuple[dict[Any, Any], Any, Any]] = []
        self.classes: list[tuple[nn.Module, type]] = []
        self.tied: list[tuple[list[str], list[tuple[nn.Module, str]]]] = []
        self.expected: Expected | None = None

    def __getstate__(self) -> dict[str, Any]:
        root = None if self.root is None else self.root()
        if root is not None:
            self.check()
        expected = self.expected if root is None else _expected_of(root)
        return {"expected": expected, "next_id": RemovableHandle.next_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.expected = state["expected"]
        # In another process torch would give the number of one of these hooks to the next, which would replace it
        RemovableHandle.next_id = max(RemovableHandle.next_id, state["next_id"])

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.root is None or self.root() is not module:
            self.find(module)
        else:
            self.check()

    def find(self, module: nn.Module) -> None:
        """Takes a module for the one whose edits are looked at.

        Raises:
            RuntimeError: it is a copy that lacks some.
        """
        if "_is_replica" in vars(module):
            raise RuntimeError("model: is sharded by tp_ext.auto, and must not be replicated by nn.DataParallel")
        root = None if self.root is None else self.root()
        expected = self.expected if root is None else _expected_of(root)
        if expected is not None:
            _compare(module, *expected)
        self.root, self.live, self.classes, self.tied = weakref.ref(module), [], [], _tied_in(module)
        for inner in module.modules():
            tables = [getattr(inner, table) for table in HOOKS]
            self.live += [(table, i, hook) for table in tables for i, hook in table.items() if _is_edit(hook)]
            if _is_edit(forward := vars(inner).get("forward")):
                self.live.append((vars(inner), "forward", forward))
            self.classes += [(inner, cls) for cls in type(inner).__mro__ if _is_edit(cls)][:1]

    def check(self) -> None:
        """Raises a RuntimeError if an edit is not where it was found."""
        for table, key, value in self.live:
            if table.get(key) is not value:
                self.refuse(f"{type(value).__name__} of tp_ext.auto was removed from one of its modules")
        for module, cls in self.classes:
            if not isinstance(module, cls):
                self.refuse(f"the class of a module was set to {type(module).__name__}")
        for names, places in self.tied:
            _refuse_untied(names, (_parameter(module, name) for module, name in places))

    @staticmethod
    def refuse(why: str) -> None:
        raise RuntimeError(
            f"model: {why}, without which the results or gradients of a sharded model are wrong; hooks and classes of "
            "tp_ext.auto must stay, in copies, too: copy by copy.deepcopy or pickle, or shard the copy by auto.apply"
        )


def _tied_in(model: nn.Module) -> list[tuple[list[str], list[tuple[nn.Module, str]]]]:
    """The parameters with several places in a model: their names, and the places."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((f"{path}.{name}".lstrip("."), module, name))
    return [([n for n, _, _ in tied], [(m, name) for _, m, name in tied]) for tied in places.values() if len(tied) > 1]


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """Returns a parameter of a module; of one that an adapter computes the one from which it does."""
    if name in module._parameters or not parametrize.is_parametrized(module, name):
        return module._parameters.get(name)
    original: Tensor | None = getattr(module.parametrizations[name], "original", None)  # type: ignore[index]
    return original


def _refuse_untied(names: list[str], params: Iterable[Tensor | None]) -> None:
    if len(set(map(id, params))) > 1:
        raise RuntimeError(
            f"model: {' and '.join(names)} were one parameter when the model was sharded or copied, and are several "
            "since they were assigned or given memory one by one; tie them again"
        )


def _edits_by_name(model: nn.Module) -> dict[str, tuple[str, ...]]:
    return {name: edits for name, module in model.named_modules() if (edits := _edits_of(module))}


def _expected_of(model: nn.Module) -> Expected:
    return _edits_by_name(model), _states_of(model), [names for names, _ in _tied_in(model)]


def _compare(
    module: nn.Module, expected: dict[str, tuple[str, ...]], states: dict[str, int], tied: list[list[str]]
) -> None:
    named = dict(module.named_parameters(remove_duplicate=False))
    for names in tied:
        _refuse_untied(names, (named[name] for name in names if name in named))
    # By what they are, and not by names: the copy may have got adapters or wrappers since
    present = collections.Counter(_edits_by_name(module).values())
    present.subtract(expected.values())
    for name, edits in expected.items():
        if present[edits] < 0:
            what = type(module.get_submodule(name)).__name__ if name in dict(module.named_modules()) else "it"
            PresentEdits.refuse(f"{name or 'it'} is a copy that lacks {', '.join(edits)} ({what} is copied without)")
    for name, count in _states_of(module).items():
        if count > states.get(name, 0):
            PresentEdits.refuse(
                f"its parts were copied one by one, and have {count} {name} in place of {states.get(name, 0)}"
            )


def before_edits(model: nn.Module) -> Before:
    """The classes and attributes of the modules of a model that will be sharded, for :func:`keep_edits`."""
    return {module: (type(module), dict(vars(module))) for module in model.modules()}


def keep_edits(model: nn.Module, before: Before) -> None:
    """Has the copies of a model that was sharded, and of its modules, keep the edits. After everything else."""
    edited: dict[nn.Module, frozenset[str]] = {}
    for module, (own, attributes) in before.items():
        edited[module] = frozenset(
            name
            for name, value in vars(module).items()
            if attributes.get(name, ...) is not value
            and name != "training"
            and (name != NAME or says_how_it_is_copied(own))
        )
    changed = {m for m in model.modules() if _edits_of(m) or edited.get(m)}
    for module in list(model.modules()):
        own, _ = before.get(module, (type(module), {}))
        has_own = says_how_it_is_copied(own)
        # A copy of the root, or of a module that rebuilds what is inside of it, is looked at in its first call
        if module is model or (has_own and any(inner in changed for inner in module.modules() if inner is not module)):
            module.register_forward_pre_hook(PresentEdits(), prepend=True)
        if edited.get(module):
            module.tp_edited = edited[module]  # type: ignore[assignment]
        if (has_own and (_edits_of(module) or edited.get(module))) or _is_edit(vars(module).get("forward")):
            module.__class__ = _with_edits(own, type(module))
    # Last: a hook counts the hooks and classes that are there by now
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, PresentEdits):
                hook.find(module)
