"""Gradients that the model's own code changes or reads: Functions of Python, hooks, gradients computed in forward.

Each of them acts on the gradient that it sees, and need not be linear in it: clipping the terms of a sum is not
clipping the sum. So the gradient there must be complete (``Record.functions``), and what a backward computes along a
dim that it mixes is pinned, found by running it on a fake gradient with the dims of the result."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from tp_ext.auto.record.dims import Reason, pin, unify

if TYPE_CHECKING:
    from tp_ext.auto.record.record import Record

REQUIRES_GRAD = getattr(Tensor.requires_grad, "__get__")  # noqa: B009, a property of C
# What a tensor has of calls before that of the model: an argument has other answers in a call of a larger model, or in
# the next step
HISTORY = {getattr(Tensor, name).__get__: name for name in ("is_leaf", "grad_fn", "retains_grad", "grad")}
REGISTERS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


@contextlib.contextmanager
def watched_gradients(record: Record, tensors: Callable[[Any], Iterator[tuple[Any, Tensor]]]) -> Iterator[None]:
    """Records, while a model is traced, the Functions of Python that it applies, and gradients that it computes."""
    function = torch.autograd.Function
    apply, grad, backward = function.__dict__["apply"], torch.autograd.grad, torch.autograd.backward

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = apply.__get__(None, cls)(*args, **kwargs)
        # Functions of torch, such as a reentrant checkpoint, compute the gradient of what they ran
        if record.paused or record.is_examined or cls.__module__.partition(".")[0] == "torch":
            return result
        results = [t for _, t in tensors(result)]
        # ``functions`` knows them by id, which a freed tensor would leave to another tensor
        record.kept += results

        def again(*inputs: Any) -> Any:
            return apply.__get__(None, cls)(*inputs, **kwargs)

        what = f"the backward of {cls.__name__}"
        # A linear backward of the terms of a sum gives the terms of its result: these may be summed later
        if not _is_linear(again, args):
            record.functions.update((id(t), what) for t in results)
        _examine(record, what, again, args, results)
        return result

    def gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # On a rank it would be the gradient of the rank's part, which no boundary of a module completes
        record.problems.append(("", f"{record.modules[-1] or 'the model'} computes gradients in its forward"))
        several = isinstance(inputs, list | tuple)
        # The run goes on with a result of these shapes, so that the plan can name this code
        return tuple(torch.empty_like(t) for t in (inputs if several else [inputs]))

    def back(*args: Any, **kwargs: Any) -> None:
        record.problems.append(("", f"{record.modules[-1] or 'the model'} computes gradients in its forward"))

    function.apply = classmethod(applied)
    torch.autograd.grad, torch.autograd.backward = gradients, back
    try:
        yield
    finally:
        function.apply = apply
        torch.autograd.grad, torch.autograd.backward = grad, backward


def _is_linear(function: Callable[..., Any], args: Any) -> bool:
    """True if a backward gives the sum of gradients the sum of its results, tried with random numbers."""
    # Fakes have no values to compare. The trial is no step of the model, and must leave its generators alone
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad(), torch.random.fork_rng([]):
        torch.manual_seed(0)
        try:
            inputs = [torch.randn(t.shape, dtype=t.dtype).requires_grad_() if _is_real(t) else t for t in args]
            outputs = function(*inputs)
            outputs = [t for t in ([outputs] if isinstance(outputs, Tensor) else outputs) if t.requires_grad]
            wanted = [t for t in inputs if _is_real(t)]
            one, other = ([torch.randn_like(t) for t in outputs] for _ in range(2))
            both = [a + b for a, b in zip(one, other, strict=True)]
            results = [GRAD(outputs, wanted, g, retain_graph=True, allow_unused=True) for g in (one, other, both)]
            rows = zip(*results, strict=True)
            return all(a is None or torch.allclose(a + b, c, rtol=1e-4, atol=1e-5) for a, b, c in rows)
        except Exception:  # of any code of the user's: integers with a meaning, devices that are not here
            return False


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _examine(record: Record, what: str, function: Callable[..., Any], args: Any, results: list[Tensor]) -> None:
    """Pins the dims that a backward sums over or mixes, by running it on fake gradients."""
    reason = record.reason(what)
    fresh: list[tuple[Tensor, Tensor]] = []

    # Copies with the dims of the arguments: the graph of the user's forward, in which these are, stays as it is
    def entered(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copy = value.detach()
        record.put(copy, record.dims_of(value))
        if value.is_floating_point():
            copy.requires_grad_()
            fresh.append((value, copy))
        return copy

    record.is_examined = True
    try:
        with torch.enable_grad(), torch._C.DisableTorchFunction():  # torch.autograd.grad looks for itself by its name
            again = function(*tree_map(entered, args))
            outputs = [again] if isinstance(again, Tensor) else [t for t in again if isinstance(t, Tensor)]
            pairs = [(t, r) for t, r in zip(outputs, results, strict=True) if t.requires_grad]
            seeds = [torch.empty_like(t) for t, _ in pairs]
            for seed, (_, result) in zip(seeds, pairs, strict=True):
                record.put(seed, record.dims_of(result))
            outputs, inputs = [t for t, _ in pairs], [t for _, t in fresh]
            gradients = GRAD(outputs, inputs, seeds, allow_unused=True) if outputs and inputs else ()
        # A gradient has the dims of its argument; `unify` pins those that differ, with this reason
        for (value, _), gradient in zip(fresh, gradients, strict=bool(gradients)):
            for value_dim, dim in zip(
                record.dims_of(value), record.dims_of(gradient) if gradient is not None else (), strict=False
            ):
                unify(value_dim, dim, reason)
    except Exception:  # of any code of the user's, run in a way that it does not know
        # What this backward mixes is not known, so that its arguments and results stay whole
        for tensor in [*(value for value, _ in fresh), *results]:
            for dim in record.dims_of(tensor):
                pin(dim, reason)
    finally:
        record.is_examined = False


GRAD = torch.autograd.grad  # that of torch, while another stands in its place


def of_call(record: Record, func: Any, args: Any) -> Any:
    """The result of a call from Python that concerns gradients, which fakes do not have; None: it concerns none."""
    # A hook on a fake never runs. It may clamp the gradient, which must be complete for that
    if func in REGISTERS:
        x, hook = args[0], args[1]
        record.functions[id(x)] = "a hook"
        record.kept.append(x)
        _examine_hook(record, hook, x)
        return _Handle()
    name = getattr(func, "__name__", "")
    # Fakes require no gradient, and code branches on it, as in ``if x.requires_grad: x.register_hook(..)``
    if name == "__get__" and func == REQUIRES_GRAD:
        return torch.is_grad_enabled() and (id(args[0]) in record.differentiable or func(args[0]))
    if name == "__get__" and func in HISTORY and any(args[0] is t for _, t in record.inputs):
        where = record.modules[-1] or "the model"
        record.problems.append(("", f"{where} reads {HISTORY[func]} of an argument, which other calls have otherwise"))
    return None


class _Handle:
    def remove(self) -> None:
        pass


def _examine_hook(record: Record, hook: Callable[[Tensor], Any], x: Tensor) -> None:
    reason = record.reason("a hook of a gradient")
    record.is_examined = True
    try:
        gradient = torch.empty_like(x)
        record.put(gradient, record.dims_of(x))
        result = hook(gradient)
        for x_dim, dim in zip(
            record.dims_of(x), record.dims_of(result) if isinstance(result, Tensor) else (), strict=False
        ):
            unify(x_dim, dim, reason)
    except Exception:
        for dim in record.dims_of(x):
            pin(dim, reason)
    finally:
        record.is_examined = False


def pin_hooked(record: Record, name: str, tensor: Tensor, fake: Tensor) -> None:
    """Keeps a parameter whole that has hooks of its own: its shard would be another parameter, without them."""
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        for dim in record.dims_of(fake):
            pin(dim, Reason(f"a hook of the gradient of {name}"))


def take_backward_hooks(record: Record, name: str, module: nn.Module) -> str:
    """Takes the backward hooks of a module away, which fakes do not have; :func:`unchanged` puts them back.

    They see the gradients of arguments and results, so the module stays whole. Returns that in words; "": it has none.
    """
    if not module._backward_hooks and not module._backward_pre_hooks:
        return ""
    text = f"{name or 'the model'} has a backward hook"
    record.problems.append((name, text))
    module._backward_hooks = collections.OrderedDict()
    module._backward_pre_hooks = collections.OrderedDict()
    return text
