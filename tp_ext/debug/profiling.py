"""Names of modules in profiles, which show the layer that an operator or a collective belongs to."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function


@contextmanager
def annotate(model: nn.Module) -> Iterator[None]:
    """Makes the forward of every module a range of the profiler, ``blocks.0.mlp (ParallelMLP)``, in a ``with`` block.

    Ranges nest as calls do, and operators and collectives of a forward lie within the range of their module. Operators
    of backward carry the sequence number of the forward operator that they belong to, which ``torch.profiler`` draws as
    an arrow. It works by hooks, which are removed at the end: outside of the block nothing is slower; inside, each call
    costs some microseconds, and compiled modules are compiled anew. One thread at a time.

    Communicates nothing.
    """
    ranges: list[record_function] = []

    def enter(label: str) -> Any:
        def hook(*_: Any) -> None:
            ranges.append(record_function(label))
            ranges[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    hooks = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        # Before the module's other hooks, whose time is the module's, too
        hooks.append(module.register_forward_pre_hook(enter(f"{name} ({kind})" if name else kind), prepend=True))
        # Also after an error: a range that stays open would take in all that follows
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
