"""The loss of a head without its logits in trainings: tied, in DDP, in a pipeline, recomputed, compiled; few tokens."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.vocabulary import close, dense
from tests.parallel.pipeline.test_stages import KEYWORDS, TOKENS, VOCAB, batch, staged
from tests.parallel.pipeline.test_stages import model as gpt

HIDDEN = 6


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


def _tied(group, weight, ids, target, wrap, pad):
    model = made(group, weight, wrap, pad)
    loss = model(ids[0], target[0])
    loss.backward()
    assert_trained(model, group, weight, loss, ids[0], target[0])


@pytest.mark.parametrize(("wrap", "pad"), [(_plain, None), (_plain, 4), (_reentrant, None)])
@pytest.mark.parametrize("p", [1, 2])
def test_a_tied_weight_gets_the_gradients_of_both_uses(p, wrap, pad):
    ranks.run(_tied, p, *batches(), wrap, pad)


def _compiled(group, weight, ids, target):
    torch._dynamo.reset()
    model = made(group, weight)
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(ids[0], target[0])
    loss.backward()
    assert_trained(model, group, weight, loss, ids[0], target[0])


def test_a_compiled_model_with_its_loss():
    ranks.run(_compiled, 2, *batches())


def _data_parallel(group, weight, ids, target):
    """DDP over dp, TP over tp, of other tokens on each rank of dp; equally many of them count."""
    mesh = mesh_of(1, 2, 1, 2)
    tp, mine = mesh["tp"].get_group(), mesh["dp"].get_local_rank()
    model = made(tp, weight)
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    loss = wrapped(ids[mine], target[mine])
    loss.backward()
    loss = loss.detach() / 2
    dist.all_reduce(loss, group=mesh["dp"].get_group())
    assert_trained(model, tp, weight, loss, ids, target)


def test_under_ddp():
    ranks.run(_data_parallel, 4, *batches())


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_one_token_and_no_valid_token(p, shape, reduction):
    """A target without dims has one token; of three here none counts."""
    ranks.run(_few, p, torch.randn(*shape, HIDDEN), torch.randn(VOCAB, HIDDEN), shape, reduction)


def _few(group, x, weight, shape, reduction):
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


def _in_a_pipeline(group, schedule):
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


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_as_the_loss_of_a_pipeline(schedule):
    """Under 1F1B, and under a schedule that splits the backward; with TP and SP."""
    assert TOKENS % 4 == 2  # chunks of unequal length
    ranks.run(_in_a_pipeline, 4, schedule)
