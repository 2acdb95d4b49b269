"""Embedding and output head of a language model, with the vocabulary sharded over the ranks."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext._checks import check_flag, check_int, check_type
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.invariance import current_blocks, refuse_in_blocks, using_blocks
from tp_ext.model.layouts import refuse_computed
from tp_ext.model.same_input import DebugMode, check_same_input
from tp_ext.nn.forms import Dense, FormedLinear, TwoAxes, form_of_options, main_grad_of
from tp_ext.nn.linear_cross_entropy import linear_cross_entropy
from tp_ext.nn.loss import vocab_parallel_cross_entropy
from tp_ext.nn.parallel_linear import check_one_axis_options
from tp_ext.nn.sampling import vocab_parallel_argmax, vocab_parallel_sample
from tp_ext.random import Init, Normal, torch_linear_init
from tp_ext.sharding import Part, Sharding, split_sizes
from tp_ext.share_sizes import Weights, refuse_in_shares


def vocab_sharding(vocab_size: int, p: int, pad_to_multiple_of: int | None, shares: Weights | None = None) -> Sharding:
    """Returns the sharding of ``[vocab_size, ..]``: like ``tensor_split``, by shares, in equal lengths that are
    multiples of ``pad_to_multiple_of``, with padding as the last rows, or in the blocks of the context."""
    check_int(least=1, vocab_size=vocab_size)
    if vocab_size < p and shares is None:
        raise ValueError(f"vocab_size: {vocab_size} must be at least the number of ranks, p = {p}")
    blocks = current_blocks()
    if blocks is not None:
        if pad_to_multiple_of is not None:
            raise ValueError(f"pad_to_multiple_of: {pad_to_multiple_of} must not be given in tp_invariant")
        if vocab_size < blocks:
            raise ValueError(f"vocab_size: {vocab_size} must be at least the blocks of tp_invariant, {blocks}")
        return Sharding(0, (Part(vocab_size, blocks=blocks, shares=shares),))
    if pad_to_multiple_of is None:
        return Sharding(0, (Part(vocab_size, shares=shares),))
    if shares is not None:
        refuse_in_shares(pad_to_multiple_of=pad_to_multiple_of)
    check_int(least=1, pad_to_multiple_of=pad_to_multiple_of)
    width = -(-vocab_size // (p * pad_to_multiple_of)) * pad_to_multiple_of
    return Sharding(0, (Part(vocab_size, padding=p * width - vocab_size),))


class _VocabParallel(FormedLinear):
    """Base class of embedding and head: a weight ``[vocab_local, n]`` that may be tied to the other's."""

    has_blocks = True
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
        weight_group: Group,
        activations: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(group, sequence_parallel=sequence_parallel, weight_group=weight_group, activations=activations)
        _, p, rank = self.tp_group
        self.vocab_size = vocab_size
        self.sharding = vocab_sharding(vocab_size, p, pad_to_multiple_of, self.shares)
        sizes = self.sharding.local_sizes(p)
        # By the operators, which take blocks from the context
        known = self.shares is None or (sizes == split_sizes(vocab_size, p) and vocab_size >= p)
        known = known or self.invariant_blocks is not None
        self.vocab_sizes = None if known else sizes
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
        gathered = self.sharding.local_shape((vocab_size, features), rank, p)
        self._weight_shape = self.local_shape("weight") if "weight" in self.operator_gathers else gathered

    def check_shape(self, weight: Tensor) -> None:
        if weight.shape != self._weight_shape:
            raise ValueError(
                f"weight: shape {tuple(weight.shape)} must be {tuple(self._weight_shape)}, this rank's rows of a "
                f"vocabulary of {self.vocab_size}; tied layers need the same pad_to_multiple_of"
            )


class VocabParallelEmbedding(_VocabParallel):
    """Embedding y = weight[ids]: the rows of the table are sharded, each rank looks up its own, the ranks add.

    Shapes: ids of any shape, integers, the same on all ranks -> y ``[*ids.shape, dim]`` (SP: ``[tokens_local, dim]``,
    ids flattened). weight ``[vocab_local, dim]``. Exactly ``nn.Embedding``: only one term of the sum is not zero.

    Communicates: forward, one all-reduce of y (SP: reduce-scatter, and backward an all-gather).

    Args:
        num_embeddings, embedding_dim: of the full table.
        group, sequence_parallel: as :class:`ColumnParallelLinear`.
        weight_group: a second group, over which the table is sharded on its columns; see :class:`ColumnParallelLinear`.
        activations: ``"hidden"``: y is ``[*ids.shape, dim_local]``, reduce-scattered on its last dim.
        padding_idx: as ``nn.Embedding``: this row is initialised to zero and gets no gradient from the embedding.
        pad_to_multiple_of: all ranks hold equally many rows, a multiple of this; the rows beyond the vocabulary are
            never looked up and never in a full state dict. Default: split as ``torch.tensor_split``.
        init: default N(0, 1), as ``nn.Embedding``.

    Raises:
        ValueError: fewer rows than ranks; ``padding_idx`` outside the vocabulary. IndexError (CPU; a device assert on
            CUDA): an id outside the vocabulary.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        group: Group = NOT_GIVEN,
        sequence_parallel: bool = False,
        weight_group: Group = None,
        activations: str = "replicated",
        pad_to_multiple_of: int | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int(least=1, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if padding_idx is not None and not (
            type(padding_idx) is int and -num_embeddings <= padding_idx < num_embeddings  # a bool is an int
        ):
            raise ValueError(f"padding_idx: {padding_idx!r} must be in [{-num_embeddings}, {num_embeddings}), or None")
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        super().__init__(
            num_embeddings,
            embedding_dim,
            Normal() if init is None else init,
            pad_to_multiple_of,
            group=group,
            sequence_parallel=sequence_parallel,
            weight_group=weight_group,
            activations=activations,
            device=device,
            dtype=dtype,
        )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, group: Group = NOT_GIVEN, **options: Any) -> Self:
        """Returns the layer with this rank's shard of the table of ``embedding``.

        Args:
            embedding: the dense layer, with the same values on all ranks; it is not changed.
            options: as in the constructor; ``padding_idx``, ``device`` and ``dtype`` are those of ``embedding``.

        To tie a head to it, make both with the same ``pad_to_multiple_of``, then set
        ``head.weight = embedding.weight``.

        Raises:
            TypeError: ``embedding`` is not an ``nn.Embedding``. ValueError: it has ``max_norm``,
                ``scale_grad_by_freq`` or ``sparse``.
        """
        check_type(nn.Embedding, "an nn.Embedding", embedding=embedding)
        refuse_computed("embedding", embedding, "weight")
        # max_norm writes to the table in forward; our gradient is dense and not scaled
        for name, default in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(embedding, name) != default:
                raise ValueError(
                    f"embedding.{name}: {getattr(embedding, name)!r} must be {default}: there is no such option"
                )
        layer = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            padding_idx=embedding.padding_idx,
            group=group,
            device="meta",
            dtype=embedding.weight.dtype,
            **options,
        ).to_empty(device=embedding.weight.device)
        layer.copy_shards(embedding)
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        if DebugMode.on:
            check_same_input("ids", ids, self.tp_group)
        hidden = self.activations == "hidden"
        weight = self.parameter("weight")
        self.check_shape(weight)
        y = _ops.vocab_parallel_embedding(
            ids,
            weight,
            "" if hidden else self.tp_group.name,  # "": not summed
            self.vocab_start,
            self.vocab_local,
            self.vocab_size,
            self.sequence_parallel,
            self._sizes_of(ids),
        )
        if hidden:
            y = _ops.reduce_scatter_region(y, self.tp_group.name, -1)
        return y if self.padding_idx is None else self._without_gradient_of_padding(y, ids)

    def _sizes_of(self, ids: Tensor) -> list[int] | None:
        """Returns each rank's number of tokens in blocks or by shares, under sequence parallelism; None: those of
        tensor_split."""
        if not self.sequence_parallel or (self.invariant_blocks is None and self.token_shares is None):
            return None
        return self.token_sizes(ids.numel())

    def _without_gradient_of_padding(self, y: Tensor, ids: Tensor) -> Tensor:
        assert self.padding_idx is not None
        padding = ids.eq(self.padding_idx)
        if self.sequence_parallel:
            # The operator has flattened the ids and split their tokens alike
            p, sizes = self.tp_group.size, self._sizes_of(ids)
            shards = padding.flatten().tensor_split(p) if sizes is None else padding.flatten().split(sizes)
            padding = shards[self.tp_group.rank]
        return torch.where(padding[..., None], y.detach(), y)

    def after_init(self, name: str, shard: Tensor) -> None:
        if self.padding_idx is not None and not shard.is_meta:
            row = self.padding_idx - self.vocab_start
            # Only one rank has the row
            if 0 <= row < self.vocab_local:
                shard[row].zero_()

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, {padding}local={tuple(self.weight.shape)}, "
            f"{self.parallel_repr()}"
        )


class VocabParallelLMHead(_VocabParallel):
    """Output head logits_local = x weight^T (+ bias), with a sharded vocabulary and logits that are never gathered.

    Shapes: x ``[.., hidden]`` (SP: ``[tokens_local, hidden]``) -> ``[.., vocab_local]``, from which :meth:`loss`,
    :meth:`sample` and :meth:`argmax` compute a loss or ids. Tied to an embedding by ``head.weight = embedding.weight``.

    Communicates as :class:`ColumnParallelLinear`.

    Args:
        hidden_size, vocab_size, bias: of the full layer.
        group, sequence_parallel, pad_to_multiple_of: as :class:`VocabParallelEmbedding`.
        weight_group, activations, grad_accumulation_fusion, reshard_after_forward: as :class:`ColumnParallelLinear`.
        init: initialiser of the weight; default and bias as ``nn.Linear``.

    Raises:
        ValueError: fewer entries than ranks; in forward, a tied weight of another shape.
    """

    operator_gathers = ("weight", "bias")
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        group: Group = NOT_GIVEN,
        sequence_parallel: bool = False,
        weight_group: Group = None,
        activations: str = "replicated",
        grad_accumulation_fusion: bool = False,
        reshard_after_forward: bool = True,
        pad_to_multiple_of: int | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int(least=1, hidden_size=hidden_size, vocab_size=vocab_size)
        check_flag(
            bias=bias,
            grad_accumulation_fusion=grad_accumulation_fusion,
            reshard_after_forward=reshard_after_forward,
        )
        default = torch_linear_init(hidden_size)
        super().__init__(
            vocab_size,
            hidden_size,
            default if init is None else init,
            pad_to_multiple_of,
            group=group,
            sequence_parallel=sequence_parallel,
            weight_group=weight_group,
            activations=activations,
            device=device,
            dtype=dtype,
        )
        refuse_in_blocks(self.invariant_blocks, grad_accumulation_fusion=bool(grad_accumulation_fusion))
        if self.invariant_blocks is not None:
            self._segments = self.sharding.segments(self.tp_group.rank, self.tp_group.size)
        self.hidden_size = self.in_features = hidden_size
        self.grad_accumulation_fusion = grad_accumulation_fusion
        self.reshard_after_forward = reshard_after_forward
        self.skip_bias_add, self.overlap_chunks = False, 1
        self.form = form_of_options(self)
        if isinstance(self.form, TwoAxes):
            check_one_axis_options(grad_accumulation_fusion=grad_accumulation_fusion)
        if bias:
            self.add_parameter("bias", (vocab_size,), default, sharding=self.sharding, device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, group: Group = NOT_GIVEN, **options: Any) -> Self:
        """Returns the head with this rank's shard of the weights of ``linear``.

        Args:
            linear: the dense layer, with the same values on all ranks; it is not changed.
            options: as in the constructor; ``device`` and ``dtype`` are those of ``linear``.

        Tied weights stay tied only if they are tied again: ``head.weight = embedding.weight``.

        Raises:
            TypeError: ``linear`` is not an ``nn.Linear``.
        """
        check_type(nn.Linear, "an nn.Linear", linear=linear)
        refuse_computed("linear", linear, "weight", "bias")
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            group=group,
            device="meta",
            dtype=linear.weight.dtype,
            **options,
        ).to_empty(device=linear.weight.device)
        layer.copy_shards(linear)
        return layer

    def forward(
        self,
        x: Tensor,
        total_tokens: int | None = None,
        *,
        weight: Tensor | None = None,
        loss: dict[str, Any] | None = None,
    ) -> Any:
        """Computes the local logits of x.

        Args:
            x: ``[.., hidden]``.
            total_tokens: under SP, the length of dim 0 over all ranks, if p does not divide it.
            weight: used instead of the layer's own, ``[vocab_local, hidden]``; for instance the embedding's, on another
                pipeline stage.
            loss: target and options of :meth:`loss`, which calls the module so that its hooks run, those of FSDP2
                among them; the loss is then computed instead of the logits.
        """
        if loss is None or not isinstance(self.form, Dense):
            return self.form.column(self, x, weight, total_tokens)[0]
        if self.token_shares is not None:
            loss = {**loss, "token_sizes": self.token_sizes(total_tokens, x)}
        weight = self.parameter("weight", weight)
        self.check_shape(weight)
        return linear_cross_entropy(
            x,
            weight,
            group=self.tp_group.name,
            bias=self.parameter("bias"),
            vocab_size=self.vocab_size,
            sizes=self.vocab_sizes,
            sequence_parallel=self.sequence_parallel,
            total_tokens=total_tokens,
            main_grad=main_grad_of(weight) if self.grad_accumulation_fusion else None,
            **loss,
        )

    def loss(
        self,
        x: Tensor,
        target: Tensor,
        total_tokens: int | None = None,
        *,
        weight: Tensor | None = None,
        keep_logits: bool = False,
        **options: Any,
    ) -> Any:
        """Computes :func:`vocab_parallel_cross_entropy` of this head's logits of x, over its group and vocabulary, by
        :func:`linear_cross_entropy`, which holds the logits of one chunk of tokens at a time.

        Args:
            x, total_tokens, weight: as :meth:`forward`.
            target: ``[..]``, of all tokens, also under SP, as the logits.
            keep_logits: computes the logits of all tokens and keeps them for backward: :meth:`forward`, then
                :func:`vocab_parallel_cross_entropy`. It can be faster with few tokens or a small vocabulary. A head on
                two axes (``weight_group``, ``activations="hidden"``) always does.
            options: ``ignore_index``, ``label_smoothing``, ``z_loss``, ``reduction``, ``mean_over``,
                ``gradient_reduction``; without the logits also ``return_entropy`` and ``chunk_tokens``, with them
                ``inplace_backward``.

        Communicates and raises as these functions.
        """
        check_flag(keep_logits=keep_logits)
        # The operator without logits knows one axis, and chunks of tokens that depend on the local vocabulary
        if keep_logits or not isinstance(self.form, Dense):
            logits = self(x, total_tokens, weight=weight)
            refuse_in_blocks(self.invariant_blocks, return_entropy=options.pop("return_entropy", None) or None)
            if self.invariant_blocks is not None:
                options.pop("chunk_tokens", None)
            with using_blocks(self.invariant_blocks):
                return vocab_parallel_cross_entropy(
                    logits, target, self.tp_group.name, vocab_size=self.vocab_size, sizes=self.vocab_sizes, **options
                )
        return self(x, total_tokens, weight=weight, loss={"target": target, **options})

    @torch.no_grad()
    def sample(
        self, x: Tensor, total_tokens: int | None = None, *, weight: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Draws ids ``[..]`` by :func:`vocab_parallel_sample` from this head's logits of x, the same on all ranks.

        Args:
            x, total_tokens, weight: as :meth:`forward`; for the next token x is ``h[:, -1]``, the last one's.
            options: ``temperature``, ``top_k``, ``top_p``.

        Communicates and raises as both of them.
        """
        logits = self(x, total_tokens, weight=weight)
        with using_blocks(self.invariant_blocks):
            options["sizes"] = self.vocab_sizes
            return vocab_parallel_sample(logits, self.tp_group.name, vocab_size=self.vocab_size, **options)

    @torch.no_grad()
    def argmax(self, x: Tensor, total_tokens: int | None = None, *, weight: Tensor | None = None) -> Tensor:
        """Returns :func:`vocab_parallel_argmax` of this head's logits of x: ids ``[..]``, the same on all ranks.

        Args and communication as :meth:`sample`.
        """
        logits = self(x, total_tokens, weight=weight)
        with using_blocks(self.invariant_blocks):
            return vocab_parallel_argmax(logits, self.tp_group.name, vocab_size=self.vocab_size, sizes=self.vocab_sizes)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, {self.vocab_size}, bias={self.bias is not None}, local={tuple(self.weight.shape)}, "
            f"{self.parallel_repr()}"
        )
