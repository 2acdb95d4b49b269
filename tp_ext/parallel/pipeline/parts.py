"""The parts of a model that a pipeline is made of, and a stage: some of them, under the names of the whole model."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tp_ext.model.census import Census


class ModelPart(NamedTuple):
    """A module or a function that is applied to the result of the part before it.

    Attributes:
        name: the name of the module in the whole model; "" for a function.
        function: the module or function.
        keywords: the names of its optional arguments, as ``step`` may pass them; None if it takes any.
        size: the number of elements of its full parameters.
    """

    name: str
    function: Callable[..., Any]
    keywords: frozenset[str] | None
    size: int


class ReadParameterError(ValueError):
    """A function among the parts reads a parameter."""


class ModelParts(NamedTuple):
    """The parts of a model: those before the blocks, the blocks, those after them."""

    first: list[ModelPart]
    blocks: list[ModelPart]
    last: list[ModelPart]

    @property
    def all(self) -> list[ModelPart]:
        return [*self.first, *self.blocks, *self.last]

    @property
    def sizes(self) -> list[int]:
        """The sizes of what precedes the blocks, of each block, and of what follows them."""
        first, blocks, last = ([part.size for part in parts] for parts in self)
        return [sum(first), *blocks, sum(last)]

    @property
    def keywords(self) -> frozenset[str] | None:
        """The names of the optional arguments that some part takes; None if one takes any."""
        names = [part.keywords for part in self.all]
        return None if None in names else frozenset().union(*filter(None, names))

    def stages(self, counts: Sequence[int], training: bool) -> list["PipelinePart"]:
        """Returns the module of each stage, from the number of blocks of each."""
        stages, begin = [], 0
        for count in counts:
            stages.append(self.blocks[begin : begin + count])
            begin += count
        stages[0] = self.first + stages[0]
        stages[-1] = stages[-1] + self.last
        return [PipelinePart(parts, training) for parts in stages]


def parts_of(census: Census) -> ModelParts:
    """Returns the parts of a model, by its ``pipeline_parts()``; those of an ``nn.Sequential`` are all blocks.

    Raises:
        TypeError: a model of another kind, a part that is neither a module nor callable.
        ValueError: a module that is not in the model, lies in another part or has no block; a parameter or persistent
            buffer of the model that is in no part, or a module whose hooks a plan of ``tp_ext.auto`` needs.
    """
    model = census.model
    if hasattr(model, "pipeline_parts"):
        first, blocks, last = cast(Any, model).pipeline_parts()
    elif isinstance(model, nn.Sequential):
        first, blocks, last = None, list(model), None
    else:
        raise TypeError(
            f"model: {type(model).__name__} must have pipeline_parts(), which returns what comes before its blocks, "
            "the blocks, and what comes after, or be an nn.Sequential"
        )
    parts = ModelParts(*([_part(one, census) for one in _listed(given)] for given in (first, blocks, last)))
    if not parts.blocks:
        raise ValueError(f"model: {type(model).__name__} must have blocks")
    _check_coverage(census, parts)
    return parts


class PipelinePart(nn.Module):
    """The module of one stage of a pipeline: some parts of a model, applied one after the other.

    Parameters, buffers and entries of the state dict have the names of the whole model. Keyword arguments reach the
    parts that take an argument of their name.

    The first forward, on every rank that of the copies on fake tensors, raises ValueError if a function reads a
    parameter: the optimizers of other stages have copies of it, and nothing sums their gradients.

    Args:
        training: the mode of this module and of the containers of the parts, which keep their own.
    """

    def __init__(self, parts: Iterable[ModelPart], training: bool = True) -> None:
        super().__init__()
        self.training = training
        self._called = False
        steps: list[tuple[str, Callable[..., Any] | None, frozenset[str] | None]] = []
        for name, function, keywords, _ in parts:
            if name:
                _place(self, name, function)
            steps.append((name, None if name else function, keywords))  # a module is registered, and nowhere else
        self._steps = tuple(steps)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        for name, function, known in self._steps:
            act = function or self.get_submodule(name)
            taken = {key: value for key, value in keywords.items() if known is None or key in known}
            # The mode slows every operator down, so it watches the first forward alone
            with nullcontext() if function is None or self._called else _no_parameters(function):
                result = act(*inputs, **taken)
            inputs = result if isinstance(result, tuple) else (result,)
        self._called = True
        inputs = tuple(one.contiguous() if isinstance(one, Tensor) else one for one in inputs)  # as p2p requires
        return inputs[0] if len(inputs) == 1 else inputs


@contextmanager
def _no_parameters(function: Callable[..., Any]) -> Iterator[None]:
    """Raises ReadParameterError if an operator or a module inside reads a parameter that is trained."""
    name = getattr(function, "__qualname__", type(function).__name__)

    def refuse(tensor: Tensor) -> None:
        # Copies of a frozen parameter stay equal
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            raise ReadParameterError(
                f"model: the part {name}, a function, must not read a parameter, as that of shape "
                f"{tuple(tensor.shape)}: each stage would train a copy. Make it an nn.Module of the model; tie a "
                "weight by assigning it to both"
            )

    with watch_reads(refuse):
        yield


@contextmanager
def watch_reads(see: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls ``see`` of each tensor that an operator or a module inside reads; of a view, of its base."""

    def check(module: nn.Module, args: Any) -> None:
        for param in module.parameters(recurse=False):
            see(param)

    # Our operators call C++ directly, which no mode sees, but their modules are called
    hook = register_module_forward_pre_hook(check)
    try:
        with _Reads(see):
            yield
    finally:
        hook.remove()


class _Reads(TorchFunctionMode):
    def __init__(self, see: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._see(leaf if leaf._base is None else leaf._base)
        return func(*args, **(kwargs or {}))


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, list | tuple | nn.ModuleList):
        return list(given)
    return list(given.values()) if isinstance(given, nn.ModuleDict) else [given]


def _part(given: Any, census: Census) -> ModelPart:
    if isinstance(given, nn.Module):
        # The name of the model itself is empty: it cannot be one of its own parts
        if not (name := census.paths.get(given)):
            raise ValueError(
                f"model: the part {type(given).__name__} must be a module inside of the model; list the modules "
                "themselves"
            )
        params = set(given.parameters())
        size = sum(entry.shape.numel() for entry in census.parameters.values() if entry.value in params)
        return ModelPart(name, given, _keywords(given), size)
    if not callable(given):
        raise TypeError(f"model: the part {given!r} must be a module or a function of the activations")
    return ModelPart("", given, _keywords(given), 0)


def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Returns the names of the arguments after the first of a module or a function; None if it takes any."""
    while (inner := _wrapped(function)) is not None:
        function = inner
    called: Callable[..., Any] = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except ValueError:  # a built-in one, such as torch.flatten
        return frozenset()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = {parameter.name for parameter in parameters[1:] if parameter.kind is not parameter.VAR_POSITIONAL}
    return frozenset(
        named | {parameter.name for parameter in parameters[:1] if parameter.kind is parameter.KEYWORD_ONLY}
    )


def _wrapped(function: Callable[..., Any]) -> nn.Module | None:
    """Returns the module inside of torch.compile's or the checkpoint's wrapper, whose forward names no argument."""
    for attribute in ("_orig_mod", "_checkpoint_wrapped_module"):
        inner = getattr(function, attribute, None)
        if isinstance(inner, nn.Module):
            return inner
    return None


def _check_coverage(census: Census, parts: ModelParts) -> None:
    """Raises ValueError unless each module with tensors is in one part: one in none has no stage, one inside of another
    part would run twice."""
    seen: dict[int, str] = {}
    for part in parts.all:  # functions have no modules; what they read is seen when they run
        for inner, module in part.function.named_modules() if isinstance(part.function, nn.Module) else ():
            other = seen.setdefault(id(module), part.name)
            # Two parts may share a module inside, as tied ones do, but a part itself must not be one
            if other != part.name and (inner == "" or module is census.model.get_submodule(other)):
                raise ValueError(f"model: the part {part.name!r} must not be inside of the part {other!r}")
    # By identity: a tied weight that hangs in no part may be one of a part under another name
    tensors = {id(one) for part in parts.all for one in _tensors(part.function)}
    for prefix, module in census.modules:
        if id(module) in seen:
            continue
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        # A plan of auto put a hook on a module that is only a container to the pipeline, so it would never run
        if any(getattr(hook, "is_needed_in_stages", False) for hook in hooks):
            raise ValueError(
                f"model: {prefix or type(module).__name__!r} must be in one of the parts of pipeline_parts(): its "
                "sharding by tp_ext.auto needs its forward to run"
            )
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            # Buffers that are in no checkpoint, such as tables, the parts make again or do not need
            if tensor is not None and name not in module._non_persistent_buffers_set and id(tensor) not in tensors:
                raise ValueError(
                    f"model: {prefix + '.' + name if prefix else name!r} must be in one of the parts of "
                    "pipeline_parts(), or no stage would have it"
                )


def _tensors(function: Callable[..., Any]) -> Iterable[Tensor]:
    return (*function.parameters(), *function.buffers()) if isinstance(function, nn.Module) else ()


def _place(root: nn.Module, name: str, module: Any) -> None:
    """Registers a module under a dotted name, in plain modules as containers."""
    *path, last = name.split(".")
    for key in path:
        if key not in root._modules:
            container = nn.Module()
            container.training = root.training
            root.add_module(key, container)
        root = root.get_submodule(key)
    root.add_module(last, module)
