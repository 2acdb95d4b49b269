"""The model that the planner prices, as a list of operators: of a transformer, by its sizes."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tp_ext._checks import check_bool, check_choice, check_int, check_number
from tp_ext.planner.values import Value

# [Note: the planner reads a model as operators]
KINDS = ("column", "row", "replicated", "attention", "pointwise", "dispatch", "embedding", "loss")
MAX_LAYERS = 100_000
LINEARS = ("qkv", "out", "mlp", "head")
NORMS = {"rms": 1, "layer": 2, "plain": 0}  # and the vectors of parameters that each has


@dataclass(frozen=True)
class Op(Value):
    """An operator, by its numbers for one token of the whole model.

    Attributes:
        kind: how it is sharded: ``column`` and ``row`` are linears, ``replicated`` one that is not; ``pointwise`` any
            memory-bound kernel; ``dispatch`` the exchange of tokens with the ranks of their experts.
        inputs, outputs: features; of an embedding and a loss ``inputs`` is the vocabulary.
        units: of the sharded features, number of those groups that are not cut. bias: of a linear.
        heads, kv_heads, key_features, value_features: of attention, and of the linear of its q, k and v.
        fused: flash attention; otherwise scores are written and read. causal: half of the scores are computed.
        moved_forward, moved_backward: elements read and written. saved: elements kept for backward, saved_bytes:
            bytes of other dtypes.
        sharded: whether these are over features; otherwise over tokens under sequence parallelism.
        vectors: number of replicated parameters of ``inputs`` elements.
        experts, top_k: of an operator of experts, of which each token has ``top_k``.
        low_precision: computed in the dtype of the layout; otherwise in bf16.
    """

    kind: str
    inputs: int = 0
    outputs: int = 0
    units: int = 1
    bias: bool = False
    heads: int = 0
    kv_heads: int = 0
    key_features: int = 0
    value_features: int = 0
    fused: bool = True
    causal: bool = True
    moved_forward: float = 0
    moved_backward: float = 0
    saved: float = 0
    saved_bytes: float = 0
    sharded: bool = False
    vectors: int = 0
    experts: int = 0
    top_k: int = 0
    low_precision: bool = True

    def __post_init__(self) -> None:
        check_choice(KINDS, kind=self.kind)
        check_int(least=1, units=self.units)
        check_int(least=0, inputs=self.inputs, outputs=self.outputs, heads=self.heads, kv_heads=self.kv_heads)
        check_int(least=0, key_features=self.key_features, value_features=self.value_features)
        check_int(least=0, vectors=self.vectors, experts=self.experts, top_k=self.top_k)
        check_number(least=0, moved_forward=self.moved_forward, moved_backward=self.moved_backward)
        check_number(least=0, saved=self.saved, saved_bytes=self.saved_bytes)
        check_bool(bias=self.bias, fused=self.fused, causal=self.causal, sharded=self.sharded)
        check_bool(low_precision=self.low_precision)
        if self.heads and (not self.kv_heads or self.heads % self.kv_heads):
            raise ValueError(f"kv_heads: {self.kv_heads} must divide heads, {self.heads}")

    @property
    def parameters(self) -> int:
        """Number of elements, in the whole model."""
        if self.kind == "embedding":
            return self.inputs * self.outputs
        if self.kind not in ("column", "row", "replicated"):
            return self.vectors * self.inputs
        return (self.inputs * self.outputs + self.bias * self.outputs) * max(1, self.experts)

    def flops(self, tokens: int, seq: int) -> float:
        """Returns the FLOPs of forward and backward of these tokens."""
        if self.kind in ("column", "row", "replicated"):
            return 6.0 * tokens * self.inputs * self.outputs * max(1, self.top_k)
        if self.kind != "attention":
            return 0.0
        features = self.heads * (self.key_features + self.value_features)
        return 6.0 * tokens * seq * features * (0.5 if self.causal else 1)


@dataclass(frozen=True)
class Block(Value):
    """Equal blocks: their number and their operators."""

    layers: int
    ops: tuple[Op, ...]

    def __post_init__(self) -> None:
        check_int(least=1, layers=self.layers)
        self._set("ops", _all_of(Op, "ops", self.ops))


@dataclass(frozen=True)
class Workload(Value):
    """A model and the length of its sequences.

    Attributes:
        name: for tables. hidden: features of an activation between blocks. seq: tokens of a sequence. heads, kv_heads:
            of attention, the limits of ``tp``. vocab: rows of the embedding. experts: of a block, 0 without.
        first, last: operators before and after the blocks. blocks: the kinds of blocks, in order. tied: whether the
            head has the weight of the embedding.
    """

    name: str
    hidden: int
    seq: int
    heads: int
    kv_heads: int
    vocab: int
    first: tuple[Op, ...]
    blocks: tuple[Block, ...]
    last: tuple[Op, ...]
    experts: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name)
        check_int(least=1, hidden=self.hidden, seq=self.seq)
        check_int(least=0, heads=self.heads, kv_heads=self.kv_heads, vocab=self.vocab, experts=self.experts)
        check_bool(tied=self.tied)
        for name, kind in (("first", Op), ("blocks", Block), ("last", Op)):
            self._set(name, _all_of(kind, name, getattr(self, name)))
        if not self.blocks:
            raise ValueError("blocks: () must have at least one Block")

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return sum(block.layers for block in self.blocks)

    @property
    def parameters(self) -> int:
        """Number of elements of the whole model."""
        blocks = sum(block.layers * sum(op.parameters for op in block.ops) for block in self.blocks)
        tied = self.vocab * self.hidden if self.tied else 0
        return blocks + sum(op.parameters for op in (*self.first, *self.last)) - tied

    def flops(self, tokens: int) -> float:
        """Returns the FLOPs of forward and backward of these tokens: those of the model, without recomputation, and of
        causal attention half."""
        check_int(least=1, tokens=tokens)
        blocks = sum(block.layers * sum(op.flops(tokens, self.seq) for op in block.ops) for block in self.blocks)
        return blocks + sum(op.flops(tokens, self.seq) for op in (*self.first, *self.last))


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name: {name!r} must be a string")


def _all_of(kind: type, name: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, tuple | list) or not all(isinstance(value, kind) for value in values):
        raise TypeError(f"{name}: {values!r} must be a tuple of {kind.__name__}")
    return tuple(values)


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int | None = None,
    ffn: int | None = None,
    vocab: int,
    seq: int,
    gated: bool = True,
    tied: bool = False,
    bias: bool | Collection[str] = False,
    fused_attention: bool = True,
    causal: bool = True,
    experts: int = 0,
    top_k: int = 0,
    expert_ffn: int | None = None,
    shared: int = 0,
    mla: Mapping[str, int] | None = None,
    positions: bool | int = False,
    head_dim: int | None = None,
    dense_layers: int | Collection[int] = 0,
    norm: str | None = None,
    norms: int = 2,
    rope: bool | None = None,
    qk_norm: str | None = None,
    embedding_norm: bool = False,
    shared_ffn: int | None = None,
    shared_gate: bool = False,
    name: str = "transformer",
) -> Workload:
    """Returns a decoder of blocks: norm, attention, residual, norm, MLP or experts, residual.

    Args:
        layers, hidden, heads, kv_heads, ffn, vocab, seq: sizes; ``kv_heads`` are as many as ``heads`` by default,
            ``ffn`` is 4 times ``hidden``.
        gated: SwiGLU, RMSNorm and RoPE; otherwise GELU and LayerNorm. tied: the head has the weight of the embedding.
        bias: of all linears of the blocks; or those that have one, of ``qkv``, ``out``, ``mlp``, ``head``.
        positions: a learned embedding of positions, of ``seq`` rows, or the number of its rows.
        fused_attention: flash attention. False writes and reads scores, and keeps the masks of dropout, a byte an
            element, as before it (Korthikanti et al., arXiv:2205.05198).
        causal: half of the scores are computed.
        experts, top_k, expert_ffn, shared: experts of a block and of a token, their width, and experts of every token,
            of the width ``shared_ffn`` together, which ``shared_gate`` weights. ``dense_layers`` blocks before them
            have an MLP, or those of these numbers.
        mla: latent attention: a dict of ``q_lora_rank`` (0: none), ``kv_lora_rank``, ``qk_nope_head_dim``,
            ``qk_rope_head_dim``, ``v_head_dim``.
        head_dim: features of a head, ``hidden / heads`` by default.
        norm: ``rms``, ``layer`` or ``plain``, LayerNorm without parameters; None and ``rope`` None: as ``gated`` says.
        norms: of a block; 1: one, before attention and MLP in parallel; 4: after attention and MLP, too.
        qk_norm: RMSNorm of q and k, of each ``head`` or of ``all`` of their features. embedding_norm: one before the
            blocks.

    Raises:
        TypeError, ValueError: a size below 1, heads that ``kv_heads`` does not divide or that do not divide ``hidden``,
            more choices than experts, another value of those that are listed.
    """
    check_int(least=1, layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=seq)
    check_layers("layers", layers)
    check_int(least=1, or_none=True, kv_heads=kv_heads, ffn=ffn, expert_ffn=expert_ffn, head_dim=head_dim)
    check_int(least=0, experts=experts, top_k=top_k, shared=shared)
    if not isinstance(positions, bool):
        check_int(least=1, positions=positions)
    check_int(least=1, or_none=True, shared_ffn=shared_ffn)
    check_bool(gated=gated, tied=tied, fused_attention=fused_attention, causal=causal)
    check_bool(embedding_norm=embedding_norm, shared_gate=shared_gate)
    check_choice((1, 2, 4), norms=norms)
    check_choice((None, *NORMS), norm=norm)
    check_choice((None, True, False), rope=rope)
    check_choice((None, "head", "all"), qk_norm=qk_norm)
    _check_name(name)
    biases = _biases(bias)
    dense = _dense_layers(dense_layers, layers) if experts else range(layers)
    if mla is not None and not isinstance(mla, Mapping):
        raise TypeError(f"mla: {mla!r} must be a dict or None")
    kv_heads, ffn = kv_heads or heads, ffn or 4 * hidden
    expert_ffn = expert_ffn or ffn
    if heads % kv_heads:
        raise ValueError(f"kv_heads: {kv_heads} must divide heads, {heads}")
    if bool(experts) != bool(top_k) or top_k > experts:
        raise ValueError(f"top_k: {top_k} must be between 1 and experts, {experts}, and 0 without experts")
    if head_dim is None and mla is None and hidden % heads:
        raise ValueError(f"hidden: {hidden} must be a multiple of heads, {heads}, unless head_dim is given")
    norm = norm or ("rms" if gated else "layer")
    normed = _norm(hidden, norm)
    # The masks of dropout of before flash attention: a byte an element
    masks = 0 if fused_attention else hidden
    residual = Op("pointwise", moved_forward=3 * hidden, moved_backward=hidden, saved_bytes=masks)
    if mla is None:
        width = head_dim or hidden // heads
        core = Op("attention", fused=fused_attention, causal=causal, **_head_sizes(heads, kv_heads, width, width))
        attention = _attention(hidden, core, biases, gated if rope is None else rope, qk_norm)
    else:
        attention = _latent_attention(hidden, heads, mla, fused_attention, causal)
    after = (normed,) if norms == 4 else ()

    def block(*mlp: Op) -> tuple[Op, ...]:
        if norms == 1:  # which both read, and which is kept once
            both = dataclasses.replace(residual, moved_forward=4 * hidden)
            return (normed, *attention, dataclasses.replace(mlp[0], saved=0), *mlp[1:], both)
        return (normed, *attention, *after, residual, normed, *mlp, *after, residual)

    always: tuple[Op, ...] = ()
    if shared or shared_ffn:
        always = _mlp(hidden, shared_ffn or shared * expert_ffn, gated, False)
        if shared_gate:
            always = (Op("replicated", hidden, 1, low_precision=False), *always)
    of_layer = {True: block(*_mlp(hidden, ffn, gated, "mlp" in biases))}
    if experts:
        of_layer[False] = block(*_experts(hidden, expert_ffn, gated, experts, top_k), *always)
    runs = itertools.groupby(of_layer[i in dense] for i in range(layers))
    first = [Op("embedding", vocab, hidden, units=vocab)]
    if positions:
        rows = seq if positions is True else positions
        first.append(Op("pointwise", rows * hidden, moved_forward=3 * hidden, moved_backward=3 * hidden, vectors=1))
    if embedding_norm:
        first.append(normed)
    head = Op("column", hidden, vocab, units=vocab, bias="head" in biases, saved=hidden, low_precision=False)
    return Workload(
        name=name,
        hidden=hidden,
        seq=seq,
        heads=heads,
        kv_heads=heads if mla else kv_heads,
        vocab=vocab,
        first=tuple(first),
        blocks=tuple(Block(len(list(run)), ops) for ops, run in runs),
        last=(normed, head, Op("loss", vocab, units=vocab)),
        experts=experts,
        tied=tied,
    )


def check_layers(name: str, layers: int) -> None:
    """Raises a ValueError for a number of layers that no model has, over which a loop would take hours."""
    if layers > MAX_LAYERS:
        raise ValueError(f"{name}: {layers} must be at most {MAX_LAYERS}")


def _biases(bias: bool | Collection[str]) -> Collection[str]:
    """Returns the names of the linears that have one."""
    if isinstance(bias, bool):
        return ("qkv", "out", "mlp") if bias else ()
    if isinstance(bias, str) or not isinstance(bias, Collection) or not all(name in LINEARS for name in bias):
        raise ValueError(f"bias: {bias!r} must be True, False or a tuple of {', '.join(LINEARS)}")
    return bias


def _dense_layers(dense: int | Collection[int], layers: int) -> Collection[int]:
    """Returns the numbers of the blocks without experts."""
    if isinstance(dense, Collection) and not isinstance(dense, str):
        if not all(isinstance(i, int) and 0 <= i < layers for i in dense):
            raise ValueError(f"dense_layers: {dense!r} must be numbers of the {layers} layers, from 0")
        return dense
    check_int(least=0, dense_layers=dense)
    if dense > layers:
        raise ValueError(f"dense_layers: {dense} must be at most layers, {layers}")
    return range(dense)


def _norm(features: int, kind: str, number: int = 1, units: int = 0) -> Op:
    """RMSNorm keeps one number of fp32 a token, LayerNorm two. Of ``units`` sharded heads: ``number`` norms."""
    moved = features * number
    return Op(
        "pointwise",
        features,
        units=max(1, units),
        moved_forward=2 * moved,
        moved_backward=3 * moved,
        saved=moved,
        saved_bytes=4 * number * (1 if kind == "rms" else 2),
        vectors=NORMS[kind],
        sharded=units > 0,
    )


def _head_sizes(heads: int, kv_heads: int, key: int, value: int) -> dict[str, Any]:
    return {"heads": heads, "kv_heads": kv_heads, "key_features": key, "value_features": value}


def _attention(hidden: int, core: Op, biases: Collection[str], rope: bool, qk_norm: str | None) -> tuple[Op, ...]:
    """Returns the operators of attention whose scores and products are ``core``."""
    heads, kv_heads, head_dim = core.heads, core.kv_heads, core.key_features
    each = _head_sizes(heads, kv_heads, head_dim, head_dim)
    width, turned = heads * head_dim, (heads + kv_heads) * head_dim
    outputs = turned + kv_heads * head_dim
    qkv = Op("column", hidden, outputs, units=kv_heads, bias="qkv" in biases, saved=hidden, **each)
    rotary = Op(
        "pointwise",
        units=heads,
        heads=heads,
        kv_heads=kv_heads,
        key_features=head_dim,
        moved_forward=2 * turned,
        moved_backward=2 * turned,
        sharded=True,
    )
    normed = [
        _norm(head_dim, "rms", number, number) if qk_norm == "head" else _norm(number * head_dim, "rms", 1, number)
        for number in ((heads, kv_heads) if qk_norm else ())
    ]
    out = Op("row", width, hidden, units=heads, bias="out" in biases)
    return (qkv, *normed, *((rotary,) if rope else ()), core, out)


def _latent_attention(hidden: int, heads: int, mla: Mapping[str, int], fused: bool, causal: bool) -> tuple[Op, ...]:
    """docs/reference/memory.md, ParallelLatentAttention: the latents are computed by every rank for its tokens."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if set(mla) != set(names):
        raise ValueError(f"mla: {sorted(mla)} must have the keys {', '.join(names)}")
    query, latent, nope, rope, value = (mla[name] or 0 for name in names)
    check_int(least=0, q_lora_rank=query)
    check_int(least=1, kv_lora_rank=latent, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value)
    key = nope + rope
    ops = [Op("replicated", hidden, latent + rope, saved=hidden)]
    if query:
        ops += [Op("replicated", hidden, query), _norm(query, "rms")]
    ops += [
        Op("column", query or hidden, heads * key, units=heads, saved=query),
        _norm(latent, "rms"),
        Op("column", latent, heads * (nope + value), units=heads, saved=latent),
        Op("column", rope, 0),  # the shared features of the key are only communicated
        Op("pointwise", units=heads, moved_forward=4 * heads * key, moved_backward=4 * heads * key, sharded=True),
    ]
    each = _head_sizes(heads, heads, key, value)
    ops += [Op("attention", fused=fused, causal=causal, **each), Op("row", heads * value, hidden, units=heads)]
    return tuple(ops)


def _mlp(hidden: int, ffn: int, gated: bool, bias: bool) -> tuple[Op, ...]:
    parts = 2 if gated else 1  # gate and up
    return (
        Op("column", hidden, parts * ffn, units=ffn, bias=bias, saved=hidden),
        Op(
            "pointwise",
            units=ffn,
            moved_forward=(parts + 1) * ffn,
            moved_backward=(2 * parts + 1) * ffn,
            saved=(parts + 1) * ffn,
            sharded=True,
        ),
        Op("row", ffn, hidden, units=ffn, bias=bias),
    )


def _experts(hidden: int, ffn: int, gated: bool, experts: int, top_k: int) -> tuple[Op, ...]:
    """Returns a router, the exchange of tokens, two grouped GEMMs, and the weighted sum of the results."""
    routed: dict[str, Any] = {"experts": experts, "top_k": top_k}
    up, act, down = _mlp(hidden, ffn, gated, False)
    copies = Op("pointwise", moved_forward=2 * hidden, moved_backward=2 * hidden, sharded=True, top_k=top_k)
    # The weights' gradients need the results of the experts
    weighted = dataclasses.replace(copies, saved=hidden)
    return (
        Op("replicated", hidden, experts, saved=hidden, low_precision=False),
        Op("dispatch", hidden, **routed),
        copies,
        Op("column", up.inputs, up.outputs, units=ffn, saved=hidden, sharded=True, **routed),
        Op(
            "pointwise",
            units=ffn,
            moved_forward=act.moved_forward,
            moved_backward=act.moved_backward,
            saved=act.saved,
            sharded=True,
            top_k=top_k,
        ),
        Op("row", down.inputs, down.outputs, units=ffn, **routed),
        weighted,
    )
