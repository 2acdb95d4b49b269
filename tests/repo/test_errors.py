"""Bad input at every public entry point: all ranks raise the same error, each on its own, before anything is sent, and
the message names the argument, its value and the rule. p = 2. The rows of layers are in tests/helpers/registry; more of
regions are in tests/test_regions_errors.py.
"""

import types

import pytest
import torch
from torch import nn, ones, tensor
from torch.distributed.device_mesh import init_device_mesh

import tp_ext
from tests.helpers import ranks, registry
from tests.mesh_program.errors import PROGRAMS, mapped
from tp_ext.export.manifest import ExportError

ids, sp = tensor([0, 1, 2, 3]), {"sequence_parallel": True}


def loss(group, logits=None, target=ids, **options):
    return tp_ext.vocab_parallel_cross_entropy(ones(4, 4) if logits is None else logits, target, group, **options)


def small(name):
    """The constructor of a layer of the registry, as f(group, **changes)."""
    return lambda group, **changes: registry.CASES[name].make(group=group, **changes)


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


NAMES = {name: small(name) for name in registry.CASES} | {name: getattr(tp_ext, name) for name in tp_ext.__all__}
NAMES |= {
    "mapped": mapped,
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
    ("tp_ext.ParallelAttention(8, 4, group=g, context_group=g)", ValueError, "context_group: .* must be another group"),
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
    ("coalesce_gradients(3)", TypeError, "module: int must be an nn.Module"),
    ("uncoalesce_gradients(3)", TypeError, "module: int must be an nn.Module"),
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
    ("tp_invariant(0).__enter__()", ValueError, "blocks: 0 must be an integer of at least 1"),
    ("shares([2, -1])", ValueError, "weights: -1 must be a finite number of at least 0"),
    ("keep_memory(1)", TypeError, "enabled: 1 must be True or False"),
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
    ("refit.plan(3, None)", TypeError, "module: 3 must be a module, or a list of the stages"),
    ("refit.plan(None, [])", TypeError, r"module: \[\] must be a module"),
    ("refit.plan(None, None, process_group='tp')", TypeError, "process_group: 'tp' must be a ProcessGroup"),
    ("refit.plan(None, None, buffers=3)", TypeError, "buffers: 3 must be True or False"),
    ("refit.plan(None, None, atomic='yes')", TypeError, "atomic: 'yes' must be True or False"),
    ("refit.plan(None, None, bucket_bytes=8)", ValueError, "bucket_bytes: 8 must be an integer of at least 64"),
    ("refit.plan(None, None, dtype=3)", TypeError, "dtype: 3 must be a floating-point torch.dtype"),
    ("refit.plan(None, None, names=['a'])", TypeError, r"names: \['a'\] must be a dict"),
    ("refit.plan(None, None, names={'a': 3})", TypeError, "names: 'a': 3 must be a name, a pair of a name and"),
    ("refit.plan(None, None, names={'a': ('b',)})", TypeError, r"names: 'a': \('b',\) must be a name"),
    ("refit.plan(None, None, optimizers=[None])", ValueError, "optimizers: 1 optimizers must be a pair"),
    ("refit.plan(None, None, optimizers=(3, None))", TypeError, "optimizer: int must be a torch.optim.Optimizer"),
    (
        "refit.plan(None, None, optimizers=(sgd(ones(2)), None))",
        ValueError,
        "optimizers: the source's must be None on a rank that does not have the source",
    ),
    ("export_model(3, ones(2), 'folder')", TypeError, "model: int must be an nn.Module"),
    ("load_exported('nowhere')", ExportError, "folder: 'nowhere' has no manifest.json"),
    ("CheckpointReader(3)", TypeError, "expected str, bytes or os.PathLike object"),
    ("grad_norm(Column(4, 4, group=g), float('nan'))", ValueError, "norm_type: nan must be a number"),
    ("KVCache(2, 4, 1, 4, static='yes')", TypeError, "static: 'yes' must be True or False"),
    ("KVCache(2, 0, 1, 4)", ValueError, "max_seq: 0 must be"),
    ("attention(g)(ones(1, 2, 8), cache=KVCache(1, 4, 2, 2))", RuntimeError, "cache: keys and values"),
    ("attention(g)(ones(1, 2, 8), cache=KVCache(1, 4, 3, 2))", ValueError, "cache: 3 heads of 2 must be this layer"),
    ("vocab_parallel_argmax(ones(2, 9), g, vocab_size=9)", ValueError, "vocab_size"),
    ("vocab_parallel_sample(ones(2, 4), g, temperature=-1)", ValueError, "temperature: -1 must be"),
    ("vocab_parallel_sample(ones(2, 4), g, top_k=0)", ValueError, "top_k: 0 must be"),
    ("vocab_parallel_sample(ones(2, 4), g, top_p=2)", ValueError, r"top_p: 2 must be in \(0, 1\]"),
    ("clip_grad_norm_(Column(4, 4, group=g), 1.0, float('nan'))", ValueError, "norm_type: nan must be a number"),
    ("clip_grad_norm_(Column(4, 4, group=g), -1.0)", ValueError, "max_norm: -1.0 must be at least 0"),
    ("clip_grad_norm_([ones(2)], 1.0, group=g)", ValueError, r"parameters_or_module: .*\(2,\) must carry tp_sharding"),
    ("clip_grad_norm_([3], 1.0, group=g)", TypeError, "parameters_or_module: 3 must be"),
]


ALL = GROUPS + REGIONS + registry.ERRORS + CONTEXT + PROGRAMS + REST


def _call(group, text):
    eval(text, globals() | NAMES, {"g": group})


@pytest.mark.parametrize(
    ("text", "exception", "match"), [pytest.param(*case, id=case[0]) for case in ALL + BY_POSITION]
)
def test_bad_input(text, exception, match):
    # Ranks compare the layers that they choose, or what their optimizers hold, and say so together
    together = "targets='side'" in text or "full_optimizer_state_dict(Column" in text
    ranks.run_raises(_call, 2, exception, match, text, in_turns=not together)


def test_every_public_name_is_here():
    texts = " ".join(case[0] for case in ALL)
    spelled = {value: name for name, value in NAMES.items()} | {
        tp_ext.vocab_parallel_cross_entropy: "loss",
        tp_ext.load_full_state_dict: "load",
        tp_ext.load_full_optimizer_state_dict: "load_optimizer",
    }
    modules = {name for name in tp_ext.__all__ if isinstance(NAMES[name], types.ModuleType)}
    takes_nothing_to_be_wrong = {
        "__version__",
        "build_info",
        "cmake_prefix_path",
        "ParallelModule",
        "shardings",
        "merge_lora",
    }
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
