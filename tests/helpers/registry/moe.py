"""The mixture of experts."""

import torch
from torch import nn

import tp_ext
from tests.helpers.dense_moe import DenseMoE
from tests.helpers.oracle import GATED
from tests.helpers.registry.bytes import A2A, AG, AR, RS, SP, E, F, H, N, S, Sent
from tests.helpers.registry.entries import HIDDEN, Variant
from tests.helpers.registry.mlp import ParallelMLP
from tests.helpers.registry.rules import Subject, module

ERRORS = [
    ("ParallelMoE(4, 6, 1, 1, group=None, expert_group=g)", ValueError, "num_experts: 1 must be at least the 2 ranks"),
    ("RouterConfig('tanh')", ValueError, "scores: 'tanh' must be one of"),
    ("router_loss(3)", TypeError, "model: int must be an nn.Module"),
]


SUBJECTS = {"ParallelMoE": Subject(module(lambda g: tp_ext.ParallelMoE(HIDDEN, HIDDEN, 4, 2, group=g)))}


EXPERTS, CHOICES = 12, 2  # over 2, 3 and 4 ranks as many


def _sent(forward, backward, shared=0, loss=0.0, capacity=None, axis="expert_group", **options):
    """Experts of which each has as many tokens: token t chooses t and t + 1."""

    def make(g):
        config = tp_ext.RouterConfig(balance_loss=loss)
        more = options | {"group": None, axis: g, "router": config, "shared_experts": shared, "capacity": capacity}
        moe = tp_ext.ParallelMoE(H, F, EXPERTS, CHOICES, **more)
        p = g.size() if options.get("sequence_parallel") else 1
        with torch.no_grad():
            moe.router.weight.copy_(4 * torch.eye(EXPERTS) + 2 * torch.eye(EXPERTS).roll(1, 0))
        x = torch.eye(H).repeat(N // H, 1)[: N // p].requires_grad_()
        return lambda: moe(x)

    return Sent("ParallelMoE", make, forward, backward)


_EXCHANGE = [(A2A, N * CHOICES * H * E)] * 2
_TP, _TP_BACKWARD = [(AR, S)], [(AR, S), (AR, N * CHOICES * 4)]
_SP = [(AG, S), (AG, N * CHOICES * 8), (RS, S)]
_SP_BACKWARD = [(RS, S), (RS, N * CHOICES * 8), (AG, S), (AR, EXPERTS * H * E)]


def _counts(p):
    """The gather of each rank's number of tokens for each expert."""
    return (AG, p * EXPERTS * 8)


SENT = {
    "experts": _sent(lambda p: [_counts(p), *_EXCHANGE], _EXCHANGE),
    "experts shared": _sent(lambda p: [_counts(p), *_EXCHANGE], _EXCHANGE, shared=2),
    "experts loss": _sent(lambda p: [_counts(p), *_EXCHANGE, (AR, 8 * (2 * EXPERTS + 2))], _EXCHANGE, loss=0.1),
    "experts capacity": _sent(lambda p: [_counts(p)] * 2 + _EXCHANGE, _EXCHANGE, capacity=1.0),
    "experts capacity by weight": _sent(
        lambda p: [*[_counts(p)] * 2, (AG, p * N * CHOICES * 16), *_EXCHANGE],
        _EXCHANGE,
        capacity=1.0,
        drop_order="weight",
    ),
    "experts tp": _sent(_TP, _TP_BACKWARD, axis="group"),
    "experts tp shared": _sent(_TP, _TP_BACKWARD, axis="group", shared=2, bias=True),
    "experts sp": _sent(_SP, _SP_BACKWARD, axis="group", **SP),
    "experts sp shared": _sent(_SP, _SP_BACKWARD, axis="group", shared=2, **SP),
    "experts sp shared bias": _sent(_SP, [*_SP_BACKWARD, (AR, H * E)], axis="group", shared=2, bias=True, **SP),
}


class ParallelMoE(DenseMoE):
    def __init__(
        self,
        hidden,
        ffn,
        experts,
        top_k,
        *,
        activation,
        bias,
        router,
        capacity,
        drop_order,
        shared_experts,
        dtype=None,
        device=None,
        **_cut,
    ):
        width, options = ffn * (2 if activation in GATED else 1), {"dtype": dtype, "device": device}
        state = {
            "router.weight": (experts, hidden),
            "experts.up_weight": (experts, width, hidden),
            "experts.down_weight": (experts, hidden, ffn),
        }
        if bias:
            state |= {"experts.up_bias": (experts, width), "experts.down_bias": (experts, hidden)}
        state = {name: torch.empty(shape, **options) for name, shape in state.items()}
        if shared_experts:
            shared = ParallelMLP(hidden, shared_experts * ffn, activation=activation, bias=bias, **options)
            state |= {f"shared.{name}": value for name, value in shared.state_dict().items()}
        chosen = {"config": router, "capacity": capacity, "drop_order": drop_order}
        super().__init__(state, top_k=top_k, activation=activation, **chosen)
        self.losses = []

    def forward(self, x, batch_size, total_tokens=None):
        y, loss, _ = super().forward(x.flatten(0, -2), batch_size)
        if self.training:
            self.losses.append(loss)
        return y.view(x.shape)


def router_loss(model):
    """The losses of the last forward of each layer, with the gradient of those of all forwards since the last call."""
    total = 0.0
    for layer in model.modules():
        if isinstance(layer, ParallelMoE) and layer.losses:
            total = total + layer.losses[-1].detach() + sum(loss - loss.detach() for loss in layer.losses)
            layer.losses = []
    return total


PLAIN = {"ParallelMoE": ParallelMoE, "router_loss": router_loss}


def _moe(r, layout, embedding):
    """Experts in place of an MLP; None: the MLP."""
    if r.random() < 0.4:
        return None
    groups = r.choice((1, 1, 1, 2, 3))
    experts = groups * r.randint(1, 16 // groups)
    top_groups = r.randint(1, groups)
    equal = layout["how"] in ("batch", "tokens")  # sequences of one length
    return {
        "experts": experts,
        "top_k": r.randint(1, min(4, experts // groups * top_groups)),
        "num_groups": groups,
        "top_groups": top_groups,
        "scores": r.choice(("softmax", "sigmoid")),
        "normalize": r.random() < 0.6,
        "weights_sum": r.choice((1.0, 2.5)),
        "balance_loss": r.choice((0.0, 0.7)),
        "z_loss": r.choice((0.0, 0.3)),
        "balance_over": r.choice(("batch", "sequence")) if equal else "batch",
        "capacity": r.choice((None, None, 0.5, 1.0, 1.3)),
        "drop_order": r.choice(("token", "weight")) if embedding is None else "token",
        "shared_experts": r.choice((0, 0, 1, 2)),
        "attach": r.random() < 0.3,
    }


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


def _valid(options, p, config):
    if options["experts"] % options["num_groups"] or options["top_groups"] > options["num_groups"]:
        return False
    if options["top_k"] > options["experts"] // options["num_groups"] * options["top_groups"]:
        return False
    if options["drop_order"] == "weight" and config["embedding"]:
        return False  # tokens of one id have weights that are equal but for rounding
    return options["balance_over"] == "batch" or config["layout"]["how"] in ("batch", "tokens")


VARIANTS = {"moe": Variant("mlp", _moe, Experts, _valid)}
OFF = {
    "moe": None, "num_groups": 1, "top_groups": 1, "scores": "softmax", "normalize": True, "weights_sum": 1.0,
    "balance_loss": 0.0, "balance_over": "batch", "capacity": None, "drop_order": "token", "shared_experts": 0,
    "attach": False,
}  # fmt: skip
