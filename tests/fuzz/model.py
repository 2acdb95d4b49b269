"""The fuzzer's model: any configuration of config.py, made of tp_ext's modules or of plain.py's.

Everything between the blocks is ``[*tokens, hidden]``; under sequence parallelism each rank has its share of dim 0.
"""

import copy
import pickle
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tp_ext.sharding import split_sizes


class Place:
    """The place of a rank's tokens: kit (tp_ext or tests.fuzz.plain), group, p, rank, whether the tokens are cut.

    It holds names, so that it can be copied and pickled.
    """

    def __init__(self, config, kit, group, experts=None):
        self.kit_name, self.group = kit.__name__, group and group.group_name
        self.p, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        self.sp = config["sp"]
        self.parallel = {"group": self.group, "sequence_parallel": self.sp, "dtype": torch.float64}
        if config["made"] == "meta":
            self.parallel["device"] = "meta"
        self.linear = self.parallel | {"grad_accumulation_fusion": config["main_grad"]}
        self.experts = experts or {}  # names of the groups of experts
        self.recomputes = config["checkpointing"] if hasattr(kit, "parallel") else None  # not the plain one
        self.shape = shape_of(config)
        self.total = self.shape[0]  # of the dim that SP cuts
        must = self.sp and self.total % config["p"]
        self.tell = {"total_tokens": self.total} if must or config["tell"] else {}

    @property
    def kit(self):
        return sys.modules[self.kit_name]

    def cut(self, full):
        """This rank's share of a tensor of all tokens."""
        return full.tensor_split(self.p)[self.rank] if self.sp else full


def shape_of(config):
    """The leading dims of an activation, of all ranks."""
    layout = config["layout"]
    if layout["how"] == "wide":  # no sequences: any dims
        return tuple(layout["lengths"])
    if layout["how"] == "batch":
        return (len(layout["lengths"]), layout["lengths"][0])
    return (sum(layout["lengths"]),)


def _parts(place, given):
    """The reference model has no shards: groups, copies and padding belong to p ranks."""
    if given is None:
        return None
    names = ("size", "unit") if place.group is None else ("size", "unit", "copies", "groups", "padding")
    return [place.kit.Part(**{name: part[name] for name in names if name in part}) for part in given]


def _norm(options, hidden, place):
    if options is None:
        return nn.Identity()
    more = {"bias": options["bias"]} if options["kind"] == "LayerNorm" else {}
    return getattr(place.kit, options["kind"])(hidden, options["eps"], options["affine"], **more, **place.parallel)


def _attention(o, config, place):
    kit = place.kit
    rope = kit.RotaryEmbedding(o["head_dim"], **o["rope"]) if isinstance(o["rope"], dict) else o["rope"]
    names = ("head_dim", "qkv_bias", "out_bias", "causal", "qk_norm", "scale", "sliding_window", "softcap")
    return kit.ParallelAttention(
        config["hidden"],
        o["heads"],
        num_kv_heads=o["kv_heads"],
        rope=rope,
        dropout=o["attention_dropout"],
        **{name: o[name] for name in names},
        **place.linear,
    )


def _latent_attention(o, config, place):
    sizes, kit = dict(o["latent"]), place.kit
    rope = sizes.pop("rope")
    return kit.ParallelLatentAttention(
        config["hidden"],
        o["heads"],
        **sizes,
        bias=o["out_bias"],
        norm_eps=1e-2,  # as _norm of config.py
        rope=rope and kit.RotaryEmbedding(sizes["qk_rope_head_dim"], **rope),
        dropout=o["attention_dropout"],
        **{name: o[name] for name in ("causal", "scale")},
        **place.linear,
    )


class Attention(nn.Module):
    def __init__(self, options, config, place):
        super().__init__()
        o = options
        self.attention = (_latent_attention if o["latent"] else _attention)(o, config, place)
        layout = config["layout"]
        lengths, self.call = layout["lengths"], {}
        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        if layout["how"] == "tokens":
            self.call["batch_size"] = len(lengths)
        elif layout["how"] == "packed":
            self.call["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32) if layout["tensor"] else ends
        self.call |= place.tell
        self.seq, learned = lengths[0], o["mask"] and o["mask"].startswith("learned")
        self.bool_mask = o["mask"] == "bool"
        shape = (
            o["heads"] if o["mask"] == "learned_per_head" else 1,
            1 if o["mask"] == "learned_per_key" else self.seq,
        )
        parallel = {name: place.parallel[name] for name in ("dtype", "device") if name in place.parallel}
        self.mask = nn.Parameter(torch.zeros(*shape, self.seq, **parallel)) if learned else None

    def forward(self, x):
        mask = self.mask
        if self.bool_mask:  # some query of it may attend to nothing
            mask = torch.rand(self.seq, self.seq, generator=torch.Generator().manual_seed(self.seq)) < 0.6
        return self.attention(x, **self.call, **({} if mask is None else {"attn_mask": mask})), None


class MLP(nn.Module):
    def __init__(self, options, config, place):
        super().__init__()
        make, self.tell = place.kit.ParallelMLP, place.tell
        kind = {name: options[name] for name in ("activation", "bias")}
        if options["gemm_epilogue"] and kind == {"activation": "gelu_tanh", "bias": True}:  # or made simpler
            kind["gemm_epilogue"] = True
        self.mlp = make(config["hidden"], options["ffn"], **kind, **place.linear)

    def forward(self, x):
        return self.mlp(x, **self.tell), None


def _given(layer, twice):
    """The weight at a call, if it is not the layer's own."""
    return {"weight": 2 * layer.weight} if twice else {}


class Pair(nn.Module):
    """Column, sine, row. The bias of each may be skipped; then it is added here, or goes on to the dropout."""

    def __init__(self, options, config, place):
        super().__init__()
        o, kit, self.tell, self.twice = options, place.kit, place.tell, options["twice"]
        parts, inner = _parts(place, o["parts"]), o["inner"]
        more = {"parts": parts, "unit": o["unit"], **place.linear}
        hidden = config["hidden"]
        self.column = kit.ColumnParallelLinear(hidden, inner, o["column_bias"], skip_bias_add=o["column_skip"], **more)
        self.row = kit.RowParallelLinear(inner, hidden, o["row_bias"], skip_bias_add=o["row_skip"], **more)

    def forward(self, x):
        h = self.column(x, **self.tell, **_given(self.column, self.twice))
        if isinstance(h, tuple):
            h = h[0] if h[1] is None else h[0] + h[1]
        y = self.row(h.sin(), **self.tell, **_given(self.row, self.twice))
        return y if isinstance(y, tuple) else (y, None)


class Gathered(nn.Module):
    """Column with gather_output, sine, row with input_is_parallel=False: features whole in between, and all tokens."""

    def __init__(self, options, config, place):
        super().__init__()
        o, kit, hidden, self.place, self.twice = options, place.kit, config["hidden"], place, options["twice"]
        parts, inner = _parts(place, o["parts"]), o["inner"]
        more = {"parts": parts, "unit": o["unit"]}
        self.column = kit.ColumnParallelLinear(
            hidden, inner, o["column_bias"], gather_output=True, **more, **place.linear
        )
        more = place.linear | {"sequence_parallel": False, "parts": _parts(place, o["row_parts"])}
        self.row = kit.RowParallelLinear(inner, hidden, o["row_bias"], input_is_parallel=False, **more)

    def forward(self, x):
        place = self.place
        h = self.column(x, **place.tell, **_given(self.column, self.twice))
        y = self.row(h.sin(), **_given(self.row, self.twice))
        return (place.kit.scatter_to_region(y, place.group, 0) if place.sp else y), None


class Exchange(nn.Module):
    """A sine with the features cut, by regions alone."""

    def __init__(self, options, config, place):
        super().__init__()
        self.place, p = place, place.p
        self.features, self.tokens = split_sizes(config["hidden"], p), split_sizes(place.total, p)

    def forward(self, x):
        kit, group = self.place.kit, self.place.group
        if not self.place.sp:
            return kit.gather_from_region(kit.scatter_to_region(x, group).sin(), group, -1, self.features), None
        y = kit.all_to_all_region(x, group, -1, 0, None, self.tokens).sin()
        return kit.all_to_all_region(y, group, 0, -1, self.tokens, self.features), None


class Experts(nn.Module):
    """A mixture of experts. Its losses are attached where the loss of the model does not get those of the last
    forward."""

    def __init__(self, options, config, place):
        super().__init__()
        o, self.call, make = dict(options["moe"]), dict(place.tell), place.kit.ParallelMoE
        names = ("scores", "normalize", "num_groups", "top_groups", "balance_loss", "z_loss", "balance_over")
        router = place.kit.RouterConfig(scaling=o.pop("weights_sum"), **{name: o.pop(name) for name in names})
        attach = o.pop("attach") or config["loops"] > 1 or config["checkpointing"] == "reentrant"
        sizes = config["hidden"], options["ffn"], o.pop("experts"), o.pop("top_k")
        kind = {name: options[name] for name in ("activation", "bias")}
        more = {"router": router, "attach_loss": 1.0 if attach else None} | place.experts
        self.moe = make(*sizes, **kind, **o, **more, **place.linear)
        layout = config["layout"]
        self.call["batch_size"] = len(layout["lengths"]) if layout["how"] in ("batch", "tokens") else 1

    def forward(self, x):
        return self.moe(x, **self.call), None


def _feed_forward(options, config, place):
    return (Experts if options["moe"] else MLP)(options, config, place)


KINDS = {"attention": Attention, "mlp": _feed_forward, "pair": Pair, "gathered": Gathered, "exchange": Exchange}


class Block(nn.Module):
    """norm -> inner -> dropout, plus x if there is a residual."""

    def __init__(self, options, config, place):
        super().__init__()
        self.place, self.residual, self.p = place, options["residual"], options["dropout"]
        self.norm = _norm(options["norm"], config["hidden"], place)
        self.inner = KINDS[options["kind"]](options, config, place)
        parallel = {name: place.parallel[name] for name in ("group", "sequence_parallel")}
        self.dropout = place.kit.Dropout(self.p, **parallel)

    def forward(self, x):
        y, bias = self.inner(self.norm(x))
        residual, place = x if self.residual else None, self.place
        if bias is None:
            return self.dropout(y, residual=residual, **place.tell)
        more = {"dim": 0, "sizes": split_sizes(place.total, place.p)} if place.sp else {}
        return place.kit.dropout(y, self.p, self.training, bias=bias, residual=residual, group=place.group, **more)


def make(config, kit, group, experts=None):
    """The model, by way of a copy or of the meta device. ``experts``: options of ParallelMoE for its groups."""
    model, how = Model(config, kit, group, experts), config["made"]
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    return model.to_empty(device="cpu") if how == "meta" else model


class Model(nn.Module):
    def __init__(self, config, kit, group, experts=None):
        super().__init__()
        self.config, self.place = config, Place(config, kit, group, experts)
        hidden, parallel = config["hidden"], self.place.parallel
        self.embedding = self.head = None
        if config["embedding"]:
            o = config["embedding"]
            self.embedding = kit.VocabParallelEmbedding(o["vocab"], hidden, pad_to_multiple_of=o["pad"], **parallel)
        self.blocks = nn.ModuleList(Block(options, config, self.place) for options in config["blocks"])
        self.norm = _norm(config["norm"], hidden, self.place)
        if config["head"]:
            o = config["head"]
            self.head = kit.VocabParallelLMHead(
                hidden, o["vocab"], bias=o["bias"], pad_to_multiple_of=o["pad"], **self.place.linear
            )
            if o["tied"]:
                self.head.weight = self.embedding.weight
        for module in {None: [], "blocks": self.blocks, "model": [self]}[config["coalesce"]]:
            kit.coalesce_gradients(module)

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        mode = self.place.recomputes if self.training and torch.is_grad_enabled() else None
        for _ in range(self.config["loops"]):
            for block in self.blocks:
                if mode is None or (mode == "reentrant" and not x.requires_grad):  # torch would pass over the weights
                    x = block(x)
                else:
                    x = checkpoint(block, x, use_reentrant=mode == "reentrant")
        x = self.norm(x)
        return self.head(x, **self.place.tell) if self.makes_logits() else x

    def makes_logits(self):
        """Returns whether forward returns logits; in training head.loss may compute the loss without them."""
        return self.head is not None and not (self.config["loss"]["by_head"] and self.training)

    def loss(self, y, target, weights):
        """Returns the loss. With a head it covers all tokens; for other outputs it is this rank's partial sum. It has
        the losses of routers."""
        return self.own_loss(y, target, weights) + self.place.kit.router_loss(self)

    def own_loss(self, y, target, weights):
        if self.head is None:
            return (y.sin() * self.place.cut(weights)).sum()
        o = dict(self.config["loss"])
        vocab, by_head = self.config["head"]["vocab"] if o.pop("tell_vocab") else None, o.pop("by_head")
        if by_head:
            del o["inplace_backward"]
            loss = self.head.loss(y, target, **self.place.tell, **o, **by_head)
        else:
            loss = self.place.kit.vocab_parallel_cross_entropy(y, target, self.place.group, vocab_size=vocab, **o)
        if o["reduction"] == "none":
            return (loss * weights).sum()
        return loss / max(target.numel(), 1) if o["reduction"] == "sum" else loss
