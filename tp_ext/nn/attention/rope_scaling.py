"""Scaling of rotary embeddings for longer contexts: the frequencies by a Hugging Face ``rope_scaling`` dict."""

import math
from collections.abc import Mapping
from typing import Any

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
        given = {key: value for key, value in scaling.items() if value is not None and key not in elsewhere}
        # Older configurations have "type", newer ones "rope_type", some both
        kinds = [given.pop(key) for key in ("rope_type", "type") if key in given]
        if not kinds or any(not isinstance(k, str) or k not in KEYS or k != kinds[0] for k in kinds):
            raise ValueError(f"scaling: rope_type {' and '.join(map(repr, kinds)) or None} must be one of {list(KEYS)}")
        self.kind: str = kinds[0]
        keys = KEYS[self.kind]
        for key, value in given.items():
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
        missing = [key for key, required in keys.items() if required and key not in given]
        if missing:
            hint = "; it is the max_position_embeddings of pretraining" if missing == [*_CONTEXT] else ""
            raise ValueError(f"scaling: {', '.join(missing)} must be given with rope_type {self.kind!r}{hint}")
        if self.kind == "llama3" and not given["low_freq_factor"] < given["high_freq_factor"]:
            raise ValueError(
                f"scaling: low_freq_factor {given['low_freq_factor']} must be less than high_freq_factor "
                f"{given['high_freq_factor']}"
            )
        # yarn divides by the logarithm of the base, ntk and dynamic by rotary_dim - 2
        if self.kind == "yarn" and not base > 1:
            raise ValueError(f"base: {base} must be greater than 1 with rope_type 'yarn'")
        if rotary_dim > MAX_ROTARY_DIM:
            raise ValueError(f"rotary_dim: {rotary_dim} must be at most {MAX_ROTARY_DIM} with scaling")
        if self.kind in ("ntk", "dynamic") and rotary_dim <= 2:
            raise ValueError(f"scaling: rope_type {self.kind!r} must have rotary_dim = {rotary_dim} of at least 4")
        self.options, self.rotary_dim, self.base = given, rotary_dim, base
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
