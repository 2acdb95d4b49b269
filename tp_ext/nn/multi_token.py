"""Multi-token prediction: modules after a model that predict the tokens after the next one, and their loss."""

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from tp_ext._checks import check_int, check_number, check_tensor, check_type, refuse_group
from tp_ext.context_layout import ContextLayout
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.model.module import ParallelModule
from tp_ext.nn.embedding import VocabParallelEmbedding, VocabParallelLMHead
from tp_ext.nn.linear import RowParallelLinear
from tp_ext.nn.norm import RMSNorm
from tp_ext.random import Init
from tp_ext.regions import all_to_all_region
from tp_ext.share_sizes import split_sizes

BlockArgument = nn.Module | Sequence[nn.Module] | Callable[[], nn.Module]
"""Type of ``block``: a module, one for each depth, or a function that makes one."""


def next_tokens(tokens: Tensor, depth: int, *, layout: ContextLayout | None = None, fill: int) -> Tensor:
    """Returns the tokens 1, 2, .. ``depth`` places further on in the same sequence: the ids that a module of
    :class:`MultiTokenPrediction` looks up, and, of the labels, what it has to predict.

    ``y[.., i, k - 1] = tokens[.., i + k]``, or ``fill`` where the sequence has ended.

    Args:
        tokens: ``[.., seq]``, of any type: each row is a sequence. With ``layout`` all tokens of the sequences, before
            ``layout.shard``: ``[tokens]``, the sequences one after the other; with its ``batch`` also ``[batch, seq]``.
        depth: number of places, at least 1.
        layout: of packed sequences, or of those of a context group.
        fill: an id of the vocabulary for ids, the ``ignore_index`` of the loss for labels.

    Returns:
        ``[*tokens.shape, depth]``.

    Communicates nothing: a context-parallel rank calls it on whole sequences, and shards the result by its layout.

    Raises:
        TypeError: arguments of another type. ValueError: a ``depth`` below 1, tokens that are not those of the layout.
    """
    check_int(least=1, depth=depth)
    check_int(fill=fill)
    check_tensor(tokens=tokens)
    if layout is not None and not isinstance(layout, ContextLayout):
        raise TypeError(f"layout: {type(layout).__name__} must be a ContextLayout, or None")
    if tokens.dim() == 0:
        raise ValueError("tokens: a 0-d tensor must have the tokens of sequences")
    if layout is not None and tokens.numel() != layout.tokens:
        raise ValueError(f"tokens: {tokens.numel()} must be the {layout.tokens} tokens of all sequences of the layout")
    lengths = (tokens.shape[-1],) * (tokens[..., 0].numel() if tokens.numel() else 0)
    if layout is not None:
        lengths = layout.lengths
    flat = tokens.flatten()
    sizes = torch.tensor(lengths, dtype=torch.int64, device=tokens.device)
    end = sizes.cumsum(0).repeat_interleave(sizes)  # of each token's sequence
    place = torch.arange(flat.numel(), device=tokens.device)[:, None] + torch.arange(1, depth + 1, device=tokens.device)
    inside = place < end[:, None]
    values = flat[place.clamp(max=max(0, flat.numel() - 1))] if flat.numel() else flat[:, None].expand(-1, depth)
    return torch.where(inside, values, fill).reshape(*tokens.shape, depth)


class MultiTokenPrediction(ParallelModule):
    """Multi-token prediction: modules k = 1, 2, .. ``depth`` that predict token i + 1 + k from the model's hidden state
    of token i, one after the other::

        h_k = block_k(projection_k(concat(RMSNorm(h_(k - 1)), RMSNorm(embedding(token i + k)))))
        logits_k = head(RMSNorm(h_k))

    h_0 is the hidden state of the model. Embedding and head are those of the model: this module has layers of its own
    with the same parameters, so that it can be on another stage of a pipeline than the embedding is. The parameters
    then are copies, whose gradients the pipeline sums (:func:`tp_ext.parallel.pipeline_stages`).

    ::

        self.mtp = tp_ext.MultiTokenPrediction(
            512, make_block, depth=2, embedding=self.embedding, head=self.head, group=tp
        )
        ...
        hidden = self.norm(x)
        loss = self.head.loss(hidden, labels)
        next_ids = tp_ext.next_tokens(ids, 2, fill=0)  # [batch, seq, 2]
        loss = loss + self.mtp.loss(self.mtp(hidden, next_ids), tp_ext.next_tokens(labels, 2, fill=-100))

    Shapes: hidden ``[.., hidden]``, next_ids ``[.., depth]`` -> ``depth`` tensors of the shape of hidden. SP: hidden
    ``[tokens_local, hidden]``, next_ids of all tokens. In ``depths[k - 1]``: ``hidden_norm``, ``embedding_norm``,
    ``projection`` (``weight`` ``[hidden, 2 hidden / p]``, the hidden state's columns first), ``block``, ``norm``.

    Communicates, for each depth: the embedding's sum; the projection forward an all-reduce of ``[tokens, hidden]``,
    backward an all-gather of ``[tokens, 2 hidden]``; SP: an all-to-all of ``[tokens, 2 hidden]`` each way, a
    reduce-scatter of ``[tokens, hidden]`` forward and an all-gather backward, and backward the sums of the norms'
    weights; and what the block does. :meth:`loss`: as :func:`linear_cross_entropy`, for each depth.

    Args:
        hidden_size: of the model.
        block: the transformer block of each depth: a function without arguments that makes one, a list of ``depth``
            modules, or for ``depth=1`` a module. It takes the hidden state and the keywords of forward, as a block of
            the model, and must be causal: at the end of a sequence its input has ``fill`` in place of tokens.
        depth: number of modules.
        embedding, head: the layers of the model, tied or not. If they are to be tied, tie them before. Their group and
            ``sequence_parallel`` are those given here.
        loss_weight: factor of :meth:`loss`, lambda: it is ``loss_weight / depth`` times the sum of those of the depths.
        eps: of the norms; None: the machine epsilon, as :class:`RMSNorm`.
        group, sequence_parallel: as :class:`ColumnParallelLinear`.
        init: of the projection; default: that of ``nn.Linear``.

    Raises:
        TypeError: an embedding, head or block of another type. ValueError: sizes, groups or ``sequence_parallel`` that
            are not those of this module; layers on two axes; another number of blocks than ``depth``.

    DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv:2412.19437), section 2.2; Gloeckle et al., "Better & Faster Large
    Language Models via Multi-token Prediction" (arXiv:2404.19737).
    """

    def __init__(
        self,
        hidden_size: int,
        block: BlockArgument,
        *,
        depth: int = 1,
        embedding: VocabParallelEmbedding,
        head: VocabParallelLMHead,
        loss_weight: float = 0.3,
        eps: float | None = None,
        group: Group = NOT_GIVEN,
        sequence_parallel: bool = False,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        refuse_group(hidden_size=hidden_size)
        check_int(least=1, hidden_size=hidden_size, depth=depth)
        check_number(loss_weight=loss_weight)
        super().__init__(group, sequence_parallel=sequence_parallel)
        self.hidden_size, self.depth, self.loss_weight = hidden_size, depth, loss_weight
        p = self.tp_group.size
        self._features = None if self.shares is None else split_sizes(2 * hidden_size, p, self.shares)
        self._check_layer("embedding", embedding, VocabParallelEmbedding, "embedding_dim")
        self._check_layer("head", head, VocabParallelLMHead, "hidden_size")
        self.embedding, self.head = _with_same_parameters(embedding), _with_same_parameters(head)
        self._originals = {"embedding": _LayerOfModel(embedding), "head": _LayerOfModel(head)}
        self.register_load_state_dict_post_hook(_share_after_loading)
        parallel: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
        options: dict[str, Any] = parallel | {"device": device, "dtype": dtype}
        self.depths = nn.ModuleList()
        for one in _blocks(block, depth):
            projection = RowParallelLinear(
                2 * hidden_size,
                hidden_size,
                bias=False,
                input_is_parallel=sequence_parallel,  # else it cuts what all ranks have
                init=init,
                **options,
            )
            layers = {name: RMSNorm(hidden_size, eps, **options) for name in ("hidden_norm", "embedding_norm", "norm")}
            self.depths.append(nn.ModuleDict({**layers, "projection": projection, "block": one}))

    def _check_layer(self, name: str, layer: Any, kind: type[ParallelModule], width: str) -> None:
        if not isinstance(layer, kind):
            raise TypeError(f"{name}: {type(layer).__name__} must be a {kind.__name__}")
        if getattr(layer, width) != self.hidden_size:
            raise ValueError(f"{name}: its width {getattr(layer, width)} must be hidden_size = {self.hidden_size}")
        ranks = [module.tp_group.ranks if module.tp_group.size > 1 else [] for module in (layer, self)]
        if ranks[0] != ranks[1]:
            raise ValueError(f"{name}: its group, ranks {ranks[0]}, must be group, ranks {ranks[1]}")
        if layer.sequence_parallel != self.sequence_parallel:
            raise ValueError(
                f"{name}: its sequence_parallel = {layer.sequence_parallel} must be that of this module, "
                f"{self.sequence_parallel}"
            )
        if (layer.shares, layer.token_shares) != (self.shares, self.token_shares):
            raise ValueError(f"{name}: its shares, {layer.shares}, must be those of this module, {self.shares}")
        if layer.activations == "hidden" or layer.weight_group.size > 1:
            raise ValueError(f"{name}: must not be on two axes, by weight_group or activations='hidden'")

    def forward(self, hidden: Tensor, next_ids: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
        """Computes the hidden states of all depths, normalised, as :meth:`loss` and the head take them.

        Args:
            hidden: the model's hidden state; SP: of this rank's tokens.
            next_ids: ``[.., depth]``, integers: of each token the ids of the ``depth`` next ones
                (:func:`next_tokens`), of all tokens, the same on all ranks; over a context group of this rank's.
            keywords: of the blocks.

        Raises:
            TypeError: no tensor. ValueError: another last dim, or another number of tokens than hidden has.
        """
        self._share("embedding")
        self._check(hidden, next_ids, "next_ids")
        total = next_ids[..., 0].numel() if self.sequence_parallel else None
        sizes = self.token_sizes(total)
        results = []
        for k, module in enumerate(cast(list[nn.ModuleDict], self.depths)):
            ids = next_ids[..., k].flatten()
            normalised = module["hidden_norm"](hidden)  # first: what it refuses, it refuses before any collective
            looked_up = self.embedding(ids).view(hidden.shape)
            pair = torch.cat([normalised, module["embedding_norm"](looked_up)], -1)
            if sizes is not None:
                # From tokens to features, in which the projection's weight is cut
                pair = all_to_all_region(pair, self.tp_group.name, -1, 0, self._features, sizes)
            hidden = module["block"](module["projection"](pair, total), **keywords)
            results.append(module["norm"](hidden))
        return tuple(results)

    def loss(self, hiddens: Sequence[Tensor], labels: Tensor, *, reduction: str = "mean", **options: Any) -> Tensor:
        """Computes the loss of the hidden states, ``loss_weight / depth`` times that of each depth, without the
        logits of all tokens.

        Args:
            hiddens: the result of forward.
            labels: ``[.., depth]``, int64, of all tokens, also under SP: of token i the labels of the ``depth`` next
                ones, ``next_tokens(labels, depth, fill=-100)`` of the labels of the model.
            reduction: ``"mean"``: the sum of the depths' means, each over its own valid labels (with ``mean_over``
                those of all ranks), 0-d; ``"sum"``: the depths' sums, ``[depth]``, for :func:`tp_ext.parallelize` with
                a ``count`` of as many numbers, or other denominators.
            options: of :meth:`VocabParallelLMHead.loss`.

        Communicates as :func:`linear_cross_entropy`, ``depth`` times.

        Raises:
            TypeError: no tensors. ValueError: another reduction, or another number of hidden states or labels; see
                also :func:`linear_cross_entropy`.
        """
        self._share("head")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction: {reduction!r} must be 'mean' or 'sum'")
        if len(hiddens) != self.depth:
            raise ValueError(f"hiddens: {len(hiddens)} must be {self.depth}, those of all depths")
        for hidden in hiddens:
            self._check(hidden, labels, "labels")
        losses = []
        for k, hidden in enumerate(hiddens):
            flat = hidden.reshape(-1, self.hidden_size)
            total = labels[..., k].numel() if self.sequence_parallel else None
            losses.append(self.head.loss(flat, labels[..., k].flatten(), total, reduction=reduction, **options))
        scaled = torch.stack(losses) * (self.loss_weight / self.depth)
        return scaled.sum() if reduction == "mean" else scaled

    def _share(self, name: str, refuse: bool = True) -> None:
        """Takes the parameters of the model's embedding or head, where loading or a conversion has made others of them.

        Raises:
            RuntimeError: they are not available here, and ``refuse`` is true.
        """
        layer, original = cast(ParallelModule, getattr(self, name)), self._originals[name].module()
        if original is None:
            return
        for local, param in layer._parameters.items():
            shared = original._parameters.get(local)
            # A stage of a pipeline has a copy; functional_call has tensors; shapes are found without memory
            if shared is param or param is None or local in layer.__dict__.get("tp_copies", ()):
                continue
            if type(param) is not nn.Parameter or (refuse and param.is_meta):
                continue
            if type(shared) is nn.Parameter and _kind(shared) == _kind(param):
                layer._parameters[local] = shared
            elif refuse:
                raise RuntimeError(
                    f"{name}.{local}: is not that of the model's {name} any more, which was converted by itself; "
                    "convert the whole model, and let one fully_shard have both"
                )

    def _share_all(self) -> None:
        """Takes them wherever parameters are listed, copied or saved, which may be before the first forward."""
        for name in self._originals:
            self._share(name, refuse=False)  # some of the model may be converted already

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        # By which parameters() of every model lists them, for an optimizer for instance
        self._share_all()
        yield from super().named_modules(*args, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._share_all()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._share_all()
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        self._share_all()
        return self.__dict__

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._share_all()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _check(self, hidden: Any, tokens: Any, name: str) -> None:
        for what, tensor in (("hidden", hidden), (name, tokens)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{what}: {type(tensor).__name__} must be a tensor")
        if hidden.dim() == 0 or hidden.shape[-1] != self.hidden_size:
            raise ValueError(f"hidden: shape {tuple(hidden.shape)} must end in hidden_size = {self.hidden_size}")
        if tokens.dim() == 0 or tokens.shape[-1] != self.depth:
            raise ValueError(f"{name}: shape {tuple(tokens.shape)} must end in depth = {self.depth}")
        count, rows = tokens[..., 0].numel(), hidden[..., 0].numel()
        sizes = self.token_sizes(count)
        own = count if sizes is None else sizes[self.tp_group.rank]
        if rows != own:
            raise ValueError(
                f"{name}: {count} tokens must be those of hidden, where this rank has {rows} and must have {own}"
            )

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, depth={self.depth}, loss_weight={self.loss_weight}, {self.parallel_repr()}"


class _LayerOfModel:
    """A weak reference to a layer of the model, which another stage of a pipeline may have. Copied with its model."""

    def __init__(self, module: nn.Module | None) -> None:
        self.module: Callable[[], nn.Module | None] = (lambda: None) if module is None else weakref.ref(module)

    def __reduce__(self) -> Any:
        return _LayerOfModel, (self.module(),)


def _share_after_loading(module: nn.Module, _: Any) -> None:
    cast(MultiTokenPrediction, module)._share_all()


def _kind(param: nn.Parameter) -> tuple[Any, ...]:
    return param.shape, param.dtype, param.device


def _with_same_parameters(layer: Any) -> Any:
    """Returns a layer like this one with the same parameters: a module may be in one stage of a pipeline alone."""
    copied = copy.deepcopy(layer, {id(param): param for param in layer.parameters()})
    copied.tied.update(name for name, param in layer._parameters.items() if param is not None)
    return copied


def _blocks(block: Any, depth: int) -> list[nn.Module]:
    """Returns the block of each depth.

    Raises:
        TypeError: no module or function. ValueError: another number of blocks, one block for two depths.
    """
    if isinstance(block, nn.Module) and not isinstance(block, nn.ModuleList):
        blocks = [block]
    elif isinstance(block, Sequence | nn.ModuleList):
        blocks = list(block)
    elif callable(block):
        blocks = [block() for _ in range(depth)]
    else:
        raise TypeError(f"block: {block!r} must be a module, a list of modules, or a function that makes one")
    for one in blocks:
        check_type(nn.Module, "a module", block=one)
    if len(blocks) != depth:
        raise ValueError(f"block: {len(blocks)} blocks must be {depth}, one for each depth; or a function makes them")
    if len(set(map(id, blocks))) < depth:
        raise ValueError(f"block: its {depth} blocks must be different modules")
    return blocks
