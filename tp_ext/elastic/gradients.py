"""The mean of gradients over replicas, which is kept apart until all of them have it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext.elastic.buffers import AllReduce
from tp_ext.parallel.grad_norm import gradient_terms, local_gradient
from tp_ext.parallel.gradient_sum import check_kinds, gradient_buckets, kinds_of_gradients


class MeanGradients:
    """The gradients of the mean loss over the tokens of all replicas, from the gradients of each replica's own mean.

    ``g = sum over replicas of (count_r / total) g_r``, ``total`` being the sum of the counts. The gradients themselves
    stay as they are until :meth:`install`: with fewer replicas they are summed again.

    Args:
        params: in the same order on all replicas.
        count: the number of tokens of this replica's mean; with 0 its gradients count as zero, whatever they are.
    """

    def __init__(self, params: Sequence[Tensor], count: float) -> None:
        self._params = list(dict.fromkeys(params))
        self.count = count
        self._held: list[tuple[Tensor, list[Tensor]]] = []
        self._missing: dict[int, Tensor] = {}

    @torch.no_grad()
    def sum(self, total: float, all_reduce: AllReduce) -> None:
        """Computes the mean over ``total`` tokens, in buffers of at most 64 MiB, or of one gradient.

        Communicates: an all-reduce of four numbers per parameter; those of the gradients.

        Raises:
            ValueError: see :func:`tp_ext.parallel.sum_gradients`.
        """
        self._held, self._missing = [], {}
        if not self._params:
            return
        # Without any token the gradients become zero, and not NaN
        share = self.count / max(total, 1e-300)
        kinds = kinds_of_gradients(self._params)
        all_reduce(kinds, True)
        grads: list[Tensor] = []
        for number, (param, has_grad) in enumerate(zip(self._params, check_kinds(self._params, kinds), strict=True)):
            terms = gradient_terms(param)
            if has_grad and param.grad is None:
                # Not the parameter's yet: the replica that has a gradient may be lost
                self._missing[number] = torch.zeros_like(param)
                terms = [self._missing[number], *terms]
            grads += map(local_gradient, terms)
        for bucket in gradient_buckets(grads):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            flat = flat * share if share else torch.zeros_like(flat)  # the mean over no tokens may be NaN
            all_reduce(flat, False)
            self._held.append((flat, bucket))

    @torch.no_grad()
    def install(self) -> None:
        """Replaces the gradients by the mean."""
        for number, grad in self._missing.items():
            self._params[number].grad = grad
        for flat, bucket in self._held:
            parts = flat.split([grad.numel() for grad in bucket])
            torch._foreach_copy_(bucket, [part.view(grad.shape) for part, grad in zip(parts, bucket, strict=True)])
        self._held, self._missing = [], {}
