"""Rotary position embedding (RoPE), and its scaling for longer contexts by a Hugging Face ``rope_scaling`` dict.

Su et al., "RoFormer" (arXiv:2104.09864).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext._checks import check_flag, check_int, check_number

# Keys of each rope_type, and whether each is required; "ntk" is ours, the others are Hugging Face's
_FACTOR, _CONTEXT = {"factor": True}, {"original_max_position_embeddings": True}
_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
KEYS: dict[str, dict[str, bool]] = {
    "default": {},
    "linear": _FACTOR,
    "ntk": _FACTOR,
    "dynamic": {**_FACTOR, **_CONTEXT},
    "llama3": {**_FACTOR, **_CONTEXT, "low_freq_factor": True, "high_freq_factor": True},
    "yarn": {**_FACTOR, **_CONTEXT, **dict.fromkeys(_OPTIONAL, False)},
}
# [Note: frequencies of a scaled RoPE are arguments of the call]
MAX_ROTARY_DIM = 512  # rotated features, since their frequencies are an argument of the kernel
_LEAST = {"factor": 1, "original_max_position_embeddings": 1, "mscale": 0, "mscale_all_dim": 0}  # the others: > 0


def base_and_rotary_dim(
    scaling: Mapping[str, Any] | None, head_dim: int, base: float | None, rotary_dim: int | None
) -> tuple[float, int]:
    """Returns ``base`` and ``rotary_dim``, from ``rope_theta`` and ``partial_rotary_factor`` of ``scaling`` if None.

    Raises:
        ValueError: ``scaling`` is no dict, or contradicts a given value.
    """
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ValueError(f"scaling: {scaling!r} must be a dict, as Hugging Face's config.rope_parameters, or None")
    theta, partial = ((scaling or {}).get(key) for key in ("rope_theta", "partial_rotary_factor"))
    if partial is not None:
        if not is_number(partial) or not 0 < partial <= 1:
            raise ValueError(f"scaling: partial_rotary_factor {partial!r} must be a number in (0, 1]")
        partial = int(head_dim * partial)
    # A value that is given twice must be given alike: silently taking either would load the wrong model
    for name, value, said in (("base", base, theta), ("rotary_dim", rotary_dim, partial)):
        if value is not None and said is not None and value != said:
            raise ValueError(f"{name}: {value!r} must be what scaling = {scaling} says, {said!r}, or be left out")
    base = theta if base is None else base
    rotary_dim = partial if rotary_dim is None else rotary_dim
    return 10000.0 if base is None else base, head_dim if rotary_dim is None else rotary_dim


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


class RopeScaling:
    """The frequencies of a scaled rotary embedding, ``base^(-2 i / rotary_dim)`` before scaling.

    Args:
        scaling: Hugging Face's ``config.rope_scaling`` or ``config.rope_parameters``, ``rope_type`` (or ``type``):

            - ``linear``: all frequencies divided by ``factor``.
            - ``ntk``: base times ``factor^(d / (d - 2))``, d = rotary_dim.
            - ``dynamic``: ``ntk`` with ``factor L / n - (factor - 1)``, L the tokens of the longest sequence, at least
              n = ``original_max_position_embeddings`` (Hugging Face's ``config.max_position_embeddings``).
            - ``llama3``: frequencies with fewer than ``low_freq_factor`` rotations over n tokens are divided by
              ``factor``, those with more than ``high_freq_factor`` rotations kept, those between interpolated linearly.
            - ``yarn`` (arXiv:2309.00071): the same between ``beta_slow`` and ``beta_fast`` rotations, default 1 and 32,
              linear in i, between whole i if ``truncate`` (the default); cosine and sine times
              ``attention_factor``, default ``0.1 ln(factor) + 1``, or the quotient of
              ``0.1 m ln(factor) + 1`` for m = ``mscale`` and ``mscale_all_dim``.

            ``rope_theta`` and ``partial_rotary_factor`` in it are used by :func:`base_and_rotary_dim`. A key whose
            value is None counts as absent.
        rotary_dim, base: of the embedding.

    Raises:
        ValueError: a rope_type or key that is unknown, a required key that is absent, a value outside its range.
    """

    def __init__(self, scaling: Mapping[str, Any], rotary_dim: int, base: float) -> None:
        elsewhere = ("rope_theta", "partial_rotary_factor")
        options = {key: value for key, value in scaling.items() if value is not None and key not in elsewhere}
        # Older configurations have "type", newer ones "rope_type", some both
        kinds = [options.pop(key) for key in ("rope_type", "type") if key in options]
        if not kinds or any(not isinstance(k, str) or k not in KEYS or k != kinds[0] for k in kinds):
            raise ValueError(f"scaling: rope_type {' and '.join(map(repr, kinds)) or None} must be one of {list(KEYS)}")
        self.kind: str = kinds[0]
        keys = KEYS[self.kind]
        # An unknown key would change the frequencies in the code that wrote the configuration, and not here
        for key, value in options.items():
            if key not in keys:
                raise ValueError(f"scaling: {key} must be one of {['rope_type', *keys]} with rope_type {self.kind!r}")
            if key == "truncate":
                if not isinstance(value, bool):
                    raise ValueError(f"scaling: truncate {value!r} must be True or False")
                continue
            least = _LEAST.get(key)
            if not is_number(value) or not (value > 0 if least is None else value >= least):
                raise ValueError(
                    f"scaling: {key} {value!r} must be a number {'> 0' if least is None else f'>= {least}'}"
                )
        missing = [key for key, required in keys.items() if required and key not in options]
        if missing:
            hint = "; it is the max_position_embeddings of pretraining" if missing == [*_CONTEXT] else ""
            raise ValueError(f"scaling: {', '.join(missing)} must be given with rope_type {self.kind!r}{hint}")
        if self.kind == "llama3" and not options["low_freq_factor"] < options["high_freq_factor"]:
            raise ValueError(
                f"scaling: low_freq_factor {options['low_freq_factor']} must be less than high_freq_factor "
                f"{options['high_freq_factor']}"
            )
        # yarn divides by the logarithm of the base, ntk and dynamic by rotary_dim - 2
        if self.kind == "yarn" and not base > 1:
            raise ValueError(f"base: {base} must be greater than 1 with rope_type 'yarn'")
        if rotary_dim > MAX_ROTARY_DIM:
            raise ValueError(f"rotary_dim: {rotary_dim} must be at most {MAX_ROTARY_DIM} with scaling")
        if self.kind in ("ntk", "dynamic") and rotary_dim <= 2:
            raise ValueError(f"scaling: rope_type {self.kind!r} must have rotary_dim = {rotary_dim} of at least 4")
        self.options, self.rotary_dim, self.base = options, rotary_dim, base
        self.amplitude = self._amplitude()
        self._fixed = None if self.kind == "dynamic" else self._frequencies(0)

    @property
    def dynamic(self) -> bool:
        """True if the frequencies depend on the number of tokens."""
        return self._fixed is None

    def frequencies(self, length: int) -> list[float]:
        """Returns the radians per position of each pair, for sequences of at most ``length`` tokens."""
        return self._frequencies(length) if self._fixed is None else self._fixed

    def _frequencies(self, length: int) -> list[float]:
        o, d = self.options, self.rotary_dim
        base, factor = self.base, o.get("factor", 1.0)
        if self.kind in ("ntk", "dynamic"):
            if self.kind == "dynamic":
                context = o["original_max_position_embeddings"]
                factor = factor * max(length, context) / context - (factor - 1)
            base *= factor ** (d / (d - 2))
        plain: list[float] = [base ** (-2 * i / d) for i in range(d // 2)]
        if self.kind == "linear":
            return [f / factor for f in plain]
        if self.kind not in ("llama3", "yarn"):
            return plain
        # The share of each frequency that is kept; the rest is divided by the factor
        kept = self._llama3_kept(plain) if self.kind == "llama3" else self._yarn_kept()
        return [f * share + f / factor * (1 - share) for f, share in zip(plain, kept, strict=True)]

    def _llama3_kept(self, plain: list[float]) -> list[float]:
        o = self.options
        low, high = o["low_freq_factor"], o["high_freq_factor"]
        rotations = (f * o["original_max_position_embeddings"] / (2 * math.pi) for f in plain)
        return [min(max((n - low) / (high - low), 0.0), 1.0) for n in rotations]

    def _yarn_kept(self) -> list[float]:
        o, d = self.options, self.rotary_dim

        def pair_of(rotations: float) -> float:
            """Returns the (fractional) index i of the pair with this many rotations over the original context."""
            ratio = o["original_max_position_embeddings"] / (2 * math.pi * rotations)
            return d * math.log(ratio) / (2 * math.log(self.base))

        first, last = pair_of(o.get("beta_fast", 32.0)), pair_of(o.get("beta_slow", 1.0))
        if o.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, d - 1)
        width = last - first or 0.001
        return [1 - min(max((i - first) / width, 0.0), 1.0) for i in range(d // 2)]

    def _amplitude(self) -> float:
        o = self.options
        if self.kind != "yarn":
            return 1.0
        if "attention_factor" in o:
            return float(o["attention_factor"])

        both = o.get("mscale") and o.get("mscale_all_dim")  # Hugging Face treats 0 as absent
        return self._grown(o["mscale"]) / self._grown(o["mscale_all_dim"]) if both else self._grown(1.0)

    @property
    def score_factor(self) -> float:
        """DeepSeek's factor of the scores, ``(0.1 m ln(factor) + 1)^2`` for m = ``mscale_all_dim``; 1 without it."""
        return self._grown(self.options["mscale_all_dim"]) ** 2 if "mscale_all_dim" in self.options else 1.0

    def _grown(self, scale: float) -> float:
        growth: float = 0.1 * scale * math.log(self.options["factor"]) + 1.0
        return growth

    def __repr__(self) -> str:
        return repr({"rope_type": self.kind, **self.options})


# [Note: RoPE has no buffer]
class RotaryEmbedding(nn.Module):
    """Rotary embedding: rotates pairs of features by position * base^(-2 i / rotary_dim); pair i is features
    (i, i + rotary_dim / 2), or (2 i, 2 i + 1) if ``interleaved``.

    It has no buffer: angles are computed in fp64 from the positions, so casting the model does not affect them.
    Communicates nothing. Backward is the rotation by the negative angles; it keeps the tables, not x.

    Args:
        head_dim: features of a head.
        base: of the angles' geometric series; default ``rope_theta`` of ``scaling``, or 10000.
        interleaved: selects the features of a pair, see above.
        rotary_dim: the number of leading features to rotate, the rest pass through; default by
            ``partial_rotary_factor`` of ``scaling``, or all.
        scaling: Hugging Face's ``config.rope_scaling`` or ``config.rope_parameters``, for contexts longer than those of
            pretraining: linear, ntk, dynamic, llama3 or yarn, see
            :class:`tp_ext.nn.attention.rotary.RopeScaling`. At most 512 rotated features.

    Raises:
        ValueError: ``rotary_dim`` is odd or larger than ``head_dim``; ``base`` is not positive; ``scaling`` has an
            unknown key, or a value outside its range.
    """

    def __init__(
        self,
        head_dim: int,
        base: float | None = None,
        interleaved: bool = False,
        *,
        rotary_dim: int | None = None,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        base, rotary_dim = base_and_rotary_dim(scaling, head_dim, base, rotary_dim)
        check_int(least=1, head_dim=head_dim, rotary_dim=rotary_dim)
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise ValueError(f"rotary_dim: {rotary_dim} must be even and at most head_dim = {head_dim}")
        check_number(above=0, base=base)
        check_flag(interleaved=interleaved)
        self.head_dim = head_dim
        self.base = float(base)
        self.interleaved = interleaved
        self.rotary_dim = rotary_dim
        scaled = None if scaling is None else RopeScaling(scaling, rotary_dim, self.base)
        self.scaling = None if scaled is None or scaled.kind == "default" else scaled

    def cos_sin(self, positions: Tensor, dtype: torch.dtype, *, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine, ``[positions, rotary_dim / 2]``, for x of ``dtype`` at integer ``positions``, 1-D.

        ``length``, for dynamic scaling only: the number of tokens of the longest sequence. Default: the largest
        position + 1, for which the host waits for the device.
        """
        # fp32 also for x in half types: tables in bf16 would have 8 bits
        table = torch.float64 if dtype == torch.float64 else torch.float32
        scaling = self.scaling
        if scaling is None:
            return _ops.rope_tables(positions, self.rotary_dim, self.base, table)
        if length is None:
            # Only dynamic scaling depends on the length: no wait for the others
            length = int(positions.max()) + 1 if scaling.dynamic and positions.numel() else 0
        frequencies = scaling.frequencies(length)
        return _ops.rope_tables(positions, self.rotary_dim, self.base, table, frequencies, scaling.amplitude)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        offset: int = 0,
        cu_seqlens: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """Rotates x.

        Args:
            x: ``[tokens, heads, head_dim]`` or ``[batch, seq, heads, head_dim]``, any strides.
            positions: integers, one for each token: ``[tokens]`` or ``[batch, seq]``. Default: 0, 1, 2, .. in each
                sequence, with one row of the tables for each, for any batch size.
            offset: position of the first token of each sequence, instead of 0.
            cu_seqlens: x ``[tokens, ..]`` consists of packed sequences; sequence i is tokens ``cu_seqlens[i]`` to
                ``cu_seqlens[i + 1]``, and positions restart in each. A list, or an integer tensor (one on a GPU is
                copied to the host).

        Raises:
            ValueError: other shapes; ``positions`` with an offset or ``cu_seqlens``; a negative offset; ``cu_seqlens``
                that do not rise from 0 to the number of tokens. TypeError: values that are no integers.
        """
        if x.dim() not in (3, 4) or x.shape[-1] != self.head_dim:
            raise ValueError(
                f"x: shape {tuple(x.shape)} must be [tokens, heads, head_dim = {self.head_dim}] or "
                f"[batch, seq, heads, head_dim = {self.head_dim}]"
            )
        check_int(offset=offset)
        if offset < 0:
            raise ValueError(f"offset: {offset} must not be negative")
        if positions is not None:
            if offset or cu_seqlens is not None:
                raise ValueError(
                    f"positions: must not be combined with offset = {offset} or cu_seqlens = {cu_seqlens}, which say "
                    "the same"
                )
            if positions.shape != x.shape[:-2]:
                raise ValueError(
                    f"positions: shape {tuple(positions.shape)} must be one for each token of x, {tuple(x.shape[:-2])}"
                )
            # A row per token: positions may repeat or be in any order
            cos, sin = self.cos_sin(positions.flatten(), x.dtype)
            rows = x if x.dim() == 3 else x.flatten(0, 1)
            return _ops.rope(rows, cos, sin, self.interleaved, None).view(x.shape)
        seq, packed = x.shape[-3], None
        if cu_seqlens is not None:
            if x.dim() == 4:
                raise ValueError(
                    f"cu_seqlens: {cu_seqlens} must come with x [tokens, heads, head_dim], not of shape "
                    f"{tuple(x.shape)}"
                )
            lengths = sequence_lengths(cu_seqlens, seq)
            seq, packed = max(lengths), packed_positions(lengths, x.device)
        places = torch.arange(offset, offset + seq, device=x.device)
        cos, sin = self.cos_sin(places, x.dtype, length=offset + seq)
        return _ops.rope(x, cos, sin, self.interleaved, packed)

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        return (
            f"{self.head_dim}, base={self.base}, interleaved={self.interleaved}, rotary_dim={self.rotary_dim}{scaling}"
        )


def sequence_lengths(cu_seqlens: Tensor | Sequence[int], tokens: int) -> list[int]:
    """Returns the lengths of the packed sequences, which must sum to ``tokens``."""
    if not isinstance(cu_seqlens, Tensor | Iterable):
        raise TypeError(f"cu_seqlens: {cu_seqlens!r} must be a 1-D tensor or a list of integers")
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if not all(isinstance(end, int) for end in ends):
        raise TypeError(f"cu_seqlens: {ends} must be integers")
    lengths = [stop - start for start, stop in pairwise(ends)]
    if not lengths or ends[0] != 0 or ends[-1] != tokens or min(lengths) < 0:
        raise ValueError(f"cu_seqlens: {ends} must rise from 0 to the number of tokens, {tokens}")
    return lengths


def packed_positions(lengths: list[int], device: torch.device) -> Tensor:
    """Returns the positions 0, 1, 2, .. of each sequence, one after the other."""
    return torch.cat([torch.arange(n, device=device) for n in lengths])
