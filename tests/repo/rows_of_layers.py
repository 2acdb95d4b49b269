"""Rows of ``test_errors_on_one_rank.py`` of calls of a step: what one rank alone sees, before a collective."""

import torch
import torch.distributed as dist
from torch import nn, ones, tensor

import tp_ext
from tp_ext import lax
from tp_ext.low_precision import Float8, float8, quantize_


def _column(group, **options):
    return tp_ext.ColumnParallelLinear(4, 6, group=group, gather_output=True, **options)


def _float8(group, x):
    layer = _column(group)
    float8(layer, Float8(scaling="row"))
    layer(x).sum().backward()


def _quantised(group, weights, x):
    layer = nn.Sequential(tp_ext.RowParallelLinear(6, 4, group=group))
    quantize_(layer, weights, block=2)
    layer(x)


def _adapter(group, x):
    tp_ext.LoRALinear(_column(group), 2, alpha=1.0)(x)


def _later_tokens(group, width=8, columns=2, labels=2, tokens=3):
    embedding = tp_ext.VocabParallelEmbedding(9, 8, group=group)
    head = tp_ext.VocabParallelLMHead(8, 9, group=group)
    module = (
        tp_ext.MultiTokenPrediction(8, nn.Identity(), depth=1, embedding=embedding, head=head, group=group)
        if columns == 1
        else tp_ext.MultiTokenPrediction(8, nn.Identity, depth=2, embedding=embedding, head=head, group=group)
    )
    hidden = module(ones(2, 3, width), torch.ones(2, tokens, columns, dtype=torch.long))
    module.loss(hidden, torch.ones(2, 3, labels, dtype=torch.long))


def _latent(group, x):
    tp_ext.ParallelLatentAttention(
        8, 4, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2, rope=1e4, group=group
    )(x)


def _head(group):
    return tp_ext.VocabParallelLMHead(8, 9, group=group)


def _layout(group):
    return tp_ext.ContextLayout([4 * group.size()], group=group)


def _clip(group, clip, *args):
    layer = _column(group)
    layer(ones(2, 4)).sum().backward()
    clip(layer, *args)


def _mapped(act):
    """Over all ranks; the function takes ones ``[2, 6]`` and whether the rank is bad."""

    def call(group, bad):
        mesh = dist.init_device_mesh("cpu", (group.size(),), mesh_dim_names=("x",))
        tp_ext.spmd(mesh, in_specs=tp_ext.P("x"), out_specs=tp_ext.P("x"))(lambda a: act(a, bad))(ones(6, 6))

    return call


def _mesh2(group):
    return dist.init_device_mesh("cpu", (group.size(), 1), mesh_dim_names=("x", "y"))


def _matmul(group, bad):
    mesh = _mesh2(group)
    tp_ext.matmul_2d(ones(2, 3), ones(1 + bad, 4), mesh["x"], mesh["y"], shape=(6, 3, 4))


def _timeline(group, bad):
    with tp_ext.debug.record_timeline(3 if bad else group):
        dist.barrier(group)


def _compared(group, bad):
    with tp_ext.debug.compare_collectives():
        dist.all_reduce(ones(2), group=group)
        if bad:
            raise ValueError("of the rank")
        dist.all_reduce(ones(2), group=group)


ALONE = {
    "x of a row linear": (
        lambda g, bad: tp_ext.RowParallelLinear(6, 4, group=g)(ones(3, 2 + bad)),
        r"x: shape \[3, 3\] must end in",
    ),
    "x of an MLP": (lambda g, bad: tp_ext.ParallelMLP(4, 8, group=g)(ones(3, 4 + bad)), r"x: shape \[3, 5\] must end"),
    "x of a norm": (lambda g, bad: tp_ext.RMSNorm(4, group=g, sequence_parallel=True)(ones(3, 4 + bad)), "x: shape"),
    "x of a layer norm": (
        lambda g, bad: tp_ext.LayerNorm(4, group=g, sequence_parallel=True)(ones(3, 4 + bad)),
        "x: shape",
    ),
    "x of a latent attention": (lambda g, bad: _latent(g, ones(1, 3, 8 + bad)), "x: shape"),
    "x of a sum and a norm": (
        lambda g, bad: tp_ext.RMSNorm(4, group=g).after_sum(ones(3, 4), ones(3 + bad, 4), group=g.group_name),
        "residual: ",
    ),
    "x of float8": (lambda g, bad: _float8(g, ones(3, 4 + bad)), r"x: shape \[3, 5\] must end in"),
    "a dtype of float8": (lambda g, bad: _float8(g, ones(3, 4).to(torch.int8 if bad else torch.float32)), "x: dtype"),
    "x of int8": (lambda g, bad: _quantised(g, "int8", ones(3, 2 + bad)), "x: shape|mat1|shape"),
    "x of an adapter": (lambda g, bad: _adapter(g, ones(3, 4 + bad)), r"x: shape \[3, 5\] must end in"),
    "hidden of later tokens": (lambda g, bad: _later_tokens(g, width=8 + bad), "hidden: "),
    "ids of later tokens": (lambda g, bad: _later_tokens(g, tokens=3 + bad), "next_ids: "),
    "labels of later tokens": (lambda g, bad: _later_tokens(g, labels=2 + bad), "labels: "),
    "logits of an arg-max": (
        lambda g, bad: tp_ext.vocab_parallel_argmax(ones(2, 3).to(torch.int8 if bad else torch.float32), g),
        "logits",
    ),
    "top_k of a sample": (
        lambda g, bad: tp_ext.vocab_parallel_sample(ones(2, 3), g, top_k=0 if bad else 2),
        "top_k: 0 must",
    ),
    "top_k of a head's sample": (lambda g, bad: _head(g).sample(ones(2, 8), top_k=0 if bad else 2), "top_k: 0 must"),
    "hidden of a head": (lambda g, bad: _head(g)(ones(2, 8 + bad)), "x: shape"),
    "labels of a head": (lambda g, bad: _head(g).loss(ones(2, 8), tensor([0, 1] + [1] * bad)), "target"),
    "hidden of a loss without logits": (
        lambda g, bad: tp_ext.linear_cross_entropy(ones(2, 8 + bad), ones(3, 8), tensor([0, 1]), g),
        "hidden|x: ",
    ),
    "tokens to be sharded": (
        lambda g, bad: _layout(g).shard(ones(12 + bad, requires_grad=True)).sum().backward(),
        "x: 13 el",
    ),
    "tokens to be gathered": (lambda g, bad: _layout(g).unshard(ones(4 + bad)), "x: 5 elements"),
    "max_norm": (lambda g, bad: _clip(g, tp_ext.clip_grad_norm_, 1.0 - 2 * bad), "max_norm: -1.0 must"),
    "norm_type": (lambda g, bad: _clip(g, tp_ext.grad_norm, float("nan") if bad else 2.0), "norm_type: nan must"),
    "a matrix": (_matmul, r"b: shape \(2, 4\) must end in"),
    "a dim of a region": (lambda g, bad: tp_ext.gather_from_region(ones(2, 2), g, 0 + 2 * bad), "dim: 2 must be in"),
    "a dim to be gathered": (lambda g, bad: tp_ext.all_gather_region(ones(2, 2), g, 0 + 2 * bad), "dim: 2 must be in"),
    "sizes to be scattered": (
        lambda g, bad: tp_ext.reduce_scatter_region(ones(6), g, sizes=[2, 2, 2 + bad]),
        r"sizes: \[2, 2, 3\]",
    ),
    "sizes of a scatter": (
        lambda g, bad: tp_ext.scatter_to_region(ones(6, requires_grad=True), g, sizes=[2, 2, 2 + bad]).sum().backward(),
        r"sizes: \[2, 2, 3\]",
    ),
    "x of a sum": (lambda g, bad: tp_ext.reduce_from_region(3 if bad else ones(2), g), "argument 'x'"),
    "an axis of a sum": (_mapped(lambda a, bad: a + lax.psum(a, "z" if bad else "x")), "psum: axis 'z'|'z'"),
    "an axis of a mean": (_mapped(lambda a, bad: a + lax.pmean(a, "z" if bad else "x")), "'z'"),
    "an axis of a maximum": (_mapped(lambda a, bad: a + lax.pmax(a, "z" if bad else "x")), "'z'"),
    "an axis of a minimum": (_mapped(lambda a, bad: a + lax.pmin(a, "z" if bad else "x")), "'z'"),
    "a dim of an all-gather": (_mapped(lambda a, bad: lax.all_gather(a, "x", dim=1 + 8 * bad)), "all_gather: dim"),
    "a dim of an all-to-all": (_mapped(lambda a, bad: lax.all_to_all(a, "x", 1 + 8 * bad, 0)), "all_to_all: split_dim"),
    "a dim of a scatter": (_mapped(lambda a, bad: lax.psum_scatter(a, "x", 1 + 8 * bad)), "psum_scatter: dim"),
    "a dropout": (lambda g, bad: tp_ext.dropout(ones(2, 4), 0.5 + bad, dim=1, group=g), "p: 1.5 must"),
    "a timeline": (_timeline, "process_group: 3 must be"),
    "a seed": (lambda g, bad: tp_ext.manual_seed("x" if bad else 1, _mesh2(g), "x"), "seed: 'x' must"),
    "sizes of a mesh": (lambda g, bad: tp_ext.init_mesh("cpu", tp=g.size() + bad), "must"),
    "an argument of a refit": (
        lambda g, bad: tp_ext.refit.plan(_column(g), _column(g), process_group=g, bucket_bytes=8 if bad else 64),
        "bucket_bytes: 8 must",
    ),
    "a count of a schedule": (
        lambda g, bad: tp_ext.parallelize(
            _column(g), tp_ext.init_mesh("cpu", tp=g.size()), loss=nn.functional.mse_loss, microbatches=0 if bad else 1
        ),
        "microbatches: 0 must",
    ),
}
