"""A guard's look at a call that ``torch.compile`` traces.

A compiled graph cannot run a proof, and needs none: what the traced code reads, the compiler compares at each call, and
traces again where it differs. So the guard looks once for each trace, at the values that the trace is made with."""

from __future__ import annotations

import threading
from typing import Any, cast

import torch
from torch._dynamo.comptime import ComptimeContext, comptime


class Unknown:
    """An argument without a value in a trace, such as a cache."""


def value_of(variable: Any) -> Any:
    """What a variable of the compiler stands for; a tensor on meta for a tensor."""
    try:
        return variable.as_python_constant()
    except Exception:  # of several types: it is no constant
        pass
    items = getattr(variable, "items", None)
    if isinstance(items, dict):
        return {key.vt.as_python_constant(): value_of(inner) for key, inner in items.items()}
    if isinstance(items, list | tuple):
        return variable.python_type()(map(value_of, items))
    try:
        value = variable.as_proxy().node.meta["example_value"]
    except Exception:  # of several types: it is no part of the graph
        return Unknown()
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return _hint(value)
    if not isinstance(value, torch.Tensor):
        return Unknown()
    return torch.empty([*map(_hint, value.shape)], dtype=value.dtype, device="meta", requires_grad=value.requires_grad)


def _hint(number: Any) -> Any:
    return number if isinstance(number, int | float) else number.node.hint


def look_while_traced(guard: Any, module: Any, args: Any, kwargs: Any) -> None:
    """Lets a guard look at a call, with ``guard.look_at_trace``."""
    comptime(_look)


def _look(context: ComptimeContext) -> None:
    names = ("guard", "module", "args", "kwargs")
    guard, module, args, kwargs = (
        cast("Any", context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()) for name in names
    )
    call = module.value, value_of(args), value_of(kwargs)
    raised: list[BaseException] = []
    with_gradients = torch.is_grad_enabled()

    def look() -> None:
        try:
            # The compiler waits, and cannot compile what runs here
            with torch.set_grad_enabled(with_gradients), torch.compiler.set_stance("force_eager"):
                guard.value.look_at_trace(*call)
        except BaseException as error:  # raised in the thread that compiles
            raised.append(error)

    # In a thread of its own, to which no mode of the compiler belongs
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
