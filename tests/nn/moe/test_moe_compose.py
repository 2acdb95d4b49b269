"""ParallelMoE with checkpointing, compile, autocast, copies; its collectives; ranks and experts without tokens; errors;
parity with the blocks of transformers."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import count_collectives_of
from tp_ext import ParallelMoE, RouterConfig, _ops

NAMES = ("dp", "ep", "tp")
LOSSES = RouterConfig(balance_loss=0.5, z_loss=0.1)
FP64 = {"dtype": torch.float64}


def made(sizes=None, **options):
    """A layer of 4 features and 5 experts, on this mesh or alone, and this rank's tokens."""
    torch.manual_seed(0)
    dp, ep, tp = (mesh_of(*sizes, names=NAMES)[name] for name in NAMES) if sizes else (None,) * 3
    options = {"router": LOSSES, "bias": True, **FP64, **options}
    layer = ParallelMoE(4, 6, 5, 2, group=tp, expert_group=ep, data_groups=[dp], **options)
    generator = torch.Generator().manual_seed(ep.get_local_rank() if ep is not None else 0)
    return layer, torch.randn(6, 4, **FP64, generator=generator)


def gradients(layer, x, call):
    x = x.clone().requires_grad_()
    y = call(layer, x)
    loss = y.square().sum()
    if layer.attach_loss is None and layer.losses is not None:
        loss = loss + layer.losses.total
    loss.backward()
    found = {"y": y.detach(), "dx": x.grad, **{name: param.grad for name, param in layer.named_parameters()}}
    layer.zero_grad()
    return found


def plain(layer, x):
    return layer(x)


def not_reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


def compiled(layer, x):
    return torch.compile(layer, backend="aot_eager")(x)


def copied(layer, x):
    layer(x)
    other_layer = copy.deepcopy(layer)
    assert other_layer.losses is None
    y = other_layer(x)
    for own, other in zip(layer.parameters(), other_layer.parameters(), strict=True):
        other.register_hook(lambda grad, own=own: setattr(own, "grad", grad.clone()))
    layer._last = other_layer._last
    return y


def _as_plain(group, call, attach):
    layer, x = made((1, 2, 2), attach_loss=attach, shared_experts=1)
    return gradients(layer, x, plain), gradients(layer, x, call)


@pytest.mark.parametrize(
    "call, attach",
    [(plain, 1.0), (not_reentrant, None), (not_reentrant, 1.0), (reentrant, 1.0), (compiled, None), (copied, None)],
)
def test_every_gradient_is_that_of_a_plain_call(call, attach):
    """Bit for bit: recomputation routes every token as before. The attached loss is the one that is added."""
    for want, found in ranks.run(_as_plain, 4, call, attach, timeout=120):
        assert want.keys() == found.keys()
        for name in want:
            assert torch.equal(want[name], found[name]), name
    (explicit, _), (attached, _) = (ranks.run(_as_plain, 4, plain, a)[0] for a in (None, 1.0))
    for name in explicit:
        torch.testing.assert_close(explicit[name], attached[name], rtol=1e-13, atol=1e-14)


@on_ranks(4)
def test_pickle(group):
    layer, _ = made((1, 2, 2))
    again = pickle.loads(pickle.dumps(layer))
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), again.parameters(), strict=True))
    assert again.losses is None


# Communication


def _counts(group, sizes, sequence_parallel, options):
    layer, x = made(sizes, sequence_parallel=sequence_parallel, **options)
    x, y = x.requires_grad_(), []
    forward = count_collectives_of(lambda: y.append(layer(x)))
    return forward, count_collectives_of(lambda: y[0].square().sum().backward())


@pytest.mark.parametrize(
    "sizes, sequence_parallel, options, forward, backward",
    [
        ((1, 2, 1), False, {}, {"all_gather": 1, "all_to_all": 2}, {"all_to_all": 2}),
        ((1, 1, 2), False, {}, {"all_reduce": 1}, {"all_reduce": 2}),
        ((1, 1, 2), True, {}, {"all_gather": 2, "reduce_scatter": 1}, {"all_gather": 1, "reduce_scatter": 2}),
        ((1, 2, 1), False, {"router": LOSSES}, {"all_gather": 1, "all_to_all": 2, "all_reduce": 1}, {"all_to_all": 2}),
        ((1, 2, 1), False, {"capacity": 1.0}, {"all_gather": 2, "all_to_all": 2}, {"all_to_all": 2}),
    ],
)
def test_collectives(sizes, sequence_parallel, options, forward, backward):
    options = {"router": RouterConfig(), **options}
    if sequence_parallel:  # the gradient of the router's weight is summed over the ranks
        backward = {**backward, "all_reduce": 1}
    assert ranks.run(_counts, 2, sizes, sequence_parallel, options) == [(forward, backward)] * 2


# Few tokens


def _one_expert_has_all(group, sizes):
    """Every token of every rank chooses expert 0: the other ranks receive none, and the other experts have no token."""
    layer, x = made(sizes, router=RouterConfig(correction_bias=True))
    layer.router.e_score_correction_bias.copy_(torch.tensor([9.0, 8, 0, 0, 0]))
    found = gradients(layer, x[: 6 * (group.rank() != 1)], plain)
    return {name: grad for name, grad in found.items() if name.startswith("experts")}


def test_ranks_and_experts_without_tokens_have_gradients_of_zero():
    """Rank 1 has no token either."""
    results = ranks.run(_one_expert_has_all, 4, (1, 4, 1))
    for rank, found in enumerate(results):
        for name, grad in found.items():
            assert grad is not None
            if rank:
                assert not grad.any(), name
            else:
                assert all(one.any() for one in grad), name


@pytest.mark.parametrize("balance_over", ["batch", "sequence"])
def test_the_losses_of_no_token_are_zero(balance_over):
    layer, x = made(router=RouterConfig(balance_loss=0.5, z_loss=0.1, balance_over=balance_over))
    assert not any(grad.any() for grad in gradients(layer, x[:0], plain).values())
    assert layer.losses.total == 0


@pytest.mark.parametrize("top_k, experts", [(1, 1), (3, 3)])
def test_one_expert_and_all_experts(top_k, experts):
    layer = ParallelMoE(4, 6, experts, top_k, group=None, router=RouterConfig(normalize=experts == 1), **FP64)
    x = torch.randn(5, 4, **FP64)
    scores = (x @ layer.router.weight.T).softmax(-1)
    want = 0
    for e in range(experts):
        gate, up = (x @ layer.experts.up_weight[e].T).chunk(2, -1)
        want = want + scores[:, e : e + 1] * (F.silu(gate) * up) @ layer.experts.down_weight[e].T
    torch.testing.assert_close(layer(x), want, rtol=1e-12, atol=1e-12)


# Routing


def test_ties_are_resolved_by_index():
    layer, _ = made(router=RouterConfig())
    with torch.no_grad():
        layer.router.weight.zero_()
    for tokens in (1, 3, 1000):
        experts = layer.router(torch.randn(tokens, 4, **FP64)).experts
        assert torch.equal(experts, torch.tensor([[0, 1]]).expand(tokens, 2))


def test_the_router_computes_in_fp32_under_autocast_and_in_bf16_layers():
    torch.manual_seed(0)
    layer = ParallelMoE(8, 8, 5, 2, group=None, router=LOSSES)
    x = torch.randn(6, 8)
    want = layer.router(x)
    with torch.autocast("cpu", torch.bfloat16):
        routed = layer.router(x)
        y = layer(x)
    assert torch.equal(routed.weights, want.weights) and routed.losses.total == want.losses.total
    torch.testing.assert_close(y.float(), layer(x), rtol=0.05, atol=0.05)
    low = layer.bfloat16()
    assert low.router(x.bfloat16()).weights.dtype == torch.float32
    assert low(x.bfloat16()).dtype == torch.bfloat16


def _updated(group, sizes):
    layer, x = made(sizes, router=RouterConfig(correction_bias=True))
    layer(x)
    layer.router.update_correction_bias(0.25)
    assert not layer.router.tokens_per_expert.any()
    return layer.router.e_score_correction_bias


def test_the_correction_bias_follows_the_choices_of_all_ranks():
    layer, _ = made(router=RouterConfig(correction_bias=True))
    x = torch.cat([torch.randn(6, 4, **FP64, generator=torch.Generator().manual_seed(rank)) for rank in range(2)])
    layer(x)
    counts = layer.router.tokens_per_expert.double()
    assert counts.sum() == 24
    want = 0.25 * (counts.mean() - counts).sign().float()
    assert all(torch.equal(bias, want) for bias in ranks.run(_updated, 4, (1, 2, 2)))
    assert "router.e_score_correction_bias" in layer.state_dict()


# Grouped linear


@pytest.mark.parametrize("counts", [(2, 0, 3), (0, 0, 0)])
def test_grouped_linear_is_twice_differentiable(counts):
    x = torch.randn(sum(counts), 4, **FP64, requires_grad=True)
    weight = torch.randn(3, 2, 4, **FP64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: _ops.grouped_linear(x, w, counts), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: _ops.grouped_linear(x, w, counts), (x, weight))


@pytest.mark.parametrize("counts", [(2, 0, 5), (7, 0, 0)])
def test_grouped_linear_by_the_grouped_gemm_of_torch(counts):
    """On the CPU, where torch has it for fp32 and for rows of whole 16 bytes; by default it is used on CUDA."""
    torch.manual_seed(0)
    x, weight, dy = torch.randn(7, 8), torch.randn(3, 16, 8), torch.randn(7, 16)
    results = []
    for grouped, scale in ((None, 1.0), (False, 0.5), (True, 0.5)):
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = _ops.grouped_linear(*inputs, counts, None, scale, grouped)
        dx, dweight = torch.autograd.grad(y, inputs, dy)
        results.append([y, dx, dweight / scale])
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_grouped_linear_refuses_what_does_not_fit():
    x, weight = torch.ones(3, 4), torch.ones(2, 5, 4)
    for counts in ([3], [1, 1], [4, -1]):
        with pytest.raises(ValueError, match=r"counts: \[.*\] must be a number of rows for each of the 2 experts"):
            _ops.grouped_linear(x, weight, counts)
    with pytest.raises(ValueError, match=r"x: shape \[3, 3\] must be \[rows, 4\]"):
        _ops.grouped_linear(torch.ones(3, 3), weight, [1, 2])


# transformers


def copy_weights(layer, block):
    with torch.no_grad():
        layer.router.weight.copy_(block.gate.weight)
        layer.experts.up_weight.copy_(block.experts.gate_up_proj)
        layer.experts.down_weight.copy_(block.experts.down_proj)
        if layer.shared is not None:
            shared = block.shared_experts
            layer.shared.up.weight.copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
            layer.shared.down.weight.copy_(shared.down_proj.weight)
            layer.router.e_score_correction_bias.copy_(block.gate.e_score_correction_bias)


def blocks(name):
    common = {"hidden_size": 16, "num_experts_per_tok": 3, "intermediate_size": 12, "moe_intermediate_size": 12}
    if name == "mixtral":
        from transformers.models.mixtral import modeling_mixtral as module

        return module.MixtralSparseMoeBlock(module.MixtralConfig(**common, num_local_experts=8)), RouterConfig(), 0
    if name == "qwen3":
        from transformers.models.qwen3_moe import modeling_qwen3_moe as module

        config = module.Qwen3MoeConfig(**common, num_experts=8, norm_topk_prob=False)
        return module.Qwen3MoeSparseMoeBlock(config), RouterConfig(normalize=False), 0
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as module

    groups = {"n_group": 4, "topk_group": 2}
    config = module.DeepseekV3Config(**common, n_routed_experts=8, n_shared_experts=2, **groups)
    ours = {"scaling": config.routed_scaling_factor, "num_groups": 4, "top_groups": 2, "correction_bias": True}
    return module.DeepseekV3MoE(config), RouterConfig("sigmoid", **ours), 2


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "deepseek"])
def test_parity_with_transformers(name):
    """In fp32, in which their routers compute."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    block, config, shared = blocks(name)
    for param in block.parameters():
        torch.nn.init.normal_(param, std=0.3)
    if name == "deepseek":
        block.gate.e_score_correction_bias.uniform_(0, 0.3)
    layer = ParallelMoE(16, 12, 8, 3, group=None, router=config, shared_experts=shared)
    copy_weights(layer, block)
    x = torch.randn(2, 10, 16)
    x, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = layer(x), block(other)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(y)
    y.backward(dy)
    want.backward(dy)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.router.weight.grad, block.gate.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.experts.up_weight.grad, block.experts.gate_up_proj.grad, rtol=1e-4, atol=1e-4)


# Errors


def _too_few(group):
    ParallelMoE(4, 6, 3, 1, group=None, expert_group=group)


def _one_group(group):
    ParallelMoE(4, 6, 8, 1, group=group, expert_group=group)


def test_groups_are_refused():
    ranks.run_raises(_too_few, 4, ValueError, "num_experts: 3 must be at least the 4 ranks of expert_group")
    ranks.run_raises(_one_group, 2, ValueError, "expert_group: must share this rank only with group")


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"capacity": 0.0}, ValueError, "capacity: 0.0 must be a finite number above 0, or None"),
        ({"drop_order": "random"}, ValueError, "drop_order: 'random' must be one of"),
        ({"router": {}}, TypeError, "router: {} must be a RouterConfig"),
        ({"router": RouterConfig(num_groups=2)}, ValueError, "num_groups: 2 must divide num_experts = 5"),
        ({"router": RouterConfig(num_groups=5)}, ValueError, "top_k: 2 must be at most the 1 experts"),
        ({"shared_experts": -1}, ValueError, "shared_experts: -1 must be an integer of at least 0"),
        ({"attach_loss": "1"}, TypeError, "attach_loss: '1' must be a number, or None"),
        ({"activation": "tanh"}, ValueError, "activation: 'tanh' must be one of"),
        ({"gradient_reduction": "max"}, ValueError, "gradient_reduction: 'max' must be one of"),
    ],
)
def test_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        made(**options)


def test_other_bad_input():
    with pytest.raises(ValueError, match="scores: 'tanh' must be one of"):
        RouterConfig("tanh")
    with pytest.raises(ValueError, match="top_groups: 3 must be at most num_groups = 2"):
        RouterConfig(num_groups=2, top_groups=3)
    layer, _ = made()
    with pytest.raises(ValueError, match=r"x: shape \(2, 3\) must end in hidden_size = 4"):
        layer(torch.ones(2, 3, **FP64))
    with pytest.raises(ValueError, match="must have RouterConfig"):
        layer.router.update_correction_bias(0.1)
    assert tp_ext.router_loss(torch.nn.Linear(2, 2)) == 0
