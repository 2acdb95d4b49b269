"""The two ends of a language model with their vocabulary dealt over the ranks: embedding and output head."""

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.module import ParallelModule, check_flags, check_positive
from tp_ext.parallel_linear import main_grad_of
from tp_ext.random import Init, Normal, torch_linear_init
from tp_ext.sharding import Part, Sharding


def vocab_sharding(vocab_size: int, p: int, pad_to_multiple_of: int | None) -> Sharding:
    """How ``[vocab_size, ..]`` is cut: like ``tensor_split``, or equal lengths that are multiples of
    ``pad_to_multiple_of``, the last rows being padding."""
    check_positive(vocab_size=vocab_size)
    if vocab_size < p:
        raise ValueError(f"vocab_size: {vocab_size} must be at least the number of ranks, p = {p}")
    if pad_to_multiple_of is None:
        return Sharding(0, (Part(vocab_size),))
    check_positive(pad_to_multiple_of=pad_to_multiple_of)
    width = -(-vocab_size // (p * pad_to_multiple_of)) * pad_to_multiple_of
    return Sharding(0, (Part(vocab_size, padding=p * width - vocab_size),))


class _VocabParallel(ParallelModule):
    """What both ends share: a weight ``[vocab_local, n]`` that may be tied to the other's."""

    weight: nn.Parameter

    def __init__(
        self,
        vocab_size: int,
        features: int,
        init: Init,
        pad_to_multiple_of: int | None,
        *,
        group: Group,
        sequence_parallel: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(group, sequence_parallel=sequence_parallel)
        _, p, rank = self.tp_group
        self.vocab_size = vocab_size
        self.sharding = vocab_sharding(vocab_size, p, pad_to_multiple_of)
        (rows,) = self.sharding.slices(rank, p)
        self.vocab_start, self.vocab_local = rows.start, rows.stop - rows.start
        self.add_parameter(
            "weight",
            (vocab_size, features),
            init,
            sharding=self.sharding,
            device=device,
            dtype=dtype,
        )
        self._weight_shape = self.local_shape("weight")

    def _checked(self, weight: Tensor) -> Tensor:
        if weight.shape != self._weight_shape:
            raise ValueError(
                f"weight: shape {tuple(weight.shape)} must be {tuple(self._weight_shape)}, this rank's rows of a "
                f"vocabulary of {self.vocab_size}; tied layers need the same pad_to_multiple_of"
            )
        return weight


class VocabParallelEmbedding(_VocabParallel):
    """y = weight[ids]; the rows of the table are sharded, each rank looks up its own and the ranks add.

    Shapes: ids of any shape, integers, the same on all ranks -> y ``[*ids.shape, dim]`` (SP: ``[tokens_local, dim]``,
    ids flattened). weight ``[vocab_local, dim]``. Exactly ``nn.Embedding``: one addend is not zero.

    Communicates: forward, one all-reduce of y (SP: reduce-scatter, and backward an all-gather).

    Args:
        num_embeddings, embedding_dim: of the full table.
        group, sequence_parallel: as everywhere.
        pad_to_multiple_of: all ranks hold equally many rows, a multiple of this; the rows beyond the vocabulary are
            never looked up and never in a full state dict. Default: split as ``torch.tensor_split``.
        init: default N(0, 1), as ``nn.Embedding``.

    Raises:
        ValueError: fewer rows than ranks. IndexError (CPU; a device assert on CUDA): an id outside the vocabulary.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Group = NOT_GIVEN,
        sequence_parallel: bool = False,
        pad_to_multiple_of: int | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        super().__init__(
            num_embeddings,
            embedding_dim,
            Normal() if init is None else init,
            pad_to_multiple_of,
            group=group,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        return _ops.vocab_parallel_embedding(
            ids,
            self._checked(self.weight),
            self.tp_group.name,
            self.vocab_start,
            self.vocab_local,
            self.vocab_size,
            self.sequence_parallel,
            None,
        )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.parallel_repr()}"


class VocabParallelLMHead(_VocabParallel):
    """logits_local = x weight^T (+ bias): the output head, its vocabulary sharded, its logits never gathered.

    Shapes: x ``[.., hidden]`` (SP: ``[tokens_local, hidden]``) -> ``[.., vocab_local]``, for
    :func:`vocab_parallel_cross_entropy`. Tied to an embedding by ``head.weight = embedding.weight``.

    Communicates as :class:`ColumnParallelLinear`.

    Args:
        hidden_size, vocab_size, bias: of the full layer.
        group, sequence_parallel, pad_to_multiple_of: as :class:`VocabParallelEmbedding`.
        grad_accumulation_fusion: as :class:`ColumnParallelLinear`.
        init: of the weight; default and bias as ``nn.Linear``.

    Raises:
        ValueError: fewer entries than ranks; in forward, a tied weight of another shape.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        group: Group = NOT_GIVEN,
        sequence_parallel: bool = False,
        grad_accumulation_fusion: bool = False,
        pad_to_multiple_of: int | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(hidden_size=hidden_size, vocab_size=vocab_size)
        check_flags(bias=bias, grad_accumulation_fusion=grad_accumulation_fusion)
        default = torch_linear_init(hidden_size)
        super().__init__(
            vocab_size,
            hidden_size,
            default if init is None else init,
            pad_to_multiple_of,
            group=group,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        self.hidden_size = hidden_size
        self.grad_accumulation_fusion = grad_accumulation_fusion
        if bias:
            self.add_parameter("bias", (vocab_size,), default, sharding=self.sharding, device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor, total_tokens: int | None = None, *, weight: Tensor | None = None) -> Tensor:
        """
        Args:
            x: ``[.., hidden]``.
            total_tokens: under SP, the length of dim 0 over all ranks, if p does not divide it.
            weight: used instead of the layer's own, ``[vocab_local, hidden]``: the embedding's, on another pipeline
                stage, say.
        """
        weight = self._checked(self.weight if weight is None else weight)
        return _ops.column_parallel_linear(
            x,
            weight,
            self.bias,
            self.tp_group.name,
            self.sequence_parallel,
            self.token_sizes(total_tokens),
            main_grad_of(weight) if self.grad_accumulation_fusion else None,
            1,
        )

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.vocab_size}, bias={self.bias is not None}, {self.parallel_repr()}"
