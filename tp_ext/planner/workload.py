"""The model that the planner prices, as a list of operators: of a transformer by its sizes, or of a configuration."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_ext._checks import check_bool, check_int
from tp_ext.planner.values import Value

# [Note: the planner reads a model as operators]
KINDS = ("column", "row", "replicated", "attention", "pointwise", "dispatch", "embedding", "loss")


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
    bias: bool = False,
    fused_attention: bool = True,
    causal: bool = True,
    experts: int = 0,
    top_k: int = 0,
    expert_ffn: int | None = None,
    shared: int = 0,
    mla: Mapping[str, int] | None = None,
    positions: bool = False,
    head_dim: int | None = None,
    dense_layers: int = 0,
    name: str = "transformer",
) -> Workload:
    """Returns a decoder of equal blocks: norm, attention, residual, norm, MLP or experts, residual.

    Args:
        layers, hidden, heads, kv_heads, ffn, vocab, seq: sizes; ``kv_heads`` are as many as ``heads`` by default,
            ``ffn`` is 4 times ``hidden``.
        gated: SwiGLU, RMSNorm and RoPE; otherwise GELU and LayerNorm. tied: the head has the weight of the embedding.
            bias: of all linears. positions: a learned embedding of positions.
        fused_attention: flash attention. False writes and reads scores, and keeps the masks of dropout, a byte an
            element, as before it (Korthikanti et al., arXiv:2205.05198).
        causal: half of the scores are computed.
        experts, top_k, expert_ffn, shared: experts of a block and of a token, their width, and experts of every token;
            ``dense_layers`` blocks before them have an MLP.
        mla: latent attention: a dict of ``q_lora_rank`` (0: none), ``kv_lora_rank``, ``qk_nope_head_dim``,
            ``qk_rope_head_dim``, ``v_head_dim``.
        head_dim: features of a head, ``hidden / heads`` by default.

    Raises:
        ValueError: a size below 1, heads that ``kv_heads`` does not divide, more choices than experts.
    """
    kv_heads, ffn, expert_ffn = kv_heads or heads, ffn or 4 * hidden, expert_ffn or ffn or 4 * hidden
    check_int(least=1, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, seq=seq)
    check_int(least=0, experts=experts, top_k=top_k, shared=shared, dense_layers=dense_layers)
    check_int(least=1, expert_ffn=expert_ffn)
    check_bool(gated=gated, tied=tied, bias=bias, fused_attention=fused_attention, causal=causal, positions=positions)
    if heads % kv_heads:
        raise ValueError(f"kv_heads: {kv_heads} must divide heads, {heads}")
    if bool(experts) != bool(top_k) or top_k > experts:
        raise ValueError(f"top_k: {top_k} must be between 1 and experts, {experts}, and 0 without experts")
    if dense_layers > layers:
        raise ValueError(f"dense_layers: {dense_layers} must be at most layers, {layers}")
    head_dim = head_dim or hidden // heads
    check_int(least=1, head_dim=head_dim)
    norm = _norm(hidden, gated)
    # The masks of dropout of before flash attention: a byte an element
    masks = 0 if fused_attention else hidden
    residual = Op("pointwise", moved_forward=3 * hidden, moved_backward=hidden, saved_bytes=masks)
    if mla is None:
        attention = _attention(hidden, heads, kv_heads, head_dim, bias, fused_attention, causal, rope=gated)
    else:
        attention = _latent_attention(hidden, heads, dict(mla), fused_attention, causal, gated)
    around = (norm, *attention, residual, norm)
    dense = Block(dense_layers if experts else layers, (*around, *_mlp(hidden, ffn, gated, bias), residual))
    routed = _experts(hidden, expert_ffn, gated, experts, top_k) if experts else ()
    always = _mlp(hidden, shared * expert_ffn, gated, bias) if shared else ()
    mixture = Block(layers - dense.layers, (*around, *routed, *always, residual))
    first = [Op("embedding", vocab, hidden, units=vocab)]
    if positions:
        first.append(Op("pointwise", seq * hidden, moved_forward=3 * hidden, moved_backward=3 * hidden, vectors=1))
    head = Op("column", hidden, vocab, units=vocab, saved=hidden, low_precision=False)
    return Workload(
        name=name,
        hidden=hidden,
        seq=seq,
        heads=heads,
        kv_heads=heads if mla else kv_heads,
        vocab=vocab,
        first=tuple(first),
        blocks=tuple(block for block in (dense, mixture) if block.layers),
        last=(norm, head, Op("loss", vocab, units=vocab)),
        experts=experts,
        tied=tied,
    )


def _norm(features: int, gated: bool) -> Op:
    """RMSNorm keeps one number of fp32 a token, LayerNorm two and has a bias."""
    numbers = 1 if gated else 2
    return Op(
        "pointwise",
        features,
        moved_forward=2 * features,
        moved_backward=3 * features,
        saved=features,
        saved_bytes=4 * numbers,
        vectors=numbers,
    )


def _attention(
    hidden: int, heads: int, kv_heads: int, head_dim: int, bias: bool, fused: bool, causal: bool, rope: bool
) -> tuple[Op, ...]:
    each: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "key_features": head_dim, "value_features": head_dim}
    width, turned = heads * head_dim, (heads + kv_heads) * head_dim
    qkv = Op("column", hidden, (heads + 2 * kv_heads) * head_dim, units=kv_heads, bias=bias, saved=hidden, **each)
    rotary = Op("pointwise", units=heads, moved_forward=2 * turned, moved_backward=2 * turned, sharded=True)
    core = Op("attention", fused=fused, causal=causal, **each)
    return (qkv, *((rotary,) if rope else ()), core, Op("row", width, hidden, units=heads, bias=bias))


def _latent_attention(
    hidden: int, heads: int, mla: dict[str, int], fused: bool, causal: bool, gated: bool
) -> tuple[Op, ...]:
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
        ops += [Op("replicated", hidden, query), _norm(query, True)]
    ops += [
        Op("column", query or hidden, heads * key, units=heads, saved=query),
        _norm(latent, True),
        Op("column", latent, heads * (nope + value), units=heads, saved=latent),
        Op("column", rope, 0),  # the shared features of the key are only communicated
        Op("pointwise", units=heads, moved_forward=4 * heads * key, moved_backward=4 * heads * key, sharded=True),
    ]
    each: dict[str, Any] = {"heads": heads, "kv_heads": heads, "key_features": key, "value_features": value}
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
    """A router, the exchange of tokens, two grouped GEMMs, and the weighted sum of the results."""
    routed: dict[str, Any] = {"experts": experts, "top_k": top_k}
    up, act, down = _mlp(hidden, ffn, gated, False)
    copies = Op("pointwise", moved_forward=2 * hidden, moved_backward=2 * hidden, sharded=True, top_k=top_k)
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
        copies,
    )


def from_config(config: str | os.PathLike[str] | Mapping[str, Any], seq: int | None = None) -> Workload:
    """Returns the workload of a model of transformers, from its ``config.json``; no weights are read.

    Args:
        config: the path of a ``config.json`` or of the folder that holds it, or its dict.
        seq: tokens of a sequence; None: ``max_position_embeddings``.

    Raises:
        ValueError: no such file, no JSON object, or a configuration without the sizes of a decoder.
    """
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"config: {str(path)!r} must be a file of JSON: {error}") from error
        if not isinstance(config, Mapping):
            raise ValueError(f"config: {str(path)!r} must hold a JSON object")
    config = config.get("text_config") or config
    kind = str(config.get("model_type", "transformer"))

    def first_of(*names: str, default: Any = None) -> Any:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if value is None:
            raise ValueError(f"config: of model_type {kind!r} must have one of the keys {', '.join(names)}")
        return value

    old = kind in ("gpt2", "gpt_neo", "opt", "bloom", "gpt_bigcode")
    experts = first_of("num_local_experts", "n_routed_experts", "num_experts", default=0)
    heads, hidden = first_of("num_attention_heads", "n_head"), first_of("hidden_size", "n_embd")
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return transformer(
        layers=first_of("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=first_of("num_key_value_heads", default=heads),
        ffn=first_of("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        vocab=first_of("vocab_size"),
        seq=first_of("max_position_embeddings", "n_positions") if seq is None else seq,
        gated=not old,
        tied=bool(config.get("tie_word_embeddings", old)),
        bias=old,
        experts=experts,
        top_k=first_of("num_experts_per_tok", "top_k", "experts_per_token") if experts else 0,
        expert_ffn=first_of("moe_intermediate_size", "intermediate_size", default=4 * hidden),
        shared=int(config.get("n_shared_experts") or 0),
        dense_layers=int(config.get("first_k_dense_replace") or 0) if experts else 0,
        mla={name: config.get(name) or 0 for name in latent} if config.get("kv_lora_rank") else None,
        positions=old,
        head_dim=config.get("head_dim"),
        name=kind,
    )
