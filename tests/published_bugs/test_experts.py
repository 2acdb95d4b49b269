"""Published bugs of mixtures of experts over expert and tensor parallelism: outputs, the gradients of router, experts
and input, and their norm, against the model in one process."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.right_and_wrong import check, check_on_rank
from tp_ext import ParallelMoE, RouterConfig
from tp_ext.nn.moe.experts import ParallelExperts

FP64 = {"dtype": torch.float64}
NAMES = ("ep", "tp")


def made(kind=ParallelMoE, sizes=None, **options):
    """A layer on a mesh of these sizes or in one process, and the tokens of this rank, of 2 data ranks or both."""
    torch.manual_seed(0)
    ep, tp = (mesh_of(*sizes, names=NAMES)[name] for name in NAMES) if sizes else (None, None)
    layer = kind(4, 6, 4, 2, group=tp, expert_group=ep, **FP64, **options)
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(5), **FP64)
    if ep is not None:
        x = x.tensor_split(ep.size())[ep.get_local_rank()]
    return layer, x.clone().requires_grad_(), ep, tp


def backward(kind=ParallelMoE, sizes=None, **options):
    """The gradient of the mean over data ranks of sums of squares: of input, router, and the first expert."""
    layer, x, ep, _ = made(kind, sizes, **options)
    layer(x).square().sum().mul(ep.size() if ep is not None else 1).backward()
    router = layer.router.weight.grad
    router = torch.zeros_like(layer.router.weight) if router is None else router
    if ep is not None and ep.size() > 1:
        dist.all_reduce(router, group=ep.get_group())
        router /= ep.size()
    return layer, x.grad, router


class WithoutSum(ParallelMoE):
    """Tokens and weights enter the sharded work without the sum of their gradients over the ranks."""

    def _enter(self, x, routed, sizes):
        return routed.experts, routed.weights, x


@on_ranks(2)
def test_the_gradient_of_the_tokens_of_sharded_experts(group):
    """Each rank's gradient of the input of tensor-parallel experts was taken for that of all ranks, so that all
    parameters below had one rank's share: https://github.com/pytorch/torchtitan/pull/4054"""
    check_on_rank(group, [backward(kind, (1, 2))[1] for kind in (ParallelMoE, WithoutSum)], backward()[1])


class WithoutSumOfWeights(ParallelMoE):
    """Only the tokens' gradients are summed over the ranks."""

    def _enter(self, x, routed, sizes):
        return routed.experts, routed.weights, super()._enter(x, routed, sizes)[2]


@on_ranks(2)
def test_the_gradient_of_the_weights_of_sharded_experts(group):
    """The router's scores had the gradient of one rank's experts:
    https://github.com/huggingface/transformers/pull/48205"""
    check_on_rank(group, [backward(kind, (1, 2))[2] for kind in (ParallelMoE, WithoutSumOfWeights)], backward()[2])


class Hidden(ParallelMoE):
    """A dropped choice has the weight 0 in forward, and an expert's output in backward."""

    def _enter(self, x, routed, sizes):
        self.all_experts = routed.experts
        return super()._enter(x, routed, sizes)

    def _computed(self, x, experts, weights):
        weights = torch.where(experts < 0, weights - weights.detach(), weights)
        return super()._computed(x, self.all_experts, weights)


@on_ranks(2)
def test_a_choice_that_is_not_computed_has_no_gradient(group):
    """Slots of no expert had a weight of 0, which hides them in the output but not in the router's gradient:
    https://github.com/huggingface/transformers/issues/48687"""
    check_on_rank(
        group, [backward(kind, (2, 1), capacity=0.5)[2] for kind in (ParallelMoE, Hidden)], backward(capacity=0.5)[2]
    )


class Detached(ParallelMoE):
    """The weights are gathered by torch's all_gather, which is not differentiable."""

    def _enter(self, x, routed, sizes):
        experts, weights, x = super()._enter(x, routed, sizes)
        return experts, weights.detach(), x


@on_ranks(2)
def test_the_router_is_trained_by_the_loss_of_the_model(group):
    """The weights of gathered tokens were gathered without a gradient, and the router learned from its auxiliary losses
    alone: https://github.com/NVIDIA-NeMo/Automodel/pull/2995"""
    results = []
    for kind in (ParallelMoE, Detached):
        layer, x, _, tp = made(kind, (1, 2), sequence_parallel=True)
        layer(x.detach().tensor_split(2)[tp.get_local_rank()]).square().sum().backward()
        grad = layer.router.weight.grad
        results.append(torch.zeros_like(layer.router.weight) if grad is None else grad)
    check_on_rank(group, results, backward()[2])


def _decayed(sizes=None, published=False):
    """An expert without tokens after a step of AdamW with weight decay."""
    layer, x, _, _ = made(ParallelMoE, sizes, router=RouterConfig(correction_bias=True))
    layer.router.e_score_correction_bias.copy_(torch.tensor([2.0, 1.0, 0.0, 0.0]))
    layer(x).square().sum().backward()
    if published:
        for param in layer.experts.parameters():
            param.grad = param.grad if param.grad.any() else None
    torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5).step()
    return tp_ext.full_state_dict(layer)["experts.up_weight"][3]


@on_ranks(2)
def test_experts_without_tokens_take_part_in_the_step(group):
    """The gradient of an expert without tokens was None, so that it missed weight decay and the decay of its momentum:
    https://github.com/NVIDIA-NeMo/Automodel/pull/2995"""
    check_on_rank(group, [_decayed((2, 1), published) for published in (False, True)], _decayed())


@on_ranks(2)
def test_gradients_of_experts_are_means_like_those_of_the_rest(group):
    """An expert's gradient is the sum over the ranks whose tokens it saw; where those of all other parameters are means
    it is as many times too large: https://github.com/pytorch/pytorch/issues/160285,
    https://github.com/databricks/megablocks/pull/20"""
    results = []
    for reduction in ("mean", "sum"):
        layer, _, _ = backward(sizes=(2, 1), gradient_reduction=reduction)
        grad, ep = layer.experts.up_weight.grad, layer.experts.expert_group
        results.append(tp_ext.gather_from_region(grad, ep.name, 0))
    check_on_rank(group, results, backward()[0].experts.up_weight.grad)


def _norms(group):
    layer, _, router = backward(sizes=(2, 2))
    layer.router.weight.grad = router
    ours = tp_ext.grad_norm(layer)
    ep, tp = layer.experts.expert_group, layer.tp_group
    squares = sum(param.grad.square().sum() for param in layer.experts.parameters()) * (tp.rank == 0)
    squares = squares + router.square().sum() * (tp.rank == 0 and ep.rank == 0)
    dist.all_reduce(squares)
    return ours, squares.sqrt()


def test_the_norm_counts_the_experts_of_all_ranks():
    """With expert and tensor parallelism the norm left out the experts of some ranks, so that gradients were clipped
    less: https://github.com/NVIDIA/Megatron-LM/pull/5916"""
    layer = backward()[0]
    want = torch.nn.utils.get_total_norm([param.grad for param in layer.parameters()])
    check(ranks.run(_norms, 4), want)


@on_ranks(2)
def test_gradients_of_different_experts_are_not_mixed(group):
    """Experts' gradients were reduced over the data ranks of all other parameters, which have other experts:
    https://github.com/NVIDIA/Megatron-LM/pull/6080"""
    results = []
    for over in (None, group):
        layer, _, _ = backward(sizes=(2, 1))
        grad, ep = layer.experts.up_weight.grad, layer.experts.expert_group
        if over is not None:
            dist.all_reduce(grad, group=over)
            grad /= 2
        results.append(tp_ext.gather_from_region(grad, ep.name, 0))
    check_on_rank(group, results, backward()[0].experts.up_weight.grad)


LOSSES = RouterConfig(balance_loss=0.5, z_loss=0.1)


def _per_token(group):
    """Gradients of a sum over tokens, divided by their number: the router's losses count that number of times."""
    results = []
    for of_rank in (False, True):
        layer, x, _, tp = made(sizes=(1, 2), sequence_parallel=True, router=LOSSES)
        own = x.detach().tensor_split(2)[tp.get_local_rank()]
        layer.attach_loss = float(len(own if of_rank else x))
        layer(own).square().sum().backward()
        results.append(layer.router.weight.grad / len(x))
    return results


def test_auxiliary_losses_of_a_sum_over_tokens():
    """With a loss per token, auxiliary losses were multiplied by the tokens of a sequence-parallel rank, and gradients
    divided by those of all: https://github.com/NVIDIA/Megatron-LM/pull/5047"""
    layer, x, _, _ = made(router=LOSSES)
    (layer(x).square().sum() / len(x) + layer.losses.total).backward()
    check(ranks.run(_per_token, 2), layer.router.weight.grad)


def _correction_bias(sizes=None):
    """The bias after one update, and what an update by this rank's tokens alone makes of it."""
    layer, x, _, tp = made(sizes=sizes, router=RouterConfig(correction_bias=True), sequence_parallel=sizes is not None)
    layer(x.detach().tensor_split(2)[tp.get_local_rank()] if sizes else x.detach())
    counts = layer.router.tokens_per_expert.double()
    of_rank = layer.router.e_score_correction_bias + 0.25 * (counts.mean() - counts).sign()
    layer.router.update_correction_bias(0.25)
    return layer.router.e_score_correction_bias.double(), of_rank.double()


@on_ranks(2)
def test_the_correction_bias_counts_the_tokens_of_all_ranks(group):
    """The numbers of tokens that correct the router were not summed over the tensor-parallel ranks, each of which had
    its own tokens: https://github.com/pytorch/torchtitan/pull/4154"""
    check_on_rank(group, _correction_bias((1, 2)), _correction_bias()[0])


class BiasOnEveryRank(ParallelExperts):
    """Each rank adds the bias to its partial sums."""

    def forward(self, x, counts):
        added = self.down_bias.detach().repeat_interleave(torch.tensor(counts), 0)
        return super().forward(x, counts) + added * (self.tp_group.rank != 0)


def _with_bias(sizes=None, kind=ParallelExperts):
    layer, x, _, _ = made(sizes=sizes, bias=True)
    torch.nn.init.normal_(layer.experts.down_bias, generator=torch.Generator().manual_seed(7))
    layer.experts.__class__ = kind
    y = layer(x)
    y.square().sum().backward()
    return [y.detach(), layer.router.weight.grad, layer.experts.down_bias.grad]


@on_ranks(2)
def test_the_output_bias_of_sharded_experts_counts_once(group):
    """The replicated bias of experts was added on every rank before the sum over the ranks, so it counted as many
    times: https://github.com/pytorch/torchtitan/pull/4245"""
    check_on_rank(group, [_with_bias((1, 2), kind) for kind in (ParallelExperts, BiasOnEveryRank)], _with_bias())


def _by_slots(layer, x, slots, group, flat):
    """y of whole experts with this many slots each, whose slots are sharded over the ranks of a group: as a buffer
    ``[experts, slots, hidden]``, or ``flat``, ``[experts * slots, hidden]``."""
    routed, used, places = layer.router(x), [0] * layer.experts.num_experts, []
    buffer = x.new_zeros(len(used), slots, x.shape[1])
    for token, (chosen, weights) in enumerate(zip(routed.experts.tolist(), routed.weights, strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            if used[expert] < slots:
                buffer[expert, used[expert]] = x[token]
                places.append((token, expert, used[expert], weight))
            used[expert] += 1
    shared = buffer.flatten(0, 1) if flat else buffer
    own = shared.chunk(group.size(), 1)[group.rank()].reshape(len(used), -1, x.shape[1])
    gate, up = torch.einsum("esh,efh->esf", own, layer.experts.up_weight).chunk(2, -1)
    computed = torch.einsum("esf,ehf->esh", F.silu(gate) * up, layer.experts.down_weight)
    parts = [torch.empty_like(computed) for _ in range(group.size())]
    dist.all_gather(parts, computed.contiguous(), group=group)
    whole, y = torch.cat(parts, 1), torch.zeros_like(x)
    for token, expert, slot, weight in places:
        y[token] += weight * whole[expert, slot]
    return y


@torch.no_grad()
def _flat_buffer(group):
    layer, x, _, _ = made(sizes=(1, 2), capacity=1.0)
    whole, _, _, _ = made(capacity=1.0)
    ours, right, published = layer(x), *(_by_slots(whole, x, 6, group, flat) for flat in (False, True))
    torch.testing.assert_close(right, ours, rtol=1e-10, atol=1e-12)
    return ours, published


def test_ranks_share_the_slots_of_experts_and_not_the_features():
    """A buffer of ``experts * slots`` rows was sharded on dim 1, meant for the slots; its features, viewed as slots,
    had the shape that the experts expect: https://github.com/deepspeedai/DeepSpeed/pull/8195"""
    layer, x, _, _ = made(capacity=1.0)  # ceil(1.0 * top_k * 12 tokens / 4 experts) = 6 slots
    check(ranks.run(_flat_buffer, 2), layer(x).detach())
