"""Caches of attention layers, of keys and values or of latents, so that the next token costs one row instead of all."""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext._checks import check_flag, check_int, check_tensor
from tp_ext.nn.attention.scaled_dot_product import (
    AttentionOptions,
    attention,
    attention_by_kv_head,
    explicit_attention,
    restricted,
    visible,
)


class TokenCache(nn.Module):
    """Buffers with a slot for each token; the length is an int, or with ``static`` the 0-d tensor ``position``.

    A subclass names its buffers, ``[batch_size, heads, max_seq, features]`` each, in ``contents``. How a cache is used:
    :class:`tp_ext.KVCache`.

    Args:
        batch_size, max_seq: number and maximal length of the sequences, prompt and padding included.
        sizes: heads and features of each buffer.
        static: see :class:`tp_ext.KVCache`.

    Raises:
        ValueError: a size that is not positive.
    """

    contents: ClassVar[tuple[str, ...]]
    position: Tensor
    padding: Tensor

    def __init__(
        self,
        batch_size: int,
        max_seq: int,
        sizes: Sequence[tuple[int, int]],
        *,
        static: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_int(least=1, batch_size=batch_size, max_seq=max_seq)
        check_flag(static=static)
        self.batch_size, self.max_seq = batch_size, max_seq
        with torch.inference_mode(False):  # an inference tensor could not be written outside that mode
            for name, (heads, features) in zip(self.contents, sizes, strict=True):
                shape = (batch_size, heads, max_seq, features)  # zeros: masked values are still multiplied, by 0
                self.register_buffer(name, torch.zeros(shape, device=device, dtype=dtype), persistent=False)
            for name, count in (("position", ()), ("padding", (batch_size,))):
                zeros = torch.zeros(count, device=device, dtype=torch.int64)
                self.register_buffer(name, zeros, persistent=False)
        self._length, self._static, self._padded = 0, static, False

    def _held(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.contents]

    @property
    def length(self) -> int:
        """Number of filled slots, padding included. With ``static``, on a GPU, this waits for the device."""
        return int(self.position) if self._static else self._length

    @property
    def static(self) -> bool:
        return self._static

    @static.setter
    def static(self, static: bool) -> None:
        # Read before the switch, which moves it to another attribute
        length = self.length
        self._static = static
        self._set_length(length)

    def _set_length(self, length: int) -> None:
        if self._static:
            self.position.fill_(length)
        else:
            self._length = length

    @torch.no_grad()
    def reset(self, padding: Tensor | Sequence[int] | None = None) -> Self:
        """Empties the cache for new prompts.

        Args:
            padding: ``[batch_size]``, integers, a tensor or a list: the number of leading padding tokens of each
                prompt; default 0.

        Raises:
            ValueError: another shape, counts outside [0, max_seq). TypeError: counts that are no integers.
        """
        if padding is not None:
            padding = self._integers("padding", padding)
            if padding.is_floating_point() or padding.is_complex() or padding.dtype == torch.bool:
                raise TypeError(f"padding: dtype {padding.dtype} must be an integer type")
            if padding.shape != (self.batch_size,):
                raise ValueError(f"padding: shape {tuple(padding.shape)} must be [batch_size = {self.batch_size}]")
            if int(padding.min()) < 0 or int(padding.max()) >= self.max_seq:
                raise ValueError(f"padding: {padding.tolist()} must be in [0, max_seq = {self.max_seq})")
        self._padded = padding is not None
        for buffer in (*self._held(), self.padding):
            buffer.zero_()  # a NaN of the last text would pass the mask of a static cache
        if padding is not None:
            self.padding.copy_(padding)
        self._set_length(0)
        return self

    def truncate(self, length: int) -> Self:
        """Removes the tokens from ``length`` on, such as drafts that speculative decoding rejects.

        Raises:
            ValueError: ``length`` is larger than that of the cache.
        """
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise ValueError(f"length: {length!r} must be in [0, {self.length}], the tokens in the cache")
        self._set_length(length)
        return self

    @torch.no_grad()
    def reorder(self, index: Tensor | Sequence[int]) -> Self:
        """Continues sequence i from the state of sequence ``index[i]``, for beam search; in place, for CUDA graphs.

        Args:
            index: ``[batch_size]``, integers, a tensor or a list, the same on all ranks.

        Raises:
            TypeError: no integers. ValueError: another shape. IndexError (CPU; a device assert on CUDA): no
                such sequence.
        """
        index = self._integers("index", index)
        if index.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"index: {index.dtype} must be torch.int64 or torch.int32")
        if index.is_cpu and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.batch_size:
            raise IndexError(f"index: {index.tolist()} must be sequences of the {self.batch_size} that the cache has")
        if index.shape != (self.batch_size,):
            raise ValueError(f"index: shape {tuple(index.shape)} must be [batch_size = {self.batch_size}]")
        # On a GPU the length of a static cache would make the host wait
        filled = self.max_seq if self._static else self._length
        for buffer in (*(cached[:, :, :filled] for cached in self._held()), self.padding):
            buffer.copy_(buffer.index_select(0, index))
        return self

    def _integers(self, name: str, values: Tensor | Sequence[int]) -> Tensor:
        """Returns the tensor of a list of integers; a tensor as it is."""
        if isinstance(values, list | tuple):
            for value in values:
                check_int(**{name: value})
            return torch.tensor(values, dtype=torch.int64, device=self.padding.device)
        check_tensor(**{name: values})
        assert isinstance(values, Tensor)
        return values

    def positions(self, n: int) -> Tensor:
        """Returns the positions of the next n tokens, for RoPE: ``[batch_size, n]``, or ``[1, n]`` if all sequences
        have the same. Positions of padding are 0."""
        slots = self._slots(n)[None]
        return (slots - self.padding[:, None]).clamp_min(0) if self._padded else slots

    def _slots(self, n: int) -> Tensor:
        device = self.position.device
        if self._static:
            return self.position + torch.arange(n, device=device)
        return torch.arange(self._length, self._length + n, device=device)

    def check(self, batch: int, n: int) -> None:
        """Checks that n more tokens of ``batch`` sequences fit.

        Raises:
            RuntimeError: gradients are recorded. With ``static`` in compiled code or on a GPU also too many tokens, on
            a GPU as a device assert. ValueError: too many tokens, or another number of sequences.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "cache: keys and values of earlier tokens have no gradient; use it under torch.inference_mode() or "
                "torch.no_grad(), and no cache to train"
            )
        if batch != self.batch_size:
            raise ValueError(f"cache: made for batch_size = {self.batch_size}, but x has {batch} sequences")
        if self._static and (torch.compiler.is_compiling() or self.position.is_cuda):
            # Compiled or captured code must not branch on the value of a tensor
            torch._assert_async(
                self.position + n <= self.max_seq,
                f"cache: {n} more tokens must not exceed max_seq = {self.max_seq}",
            )
        elif self.length + n > self.max_seq:
            raise ValueError(
                f"cache: {self.length} tokens and {n} more must not exceed max_seq = {self.max_seq}; make a longer "
                "cache, or reset() or truncate() it"
            )

    def keys_after(self, n: int) -> int:
        """Returns the number of keys for the next n tokens: cached and new ones, or all slots of a static cache."""
        return self.max_seq if self._static else self._length + n

    def check_empty(self) -> None:
        """Raises ValueError: there are tokens or padding in the cache, so that a prompt over a context group does not
        begin at position 0."""
        if self._padded or self.length:
            raise ValueError(f"cache: {self.length} tokens and padding = {self._padded} must be none: reset() it")

    def write(self, values: Sequence[Tensor], slots: Tensor | None = None) -> None:
        """Fills the next n slots of each buffer with ``[batch, n, heads, features]``.

        ``slots``, of a static cache: where they go, if the caller has computed it.

        Raises:
            TypeError: values of another dtype than the cache.
        """
        n = values[0].shape[1]
        for cached, value in zip(self._held(), values, strict=True):
            if value.dtype != cached.dtype:
                raise TypeError(
                    f"cache: dtype {cached.dtype} must be that of the keys, {value.dtype}: new_cache(.., dtype=)"
                )
        if self._static and slots is None:
            slots = self._slots(n)
        for cached, value in zip(self._held(), values, strict=True):
            if slots is not None and self._static:
                # Slots as a tensor: shapes and code are the same at each step of a static cache
                cached.index_copy_(2, slots, value.transpose(1, 2))
            else:
                cached.narrow(2, self._length, n).copy_(value.transpose(1, 2))
        if self._static:
            self.position.add_(n)
        else:
            self._length += n

    def extend(
        self, values: Sequence[Tensor], mask: Tensor | None, sliding_window: int | None = None
    ) -> tuple[list[Tensor], Tensor | None, bool]:
        """Appends the next n tokens, and returns what their queries may attend to.

        Args:
            values: of each buffer, ``[batch, n, heads, features]``.
            mask: bool or additive, 4-D, broadcastable to ``[batch, heads, n, keys_after(n)]``.
            sliding_window: as :class:`tp_ext.ParallelAttention`.

        Returns:
            The m slots to read of each buffer, ``[batch, heads, m, features]``; the complete mask over them, or None;
            and whether the tokens are the first. Then they attend causally, as without a cache, under ``mask`` alone.
        """
        n = values[0].shape[1]
        plain = not self._static and not self._padded
        first, alone = plain and self._length == 0, plain and n == 1
        # The first tokens attend as without a cache; a single one, with the keys limited to its window, needs no mask
        slots = None if first or alone else self._slots(n)
        oldest = 0
        if not self._static and sliding_window is not None:
            # The first key that the first of the new tokens may see
            oldest = max(0, self._length + 1 - sliding_window)
        self.write(values, slots)
        kept = self._held()
        if not self._static:
            kept = [cached.narrow(2, oldest, self._length - oldest) for cached in kept]
        if not first:
            count = kept[0].shape[2]
            # The mask is over all keys, of which only those from oldest on are read
            if mask is not None and mask.shape[3] > 1:
                mask = mask.narrow(3, oldest, count)
            if slots is not None:
                mask = restricted(mask, self._visible(slots, oldest, count, sliding_window))
        return kept, mask, first

    def append_filled(
        self, values: Sequence[Tensor], mask: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """Appends the next n tokens, for attention in tp_invariant; arguments as :meth:`extend`.

        Returns:
            The m filled slots of each buffer, also of a static cache; the mask over them; the padding, or None.
        """
        self.write(values)
        length = self.length
        if mask is not None and mask.shape[3] > length:
            mask = mask.narrow(3, 0, length)
        filled = [cached.narrow(2, 0, length) for cached in self._held()]
        return filled, mask, self.padding if self._padded else None

    def _visible(self, slots: Tensor, oldest: int, count: int, sliding_window: int | None) -> Tensor:
        """Returns a mask, True where the tokens in ``slots`` attend to the ``count`` slots from ``oldest`` on:
        ``[batch or 1, 1, n, count]``. Padding attends to itself, so that its softmax is not over an empty set."""
        keys = torch.arange(oldest, oldest + count, device=slots.device)
        seen = visible(slots, keys, True, sliding_window)[None, None]
        if self._padded:
            seen = seen & ((keys >= self.padding[:, None])[:, None, None] | (keys == slots[:, None]))
        return seen

    def extra_repr(self) -> str:
        cached = self._held()[0]
        return f"{tuple(cached.shape)}, {cached.dtype}, static={self._static}"


class KVCache(TokenCache):
    """Keys and values of this rank's heads of one :class:`ParallelAttention`, made by ``layer.new_cache(..)``.

    ``k`` and ``v`` are ``[batch_size, kv_heads_local, max_seq, head_dim]``, contiguous and allocated once: with the
    tokens next to each other, ``scaled_dot_product_attention`` streams through them. A slot holds one token; a forward
    of n tokens fills the next n slots and attends to all before them. Prefill (any n) and decoding (n = 1, or more in
    speculative decoding) are the same call. Communicates nothing; every rank keeps the same length.

    ``static=False``: the length is an int, attention reads only the filled slots. ``static=True``: it is the 0-d int64
    tensor ``position``, and all slots are read under a mask, so shapes and code are the same at every step: CUDA graphs
    can replay it and ``torch.compile`` compiles it once. ``cache.static = True`` switches, for instance after prefill.

    Prompts of different lengths are padded on the *left*: ``reset(padding=counts)``. Padding is never attended to, and
    positions (RoPE) count from its end, so every sequence gives the same result as alone.

    A sliding window bounds the slots that are read (all of a static cache, under a mask), not those that are kept.

    A cache holds no gradients: forward with a cache is refused where they are recorded. Its buffers are in no state
    dict.

    Args:
        batch_size, max_seq: number and maximal length of the sequences, prompt and padding included.
        num_kv_heads_local, head_dim: of the layer on this rank.
        static: see above.
        device, dtype: of the layer's keys (under autocast the low precision).

    Raises:
        ValueError: a size that is not positive.
    """

    contents = ("k", "v")
    k: Tensor
    v: Tensor

    def __init__(
        self,
        batch_size: int,
        max_seq: int,
        num_kv_heads_local: int,
        head_dim: int,
        *,
        static: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int(least=0, num_kv_heads_local=num_kv_heads_local)  # 0: of a rank without a share of the heads
        check_int(least=1, head_dim=head_dim)
        sizes = [(num_kv_heads_local, head_dim)] * 2
        super().__init__(batch_size, max_seq, sizes, static=static, device=device, dtype=dtype)

    def append(self, k: Tensor, v: Tensor, slots: Tensor | None = None) -> None:
        """Appends the keys and values of the next n tokens, ``[batch, n, kv_heads_local, head_dim]``.

        ``slots``, of a static cache: where they go, if the caller has computed it.

        Raises:
            TypeError: keys of another dtype than the cache.
        """
        self.write((k, v), slots)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        kv_heads: Sequence[int] | None = None,
    ) -> Tensor:
        """Appends the next n tokens; each attends to itself and the tokens before it, within the window if any.

        Args:
            q: ``[batch, n, heads_local, head_dim]``. k, v: ``[batch, n, kv_heads_local, head_dim]``.
            mask: bool or of q's dtype, 4-D, broadcastable to ``[batch, heads_local, n, keys_after(n)]``.
            scale, sliding_window, softcap: as :class:`ParallelAttention`.
            kv_heads: of a layer built in :func:`tp_ext.tp_invariant`: the head of k and v of each head of q. The rows
                then have the bits that they have in a forward of the whole text.

        Returns: ``[batch, n, heads_local, head_dim]``.

        Raises:
            TypeError: keys of another dtype than the cache.
        """
        q = q.transpose(1, 2)
        if kv_heads is not None:
            (keys, values), mask, padding = self.append_filled((k, v), mask)
            y = _ops.block_attention(q, keys, values, mask, padding, kv_heads, True, scale, sliding_window, softcap)
            return y.transpose(1, 2)
        (keys, values), seen, first = self.extend((k, v), mask, sliding_window)
        if first:
            y = attention(q, keys, values, mask, AttentionOptions(True, scale, sliding_window, softcap))
        # torch's fused functions have no soft cap
        elif softcap is not None:
            blind = mask is not None
            y = explicit_attention(q, keys, values, seen, scale=scale, softcap=softcap, blind=blind)
        else:
            y = attention_by_kv_head(q, keys, values, seen, scale)
        return y.transpose(1, 2)


class LatentKVCache(TokenCache):
    """Latents and rotated RoPE keys of one :class:`ParallelLatentAttention`, made by ``layer.new_cache(..)``.

    ``latent`` is ``[batch_size, 1, max_seq, kv_lora_rank + qk_rope_head_dim]``: the normalised latent of a token, from
    which the keys and values of all heads are computed, and the key that all heads share. A token takes as many numbers
    as a KV head of that width; every rank of a tensor-parallel group holds the same ones. Prefill, decoding, ``static``
    caches, left padding, :meth:`reset`, :meth:`truncate` and :meth:`reorder` are as with :class:`KVCache`.

    Communicates nothing. A cache holds no gradients: forward with a cache is refused where they are recorded. Its
    buffers are in no state dict.

    Args:
        batch_size, max_seq: number and maximal length of the sequences, prompt and padding included.
        kv_lora_rank, qk_rope_head_dim: of the layer.
        static: see :class:`KVCache`.
        device, dtype: of the layer's latents (under autocast the low precision).

    Raises:
        ValueError: a size that is not positive.
    """

    contents = ("latent",)
    latent: Tensor

    def __init__(
        self,
        batch_size: int,
        max_seq: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        *,
        static: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int(least=1, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)
        sizes = [(1, kv_lora_rank + qk_rope_head_dim)]
        super().__init__(batch_size, max_seq, sizes, static=static, device=device, dtype=dtype)
