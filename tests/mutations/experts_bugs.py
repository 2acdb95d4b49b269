"""Bugs of one line in expert layers: router, losses, capacity, exchange, gradients of experts, norms with experts."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("tp_ext")
RANDOM = "nn/moe/test_moe.py::test_random_layers"
COMPOSE = "nn/moe/test_moe_compose.py"
STEPS = "parallel/test_average_gradients.py::test_three_steps"

EXPERTS_BUGS = [
    _bug(
        "experts_gradient_scale",
        "nn/moe/experts.py",
        'self.gradient_scale = 1 / ep.size if gradient_reduction == "mean" else 1.0',
        "self.gradient_scale = 1.0",
        "Experts' gradients are sums over the expert group where all others are means.",
        RANDOM,
    ),
    _bug(
        "experts_down_bias_on_every_rank",
        "nn/moe/experts.py",
        "return y + added if first else y.view_as(y)",
        "return y + added",
        "Every tensor-parallel rank adds the bias.",
        RANDOM,
    ),
    _bug(
        "router_ties",
        "nn/moe/router.py",
        "return choice.sort(dim=-1, descending=True, stable=True).indices[..., : self.top_k].contiguous()",
        "return choice.sort(dim=-1, stable=True).indices.flip(-1)[..., : self.top_k].contiguous()",
        "Of experts with equal scores the last one comes first.",
        f"{COMPOSE}::test_ties_are_resolved_by_index",
    ),
    _bug(
        "router_loss_of_the_rank",
        "nn/moe/router.py",
        "return self.data_ranks.sum(self._over_tp(x))",
        "return self._over_tp(x)",
        "The losses are those of the rank's own tokens.",
        RANDOM,
    ),
    _bug(
        "router_weights_not_copied",
        "nn/moe/moe.py",
        "weights = _ops.copy_to_region(routed.weights, name)",
        "weights = routed.weights",
        "The router's gradient is that of one rank's experts.",
        RANDOM,
    ),
    _bug(
        "capacity_of_the_rank",
        "nn/moe/router.py",
        "+ table[: ranks.rank].sum(0)[flat]",
        "",
        "The position in an expert's queue does not count the tokens of other ranks.",
        RANDOM,
    ),
    _bug(
        "shared_output_bias_unsummed",
        "nn/moe/moe.py",
        'bias = self.shared.down.parameter("bias")',
        "bias = self.shared.down.bias",
        "Under sequence parallelism the gradient of the shared experts' bias is that of the rank's tokens.",
        RANDOM,
    ),
    _bug(
        "shared_input_not_copied",
        "nn/moe/moe.py",
        "y = routed_and_shared(exchange, self.experts, self.shared, x, weights)",
        "y = routed_and_shared(exchange, self.experts, self.shared, x.detach(), weights)",
        "The gradient of the input has no part of the shared experts.",
        RANDOM,
    ),
    _bug(
        "exchange_order_of_arrival",
        "nn/moe/token_exchange.py",
        "of_row = local.repeat_interleave(table[:, own_experts].flatten(), output_size=sum(received))",
        "of_row = local.repeat_interleave(table[:, own].T.flatten(), output_size=sum(received))",
        "Rows are taken to arrive in the order of experts.",
        RANDOM,
    ),
    _bug(
        "average_of_experts",
        "parallel/average_gradients.py",
        "if not is_sharded_over(entry.layout, axis, name)]",
        "]",
        "Different experts' gradients are averaged.",
        f"{STEPS}[sizes1-average_gradients]",
    ),
    _bug(
        "norm_over_a_spanned_axis",
        "parallel/grad_norm.py",
        "norm = torch.full_like(norm, _norm_of_none(norm_type))",
        "pass",
        "What FSDP2 shards over the expert group, too, counts once for each of its ranks.",
        f"{STEPS}[sizes0-fsdp2]",
    ),
]
