"""``nn.MultiheadAttention`` and the layers of ``nn.Transformer``, sharded over their heads."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import transformer

from tp_ext import _ops
from tp_ext.auto.record.dims import Atom, Dim, atoms, concatenate
from tp_ext.auto.record.rules import OperatorCall, no_rule
from tp_ext.auto.record.torch_rules import span_of
from tp_ext.common_generator import begin_draw
from tp_ext.group import ParallelGroup
from tp_ext.nn.dropout import masked
from tp_ext.sharding import Sharding

SIGNATURE = inspect.signature(F.multi_head_attention_forward)
WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
NEED_ALL_HEADS = {"bias_k": "add_bias_kv", "add_zero_attn": "add_zero_attn", "static_k": "static_k",
                  "static_v": "static_v"}  # argument -> the option that sets it  # fmt: skip


@contextlib.contextmanager
def plain_paths() -> Iterator[None]:
    """Keeps torch's attention from its fused paths for inference, and from reading values of masks, while it lasts.

    The fused paths are operators that hide the weights of a whole layer; whether a mask is causal, a hint alone, is
    read from its values.
    """
    fused, detect = torch.backends.mha.get_fastpath_enabled(), transformer._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(False)
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        transformer._detect_is_causal_mask = detect


# ---------------------------------------------------------------- the rule


def multi_head_attention(record: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """The rule of ``F.multi_head_attention_forward``: q, k and v have the same heads, and so has what the output
    projection reads.

    It is recorded as two operators: one in the module, whose result has the heads; and the projection, in the module
    that holds its weight, which sums over the heads as a row-parallel layer does. So do the weights of attention that
    a caller asks for.
    """
    call = {name: SIGNATURE.parameters[name].default for name in SIGNATURE.parameters}
    call |= SIGNATURE.bind(*args, **kwargs).arguments
    output, averaged = result
    query, key, value, heads = call["query"], call["key"], call["value"], call["num_heads"]
    named = "multi_head_attention"
    bias, projection = call["out_proj_bias"], call["out_proj_weight"]
    weights = [call[name] for name in WEIGHTS if call[name] is not None]
    masks = [call[name] for name in ("key_padding_mask", "attn_mask") if call[name] is not None]
    inputs = [query, key, value, *weights, *masks]
    inputs += [] if call["in_proj_bias"] is None else [call["in_proj_bias"]]
    last = [projection] if bias is None else [bias, projection]
    option = next((NEED_ALL_HEADS[name] for name in NEED_ALL_HEADS if _is_set(call[name])), "")
    owner = record.parameters.get(id(projection), ("", None))[0].rpartition(".")[0]
    # Options that need all heads, and a projection that no module holds: without a rule, all dims are whole
    if option or not owner:
        extra = [call[name] for name in NEED_ALL_HEADS if isinstance(call[name], Tensor)]
        results = [t for t in (output, averaged) if t is not None]
        reason = record.reason(f"{option} of {named}" if option else named)
        op = OperatorCall(named, args, kwargs, [*inputs, *extra, *last], results, record, reason)
        no_rule(op)
        record.add(op)
        return
    batch, length = ([query.shape[1]] if query.dim() == 3 else []), query.shape[0]
    # Stand for tensors inside of torch's function, which is not traced; making them is no step of the model
    record.paused = True
    mixed = query.new_empty(length, *batch, projection.shape[1])
    scores = query.new_empty(*batch, heads, length, key.shape[0])
    record.paused = False
    op = OperatorCall(named, args, kwargs, inputs, [mixed, scores], record, record.reason(named))
    of_heads: Dim = [Atom(heads), Atom(projection.shape[1] // heads, op.reason)]
    _tie_projections(op, call, of_heads)
    of_q, of_k, of_v = op.dims(0), op.dims(1), op.dims(2)
    op.unify(of_k[0], of_v[0])
    for batch_q, batch_k, batch_v in zip(of_q[1:-1], of_k[1:-1], of_v[1:-1], strict=True):
        op.unify(batch_q, batch_k)
        op.unify(batch_q, batch_v)
    # The softmax is over all keys. Sharded features of an argument would leave q, k or v partial before it
    op.pin(of_k[0], of_q[-1], of_k[-1], of_v[-1])
    # A mask [batch x heads, query, key] comes with all heads: the layer takes those of its rank
    for mask in masks:
        op.pin(*op.dims_of(mask)[: mask.dim() - 2], *op.dims_of(mask)[-1:])
    op.give([*of_q[:-1], of_heads])
    op.give([*of_q[1:-1], of_heads[:1], of_q[0], of_k[0]], 1)
    record.add(op)
    record.modules.append(owner)
    try:
        _project(record, mixed, last, output, of_heads)
        if averaged is not None:
            op = OperatorCall("mean", (), {}, [scores], [averaged], record, record.reason("mean of attention weights"))
            op.contracted = of_heads[:1]
            record.add(op)
    finally:
        record.modules.pop()


def _is_set(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)


def _tie_projections(op: OperatorCall, call: Mapping[str, Any], of_heads: Dim) -> None:
    """Each projection's rows are heads; those of q | k | v in one weight are parts of it."""
    width = call["embed_dim_to_check"]
    for tensor in (call["in_proj_weight"], call["in_proj_bias"]):
        if tensor is None:
            continue
        rows = op.dims_of(tensor)[0]
        concatenate(rows, [width, 2 * width], op.reason)
        for start in range(0, 3 * width, width):
            part = span_of(atoms(rows), start, start + width)
            op.unify(part, of_heads) if part is not None else op.pin(rows)
    for name in WEIGHTS:
        if call[name] is not None:
            op.pin(op.dims_of(call[name])[1])
            # The rows of in_proj_weight are q | k | v, and are unified above, part by part
            if name != "in_proj_weight":
                op.unify(op.dims_of(call[name])[0], of_heads)


def _project(record: Any, mixed: Tensor, last: list[Tensor], output: Tensor, of_heads: Dim) -> None:
    op = OperatorCall("mm" if len(last) == 1 else "addmm", (), {}, [*last[:-1], mixed, last[-1]], [output], record,
            record.reason("multi_head_attention"))  # fmt: skip
    features, heads = op.dims_of(last[-1])
    op.unify(heads, of_heads)
    for bias in last[:-1]:
        op.unify(op.dims_of(bias)[0], features)
    op.pin(features)  # its layer sums over the heads
    op.contracted = of_heads
    op.give([*op.dims_of(mixed)[:-1], features])
    record.add(op)


def attends(module: nn.Module) -> bool:
    """True if a module's forward is that of ``nn.MultiheadAttention``."""
    return type(module).forward is nn.MultiheadAttention.forward


# ---------------------------------------------------------------- the module


class ShardedAttention(nn.MultiheadAttention):
    """Multi-head attention of which a rank has some heads; its output projection is row-parallel and sums.

    out = sum over ranks of concat_h(softmax(q_h k_h^T / sqrt(d) + mask) v_h) W_out^T + b over the rank's heads h.
    Arguments, options and results are those of ``nn.MultiheadAttention``: attention weights are the mean over all heads
    or those of each head. Never constructed: it becomes the class of an existing module.

    Shapes: in_proj_weight ``[3 heads_local d, embed]`` in parts q | k | v, or q_proj_weight ``[heads_local d, embed]``
    and so on; query, key, value and results as documented by torch.
    Communicates: forward, one all-reduce of the output; with ``need_weights`` one all-reduce of their mean, or one
    all-gather of those of all heads.
    """

    tp_group: ParallelGroup | None  # None: on fakes, where shapes alone count
    heads_of_ranks: list[int]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the output and, with ``need_weights``, the attention weights."""
        # As torch, whose is_causal is a hint on a mask and makes none
        if is_causal and attn_mask is None:
            raise RuntimeError("attn_mask: must be given with is_causal, a hint that it is causal")
        dtype, other = query.dtype, F._none_or_dtype(attn_mask)
        padding = F._canonical_mask(key_padding_mask, "key_padding_mask", other, "attn_mask", dtype)
        mask = F._canonical_mask(attn_mask, "attn_mask", None, "", dtype, False)
        batched = query.dim() == 3
        q, k, v = self.projected(query, key, value)  # [.., heads d], in the order of dims of the arguments
        q, k, v = (self.by_heads(t, batched) for t in (q, k, v))  # [batch, heads, tokens, d]
        # As torch: the hint replaces the mask where no other mask is merged with it
        is_causal = is_causal and padding is None and not need_weights
        mask = None if is_causal else self.merged(mask, padding, *q.shape[:2])
        dropped = self.dropout if self.training else 0.0
        weights = None
        # The fused kernel returns no weights, and draws masks that no other number of ranks has
        if need_weights or dropped:
            scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)
            if is_causal:
                later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
                scores = scores.masked_fill(later, -torch.inf)
            scores = scores if mask is None else scores + mask
            # As torch: a row that sees nothing is NaN where weights are asked for, else zero
            unseen = (scores == -torch.inf).all(-1, keepdim=True) & (not need_weights)
            weights = scores.masked_fill(unseen, 0.0).softmax(-1).masked_fill(unseen, 0.0)
            if dropped and self.tp_group is not None:
                begin_draw((self.tp_group,), weights.device)
                weights = masked(weights, dropped, True, group=self.tp_group.name, dim=1, sizes=self.heads_of_ranks)
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal)
        mixed = mixed.transpose(1, 2).flatten(-2)
        if batched and not self.batch_first:
            mixed = mixed.transpose(0, 1)
        out = self.out_proj(mixed if batched else mixed.squeeze(0))
        if not need_weights or weights is None:
            return out, None
        weights = self.of_all_heads(weights, average_attn_weights)
        return out, weights if batched else weights.squeeze(0)

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """q, k and v of this rank's heads; by one product where all are made of the same tensor."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and query is key and key is value:
            return F.linear(query, weight, bias).chunk(3, -1)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def by_heads(self, x: Tensor, batched: bool) -> Tensor:
        """``[batch, heads, tokens, d]`` of a projection."""
        x = x.unflatten(-1, (-1, self.head_dim))
        if not batched:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def merged(self, mask: Tensor | None, padding: Tensor | None, batch: int, heads: int) -> Tensor | None:
        """The sum of both masks, broadcast to ``[batch, heads_local, query, key]``."""
        # Code around the layer knows nothing of ranks: its mask has the heads of all of them
        if mask is not None and mask.dim() == 3:  # [batch heads, query, key], of all heads
            first = 0 if self.tp_group is None else sum(self.heads_of_ranks[: self.tp_group.rank])
            mask = mask.view(batch, self.num_heads, *mask.shape[1:])[:, first : first + heads]
        if padding is None:
            return mask
        padding = padding.view(batch, 1, 1, -1)
        return padding if mask is None else mask + padding

    def of_all_heads(self, weights: Tensor, average: bool) -> Tensor:
        """The attention weights, their mean over all heads or those of each."""
        group = self.tp_group
        # The mean is linear in the heads: an all-reduce of one map communicates less than a gather of all maps
        if average:
            mean = weights.sum(1) / self.num_heads
            return mean if group is None else _ops.reduce_from_region(mean, group.name)
        # Nothing communicates on fakes, and the code around the layer expects all heads
        if group is None:
            return weights.new_empty(weights.shape[0], self.num_heads, *weights.shape[2:])
        return _ops.gather_from_region(weights, group.name, 1, self.heads_of_ranks)


def shard_attention(module: nn.Module, sharding: Sharding, group: ParallelGroup) -> None:
    """Makes attention, whose projections are shards already, compute this rank's heads."""
    module.__class__ = ShardedAttention
    module.tp_group = group  # type: ignore[assignment]
    parts = len(sharding.parts)  # q | k | v
    width = module.head_dim
    module.heads_of_ranks = [size // parts // width for size in sharding.local_sizes(group.size)]  # type: ignore[operator, assignment]


def forward_on_fakes(module: nn.Module) -> Callable[..., Any]:
    """Returns the forward of attention with local shapes of its projections, which are those of the module."""
    local = copy.copy(module)
    local.__class__ = ShardedAttention
    local.tp_group = None  # type: ignore[assignment]
    return local.forward
