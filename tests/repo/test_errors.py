"""Bad input at every public entry point: all ranks raise the same error, each on its own, before anything is sent, and
the message names the argument, its value and the rule. p = 2. (More of regions in tests/test_regions_errors.py.)
"""

import types

import pytest
import torch
from torch import nn, ones, tensor
from torch.distributed.device_mesh import init_device_mesh

import tp_ext
from tests.helpers import ranks
from tests.mesh_program.errors import PROGRAMS, mapped
from tests.nn.attention.latent_errors import LATENT, latent

ids, sp = tensor([0, 1, 2, 3]), {"sequence_parallel": True}


def loss(group, logits=None, target=ids, **options):
    return tp_ext.vocab_parallel_cross_entropy(ones(4, 4) if logits is None else logits, target, group, **options)


def attention(group, **options):
    return tp_ext.ParallelAttention(8, 4, group=group, **options)


def context(group, lengths=(4, 2), way="ring", **options):
    """Attention over a context group, and a layout of it."""
    layer = tp_ext.ParallelAttention(8, 4, group=None, context_group=group, context=way, **options)
    return lambda x, **call: layer(x, **{"layout": tp_ext.ContextLayout(list(lengths), group=group)} | call)


def load(group, **changes):
    state = {k: v for k, v in ({"weight": ones(6, 4), "bias": ones(6)} | changes).items() if v is not None}
    tp_ext.load_full_state_dict(tp_ext.ColumnParallelLinear(4, 6, group=group), state)


def sgd(*params):
    return torch.optim.SGD(params, lr=0.1)


class Wrapping(torch.optim.Optimizer):
    """Keeps its state in another optimizer."""

    def __init__(self, params):
        super().__init__(params, {})
        self.inside = torch.optim.AdamW(self.param_groups)


def wrapping(module):
    return module, Wrapping(module.parameters())


def load_optimizer(group, params=("weight", "bias"), state=None):
    module = tp_ext.ColumnParallelLinear(4, 6, group=group)
    state = {"param_groups": [{"lr": 0.1, "params": list(params)}], "state": state or {}}
    tp_ext.load_full_optimizer_state_dict(module, sgd(*module.parameters()), state)


NAMES = {name: getattr(tp_ext, name) for name in tp_ext.__all__} | {
    "mapped": mapped,
    "latent": latent,
    "nn": nn,
    "parallel": tp_ext.parallel,
    "random": tp_ext.random,
    "Column": tp_ext.ColumnParallelLinear,
    "Row": tp_ext.RowParallelLinear,
    "MLP": tp_ext.ParallelMLP,
    "Attention": tp_ext.ParallelAttention,
    "Embedding": tp_ext.VocabParallelEmbedding,
    "LMHead": tp_ext.VocabParallelLMHead,
    "CrossEntropy": tp_ext.VocabParallelCrossEntropy,
}

# What is called (g: the group), the exception, what its message says
GROUPS = [
    ("Column(4, 4, group=3)", TypeError, "group: 3 must be a ProcessGroup"),
    ("Dropout(0.5, group=[0, 1])", TypeError, r"group: \[0, 1\] must be"),
    ("RMSNorm(4, group=True)", TypeError, "group: True must be"),
    ('LayerNorm(4, group="nobody")', ValueError, "group: 'nobody' must be the name"),
    ('loss("nobody")', ValueError, "group: 'nobody' must be the name"),
    ("CrossEntropy(group=1.0)", TypeError, "group: 1.0 must be"),
    ('copy_to_region(ones(2), "nobody")', ValueError, "group: 'nobody' must be the name"),
    ("dropout(ones(2), dim=0, group=3)", TypeError, "group: 3 must be"),
    ("full_state_dict(nn.Linear(2, 2), group=3)", TypeError, "group: 3 must be"),
    ('load_full_state_dict(nn.Linear(2, 2), {}, group="nobody")', ValueError, "group: 'nobody'"),
    ("clip_grad_norm_(nn.Linear(2, 2), 1.0, group=3)", TypeError, "group: 3 must be"),
]
REGIONS = [
    ("reduce_from_region(3, g)", RuntimeError, "argument 'x' but instead found type 'int'"),
    ("scatter_to_region(ones(2, 2), g, 2)", IndexError, r"dim: 2 must be in \[-2, 2\)"),
    ("gather_from_region(ones(2, 2), g, -3)", IndexError, r"dim: -3 must be in \[-2, 2\)"),
    ("all_gather_region(ones(()), g)", IndexError, r"dim: 0 must be in"),
    ("reduce_scatter_region(ones(4), g, sizes=[1, 2])", ValueError, r"sizes: \[1, 2\].* 4"),
    ("gather_from_region(ones(4), g, sizes=[5, 5])", ValueError, r"sizes: .*\[5, 5\].* 4"),
    ("scatter_to_region(ones(4), g, sizes=[4])", ValueError, r"sizes: \[4\].*2"),
    ("all_to_all_region(ones(2, 2), g, 0, 5)", IndexError, "concat_dim: 5 must be in"),
    ("all_to_all_region(ones(4, 4), g, 0, 1, split_sizes=[3, 3])", ValueError, r"split_sizes: \[3, 3\].* 4"),
]
LINEARS = [
    ("Column(4, 0, group=g)", ValueError, "out_features: 0 must be an integer of at least 1"),
    ("Column(4.5, 4, group=g)", ValueError, "in_features: 4.5 must be an integer"),
    ("Column(4, 8, parts=(4, 5), group=g)", ValueError, r"parts: .*must sum to out_features = 8"),
    ("Column(4, 8, parts=(), group=g)", ValueError, r"parts: \(\) must hold at least one"),
    ("Column(4, 8, unit=3, group=g)", ValueError, "size: 8 .*whole units of 3"),
    ("Column(4, 8, unit=2, parts=(8,), group=g)", ValueError, "unit: 2 must be given in each Part"),
    ("Column(4, 6, parts=(Part(6, copies=3),), group=g)", ValueError, "copies: 3 .*p = 2"),
    ("Column(4, 4, skip_bias_add=True, gather_output=True, group=g)", ValueError, "skip_bias_add: .*gather_output"),
    ("Column(4, 4, group=g)(ones(3, 5))", ValueError, r"x: shape \[3, 5\] must end in the 4"),
    ("Column(4, 4, group=g)(ones(()))", ValueError, r"x: shape \[\] must end in"),
    ("Column(4, 4, group=g)(ones(3, 4).double())", TypeError, "x: dtype Double must be that of weight, Float"),
    ("Column(4, 4, group=g)(ids)", TypeError, "x: dtype Long must be a floating"),
    ("Column(4, 4, group=g, **sp)(ones(4))", ValueError, r"x: shape \[4\] must have a dim of tokens"),
    ("Column(4, 4, group=g, **sp)(ones(3, 4), total_tokens=9)", ValueError, "total_tokens: 9 gives .* 3"),
    ("Column(4, 4, group=g, **sp)(ones(3, 4), total_tokens=-1)", ValueError, "total_tokens: -1 must be"),
    ("Column.from_linear(nn.Conv1d(1, 1, 1), group=g)", TypeError, "linear: Conv1d must be an nn.Linear"),
    ("Row(4, 4, input_is_parallel=False, **sp, group=g)", ValueError, "input_is_parallel: .*sequence_parallel"),
    ("Row(4, 4, parts=(Part(4, copies=2),), group=g)", ValueError, "parts: .*must not have copies"),
    (
        "Row(4, 4, group=g)(ones(3, 4))",
        ValueError,
        r"x: shape \[3, 4\] must end in the 2.*needs input_is_parallel=False",
    ),
    ("Row(4, 4, group=g)(ones(3, 1))", ValueError, r"x: shape \[3, 1\] must end in the 2 .* on this rank$"),
    ("Row(4, 4, input_is_parallel=False, group=g)(ones(3, 2))", ValueError, r"x: shape \(3, 2\) .*in_features = 4"),
    ("Row(4, 4, **sp, group=g)(ones(6, 2), total_tokens=5)", ValueError, "total_tokens: 5 must .*, 6"),
    ('MLP(4, 8, activation="tanh", group=g)', ValueError, "activation: 'tanh' must be one of .*swiglu"),
    ("MLP(4, 8, gemm_epilogue=True, group=g)", ValueError, "gemm_epilogue: True must not .* activation='gelu'"),
    ("MLP(4, -8, group=g)", ValueError, "ffn_hidden_size: -8 must be"),
    ('MLP(4, 8, activation="swiglu", group=g)(ones(3, 5))', ValueError, r"x: shape \[3, 5\]"),
]
ATTENTION = [
    ("Attention(8, 3, group=g)", ValueError, "hidden_size: 8 must be a multiple of num_heads = 3"),
    ("attention(g, num_kv_heads=3)", ValueError, "num_kv_heads: .*num_heads = 4, num_kv_heads = 3, p = 2"),
    ("Attention(8, 1, group=g)", ValueError, "num_heads: .*num_heads = 1, num_kv_heads = 1, p = 2"),
    ("Attention(8, 2.0, group=g)", ValueError, "num_heads: 2.0 must be an integer"),
    ("attention(g, head_dim=0)", ValueError, "head_dim: 0 must be"),
    ("attention(g, dropout=1.0)", ValueError, r"dropout: 1.0 must be a probability, in \[0, 1\)"),
    ('attention(g, dropout="half")', ValueError, "dropout: 'half' must be"),
    ("attention(g, scale=0)", ValueError, "scale: 0 must be a positive finite number"),
    ("attention(g, softcap=-1.0)", ValueError, "softcap: -1.0 must be a positive finite number"),
    ("attention(g, softcap=True)", ValueError, "softcap: True must be"),
    ("attention(g, sliding_window=0)", ValueError, "sliding_window: 0 must be"),
    ("attention(g, sliding_window=1.5)", ValueError, "sliding_window: 1.5 must be"),
    (
        "attention(g)(ones(1, 4, 8), attn_mask=ones(4, 4).long())",
        TypeError,
        "attn_mask: dtype torch.int64 must be .*bool",
    ),
    ("attention(g)(ones(1, 4, 8), attn_mask=[1])", TypeError, r"attn_mask: \[1\] must be a tensor"),
    (
        "attention(g)(ones(1, 4, 8), attn_mask=ones(2, 4, 4))",  # this rank's heads
        ValueError,
        r"attn_mask: shape \(2, 4, 4\) must be broadcastable to .* = \[1, 4, 4, 4\]",
    ),
    ("attention(g)(ones(1, 4, 8), attn_mask=ones(1, 1, 1, 1, 1))", ValueError, r"attn_mask: shape \(1, 1, 1, 1, 1\)"),
    (
        "attention(g)(ones(4, 8), cu_seqlens=[0, 4], attn_mask=ones(4, 4))",
        ValueError,
        "attn_mask: must not be combined",
    ),
    ("attention(g, rope=True)", ValueError, "rope: True must be a base or a RotaryEmbedding"),
    ("attention(g, rope=RotaryEmbedding(4))", ValueError, "rope: RotaryEmbedding.*of 2"),
    ("attention(g, rope=-1.0)", ValueError, "base: -1.0 must be a positive"),
    ("attention(g)(ones(4, 8))", ValueError, r"x: shape \(4, 8\).*exactly one of batch_size = None"),
    ("attention(g)(ones(4, 8), batch_size=2, cu_seqlens=[0, 4])", ValueError, "x: .*exactly one of batch_size = 2"),
    ("attention(g)(ones(1, 4, 8), batch_size=1)", ValueError, r"x: shape \(1, 4, 8\)"),
    ("attention(g, **sp)(ones(2, 2, 8))", ValueError, r"x: shape \(2, 2, 8\) must be \[tokens_local, hidden\]"),
    ("attention(g)(ones(4, 8), batch_size=3)", ValueError, "batch_size: 3 must divide the number of tokens, 4"),
    ("attention(g)(ones(4, 8), batch_size=0)", ValueError, "batch_size: 0 must be"),
    ("attention(g, **sp)(ones(4, 8), batch_size=3)", ValueError, "batch_size: 3 must divide the number of tokens, 8"),
    ("attention(g)(ones(4, 8), cu_seqlens=[0, 3])", ValueError, r"cu_seqlens: \[0, 3\] must .* tokens, 4"),
    ("attention(g)(ones(4, 8), cu_seqlens=[0, 3, 2, 4])", ValueError, r"cu_seqlens: \[0, 3, 2, 4\] must rise"),
    ("attention(g)(ones(4, 8), cu_seqlens=[1, 4])", ValueError, r"cu_seqlens: \[1, 4\] must rise from 0"),
    ("attention(g)(ones(4, 8), cu_seqlens=[])", ValueError, r"cu_seqlens: \[\] must rise"),
    ("attention(g)(ones(4, 8), cu_seqlens=tensor([0.0, 4.0]))", TypeError, "cu_seqlens: .*must be integers"),
    ("attention(g)(ones(4, 8), cu_seqlens=tensor([[0, 4]]))", TypeError, "cu_seqlens: .*must be integers"),
    ("attention(g)(ones(2, 4, 7))", ValueError, r"x: shape \[2, 4, 7\] must end in the 8"),
    ("RotaryEmbedding(8, rotary_dim=3)", ValueError, "rotary_dim: 3 must be even and at most head_dim = 8"),
    ("RotaryEmbedding(8, rotary_dim=10)", ValueError, "rotary_dim: 10 must be even"),
    ("RotaryEmbedding(8, base=0)", ValueError, "base: 0 must be a positive"),
    ('RotaryEmbedding("8")', ValueError, "head_dim: '8' must be"),
    ("RotaryEmbedding(8)(ones(4, 2, 8), ids[:3])", ValueError, r"positions: shape \(3,\) must be .*\(4,\)"),
    ("RotaryEmbedding(8)(ones(4, 2, 7), ids)", ValueError, r"x: shape \(4, 2, 7\) must be .*head_dim = 8"),
]
CONTEXT = [
    ("ContextLayout([4], group='nobody')", ValueError, "group: 'nobody' must be the name"),
    ("ContextLayout(batch=2, group=g)", ValueError, "lengths: None must be given, or batch = 2 and seq = None must be"),
    ("ContextLayout([4, -2], group=g)", ValueError, "lengths: -2 must not be negative"),
    ("ContextLayout([4.0], group=g)", TypeError, "lengths: 4.0 must be an integer"),
    ("ContextLayout([4], group=g).shard(ones(5))", ValueError, "x: 5 elements in dim 0 must be the 4 tokens"),
    ("ContextLayout([4], group=g).unshard(ones(4))", ValueError, "x: 4 elements in dim 0 must be the 2 tokens"),
    ("ContextLayout([4], group=g).unshard(ones(4), 1)", IndexError, r"dim: 1 must be in \[-1, 1\)"),
    ("context(g, way='star')", ValueError, "context: 'star' must be one of ring, all_gather, ulysses"),
    ("context(g, attend=3)", TypeError, "attend: 3 must be a callable on q, k, v and a ContextLayout"),
    ("context(g, dropout=0.1, exact_dropout=False)", ValueError, "exact_dropout: False must not be combined"),
    ("context(g, way='ulysses', num_kv_heads=4, head_dim=2)(ones(3, 7))", ValueError, r"x: shape \[3, 7\] must end"),
    ("context(g)(ones(4, 8))", ValueError, r"x: shape \(4, 8\) must be \[3, hidden\] or \[1, 3, hidden\]"),
    ("context(g)(ones(3, 8), layout=None)", ValueError, "layout: must be given with a context_group of 2 ranks"),
    ("context(g)(ones(3, 8), layout=[4, 2])", TypeError, r"layout: \[4, 2\] must be a ContextLayout"),
    ("context(g)(ones(6, 8), layout=ContextLayout([4, 2], group=None))", ValueError, "layout: its group '' must be"),
    ("context(g)(ones(3, 8), batch_size=1)", ValueError, "batch_size: 1 must not be combined with layout"),
    ("context(g)(ones(3, 8), cu_seqlens=[0, 3])", ValueError, r"cu_seqlens: \[0, 3\] must not be combined"),
    ("context(g)(ones(3, 8), total_tokens=6)", ValueError, "total_tokens: 6 must not be combined"),
    ("context(g)(ones(3, 8), attn_mask=ones(3, 3))", ValueError, "attn_mask: must not be combined with layout"),
    ("context(g)(ones(3, 8), cache=KVCache(1, 9, 4, 2))", ValueError, "cache: must come with a layout of batch="),
    ("parallelize(3, init_mesh('cpu'), loss=ones)", TypeError, "model: int must be an nn.Module"),
    ("parallel.sum_gradients([3], g)", TypeError, "model: int must be a parameter"),
    ("parallel.sum_gradients(nn.Linear(2, 2), 3)", TypeError, "group: 3 must be"),
    ("parallel.pipeline_stages(nn.Linear(2, 2), g, microbatches=2, loss=ones)", TypeError, "model: Linear must have"),
    ("parallel.pipeline_stages(nn.Sequential(nn.ReLU()), g, microbatches=2, loss=ones)", ValueError, "model: 1 blocks"),
    ("parallel.pipeline_stages(nn.Sequential(), g, schedule='2F2B', microbatches=2, loss=ones)", ValueError, "2F2B"),
]
VOCABULARY = [
    ("Embedding(1, 4, group=g)", ValueError, "vocab_size: 1 must be at least the number of ranks, p = 2"),
    ("Embedding(0, 4, group=g)", ValueError, "num_embeddings: 0 must be"),
    ("Embedding(8, -4, group=g)", ValueError, "embedding_dim: -4 must be"),
    ("Embedding(8, 4, group=g, pad_to_multiple_of=0)", ValueError, "pad_to_multiple_of: 0 must be"),
    ("Embedding(8, 4, group=g)(ones(3))", TypeError, "ids: dtype Float must be int64 or int32"),
    ("Embedding(8, 4, group=g)(ids + 5)", IndexError, r"ids: 8 must be in .*8"),
    ("Embedding(8, 4, group=g)(ids - 1)", IndexError, "ids: -1 must be in"),
    ("LMHead(4, 1, group=g)", ValueError, "vocab_size: 1 must be at least .* p = 2"),
    ("LMHead(0, 8, group=g)", ValueError, "hidden_size: 0 must be"),
    ("LMHead(4, 8, group=g)(ones(3, 5))", ValueError, r"x: shape \[3, 5\] must end in the 4"),
    ("LMHead(4, 8, group=g, **sp)(ones(3, 4), total_tokens=9)", ValueError, "total_tokens: 9 gives"),
    ("loss(g, ones(()))", ValueError, "logits_local: a 0-d tensor must have"),
    ("loss(g, ones(4, 4).long())", TypeError, "logits: dtype Long must be a floating"),
    ("loss(g, target=ids.int())", TypeError, "target: dtype Int must be int64"),
    ("loss(g, target=ids[:3])", ValueError, r"target: shape \[3\] must be that of logits, \[4, 4\]"),
    ("loss(g, target=ids + 6, vocab_size=8)", IndexError, r"target: 8 must be in .*8"),
    ("loss(g, target=ids - 1)", IndexError, "target: -1 must be in"),
    ("loss(g, reduction='average')", ValueError, "reduction: 'average' must be one of"),
    ("loss(g, gradient_reduction='average')", ValueError, "gradient_reduction: 'average' must be one of"),
    ("loss(g, mean_over=g, reduction='sum')", ValueError, "mean_over: must not be given with reduction='sum'"),
    ("loss(g, mean_over=init_device_mesh('cpu', (1, 2), mesh_dim_names=('a', 'b')))", ValueError, "mesh: its axes"),
    ("loss(g, label_smoothing=1.5)", ValueError, r"label_smoothing: 1.5 must be in \[0, 1\]"),
    ("loss(g, label_smoothing=float('nan'))", ValueError, "label_smoothing: nan must be in"),
    ("loss(g, z_loss=-1.0)", ValueError, "z_loss: -1 must be at least 0"),
    ("loss(g, vocab_size=4)", ValueError, r"logits_local: 4 columns.*vocab_size = 4.*gathered"),
    ("loss(g, vocab_size=12)", ValueError, "logits_local: 4 columns .*vocab_size = 12 at p = 2"),
    ("loss(g, vocab_size=1)", ValueError, "vocab_size: 1 must be at least the number of ranks, p = 2"),
    ("linear_cross_entropy(ones(4, 4), ones(4, 4), ids, g, vocab_size=4)", ValueError, "weight: 4 rows.*gathered"),
    ("linear_cross_entropy(ones(4, 4), ones(4, 4), ids, g, chunk_tokens=0)", ValueError, "chunk_tokens: 0 must be"),
    ("Embedding(8, 4, padding_idx=8, group=g)", ValueError, r"padding_idx: 8 must be in \[-8, 8\), or None"),
    ("Embedding.from_embedding(nn.Linear(8, 4), group=g)", TypeError, "embedding: Linear must be an nn.Embedding"),
    (
        "Embedding.from_embedding(nn.Embedding(8, 4, max_norm=1.0), group=g)",
        ValueError,
        "embedding.max_norm: 1.0 must be None",
    ),
    (
        "Embedding.from_embedding(nn.Embedding(8, 4, sparse=True), group=g)",
        ValueError,
        "embedding.sparse: True must be False",
    ),
    ("LMHead.from_linear(nn.Embedding(8, 4), group=g)", TypeError, "linear: Embedding must be an nn.Linear"),
    ("LMHead(4, 8, group=g).loss(ones(4, 4), ids, reduction='max')", ValueError, "reduction: 'max'"),
    ("LMHead(4, 8, group=g).sample(ones(4, 4), top_k=0)", ValueError, "top_k: 0 must be"),
    ("loss(g, vocab_size=8.0)", ValueError, "vocab_size: 8.0 must be an integer"),
    ("CrossEntropy(group=g, reduction='max')(ones(4, 4), ids)", ValueError, "reduction: 'max'"),
]
BY_POSITION = [
    ("Column(4, 4, g)", TypeError, "bias: a ProcessGroup must not stand here; pass group= by keyword"),
    ("Column(4, 4, 'yes', group=g)", TypeError, "bias: 'yes' must be True or False"),
    ("Column(4, g)", TypeError, "out_features: .*pass group= by keyword"),
    ("Column(4, 4, group=g, sequence_parallel=g)", TypeError, "sequence_parallel: .*pass group= by keyword"),
    ("Column(4, 4, group=g, gather_output=2)", TypeError, "gather_output: 2 must be True or False"),
    ("Column(4, 4, group=g, skip_bias_add='')", TypeError, "skip_bias_add: '' must be True or False"),
    ("Column(4, 4, group=g, grad_accumulation_fusion=None)", TypeError, "grad_accumulation_fusion: None must be"),
    ("Row(4, 4, g)", TypeError, "bias: .*pass group= by keyword"),
    ("Row(4, 4, group=g, input_is_parallel=2)", TypeError, "input_is_parallel: 2 must be True or False"),
    ("MLP(4, 8, bias=g)", TypeError, "bias: .*pass group= by keyword"),
    ("MLP(4, 8, group=g, gemm_epilogue='no')", TypeError, "gemm_epilogue: 'no' must be"),
    ("attention(g, bias='no')", TypeError, "bias: 'no' must be True or False"),
    ("RMSNorm(4, g)", TypeError, "eps: .*pass group= by keyword"),
    ("RMSNorm(g)", TypeError, "normalized_shape: .*pass group= by keyword"),
    ("RMSNorm(4, '1e-5', group=g)", TypeError, "eps: '1e-5' must be a number"),
    ("RMSNorm(4, None, g)", TypeError, "elementwise_affine: .*pass group= by keyword"),
    ("LayerNorm(4, g)", TypeError, "eps: .*pass group= by keyword"),
    ("LayerNorm(4, None, group=g)", TypeError, "eps: None must be a number"),
    ("LayerNorm(4, 1e-5, True, g)", TypeError, "bias: .*pass group= by keyword"),
    ("Embedding(g, 4)", TypeError, "num_embeddings: .*pass group= by keyword"),
    ("LMHead(4, 8, bias=g)", TypeError, "bias: .*pass group= by keyword"),
    ("Dropout(g)", TypeError, "p: .*pass group= by keyword"),
    ("LoRALinear(Column(4, 4, group=g), g, alpha=1)", TypeError, "r: .*pass group= by keyword"),
]
REST = [
    ("ParallelMoE(4, 6, 1, 1, group=None, expert_group=g)", ValueError, "num_experts: 1 must be at least the 2 ranks"),
    ("RouterConfig('tanh')", ValueError, "scores: 'tanh' must be one of"),
    ("router_loss(3)", TypeError, "model: int must be an nn.Module"),
    ("RMSNorm((), group=g)", ValueError, r"normalized_shape: \(\) must be one or more integers"),
    ("LayerNorm([4, 0], group=g)", ValueError, r"normalized_shape: \[4, 0\] must be"),
    ("RMSNorm(4, group=g)(ones(3, 5))", ValueError, r"x: shape \(3, 5\) must end in normalized_shape = \(4,\)"),
    (
        "RMSNorm(4, group=g, **sp)(ones(3, 4), ones(4))",
        ValueError,
        r"residual: shape \(4,\) must be that of x, \(3, 4\)",
    ),
    (
        "LayerNorm(4, group=g)(ones(3, 4), ones(2, 4))",
        ValueError,
        r"residual: shape \(2, 4\) must be that of x, \(3, 4\)",
    ),
    (
        "RMSNorm(4, group=g)(ones(3, 4), ones(3, 4).double())",
        TypeError,
        "residual: dtype Double must be that of x, Float",
    ),
    (
        "LayerNorm(4, group=g)(ones(3, 4), ones(3, 4).half())",
        TypeError,
        "residual: dtype Half must be that of x, Float",
    ),
    ("LayerNorm((3, 4), group=g)(ones(4))", ValueError, r"x: shape \(4,\) must end in"),
    ("LayerNorm(4, group=g)(ids)", TypeError, "x: dtype Long must be a floating"),
    ("RMSNorm(4, group=g)(ids)", TypeError, "x: dtype .*must be a floating"),
    ("Dropout(1.5, group=g)", ValueError, r"p: 1.5 must be a probability, in \[0, 1\]: that of dropping an element"),
    ("Dropout('half')", ValueError, "p: 'half' must be a probability"),
    ("dropout(ones(4), -0.1)", ValueError, "p: -0.1 must be a probability"),
    ("dropout(ones(4), dim=1, group=g)", IndexError, r"dim: 1 must be in \[-1, 1\)"),
    ("dropout(ones(4), dim=0, group=g, sizes=[1, 2])", ValueError, r"sizes: \[1, 2\] must have one length per rank"),
    ("dropout(ones(4), bias=ones(3))", ValueError, r"bias: shape \[3\] must be .*4"),
    ("dropout(ones(4), residual=ones(3))", ValueError, r"residual: shape \[3\] must be .*4"),
    ("Dropout(0.5, group=g, **sp)(ones(4, 2), total_tokens=5)", ValueError, "total_tokens: 5 gives .* 4"),
    ("LoRALinear(nn.Linear(4, 4), 2, alpha=1)", TypeError, "base: Linear must be a ColumnParallelLinear"),
    ("coalesce_gradients(3)", TypeError, "module: int must be an nn.Module"),
    ("uncoalesce_gradients(3)", TypeError, "module: int must be an nn.Module"),
    ("add_lora(nn.Linear(4, 4), targets='up', r=2, alpha=1)", ValueError, "targets: 'up' must name"),
    ("merge_lora(nn.Linear(4, 4))", ValueError, "model: Linear must hold a LoRALinear inside"),
    ("Part(8, unit=3)", ValueError, "size: 8 .*whole units of 3"),
    ("Part(-1)", ValueError, "size: -1 must be an integer of at least 0"),
    ("Part(8, copies=0)", ValueError, "copies: 0 must be"),
    ("Sharding(0, [])", ValueError, r"parts: \(\) must hold"),
    ("Sharding(0, [8]).slices(2, 2)", ValueError, r"rank: 2 must be in \[0, 2\)"),
    ("Sharding(0, [8]).shard(ones(7), 0, 2)", ValueError, r"full: shape \(7,\) must have 8"),
    ("Sharding(0, [8]).unshard([ones(4), ones(3)])", ValueError, r"locals: shape \(3,\) on rank 1 must have 4"),
    ("Sharding(0, [Part(8, copies=2)]).slices(0, 3)", ValueError, "copies: 2 .*p = 3"),
    ("Layout((Sharding(0, [8]), 3))", TypeError, "group: 3 must be"),
    ("Layout((Sharding(0, [8]), g), (Sharding(0, [8]), None))", ValueError, "entries: .* must have the 4 elements"),
    ("dict(layouts(nn.Linear(2, 2), group=3))", TypeError, "group: 3 must be"),
    ("declare_layouts(nn.Linear(2, 2), {'other': Layout()})", ValueError, "layouts: 'other' must be a parameter"),
    (
        "declare_tied(nn.Linear(2, 2), {'weigth': 'other'})",
        ValueError,
        r"copies: 'weigth' .* one of \['weight', 'bias'\]",
    ),
    ("declare_tied(nn.Linear(2, 2), {'weight': 3})", TypeError, "copies: 'weight' is int and must be the name of"),
    ("manual_seed('one')", TypeError, "seed: 'one' must be an integer"),
    ("manual_seed(1, g)", TypeError, "mesh: .*must be a DeviceMesh"),
    ("random.at('one')", TypeError, "step: 'one' must be an integer"),
    ("name_modules(nn.Linear(2, 2), prefix=3)", TypeError, "prefix: 3 must be a string"),
    ("name_modules(3)", TypeError, "module: 3 must be a module, or a list of the stages"),
    ("manual_seed(1) or reset_parameters(nn.Linear(2, 2, device='meta'))", ValueError, "module: 'weight' is on meta"),
    ("manual_seed(1) or reset_parameters(nn.ParameterList([ones(2)]))", ValueError, "module: '0' belongs to a Param"),
    ("init_mesh('cpu', tp=4)", ValueError, "pp, dp, cp, tp: .*tp = 4 must multiply to the 2 ranks"),
    ("full_state_dict(nn.Linear(2, 2), mesh=g)", TypeError, "mesh: ProcessGroup.* must be a DeviceMesh"),
    ("full_state_dict([])", TypeError, r"module: \[\] must be a module, or a list of the stages"),
    ("load(g, weight=ones(4, 6))", ValueError, r"state: 'weight' has shape \(4, 6\) and must have \(6, 4\)"),
    ("load(g, weight=ones(3, 4))", ValueError, r"state: 'weight' has shape \(3, 4\) and must have \(6, 4\)"),
    ("load(g, bias=3)", TypeError, "state: 'bias' is int and must be a tensor"),
    ("load(g, bias=None)", KeyError, r"state: missing keys \['bias'\]"),
    ("load(g, other=ones(1))", KeyError, r"unexpected keys \['other'\]"),
    (
        "load_optimizer(g, params=['bias'])",
        ValueError,
        r"state: parameter groups \[\['bias'\]\] must be the optimizer's",
    ),
    ("load_optimizer(g, state={'other': {}})", ValueError, "state: 'other' must be a parameter of the optimizer"),
    ("full_optimizer_state_dict(Column(4, 4, group=g), sgd(ones(2)))", ValueError, r"optimizer: .*\(2,\)"),
    ("sharded_state_dict(Column(4, 4, group=g), sgd(ones(2)))", ValueError, r"optimizer: .*\(2,\)"),
    ("sharded_state_dict(*wrapping(nn.Linear(2, 2)))", ValueError, "optimizer: Wrapping must have .* in its 'inside'"),
    ("full_optimizer_state_dict(*wrapping(nn.Linear(2, 2)))", ValueError, "'inside', a AdamW; pass that optimizer"),
    ("CheckpointReader(3)", TypeError, "expected str, bytes or os.PathLike object"),
    ("grad_norm(Column(4, 4, group=g), -1)", ValueError, "norm_type: -1.0 must be positive"),
    ("KVCache(2, 0, 1, 4)", ValueError, "max_seq: 0 must be"),
    ("attention(g)(ones(1, 2, 8), cache=KVCache(1, 4, 2, 2))", RuntimeError, "cache: keys and values"),
    ("attention(g)(ones(1, 2, 8), cache=KVCache(1, 4, 3, 2))", ValueError, "cache: 3 heads of 2 must be this layer"),
    ("LoRALinear(nn.Linear(4, 4), 2, alpha=1)", TypeError, "base: Linear must be a ColumnParallelLinear"),
    ("LoRALinear(Column(4, 4, group=g), 0, alpha=1)", ValueError, "r: 0 must be"),
    (
        "add_lora(MLP(4, 8, group=g), targets='side', r=2, alpha=1)",
        ValueError,
        r"targets: 'side' must name .*inside the model; it has \['down', 'up'\]",
    ),
    ("vocab_parallel_argmax(ones(2, 9), g, vocab_size=9)", ValueError, "vocab_size"),
    ("vocab_parallel_sample(ones(2, 4), g, temperature=-1)", ValueError, "temperature: -1 must be"),
    ("vocab_parallel_sample(ones(2, 4), g, top_k=0)", ValueError, "top_k: 0 must be"),
    ("vocab_parallel_sample(ones(2, 4), g, top_p=2)", ValueError, r"top_p: 2 must be in \(0, 1\]"),
    ("clip_grad_norm_(Column(4, 4, group=g), 1.0, 0)", ValueError, "norm_type: 0.0 must be positive"),
    ("clip_grad_norm_(Column(4, 4, group=g), -1.0)", ValueError, "max_norm: -1.0 must be at least 0"),
    ("clip_grad_norm_([ones(2)], 1.0, group=g)", ValueError, r"parameters_or_module: .*\(2,\) must carry tp_sharding"),
    ("clip_grad_norm_([3], 1.0, group=g)", TypeError, "parameters_or_module: 3 must be"),
]


ALL = GROUPS + REGIONS + LINEARS + ATTENTION + LATENT + CONTEXT + VOCABULARY + PROGRAMS + REST


def _call(group, text):
    eval(text, globals() | NAMES, {"g": group})


@pytest.mark.parametrize(
    ("text", "exception", "match"), [pytest.param(*case, id=case[0]) for case in ALL + BY_POSITION]
)
def test_bad_input(text, exception, match):
    ranks.run_raises(_call, 2, exception, match, text)


def test_every_public_name_is_here():
    texts = " ".join(case[0] for case in ALL)
    spelled = {value: name for name, value in NAMES.items()} | {
        tp_ext.vocab_parallel_cross_entropy: "loss",
        tp_ext.load_full_state_dict: "load",
        tp_ext.load_full_optimizer_state_dict: "load_optimizer",
    }
    modules = {name for name in tp_ext.__all__ if isinstance(NAMES[name], types.ModuleType)}
    takes_nothing_to_be_wrong = {"__version__", "build_info", "ParallelModule", "shardings", "merge_lora"}
    # What is wrong with a file one rank alone may see: they agree on it, which takes messages; see their own tests
    agree = {f"{do}_{what}" for do in ("save", "load") for what in ("checkpoint", "safetensors", "sharded_state_dict")}
    names = set(tp_ext.__all__) - takes_nothing_to_be_wrong - agree - modules
    missing = [n for n in names if spelled[NAMES[n]] + "(" not in texts]
    assert not missing


def _mesh(group, kind):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp") if kind != "unnamed" else None)
    if kind == "layer":
        tp_ext.RMSNorm(4, group=mesh)
    if kind == "region":
        tp_ext.copy_to_region(ones(2), mesh)
    tp_ext.manual_seed(1, mesh, "tensor")


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("layer", r"group: a mesh of 2 axes \('dp', 'tp'\) must have one axis; slice it"),
        ("region", "group: a mesh of 2 axes"),
        ("axis", "tp_axis: 'tensor' must be an axis of the mesh, which has .*'tp'"),
        ("unnamed", "tp_axis: 'tensor' must be an axis of the mesh, which has None"),
    ],
)
def test_meshes(kind, match):
    """in_turns=False: making the mesh takes all ranks."""
    ranks.run_raises(_mesh, 2, ValueError, match, kind, in_turns=False)
