"""Calls from Python that are one operator for a plan: attention, cross entropy, dropout, group norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_ext.auto.record.channel_rules import group_norm
from tp_ext.auto.record.dims import Atom
from tp_ext.auto.record.multi_head import multi_head_attention
from tp_ext.auto.record.record import Record, tensors
from tp_ext.auto.record.rules import OperatorCall


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _cross_entropy(record: Record, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> None:
    """The classes may be sharded: three numbers of each row are summed over the ranks."""
    logits = _argument(args, kwargs, 0, "input")
    op = OperatorCall("cross_entropy", args, kwargs, [logits], [result], record, record.reason("cross_entropy"))
    op.contracted = op.dims()[1 if logits.dim() > 1 else 0]
    record.add(op, is_loss=True)


def _dropout(record: Record, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> None:
    x = _argument(args, kwargs, 0, "input")
    op = OperatorCall("dropout", args, kwargs, [x], [result], record, record.reason("dropout"))
    # Without training, or in place, the result is x itself, which keeps its dims and its maker
    if result is not x:
        op.give(op.dims())
        record.add(op)
    record.draw(
        "dropout", x, bool(_argument(args, kwargs, 1, "p", 0.5) and _argument(args, kwargs, 2, "training", True))
    )


def _attention(record: Record, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> None:
    """Batch and heads are the same in q, k, v and mask; with fewer heads in k and v, those of q are groups of them."""
    q, k, v = (_argument(args, kwargs, i, name) for i, name in enumerate(("query", "key", "value")))
    mask = _argument(args, kwargs, 3, "attn_mask")
    inputs = [q, k, v] + ([] if mask is None else [mask])
    name = "scaled_dot_product_attention"
    op = OperatorCall(name, args, kwargs, inputs, [result], record, record.reason(name))
    of_q, of_k, of_v = op.dims(0), op.dims(1), op.dims(2)
    for i in range(q.dim() - 2):
        op.unify(of_k[i], of_v[i])
        if q.shape[i] == k.shape[i]:
            op.unify(of_q[i], of_k[i])
        elif i == q.dim() - 3:
            # The query heads of a KV head follow each other, so that the KV heads are the slower factor
            op.unify(of_q[i], [*of_k[i], Atom(q.shape[i] // k.shape[i])])
        else:
            op.pin(of_q[i], of_k[i])
    op.unify(of_k[-2], of_v[-2])
    op.unify(of_q[-1], of_k[-1])
    # The softmax is over all keys. Sharded features of a head would leave the scores partial before it
    op.pin(of_k[-2], of_q[-1])
    if mask is not None:
        scores = [*of_q[:-1], of_k[-2]]
        for i, dim in enumerate(reversed(op.dims(3)), 1):
            # A dim of length 1 is broadcast, and is the same on all ranks
            if mask.shape[-i] != 1:
                op.unify(dim, scores[-i])
    op.give([*of_q[:-1], of_v[-1]])
    record.add(op)
    record.draw(name, result, bool(_argument(args, kwargs, 4, "dropout_p", 0.0)))


def _statistics(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """A tensor of the statistics of a group norm, as many as it has groups."""
    x = _argument(args, kwargs, 0, "input")
    return [x.new_empty(x.shape[0], _argument(args, kwargs, 1, "num_groups"))]


def _group_norm(record: Record, args: Sequence[Any], kwargs: Mapping[str, Any], result: list[Tensor]) -> None:
    inputs = [t for _, t in tensors([list(args), kwargs])]
    op = OperatorCall("native_group_norm", args, kwargs, inputs, result, record, record.reason("native_group_norm"))
    group_norm(op, result[1].shape[1])
    record.add(op)


# Tensors whose shapes show what those of the result do not: integers of a call that must be local
SHOWN: dict[Any, Callable[[Sequence[Any], Mapping[str, Any]], list[Tensor]]] = {
    F.group_norm: _statistics,
    torch.group_norm: _statistics,
}
WHOLE_CALLS: dict[Any, Callable[[Record, Sequence[Any], Mapping[str, Any], Any], None]] = {
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
    F.dropout: _dropout,
    F.multi_head_attention_forward: multi_head_attention,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
}
