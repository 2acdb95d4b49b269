"""Context parallelism of models of transformers: their attention is computed over the ranks that share a sequence."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tp_ext._checks import check_type
from tp_ext.context_layout import ContextLayout
from tp_ext.nn.attention.context_attention import CONTEXTS, AttentionOptions, check_context, context_attention

IGNORED = -100  # a label without a loss
REFUSED = ("position_bias", "s_aux", "cache")  # arguments of attention that it does not know
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def context_parallel(model: transformers.PreTrainedModel, *, context: str = "ring") -> transformers.PreTrainedModel:
    """Makes the attention of a model that of whole sequences whose tokens are cut over ranks, in place.

    ::

        mesh = tp_ext.init_mesh("cuda", cp=2, tp=4)
        model = from_pretrained(path, mesh=mesh, attn_implementation="sdpa").train()
        context_parallel(model)
        layout = tp_ext.ContextLayout(batch=4, seq=8192, group=mesh["cp"])
        model(**context_inputs(layout, ids, labels)).loss.backward()
        tp_ext.parallel.sum_gradients(model.parameters(), mesh["cp"])

    The model must attend by transformers' attention interface (``_supports_attention_backend``), and be sharded, if at
    all, before: a plan does not know of contexts.

    Args:
        context: ``"ring"``, ``"all_gather"`` or ``"ulysses"``, as of :class:`tp_ext.ParallelAttention`.

    Returns:
        The model. Its forward takes what :func:`context_inputs` returns, and neither masks nor caches.

    Communicates nothing; forward and backward as :func:`tp_ext.nn.attention.context_attention.context_attention`.

    Raises:
        TypeError: no model of transformers. ValueError: an unknown ``context``; a model whose attention or rotary
            embedding cannot be computed so, or that has dropout.

    Liu et al., "Ring Attention with Blockwise Transformers", arXiv:2310.01889.
    """
    check_type(transformers.PreTrainedModel, "a PreTrainedModel", model=model)
    check_context(context)
    if not model._supports_attention_backend:
        raise ValueError(f"model: {type(model).__name__} must use the attention interface of transformers")
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        # torch draws masks by the place in the local tensor: they would depend on how tokens are cut
        if isinstance(rate, float) and rate > 0:
            raise ValueError(f"model: {name} must not drop out over a context group, and has p = {rate}")
        # transformers takes the length from the positions of the call, here those of one rank
        if getattr(module, "rope_type", None) in LENGTH_DEPENDENT_ROPE:
            raise ValueError(f"model: {name} must not depend on the length of a sequence, and is {module.rope_type!r}")
    # Every part of a composite model has a configuration of its own
    for module in model.modules():
        if isinstance(getattr(module, "config", None), transformers.PreTrainedConfig):
            module.config._attn_implementation = f"tp_ext_{context}"
    model.register_forward_pre_hook(_check_inputs, with_kwargs=True)
    return model


def context_inputs(
    layout: ContextLayout, input_ids: Tensor, labels: Tensor | None = None, *, gradient_reduction: str = "sum"
) -> dict[str, Any]:
    """Returns the arguments of a causal language model's forward for this rank's tokens.

    Args:
        layout: of ``batch=, seq=``, over the context group.
        input_ids, labels: ``[batch, seq]``, whole, the same on all ranks of the group; labels as transformers takes
            them: not shifted, -100 where there is no loss.
        gradient_reduction: how the ranks' gradients are combined: ``"sum"``, by
            :func:`tp_ext.parallel.sum_gradients`; ``"mean"``, where DDP or FSDP2 has the context group in its mesh.

    The loss of a rank is its share: the sum over its tokens divided by the number of labels of all ranks (``"mean"``:
    and times p). The sum (mean) over the ranks is the loss of the whole batch. Communicates nothing.

    Raises:
        TypeError: no layout. ValueError: a layout of packed lengths; another shape or ``gradient_reduction``.
    """
    check_type(ContextLayout, "a ContextLayout", layout=layout)
    if layout.batch is None:
        raise ValueError("layout: must be one of batch= and seq=, not of packed lengths")
    if gradient_reduction not in ("sum", "mean"):
        raise ValueError(f"gradient_reduction: {gradient_reduction!r} must be 'sum' or 'mean'")
    shape = (layout.batch, max(layout.lengths, default=0))
    for name, ids in (("input_ids", input_ids), ("labels", labels)):
        if ids is not None and tuple(ids.shape) != shape:
            raise ValueError(f"{name}: shape {tuple(ids.shape)} must be {shape}, by the layout")
    local = layout.shard(input_ids, 1)
    positions = layout.positions.view(layout.batch, -1).to(local.device)
    inputs = {"input_ids": local, "position_ids": positions, "use_cache": False, "layout": layout}
    if labels is not None:
        # Before the cut: the token after a rank's last one may be on another rank
        shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        # Of all ranks: transformers divides this rank's sum of losses by it
        number = (shifted != IGNORED).sum()
        inputs["num_items_in_batch"] = number if gradient_reduction == "sum" else number / layout.group.size
        inputs["labels"] = inputs["shift_labels"] = layout.shard(shifted, 1)
    return inputs


def _check_inputs(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: raises ValueError, on all ranks, for what attention over a context group does not know."""
    arguments = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    # Keywords that forward does not name are bound under the name of its **kwargs
    arguments = {**arguments, **arguments.get("kwargs", {})}
    if arguments.get("layout") is None:
        raise ValueError("layout: must be given; call the model with context_inputs(layout, ids, labels)")
    for name in ("attention_mask", "past_key_values", "use_cache"):
        if arguments.get(name) is not None and arguments[name] is not False:
            raise ValueError(f"{name}: must be left out over a context group")
    if arguments.get("position_ids") is None:
        raise ValueError("position_ids: must be those of the layout, as context_inputs returns them")


def _attend(
    context: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    layout: ContextLayout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes an attention of transformers: q, k, v ``[batch, heads, seq_local, head_dim]`` -> ``[batch, seq_local,
    heads, head_dim]``."""
    # Models whose blocks drop unknown keywords attend without it, to this rank's tokens alone
    if layout is None:
        raise ValueError(f"layout: must reach the attention of {type(module).__name__}, whose code does not pass it on")
    if attention_mask is not None or dropout:
        raise ValueError(f"{'dropout' if dropout else 'attention_mask'}: must be left out over a context group")
    if unknown := [name for name in REFUSED if others.get(name) is not None]:
        raise ValueError(f"{unknown[0]}: the attention of {type(module).__name__} is not known over a context group")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options = AttentionOptions(causal, scaling, sliding_window, softcap)
    q, k, v = (t.transpose(1, 2).contiguous() for t in (query, key, value))
    return context_attention(q, k, v, layout, context, options), None


for _context in CONTEXTS:
    _function: Callable[..., Any] = functools.partial(_attend, _context)
    ALL_ATTENTION_FUNCTIONS.register(f"tp_ext_{_context}", _function)
