"""The fuzzer's model: any configuration of config.py, made of tp_ext's modules or of plain.py's.

Everything between the blocks is ``[*tokens, hidden]``; under sequence parallelism each rank has its share of dim 0.
"""

import copy
import pickle
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import registry
from tests.helpers.registry.norms import make_norm
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


class Block(nn.Module):
    """norm -> inner -> dropout, plus x if there is a residual."""

    def __init__(self, options, config, place):
        super().__init__()
        self.place, self.residual, self.p = place, options["residual"], options["dropout"]
        self.norm = make_norm(options["norm"], config["hidden"], place)
        variants = (v for name, v in registry.VARIANTS.items() if options.get(name))
        self.inner = next(variants, registry.KINDS[options["kind"]]).make(options, config, place)
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
        self.norm = make_norm(config["norm"], hidden, self.place)
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
