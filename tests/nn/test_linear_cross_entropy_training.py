"""The loss of a head without its logits in trainings: tied, in DDP, in a pipeline, recomputed, compiled, under
autocast, in half precision, with main_grad; few tokens.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.vocabulary import close, dense
from tests.nn.test_linear_cross_entropy import HIDDEN, assert_dense, local_rows, make
from tests.parallel.pipeline.test_stages import KEYWORDS, TOKENS, VOCAB, batch, staged
from tests.parallel.pipeline.test_stages import model as gpt


class Model(nn.Module):
    """Embedding, sine, and the loss of a head that is tied to the embedding."""

    def __init__(self, group, wrap=lambda fn: fn, pad=None):
        super().__init__()
        options = {"group": group, "dtype": torch.float64, "pad_to_multiple_of": pad}
        self.embedding = tp_ext.VocabParallelEmbedding(VOCAB, HIDDEN, **options)
        self.head = tp_ext.VocabParallelLMHead(HIDDEN, VOCAB, **options)
        self.head.weight = self.embedding.weight
        self.wrap = wrap

    def forward(self, ids, target):
        loss = self.wrap(lambda x: self.head.loss(x, target, z_loss=0.1, chunk_tokens=4))
        return loss(self.embedding(ids).sin())


def reference(weight, ids, target):
    """The loss of the whole model in plain torch, and the gradient of its weight, of both uses."""
    weight = weight.clone().requires_grad_()
    loss = dense(F.linear(F.embedding(ids, weight).sin(), weight), target, z_loss=0.1)
    loss.backward()
    return loss.detach(), weight.grad


def _reentrant(fn):
    return lambda x: checkpoint(fn, x, use_reentrant=True)


def _plain(fn):
    return fn


def made(group, weight, *args, **options):
    model = Model(group, *args, **options)
    tp_ext.load_full_state_dict(model, {"embedding.weight": weight, "head.weight": weight}, group=group)
    return model


def assert_trained(model, group, weight, loss, ids, target):
    """The loss, and this rank's rows of the gradient of the tied weight."""
    want, grad = reference(weight, ids, target)
    torch.testing.assert_close(loss.detach(), want, **close)
    own = model.embedding.sharding.shard(grad, group.rank(), group.size())
    torch.testing.assert_close(model.embedding.weight.grad[: len(own)], own, **close)


def batches(n=2):
    ids, target = torch.randint(VOCAB, (n, 5, 3)), torch.randint(VOCAB, (n, 5, 3))
    target[:, 1, :2] = -100
    return torch.randn(VOCAB, HIDDEN, dtype=torch.float64), ids, target


@pytest.mark.parametrize(("wrap", "pad"), [(_plain, None), (_plain, 4), (_reentrant, None)])
@on_ranks(1, 2)
def test_a_tied_weight_gets_the_gradients_of_both_uses(group, wrap, pad):
    weight, ids, target = batches()
    model = made(group, weight, wrap, pad)
    loss = model(ids[0], target[0])
    loss.backward()
    assert_trained(model, group, weight, loss, ids[0], target[0])


@on_ranks(2, backend="gloo")
def test_a_compiled_model_with_its_loss(group):
    weight, ids, target = batches()
    torch._dynamo.reset()
    model = made(group, weight)
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(ids[0], target[0])
    loss.backward()
    assert_trained(model, group, weight, loss, ids[0], target[0])


@on_ranks(4)
def test_under_ddp(group):
    """DDP over dp, TP over tp, of other tokens on each rank of dp; equally many of them count."""
    weight, ids, target = batches()
    mesh = mesh_of(1, 2, 1, 2)
    tp, mine = mesh["tp"].get_group(), mesh["dp"].get_local_rank()
    model = made(tp, weight)
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    loss = wrapped(ids[mine], target[mine])
    loss.backward()
    loss = loss.detach() / 2
    dist.all_reduce(loss, group=mesh["dp"].get_group())
    assert_trained(model, tp, weight, loss, ids, target)


@on_ranks(1, 2)
@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_one_token_and_no_valid_token(group, shape, reduction):
    """A target without dims has one token; of three here none counts."""
    x = torch.randn(*shape, HIDDEN)
    weight = torch.randn(VOCAB, HIDDEN)
    head = tp_ext.VocabParallelLMHead(HIDDEN, VOCAB, group=group)
    tp_ext.load_full_state_dict(head, {"weight": weight}, group=group)
    target = torch.full(shape, -100 if shape == (3,) else 2)
    x, full = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = head.loss(x, target, reduction=reduction)
    assert loss.shape == (shape if reduction == "none" else ())
    loss.sum().backward()
    x_full = x.detach().clone().requires_grad_()
    want = dense(F.linear(x_full, full)[None], target[None], reduction=reduction)
    want.sum().backward()
    torch.testing.assert_close(loss, want.view(loss.shape))
    torch.testing.assert_close(x.grad, x_full.grad)
    torch.testing.assert_close(head.weight.grad, head.sharding.shard(full.grad, group.rank(), group.size()))
    if shape == (3,):
        assert not loss.any() and not x.grad.any() and not head.weight.grad.any()


class Unprojected(nn.Module):
    """The last part of a model whose head is called by the loss."""

    def __init__(self, norm, head):
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x, total_tokens=None):
        return self.norm(x)


class HeadInTheLoss(nn.Module):
    def __init__(self, group=None, sp=False):
        super().__init__()
        whole = gpt(group, sp)
        self.embedding, self.blocks, self.last = whole.embedding, whole.blocks, Unprojected(whole.norm, whole.head)

    def pipeline_parts(self):
        return [torch.flatten, self.embedding], self.blocks, self.last

    def loss(self, x, target, reduction="sum"):
        return self.last.head.loss(x, target.flatten(), target.numel(), reduction=reduction, chunk_tokens=4)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@on_ranks(4)
def test_as_the_loss_of_a_pipeline(group, schedule):
    """Under 1F1B, and under a schedule that splits the backward; with TP and SP."""
    assert TOKENS % 4 == 2  # chunks of unequal length
    mesh = mesh_of(2, 1, 1, 2)
    one, model = HeadInTheLoss(), HeadInTheLoss(mesh["tp"], sp=True)
    steps = staged(model, mesh, schedule, loss=model.loss)
    ids, target = batch(0)
    steps.step(ids, target=target, return_outputs=False, **KEYWORDS)
    x = one.embedding(ids.flatten())
    for block in one.blocks:
        x = block(x, len(ids), ids.numel())
    want = one.last.head.loss(one.last(x), target.flatten(), keep_logits=True)
    want.backward()
    torch.testing.assert_close(steps.loss, want.detach(), rtol=1e-11, atol=1e-12)
    for stage in steps.stages:
        table = dict(tp_ext.layouts(stage))
        for name, param in stage.named_parameters():
            grad = table[name].shard(one.get_parameter(name).grad)
            torch.testing.assert_close(param.grad, grad, msg=name, rtol=1e-11, atol=1e-12)


# Compiled, recomputed, in other dtypes, with main_grad, in the head


OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.1, "chunk_tokens": 4}


def _compile(fn):
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


def _dynamic(fn):
    return torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)


def _checkpoint(fn):
    return lambda *args: checkpoint(fn, *args, use_reentrant=False)


CASES = [{}, {"reduction": "none", "return_entropy": True}, {"sequence_parallel": True}]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("options", CASES, ids=["mean", "tokens", "sp"])
@pytest.mark.parametrize("wrap", [_compile, _dynamic, _checkpoint])
@on_ranks(1, 2, backend="gloo", timeout=200)
def test_compiled_and_recomputed_as_eager(group, wrap, options):
    torch._dynamo.reset()
    (x, weight), (bias, target) = make(13)
    x = x.tensor_split(group.size())[group.rank()] if options.get("sequence_parallel") else x

    def fn(x, w, b):
        o = {"vocab_size": len(weight), "total_tokens": len(target), **OPTIONS, **options}
        result = tp_ext.linear_cross_entropy(x.sin(), w, target, group, bias=b, **o)
        return sum(one.sum() for one in result) if options.get("return_entropy") else result.sum() * 2

    results = []
    for f in (fn, wrap(fn)):
        leaves = [x.clone(), local_rows(weight, group, None), local_rows(bias, group, None)]
        loss = f(*(leaf.requires_grad_() for leaf in leaves))
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_other_dtypes(dtype, bound, reduction):
    bounds = {"rtol": bound, "atol": 4 * bound}
    assert_dense(2, make(13, dtype=dtype), bounds=bounds, chunk_tokens=4, reduction=reduction)


def _scaled(group, scale):
    """The gradient of x in fp16 with the loss scaled as GradScaler does."""
    x = torch.ones(64, HIDDEN, dtype=torch.float16, requires_grad=True)
    weight = torch.ones(30000, HIDDEN, dtype=torch.float16).requires_grad_()
    with torch.autocast("cpu", torch.float16):
        loss = tp_ext.linear_cross_entropy(x, weight, torch.zeros(64, dtype=torch.int64), group)
    (loss * scale).backward()
    return weight.grad[1:]


def test_small_probabilities_survive_fp16():
    """The share of one token in the mean is 5e-7 here, times the scale 0.03."""
    (grad,) = ranks.run(_scaled, 1, 65536.0)
    torch.testing.assert_close(grad.float(), torch.full_like(grad.float(), 65536 / 30000), rtol=1e-2, atol=0)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@on_ranks(2)
def test_autocast(group, reduction):
    (x, weight), (_, target) = make(12)
    x, w = x.float().requires_grad_(), local_rows(weight, group, None).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = tp_ext.linear_cross_entropy(x, w, target, group, reduction=reduction)
        logits = tp_ext.VocabParallelCrossEntropy(group=group, reduction=reduction)(
            torch.nn.functional.linear(tp_ext.copy_to_region(x, group), w), target
        )
    grads = [torch.autograd.grad(one.sum(), (x, w)) for one in (loss, logits)]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, logits)
    for a, b in zip(*grads, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def _accumulated(group, operands, reduction, dtype):
    (x, weight), (_, target) = operands
    grads = []
    for fused in (False, True):
        torch.manual_seed(0)
        o = {"grad_accumulation_fusion": fused, "dtype": dtype, "group": group}
        head = tp_ext.VocabParallelLMHead(HIDDEN, len(weight), **o)
        head.weight.main_grad = torch.ones(head.weight.shape, dtype=torch.float64)
        for scale in (1.0, 0.5):
            (head.loss(x.to(dtype), target, reduction=reduction, chunk_tokens=4).sum() * scale).backward()
        assert fused == (head.weight.grad is None)
        grads.append(head.weight.main_grad - 1 if fused else head.weight.grad)
    return grads


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_main_grad_gets_the_gradient_of_the_weight(reduction):
    for plain, fused in ranks.run(_accumulated, 2, make(13), reduction, torch.float64):
        torch.testing.assert_close(plain, fused, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{"pad_to_multiple_of": 4}, {"sequence_parallel": True}], ids=["padded", "sp"])
@on_ranks(2)
def test_loss_of_a_head_without_and_with_the_logits(group, options):
    """head.loss without and with the logits."""
    (x, weight), (_, target) = make(13)
    head = tp_ext.VocabParallelLMHead(HIDDEN, len(weight), bias=True, group=group, dtype=x.dtype, **options)
    own = x.flatten(0, 1).tensor_split(group.size())[group.rank()] if head.sequence_parallel else x.flatten(0, 1)
    results = []
    for keep in (False, True):
        x_own = own.clone().requires_grad_()
        loss = head.loss(x_own, target.flatten(), target.numel(), keep_logits=keep, z_loss=0.1, label_smoothing=0.1)
        results.append((loss, *torch.autograd.grad(loss, (x_own, head.weight, head.bias))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_the_loss_of_a_head_that_fsdp2_shards(group):
    (x, weight), (_, target) = make(13)
    grads = []
    for sharded in (False, True):
        torch.manual_seed(0)
        head = tp_ext.VocabParallelLMHead(HIDDEN, len(weight), group=None, dtype=x.dtype)
        if sharded:
            fully_shard(head, mesh=init_device_mesh("cpu", (2,)))
        head.loss(x, target).backward()  # the same tokens on both ranks: the mean of the gradients is each one's
        grads.append(head.weight.grad.full_tensor() if sharded else head.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def _second_derivative(group, operands, reduction):
    (x, weight), (_, target) = operands
    w = local_rows(weight, group, None).requires_grad_()
    loss = tp_ext.linear_cross_entropy(x, w, target, group, reduction=reduction).sum()
    torch.autograd.grad(loss, w, create_graph=True)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_second_derivative_is_refused(reduction):
    match = "linear_cross_entropy has no second derivative"
    ranks.run_raises(_second_derivative, 2, NotImplementedError, match, make(12), reduction, in_turns=False)
