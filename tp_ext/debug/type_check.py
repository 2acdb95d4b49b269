"""Type checking of a parallel program by ``spmd_types``: a forgotten or doubled collective is an error at its line."""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tp_ext._checks import check_bool
from tp_ext._ops.binding import declarations, overload_of
from tp_ext.group import Group, parallel_group, process_group
from tp_ext.model.layouts import layouts_of
from tp_ext.model.module import ParallelModule

# Methods that compute nothing: a program may call them before it gives a tensor its type
_QUERIES = {"__get__", "__len__", "dim", "is_floating_point", "numel", "size", "stride"}


@contextlib.contextmanager
def typecheck(
    module: nn.Module | None, mesh: DeviceMesh | Group = None, *, strict: bool = True, local: bool = True
) -> Iterator[None]:
    """Checks the types of all tensors of a program: how their values, and their gradients, relate between ranks.

    ``spmd_types`` gives each tensor a type for each axis of a mesh: R (replicated, its gradient is partial), I
    (invariant: replicated, and so is its gradient), V (varying) or P (partial sums). In this context it checks each
    operation of torch, each of this package and each collective, in forward and therefore in backward: an operation of
    arguments whose types do not go together is an error, before a gradient is wrong::

        import spmd_types as spmd

        with tp_ext.debug.typecheck(model, mesh):
            x = spmd.assert_type(x, {"tp": spmd.I})
            loss = model(x)
            spmd.assert_type(loss, {"tp": spmd.I})

    One process is enough, with ``init_process_group("fake", ..)``: only types are of interest.

    Parameters and buffers of ``module`` get their types by their layouts: V along an axis over which they are sharded,
    I along one over which the module is tensor-parallel, R along all others, where data parallelism sums gradients
    after backward. The program gives all other tensors theirs, by ``spmd_types.assert_type``; a tensor made by
    ``torch.zeros``, ``ones``, ``full`` or ``arange`` is R, and so is one of integers or bools that has no other.

    Args:
        module: the model; None if there is none, or its parameters have types.
        mesh: the mesh, or one group; None: that of ``spmd_types.set_current_mesh``.
        strict: a tensor without a type may not meet one with a type.
        local: False: also checks along which dim a tensor is sharded, where every operation of torch in the program
            has a rule for ``DTensor``. Attention on sharded heads is not such an operation.

    Communicates: what the program does.

    Raises:
        ImportError: ``spmd_types`` is not installed. ValueError: a parameter is a ``DTensor``: check the model before
            FSDP2 wraps it; ``mesh`` is no group. TypeError: an argument of another type. In the context:
            ``spmd_types.SpmdTypeError``.

    ``spmd_types`` (https://github.com/meta-pytorch/spmd_types) explains the types. Within :func:`tp_ext.spmd` they are
    tracked in any case.
    """
    check_bool(strict=strict, local=local)
    if not isinstance(module, nn.Module | None):
        raise TypeError(f"module: {type(module).__name__} must be an nn.Module or None")
    spmd = _spmd_types()
    with contextlib.nullcontext() if mesh is None else spmd.set_current_mesh(_axes(mesh)):
        if module is not None:
            _assert_parameter_types(module)
        mode = "strict" if strict else "permissive"
        with spmd.checker.typecheck(strict_mode=mode, local=local), _Rules():
            yield


def _axes(mesh: DeviceMesh | Group) -> Any:
    if isinstance(mesh, DeviceMesh):
        return mesh
    try:
        return [process_group(mesh)] if parallel_group(mesh).name else []
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("group:", "mesh:", 1)) from None


def _spmd_types() -> Any:
    try:
        importlib.import_module("spmd_types.checker")
    except ImportError as error:
        raise ImportError("typecheck needs spmd_types: pip install 'tp_ext[typecheck]'") from error
    return importlib.import_module("spmd_types")


def _assert_parameter_types(module: nn.Module) -> None:
    """Gives all parameters and buffers types by their layouts, on the current mesh."""
    spmd = _spmd_types()
    groups = [group for part in module.modules() for group in _groups_of_module(part)]
    own = {spmd.MeshAxis.of(process_group(name)) for name in dict.fromkeys(group.name for group in groups) if name}
    outside = dict.fromkeys(spmd.current_mesh() or (), spmd.R)
    for prefix, part in module.named_modules():
        layouts = layouts_of(part)
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is None:
                continue
            if isinstance(tensor, DTensor):
                raise ValueError(
                    f"module: {f'{prefix}.{name}'.strip('.')!r} is a DTensor and must be a plain tensor: check the "
                    "model before FSDP2 wraps it"
                )
            spec: list[Any] = [()] * tensor.dim()
            for sharding, group in layouts.get(name, ()):
                if group.size > 1:
                    spec[sharding.dim] = (*spec[sharding.dim], process_group(group.name))
            # The layers sum gradients of replicated parameters over their own groups: invariant there
            held = {axis: spmd.I if axis in own and tensor.requires_grad else t for axis, t in outside.items()}
            for axis in {spmd.MeshAxis.of(group) for entry in spec for group in entry}:
                held[axis] = spmd.V
            spmd.assert_type(tensor, held, partition_spec=spmd.PartitionSpec(*(entry or None for entry in spec)))


def _groups_of_module(module: nn.Module) -> list[Any]:
    held = [group for layout in layouts_of(module).values() for _, group in layout]
    if isinstance(module, ParallelModule) and module.expert_group is not None:  # whose ranks have other tokens
        experts = module.expert_group.name
        held = [group for group in held if group.name != experts]
    return [*held, module.tp_group, module.weight_group] if isinstance(module, ParallelModule) else held


class _Rules(TorchFunctionMode):
    """Types the results of this package's operators by their rules; leaves all others to ``spmd_types``."""

    def __init__(self) -> None:
        super().__init__()
        self._spmd = _spmd_types()
        self._functions = importlib.import_module("tp_ext.debug.type_rules").FUNCTIONS
        self._typed = _typed_operators()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function: Any = getattr(func, "__self__", None)  # of the apply of an autograd function
        operator = self._typed.get(func)
        if isinstance(function, type) and function in self._functions:
            operator = function
        if not self._spmd.is_type_checking():
            return func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _QUERIES:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Tensor) and not (one.is_floating_point() or one.is_complex()):
                    self._type_of_integers(one)
        if operator is None:
            return func(*args, **(kwargs or {}))
        # Rules take the arguments by name, however they were passed
        bound = inspect.signature(operator.forward).bind(*args, **(kwargs or {}))

        def compute(*arguments: Any) -> Any:
            with torch._C.DisableTorchFunction():
                y = func(*arguments)
                # An operator may return its argument, which keeps its own type
                return y.view_as(y) if any(y is argument for argument in arguments) else y

        return self._spmd.rules.run_typecheck(operator, compute, bound.args)

    def _type_of_integers(self, tensor: Tensor) -> None:
        """Gives positions, lengths and the like, which have no gradient, the type R unless they have one."""
        if not self._spmd.get_local_type(tensor) and not isinstance(tensor, DTensor):
            self._spmd.assert_type(tensor, self._spmd.R)


def _typed_operators() -> dict[Any, Any]:
    """Returns the operators that have a rule, each as an autograd function of ``spmd_types``: the parameters of its
    ``forward`` are those of the operator."""
    rules = importlib.import_module("tp_ext.debug.type_rules").RULES
    return {overload_of(name): _typed_operator(name, declarations[name], rules[name]) for name in rules}


def _typed_operator(name: str, declared: Callable[..., Any], types: Callable[..., Any]) -> Any:
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved; with it ``forward`` has no context among its parameters."""

    members = {"forward": declared, "setup_context": setup_context, "spmd_typecheck": types}
    statics = {key: staticmethod(value) for key, value in members.items()}
    return type(name, (torch.autograd.Function,), statics)
