"""RMSNorm and LayerNorm: torch's modules, with complete gradients of the weights under sequence parallelism."""

import itertools
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext._checks import check_flag, check_number, refuse_group
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.invariance import block_start, blocks_of_rank, blocks_of_ranks, refuse_compiled
from tp_ext.model.fused_paths import is_plain
from tp_ext.model.layer_shares import need_not_meet
from tp_ext.model.module import ParallelModule
from tp_ext.random import Constant
from tp_ext.sharding import Sharding

EPSILON_32, EPSILON_64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


class _Norm(ParallelModule):
    """Base class of both norms: the normalised dims, flattened to one, and the replicated parameters."""

    has_blocks = True
    weight: nn.Parameter | None
    eps: float | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        parameters: dict[str, float | None],  # their first values, None: without it
        eps: float | None,
        elementwise_affine: bool,
        *,
        group: Group,
        sequence_parallel: bool,
        weight_group: Group,
        activations: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        refuse_group(normalized_shape=normalized_shape)
        super().__init__(group, sequence_parallel=sequence_parallel, weight_group=weight_group, activations=activations)
        if not sequence_parallel:
            need_not_meet(self)  # it has nothing to do with other ranks
        shape = tuple(normalized_shape) if isinstance(normalized_shape, Sequence) else (normalized_shape,)
        if not shape or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in shape):
            raise ValueError(f"normalized_shape: {normalized_shape!r} must be one or more integers of at least 1")
        self.normalized_shape = shape
        # Only the last dim is sharded: of a row of several dims a rank would have no range
        if activations == "hidden" and len(shape) > 1:
            raise ValueError(f"normalized_shape: {normalized_shape!r} must be one dim with activations='hidden'")
        sharding = Sharding(0, shape) if activations == "hidden" else None
        self._over_group = sharding is not None and self.tp_group.size > 1
        self._local_shape = (
            shape if sharding is None else (sharding.local_size(self.tp_group.rank, self.tp_group.size),)
        )
        for name, value in parameters.items():
            if value is None:
                self.register_parameter(name, None)
            else:
                self.add_parameter(name, shape, Constant(value), sharding=sharding, device=device, dtype=dtype)
        self._names = tuple(parameters)
        self.eps = eps
        self.elementwise_affine = elementwise_affine

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is not None and residual.shape != x.shape:
            raise ValueError(f"residual: shape {tuple(residual.shape)} must be that of x, {tuple(x.shape)}")
        if self.invariant_blocks is not None:
            y, total = self._in_token_blocks(x, residual)
            return y.view(x.shape) if residual is None else (y.view(x.shape), total.view(x.shape))
        flat, parameters = self._flat(x), map(self.parameter, self._names)
        if self._over_group:
            total = x if residual is None else x + residual
            y = self._compute_over_group(total, *parameters)
        elif len(self.normalized_shape) == 1:
            y, total = self._compute(x, residual, *parameters)
        else:
            rest = None if residual is None else self._flat(residual)
            y, total = self._compute(flat, rest, *map(_flattened, parameters))
            y, total = y.view(x.shape), total.view(x.shape)
        return y if residual is None else (y, total)

    def _flat(self, x: Tensor) -> Tensor:
        shape = self._local_shape
        if x.shape[-len(shape) :] != shape:
            share = ", of which this rank's share is " + str(shape) if self._over_group else ""
            raise ValueError(f"x: shape {tuple(x.shape)} must end in normalized_shape = {self.normalized_shape}{share}")
        return x.flatten(-len(shape)) if len(shape) > 1 else x

    # [Note: parameters of tokens are summed by blocks of tokens]
    def _in_token_blocks(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Computes the norm of each block of tokens by itself, and returns y and x + residual, flattened."""
        flat = self._flat(x)
        flat = flat.flatten(0, -2) if flat.dim() > 1 else flat[None]  # a token of any batch: as under SP
        rest = None if residual is None else self._flat(residual).reshape(flat.shape)
        (_, p, rank), blocks, local = self.tp_group, self.invariant_blocks, flat.shape[0]
        assert blocks is not None
        over_ranks, total = self.sequence_parallel and p > 1, local
        if over_ranks:  # no rank can know it from its own tokens
            total = int(_ops.reduce_from_region(torch.tensor(float(local)), self.tp_group.name))
        held = blocks_of_rank(blocks, rank, p) if over_ranks else range(blocks)
        starts = [block_start(total, block, blocks) for block in (*held, held.stop)]
        lengths = [stop - start for start, stop in itertools.pairwise(starts)]
        if sum(lengths) != local:
            raise ValueError(
                f"x: {local} tokens on rank {rank} must be {sum(lengths)}, its blocks of the {total} of all ranks"
            )
        return self.over_segments(flat, rest, 0, list(zip(held, lengths, strict=True)), over_ranks)

    def over_segments(
        self, x: Tensor, residual: Tensor | None, dim: int, segments: Sequence[tuple[int, int]], over_ranks: bool
    ) -> tuple[Tensor, Tensor]:
        """Computes the norm of slices of x along ``dim`` by themselves; their gradients of the parameters are summed by
        one tree over the blocks of the group, or of this rank.

        Args:
            segments: block and length of each slice; block -1: of a slice whose gradient another rank counts.

        Returns: y, and x + residual, or x.
        """
        refuse_compiled()
        group, blocks = self.tp_group, self.invariant_blocks
        assert blocks is not None
        first = blocks_of_rank(blocks, group.rank, group.size).start if over_ranks else 0
        copies: dict[str, list[Tensor]] = {}
        of_ranks = blocks_of_ranks(blocks, group.size) if over_ranks else [int(blocks)]
        for name in self._names:
            if (param := _flattened(self.parameter(name))) is not None:
                copies[name] = _ops.block_copies(param, group.name if over_ranks else "", of_ranks)
        segments = segments or [(first, 0)]
        lengths = [length for _, length in segments]
        slices, rest = x.split(lengths, dim), None if residual is None else residual.split(lengths, dim)
        results = []
        for i, (block, length) in enumerate(segments):
            if length == 0 and i:
                continue  # one slice at least: the result of an empty x
            used = {name: of[block - first] if block >= 0 else _without_gradient(of[0]) for name, of in copies.items()}
            results.append(self._compute(slices[i], None if rest is None else rest[i], **used))
        ys, totals = zip(*results, strict=True)
        return torch.cat(ys, dim), x if residual is None else torch.cat(totals, dim)

    def _compute(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns y and x + residual, or x; x ``[.., n]``, whole rows."""
        raise NotImplementedError

    def _compute_over_group(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Returns y of shares of rows."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}, {self.parallel_repr()}"
        )


def _flattened(param: Tensor | None) -> Tensor | None:
    return param if param is None or param.dim() == 1 else param.flatten()


def _without_gradient(param: Tensor) -> Tensor:
    """Returns the parameter with a gradient of zeros: detached, its node would not sum over the ranks on this one."""
    return torch.where(torch.zeros((), dtype=torch.bool, device=param.device), param, param.detach())


class RMSNorm(_Norm):
    """RMS norm y = x / sqrt(mean(x^2) + eps) * weight, over the last dims; otherwise as ``torch.nn.RMSNorm``.

    Shapes: x ``[.., *normalized_shape]`` -> the same. Statistics in fp32 (fp64 for fp64); saved for backward: x and one
    number per row. Communicates: under SP, backward, one all-reduce of the weight's gradient. ``activations="hidden"``:
    one all-reduce of one number per row, forward and backward; ``norm(x, residual)`` adds first, in a pass of its own.

    ``norm(x, residual)``, of a sublayer's output and its residual stream, returns ``(y, total)``: total = x + residual,
    rounded to their dtype, and y = norm(total), in one pass over memory, with the same bits as the two steps. residual
    has x's shape, dtype and device (ValueError, TypeError; under autocast their dtypes may differ, as in torch). Saved
    for backward: total, which stays alive anyway, instead of x. Backward adds the gradient of total in the same pass: x
    and residual share one gradient.

    Args:
        normalized_shape, eps, elementwise_affine: as torch; ``eps=None`` is the machine epsilon of the dtype that the
            statistics are computed in (fp32 for half types).
        group: the tensor-parallel group.
        sequence_parallel: x is ``[tokens_local, ..]``, sharded on dim 0.
        weight_group: a second group, over which the weight is sharded once more, see :class:`ColumnParallelLinear`.
        activations: ``"hidden"``: x and the weight are ``[.., n_local]``, sharded over ``group``, and the ranks sum the
            squares of each row. ``normalized_shape`` is one dim then.

    Zhang and Sennrich, "Root mean square layer normalization" (arXiv:1910.07467).
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        group: Group = NOT_GIVEN,
        sequence_parallel: bool = False,
        weight_group: Group = None,
        activations: str = "replicated",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if eps is not None:
            check_number(eps=eps)
        check_flag(elementwise_affine=elementwise_affine)
        super().__init__(
            normalized_shape,
            {"weight": 1.0 if elementwise_affine else None},
            eps,
            elementwise_affine,
            group=group,
            sequence_parallel=sequence_parallel,
            weight_group=weight_group,
            activations=activations,
            device=device,
            dtype=dtype,
        )

    def is_one_kernel(self) -> bool:
        """Returns whether the layer is nothing but the norm of whole rows of one dim: :meth:`after_sum` may be called
        in its place."""
        whole_rows = not self._over_group and self.invariant_blocks is None and len(self.normalized_shape) == 1
        return whole_rows and is_plain(self, RMSNorm)

    def after_sum(self, x: Tensor, residual: Tensor, group: str) -> tuple[Tensor, Tensor]:
        """Returns ``norm(sum of x over the ranks of group, residual)``, by one operator.

        Communicates: one all-reduce of x.
        """
        self._flat(x)  # raises before the collective
        return _ops.all_reduce_rms_norm(x, residual, self.parameter("weight"), self._epsilon(x), group)

    def _epsilon(self, x: Tensor) -> float:
        if self.eps is not None:
            return self.eps
        # Statistics of half types are computed in fp32
        return EPSILON_64 if x.dtype == torch.float64 else EPSILON_32

    def _compute(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            return _ops.rms_norm(x, weight, self._epsilon(x)), x
        return _ops.rms_norm_residual(x, residual, weight, self._epsilon(x))

    def _compute_over_group(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return _ops.sharded_rms_norm(x, weight, self._epsilon(x), self.tp_group.name, *self.normalized_shape)


class LayerNorm(_Norm):
    """Layer norm y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dims, as torch's.

    Shapes, precision, communication and ``norm(x, residual)`` as :class:`RMSNorm`, with two numbers per row and, under
    SP, a second all-reduce for the bias. ``activations="hidden"``: forward an all-gather of two numbers per row,
    backward an all-reduce. Nothing is saved if only the bias is trained and x is not sharded on its last dim.

    Args:
        normalized_shape, eps, elementwise_affine, bias: as torch.
        group: the tensor-parallel group.
        sequence_parallel: x is ``[tokens_local, ..]``, sharded on dim 0.
        weight_group, activations: as :class:`RMSNorm`, also for the bias.
    """

    bias: nn.Parameter | None
    eps: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        group: Group = NOT_GIVEN,
        sequence_parallel: bool = False,
        weight_group: Group = None,
        activations: str = "replicated",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_number(eps=eps)
        check_flag(elementwise_affine=elementwise_affine, bias=bias)
        super().__init__(
            normalized_shape,
            {"weight": 1.0 if elementwise_affine else None, "bias": 0.0 if elementwise_affine and bias else None},
            eps,
            elementwise_affine,
            group=group,
            sequence_parallel=sequence_parallel,
            weight_group=weight_group,
            activations=activations,
            device=device,
            dtype=dtype,
        )

    def _compute(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            return _ops.layer_norm(x, weight, bias, self.eps), x
        return _ops.layer_norm_residual(x, residual, weight, bias, self.eps)

    def _compute_over_group(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return _ops.sharded_layer_norm(x, weight, bias, self.eps, self.tp_group.name, *self.normalized_shape)
