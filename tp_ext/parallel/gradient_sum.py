"""The sum of gradients over the ranks of a context group, for training without data parallelism."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tp_ext.group import Group, parallel_group, process_group
from tp_ext.parallel.grad_norm import gradient_terms, local_gradient

_BUCKET_BYTES = 64 << 20  # of a buffer of gradients that are summed together
# The index of a dtype is its number in the exchange: in the order of torch's names, aliases once
_DTYPES = tuple(dict.fromkeys(one for one in vars(torch).values() if isinstance(one, torch.dtype)))
# Above all of these numbers, so that a missing ``grad`` is never the least one
_ANY = 99


@torch.no_grad()
def sum_gradients(model: nn.Module | Iterable[Tensor], group: Group) -> None:
    """Sums the gradient of every parameter over the ranks of ``group``, in place.

    To be called after backward, by all ranks of the group. Over a context group each rank has the gradient of its own
    tokens, of the same parameters; their sum is that of all tokens. Where DDP or FSDP2 also has the context group in
    its mesh it does this itself, as a mean.

    Args:
        model: a module, or parameters in the same order on all ranks. Summed are ``.grad``, and ``main_grad`` where
            there is one; tied parameters once. A rank without ``.grad`` where another has one gets the sum.

    Communicates: an all-reduce of four numbers per parameter, and all-reduces of the gradients of each dtype, in
    buffers of 64 MiB.

    Raises:
        TypeError, ValueError: see :func:`tp_ext.group.group_name`; TypeError: no module and no parameters. ValueError,
            on all ranks: gradients of one parameter that have different dtypes on the ranks, or ``main_grad`` on some
            of them alone.
    """
    if isinstance(model, Tensor) or not isinstance(model, nn.Module | Iterable):
        raise TypeError(f"model: {type(model).__name__} must be a module, or the parameters in a list")
    if parallel_group(group).size == 1:
        return
    pg = process_group(group)
    tensors = model.parameters() if isinstance(model, nn.Module) else model
    params = list(dict.fromkeys(tensors))
    for param in params:
        if not isinstance(param, Tensor):
            raise TypeError(f"model: {type(param).__name__} must be a parameter, or the model be a module")
    if not params:
        return
    # The buffers must be the same on all ranks: without this a rank with other gradients would leave the others waiting
    kinds = kinds_of_gradients(params)
    dist.all_reduce(kinds, dist.ReduceOp.MAX, group=pg)
    grads: list[Tensor] = []
    for param, has_grad in zip(params, check_kinds(params, kinds), strict=True):
        # Another rank has a gradient here: all must give the buffers the same number of elements
        if has_grad and param.grad is None:
            param.grad = torch.zeros_like(param)
        grads += map(local_gradient, gradient_terms(param))
    for bucket in gradient_buckets(grads):
        # Many small all-reduces would be bound by latency
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        dist.all_reduce(flat, group=pg)
        parts = flat.split([grad.numel() for grad in bucket])
        torch._foreach_copy_(bucket, [part.view(grad.shape) for part, grad in zip(parts, bucket, strict=True)])


def kinds_of_gradients(params: Sequence[Tensor]) -> Tensor:
    """Returns four numbers for each parameter, whose largest of all ranks :func:`check_kinds` takes."""
    return torch.tensor([_kinds(param) for param in params], dtype=torch.int32, device=params[0].device)


def check_kinds(params: Sequence[Tensor], largest: Tensor) -> list[bool]:
    """Returns for each parameter whether some rank has a ``.grad``.

    Raises:
        ValueError: gradients of a parameter have different dtypes on the ranks, or ``main_grad`` on some of them alone.
    """
    kinds = []
    for number, (param, (grad, main_grad, other_grad, other_main_grad)) in enumerate(
        zip(params, largest.tolist(), strict=True)
    ):
        for name, most, least in (("grad", grad, -other_grad), ("main_grad", main_grad, -other_main_grad)):
            if least not in (most, _ANY):
                both = " and ".join(str(_DTYPES[kind - 1]) if kind else "None" for kind in (least, most))
                raise ValueError(
                    f"model: {name} of parameter {number}, of shape {tuple(param.shape)}, must be alike on all ranks, "
                    f"and is {both} on some"
                )
        kinds.append(bool(grad))
    return kinds


def _kinds(param: Tensor) -> tuple[int, int, int, int]:
    """Returns numbers whose largest of all ranks tell what gradients a parameter has there: the dtype of each, 0 for
    none, and the negative of it. A ``grad`` that a rank lacks may be of any dtype on the others."""
    main_grad = getattr(param, "main_grad", None)
    grad, main = _number(param.grad), 0 if main_grad is param.grad else _number(main_grad)
    return grad, main, -(grad or _ANY), -main


def _number(grad: Tensor | None) -> int:
    return 0 if grad is None else _DTYPES.index(grad.dtype) + 1


@torch.no_grad()
def average_over(params: Iterable[Tensor], group: Group) -> None:
    """Replaces the gradient of every parameter by its mean over the ranks of ``group``, as :func:`sum_gradients`. It
    leaves gradients of earlier steps, which are equal on all ranks, as they are."""
    size = parallel_group(group).size
    if size == 1:
        return
    params = list(dict.fromkeys(params))
    sum_gradients(params, group)
    for param in params:
        for grad in gradient_terms(param):
            grad.div_(size)


def check_over_axes(means: Sequence[tuple[Iterable[Tensor], Group]]) -> None:
    """Raises on all ranks, before the first of several means over axes of a mesh is taken, what :func:`check_kinds` of
    one of them would raise: on some ranks alone, while the others are at the next axis.

    Args:
        means: the parameters of each mean, and its axis.

    Communicates: with several axes an all-reduce of four numbers per parameter over each.
    """
    axes = [group for _, group in means if parallel_group(group).size > 1]
    params = list(dict.fromkeys(param for over, _ in means for param in over))
    if len(axes) < 2 or not params:
        return
    kinds = kinds_of_gradients(params)
    for axis in axes:
        dist.all_reduce(kinds, dist.ReduceOp.MAX, group=process_group(axis))
    check_kinds(params, kinds)


def gradient_buckets(grads: list[Tensor]) -> list[list[Tensor]]:
    """Returns the gradients in lists of one dtype and device, of about 64 MiB, in their order; none that is empty."""
    buckets: list[list[Tensor]] = []
    current: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for grad in grads:
        if grad.numel() == 0:
            continue
        size, key = grad.numel() * grad.element_size(), (grad.dtype, grad.device)
        bucket, filled = current.get(key, ([], _BUCKET_BYTES))
        # Sizes are the same on all ranks, hence the buckets. A larger gradient has one of its own
        if filled + size > _BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(grad)
        current[key] = (bucket, filled + size)
    return buckets
