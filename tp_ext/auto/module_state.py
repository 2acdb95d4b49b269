"""What code of a model reads apart from its arguments: attributes of its modules, what these refer to, their modes,
modules and hooks, class attributes, globals and variables of closures.

See [Note: the state of modules is looked at in each call]: thousands of attributes cannot be walked in Python each
time. So a :class:`StateWatch` holds what every place had when it was walked last, and compares by identity, in C. Only
where that differs the places are described by texts, and compared with those at ``apply``."""

from __future__ import annotations

import collections
import dataclasses
import enum
import hashlib
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from tp_ext.auto.record.edits import NAME
from tp_ext.auto.record.machinery import COMPUTING, FUNCTIONS, MACHINERY, is_of
from tp_ext.auto.record.reachable import names_in

Path = tuple[str, ...]  # a module's name, or SHARED, and where in it
SHARED = "*"  # what a model and its structure share: globals, class attributes, closures of functions of classes

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, range)
CONTAINERS = (list, tuple, set, frozenset, collections.deque)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
# Ours, and notes of libraries on what they have done to this object, which its structure has not had
# tp_layouts: a plan declares them, and a copy that was read from a file has them in other objects
PARAMETRIZED = "parametrizations"
NEW = " (new)"  # the end of the name of a module that has come since
INTERNAL = {*vars(nn.Module()), NAME, "save_pretrained", "tp_call", "tp_edited", "tp_ext_plan", "tp_layouts",
            "tp_shardings", "_is_hf_initialized", "_is_torch_compile", "_output_capturing_hooks_installed",
            "_compile_kwargs", "_compiled_call_impl", "generate", "resize_token_embeddings"}  # fmt: skip
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # the module that a wrapper of torch has
LIBRARIES = ("torch", "tp_ext", "transformers", "accelerate", "builtins", "collections", "functools", "einops")
DEPTH = 4  # of plain objects and dicts inside of an attribute


@dataclasses.dataclass(eq=False)
class StatePlace:
    """A place that holds a value: a key of a dict, which may be that of an object's attributes."""

    text: str
    holder: Any = None
    key: Any = None


def text_of(value: Any, depth: int = DEPTH) -> str:
    """A value as a text that is the same for equal values, in any process."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor of {value.dim()} dims"
    if isinstance(value, FUNCTIONS):
        code = getattr(value, "__code__", None)
        digest = hashlib.sha256(code.co_code + repr(code.co_consts).encode()).hexdigest()[:8] if code else ""
        return f"{value.__module__}.{getattr(value, '__qualname__', '')} {digest}".strip()
    if depth and isinstance(value, CONTAINERS):
        texts = [text_of(inner, depth - 1) for inner in value]
        return f"{type(value).__name__}({', '.join(sorted(texts) if isinstance(value, set | frozenset) else texts)})"
    if depth and isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {text_of(inner, depth - 1)}' for key, inner in value.items())}}}"
    return f"a {type(value).__qualname__}"


def is_layer(module: nn.Module) -> bool:
    """True for a layer of ours, also with parametrizations, of which it has taken none that does not fit its shards."""
    cls = type(module).__bases__[0] if parametrize.is_parametrized(module) else type(module)
    return is_of(cls, ("tp_ext",))


def class_text(module: nn.Module) -> str:
    """What a module computes, by its class's forward: classes that wrap it, such as FSDP2's, inherit that."""
    forward = type(module).forward
    return "tp_ext" if is_layer(module) else f"{forward.__module__}.{forward.__qualname__}"


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of wrappers of torch, which compile it or compute it again in backward."""
    while inner := next((module._modules[n] for n in WRAPPED if module._modules.get(n) is not None), None):
        module = inner
    return module


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by the names that they had when its plan was applied, wherever they are by now; those that
    have come since by that which they have without wrappers of torch, and ``NEW``."""
    modules: dict[str, nn.Module] = {}
    seen: set[int] = set()
    end = NEW if any(NAME in vars(module) for module in model.modules()) else ""

    def walk(name: str, module: nn.Module) -> None:
        module = unwrapped(module)
        if id(module) in seen:
            return
        seen.add(id(module))
        known = vars(module).get(NAME, f"{name}{end}" if name else "")
        modules[f"{name}{end}" if known in modules else known] = module
        for child, inner in module._modules.items():
            if inner is not None:
                walk(f"{name}.{child}" if name else child, inner)

    walk("", model)
    return modules


def hook_text(hook: Any) -> str:
    """A hook as a text; "": it is of a library, and changes no numbers: what computes a parameter from others by
    ``torch.nn.utils`` takes none that is a shard, but for masks of elements."""
    return "" if is_of(hook, MACHINERY + COMPUTING) else text_of(hook)


class StateWatch:
    """Notices that a model's state changes."""

    def __init__(self, model: nn.Module, ignored: Iterable[Path] = ()) -> None:
        self.ignored = set(ignored)
        self.places: dict[Path, StatePlace] = {}
        self.getters: list[Callable[[Any], Iterable[Any]]] = []
        self.holders: list[Any] = []
        self.seen: set[int] = set()
        self.modules = named_modules(model)
        self.names = {id(module): name for name, module in self.modules.items()}
        self.modes = {name: module.training for name, module in self.modules.items()}
        self.trainable: dict[Path, StatePlace] = {
            (name, key, "requires_grad"): StatePlace(str(p.requires_grad), module, key)
            for name, module in self.modules.items()
            for key, p in module._parameters.items()
            if p is not None
        }
        for name, module in self.modules.items():
            self.add_module(name, module)
        for cls in {cls for module in self.modules.values() for cls in type(module).__mro__}:
            self.add_class(cls)
        for name in GLOBAL_HOOKS:
            self.add_hooks((SHARED, name), vars(torch_module), name)
        held = {place: place.holder._parameters for place in self.trainable.values()}
        self.frozen = [(parameters, place.key) for place, parameters in held.items() if place.text == "False"]
        # Whose type is that of the model
        self.typed = next(((of, place.key) for place, of in held.items() if of[place.key].is_floating_point()), None)
        self.values = [*self.now()]
        self.lengths = [*map(len, self.holders)]

    def now(self) -> Iterator[Any]:
        return chain.from_iterable(map(operator.call, self.getters, self.holders))

    def is_unchanged(self) -> bool:
        """See [Note: the state of modules is looked at in each call]."""
        try:
            same = [*map(len, self.holders)] == self.lengths and all(map(operator.is_, self.now(), self.values))
            return same and not any(parameters[key].requires_grad for parameters, key in self.frozen)
        except (KeyError, AttributeError):  # an attribute, a parameter is gone
            return False

    def dtype(self) -> torch.dtype | None:
        """The type of the model's parameters."""
        return None if self.typed is None else self.typed[0][self.typed[1]].dtype

    def add(self, getter: Callable[[Any], Iterable[Any]], holder: Any) -> None:
        self.getters.append(getter)
        self.holders.append(holder)

    def add_module(self, name: str, module: nn.Module) -> None:
        for child, inner in module._modules.items():
            if inner is not None:
                inner = unwrapped(inner)
                text = f"{class_text(inner)} {self.names[id(inner)]}"
                self.places[name, "_modules", child] = StatePlace(text, module._modules, child)
        self.add(dict.values, module._modules)
        for hooks in HOOKS:
            self.add_hooks((name, hooks), vars(module), hooks)
        if is_layer(module):  # its own attributes are no business of the model's code
            self.add(operator.itemgetter("training", "training"), vars(module))
            self.add(_forward_of_instance, _Sized(vars(module)))
            forward = vars(module).get("forward")
            if name and forward is not None and not is_of(forward, MACHINERY):
                self.places[name, "forward"] = StatePlace(text_of(forward), vars(module), "forward")
            return
        self.add_holder((name,), vars(module), 0, INTERNAL)

    def add_hooks(self, path: Path, holder: Any, key: str) -> None:
        self.add(dict.values, holder[key])
        texts = [text for hook in holder[key].values() if (text := hook_text(hook))]
        if texts:
            self.places[path] = StatePlace(repr(texts), holder, key)

    def add_holder(self, path: Path, holder: dict[str, Any], depth: int, internal: Iterable[str] = ()) -> None:
        """Adds the attributes of an object, or the items of a dict."""
        if id(holder) in self.seen:
            return
        self.seen.add(id(holder))
        names, parameters = ["training"] if not depth else [], holder.get("_parameters", ()) if not depth else ()
        for key, value in holder.items():
            inner_path = (*path, str(key))
            if key in internal or inner_path in self.ignored or (key == "forward" and path == ("",)):
                continue
            # By weight_norm or a mask, of parameters
            if isinstance(value, Tensor) and any(f"{key}_{end}" in parameters for end in ("orig", "v")):
                continue
            if key == "forward" and is_of(value, MACHINERY):
                continue
            if not isinstance(value, Tensor):
                names.append(key)
            is_walked = self.add_inner(inner_path, value, depth)
            self.places[inner_path] = StatePlace(text_of(value, 0 if is_walked else DEPTH), holder, key)
        if names:
            self.add(operator.itemgetter(names[0], *names), holder)

    def add_inner(self, path: Path, value: Any, depth: int) -> bool:
        """Adds what a value holds; returns whether its parts have places of their own."""
        if isinstance(value, list | set | collections.deque):
            if not any(isinstance(inner, Tensor) for inner in value):
                self.add(iter, value)
            return False
        attributes = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        is_opaque = isinstance(value, (nn.Module, Tensor, *PLAIN, *FUNCTIONS)) or is_of(value, ("torch", "tp_ext"))
        if not isinstance(attributes, dict) or depth >= DEPTH or is_opaque:
            return False
        self.add_holder(path, attributes, depth + 1)
        return True

    def add_class(self, cls: type) -> None:
        """Adds class attributes, and what the functions of a class read of globals and closures."""
        if is_of(cls, LIBRARIES):
            return
        for key, value in list(vars(cls).items()):
            if isinstance(value, types.FunctionType):
                self.add_function(value)
            elif isinstance(value, (*PLAIN, *CONTAINERS, dict)) and not key.startswith("__"):
                self.add_variable((SHARED, cls.__qualname__, key), vars(cls), key, value)

    def add_function(self, function: types.FunctionType) -> None:
        if id(function) in self.seen or is_of(function, LIBRARIES):
            return
        self.seen.add(id(function))
        for name in set(names_in(function.__code__)):
            value = function.__globals__.get(name)
            if isinstance(value, types.FunctionType):
                self.add_function(value)
            elif name in function.__globals__:
                self.add_variable((SHARED, function.__module__, name), function.__globals__, name, value)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # no value yet
                continue
            if isinstance(value, types.FunctionType):
                self.add_function(value)
            elif isinstance(value, (*PLAIN, *CONTAINERS, dict)):
                self.places[SHARED, function.__qualname__, name] = StatePlace(text_of(value))
                self.add(_contents, _Cell(cell))
                self.add_inner((SHARED, function.__qualname__, name), value, 1)

    def add_variable(self, path: Path, holder: Any, key: str, value: Any) -> None:
        if isinstance(value, (*PLAIN, *CONTAINERS, dict)) and path not in self.places:
            self.places[path] = StatePlace(text_of(value))
            # The holder has other names, too, of which nothing is read
            self.add(_variable(key), _Sized(holder))
            self.add_inner(path, value, 1)


class _Sized:
    """A holder with one watched name; its length does not matter."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    def __len__(self) -> int:
        return 0


class _Cell(_Sized):
    """A variable of a closure."""


def _forward_of_instance(attributes: _Sized) -> tuple[Any]:
    return (attributes.holder.get("forward"),)


def _contents(cell: _Cell) -> tuple[Any]:
    return (cell.holder.cell_contents,)


def _variable(key: str) -> Callable[[_Sized], tuple[Any]]:
    return lambda sized: (sized.holder[key],)


@dataclasses.dataclass
class Baseline:
    """The state of a model as its plan was applied to it, by texts, so that it fits each copy of the model."""

    texts: dict[Path, str]
    modes: dict[str, bool]
    trainable: dict[Path, str]

    @classmethod
    def of(cls, model: nn.Module) -> Baseline:
        watch = StateWatch(model)
        return cls(_texts(watch.places), watch.modes, _texts(watch.trainable))

    def changes(self, watch: StateWatch, by_values: bool) -> dict[Path, str]:
        """What has changed, with what it is now; "": it is gone.

        Args:
            by_values: the plan was proven by values, in train and in eval mode.
        """
        now = _texts(watch.places)
        changed = {p: now.get(p, "") for p in {*now, *self.texts} if now.get(p) != self.texts.get(p)}
        # Our adapters and quantized layers stand for what they were made of
        layers = [(name, module) for name, module in watch.modules.items() if is_layer(module)]
        ours = [name.removesuffix(NEW) for name, _ in layers if name.endswith(NEW)]
        ours += [
            watch.names[id(m._modules[PARAMETRIZED])].removesuffix(NEW) for _, m in layers if PARAMETRIZED in m._modules
        ]

        def matters(path: Path, text: str) -> bool:
            name = path[0]
            if path in watch.ignored or (name not in watch.modules and name != SHARED):  # gone with its module
                return False
            new = text.rpartition(" ")[0].rpartition(" ")[2] if path[1] == "_modules" and text.endswith(NEW) else ""
            new = new or (name.removesuffix(NEW) if name.endswith(NEW) else "")
            return not new or not any(is_inside(new, of) for of in ours)

        changed = {path: text for path, text in changed.items() if matters(path, text)}
        # Without the gradient of what is frozen now, sums are superfluous and right
        trainable = {
            path: place.text
            for path, place in watch.trainable.items()
            if place.text == "True" and self.trainable.get(path) == "False"
        }
        modes: dict[Path, str] = {}
        # The proof by values has run all modules in train mode, and all in eval mode
        if len({*watch.modes.values()}) > 1 or not by_values:
            modes = {
                (name, "training"): str(mode)
                for name, mode in watch.modes.items()
                if mode != self.modes.get(name, mode)
            }
        every: dict[Path, str] = {**changed, **trainable, **modes}
        return dict(sorted(every.items()))


def is_hidden(path: Path) -> bool:
    """True for a change that no calls of forward show: it concerns backward, or what a hook keeps."""
    return path[-1] == "requires_grad" or path[1].removeprefix("_global") in HOOKS


def _texts(places: dict[Path, StatePlace]) -> dict[Path, str]:
    return {path: place.text for path, place in places.items()}


def is_inside(name: str, other: str) -> bool:
    """True if a module is another one or inside of it."""
    return name == other or name.startswith(f"{other}.")


def sentence(changes: dict[Path, str]) -> str:
    """Names what has changed."""
    parts = []
    for path, text in changes.items():
        place = ".".join(part for part in path if part not in ("", SHARED, "_modules"))
        is_module = path[1] == "_modules"
        if path[0].endswith(NEW):
            continue  # of a module that is new as a whole
        if is_module and text.endswith(NEW):
            text = f"{text.removesuffix(NEW).rpartition(' ')[0]}, a new module"
        elif is_module and text:
            text = f"what was {text.rpartition(' ')[2]}"
        parts.append(f"{place.replace(NEW, '')} is {text or 'gone'}")
    return f"{', '.join(parts[:3])}{', ..' if len(parts) > 3 else ''}, which was not so when the plan was applied"
