"""Mistakes, made on purpose on the ranks alone, that the fuzzer has to find: those that libraries of the field have
shipped, and a few that would be easy to make here."""

import contextlib
from unittest.mock import patch

import torch
import torch.distributed as dist

from tp_ext import _ops
from tp_ext.model.model_groups import ModelGroups
from tp_ext.model.module import ParallelModule
from tp_ext.nn.attention.attention import ParallelAttention
from tp_ext.sharding import Layout


def norm_gradients_unsummed():
    """Norm weights used by sharded tokens as they are: under SP each rank has its own tokens' gradient."""
    real = ParallelModule.parameter

    def parameter(self, name, *given, **options):
        return getattr(self, name) if self.tp_shardings.get(name) is None else real(self, name, *given, **options)

    return patch.object(ParallelModule, "parameter", parameter)


def copied_heads_unsummed():
    """KV heads that several ranks hold, each with the gradient of its own query heads."""
    return patch.object(_ops, "copy_replicas_to_region", lambda value, *rest: value)


def mask_gradient_unsummed():
    """A learned mask of the attention scores, with the gradient of this rank's heads alone."""
    real = ParallelAttention._mask_local

    def local(self, mask, dtype):
        with patch.object(_ops, "copy_to_region", lambda x, group: x):
            return real(self, mask, dtype)

    return patch.object(ParallelAttention, "_mask_local", local)


def row_bias_p_times():
    """Each rank adds the bias to its partial sum."""
    real = _ops.row_parallel_linear

    def row(x, weight, bias, group, *rest):
        p = int(group.rpartition("/")[2]) if group else 1
        return real(x, weight, None if bias is None else p * bias, group, *rest)

    return patch.object(_ops, "row_parallel_linear", row)


def smoothing_over_the_local_vocabulary():
    """A rank spreads the smoothing over as many entries as it holds."""
    real = _ops.vocab_parallel_cross_entropy

    def loss(logits, target, group, start, local, full, ignored, smoothing, *rest):
        p = int(group.rpartition("/")[2]) if group else 1
        return real(logits, target, group, start, local, full, ignored, smoothing / p, *rest)

    return patch.object(_ops, "vocab_parallel_cross_entropy", loss)


def smoothing_without_logits_over_the_local_vocabulary():
    """The same in the loss of a head without its logits."""
    real = _ops.linear_cross_entropy

    def loss(x, weight, bias, target, group, start, local, full, ignored, smoothing, *rest):
        p = int(group.rpartition("/")[2]) if group else 1
        return real(x, weight, bias, target, group, start, local, full, ignored, smoothing / p, *rest)

    return patch.object(_ops, "linear_cross_entropy", loss)


def padding_in_the_loss():
    """The columns that pad the vocabulary are ones like others."""
    real = _ops.vocab_parallel_cross_entropy

    def loss(logits, target, group, start, local, full, *rest):
        rank, p = map(int, group.rpartition("@")[2].split("/")) if group else (0, 1)
        width = logits.shape[-1]
        whole = torch.tensor(width)
        if p > 1:
            dist.all_reduce(whole)
        place = (rank * width, width, int(whole)) if whole > full else (start, local, full)
        return real(logits, target, group, *place, *rest)

    return patch.object(_ops, "vocab_parallel_cross_entropy", loss)


def copies_in_the_norm():
    """Every rank counts what it holds: replicated gradients, and those of copied KV heads, as often as there are."""
    mistakes = contextlib.ExitStack()
    mistakes.enter_context(patch.multiple(ModelGroups, first=True, counts=lambda groups, layout, tensor=None: True))
    held = patch.object(Layout, "owned", lambda layout, grad: [chunk.tensor for chunk in layout.local_chunks(grad)[1]])
    mistakes.enter_context(held)
    return mistakes


def masks_of_the_local_index():
    """Dropout masks by the element's place on the rank: under SP all ranks drop alike."""
    real = _ops.bias_dropout_residual

    def dropout(x, bias, residual, seed, p, *index):
        return real(x, bias, residual, seed, p, *(max(x.numel(), 1),) * 2, 0)

    return patch.object(_ops, "bias_dropout_residual", dropout)


def column_gradient_unsummed():
    """The input's gradient is that of the rank's own features."""
    real = _ops.column_parallel_linear

    def column(x, weight, bias, group, sequence_parallel, *rest):
        return real(x, weight, bias, group if sequence_parallel else "", sequence_parallel, *rest)

    return patch.object(_ops, "column_parallel_linear", column)


MISTAKES = {
    function.__name__: function
    for function in (
        norm_gradients_unsummed,
        copied_heads_unsummed,
        mask_gradient_unsummed,
        row_bias_p_times,
        smoothing_over_the_local_vocabulary,
        smoothing_without_logits_over_the_local_vocabulary,
        padding_in_the_loss,
        copies_in_the_norm,
        masks_of_the_local_index,
        column_gradient_unsummed,
    )
}
