"""Every public call that communicates has a row in a table of ``test_errors_on_one_rank.py``, or a reason why not."""

import importlib
import inspect
import re

from tests.repo import rows_of_files, rows_of_layers, rows_of_models
from tests.repo import test_errors_on_one_rank as tables

MODULES = ("auto", "debug", "elastic", "huggingface", "lightning", "low_precision", "optim", "parallel", "planner")
MODULES += ("random", "refit", "verify")
GROUPS = {"group", "mesh", "process_group", "data_groups", "data_group", "row_group"}


def _public(module):
    """The public functions and classes of a module, by name."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    values = {name: getattr(module, name) for name in names}
    own = "tp_ext." if hasattr(module, "__path__") else module.__name__  # a package offers names of its files
    return {
        name: value
        for name, value in values.items()
        if inspect.isroutine(value) or (inspect.isclass(value) and not issubclass(value, BaseException))
        if value.__module__ and f"{value.__module__}.".startswith(own)
    }


def _communicates(value):
    signature = inspect.signature(value).parameters if callable(value) else ()  # () of a property
    says = re.search(r"[Cc]ommunicates(?! nothing)", inspect.getdoc(value) or "")
    return says or not GROUPS.isdisjoint(signature)


def _calls():
    """The names of the public calls that communicate, or take a group: functions, classes and their methods."""
    calls, seen = {}, set()
    for name in ("", *MODULES):
        module = importlib.import_module(f"tp_ext.{name}".rstrip("."))
        for function, value in _public(module).items():
            if value in seen:  # offered by two modules
                continue
            seen.add(value)
            path = f"{name}.{function}".lstrip(".")
            calls[path] = value
            if inspect.isclass(value):
                methods = {n: m for n, m in vars(value).items() if not n.startswith("_")}
                calls |= {
                    f"{path}.{n}": getattr(m, "__func__", m)
                    for n, m in methods.items()
                    if inspect.isroutine(m) or inspect.isdatadescriptor(m)
                }
    return {name for name, value in calls.items() if _communicates(value)}


ROWS = {  # a row of each, some have more
    "ColumnParallelLinear": "a width",
    "ContextLayout.shard": "tokens to be sharded",
    "ContextLayout.unshard": "tokens to be gathered",
    "LayerNorm": "x of a layer norm",
    "LoRALinear": "x of an adapter",
    "MultiTokenPrediction": "hidden of later tokens",
    "MultiTokenPrediction.loss": "labels of later tokens",
    "ParallelAttention": "a mask",
    "ParallelLatentAttention": "x of a latent attention",
    "ParallelMLP": "x of an MLP",
    "ParallelMoE": "sequences of experts",
    "RMSNorm": "x of a norm",
    "RMSNorm.after_sum": "x of a sum and a norm",
    "RowParallelLinear": "x of a row linear",
    "VocabParallelEmbedding": "an id",
    "VocabParallelLMHead": "hidden of a head",
    "VocabParallelLMHead.loss": "labels of a head",
    "VocabParallelLMHead.sample": "top_k of a head's sample",
    "add_lora": "another r of add_lora",
    "all_gather": "a dim of an all-gather",
    "all_gather_region": "a dim to be gathered",
    "all_to_all": "a dim of an all-to-all",
    "all_to_all_region": "split sizes",
    "auto.apply": "a plan",
    "clip_grad_norm_": "max_norm",
    "copy_to_region": "a backward",
    "debug.assert_replicated": "what is replicated",
    "debug.check": "a model",
    "debug.findings": "a finding of debug.findings",
    "debug.record_timeline": "a timeline",
    "debug.sha256": "a model of sha256",
    "dropout": "a dropout",
    "elastic.ElasticData": "a timeout of a replica",
    "full_optimizer_state_dict": "an optimizer of full_optimizer_state_dict",
    "full_state_dict": "a model of full_state_dict",
    "gather_from_region": "a dim of a region",
    "grad_norm": "norm_type",
    "huggingface.from_pretrained": "a damaged pretrained model",
    "huggingface.load_adapter": "another adapter",
    "huggingface.prepare": "an optimizer of prepare",
    "huggingface.save_adapter": "an adapter to be saved",
    "huggingface.weight_source": "a model of weight_source",
    "init_mesh": "sizes of a mesh",
    "linear_cross_entropy": "hidden of a loss without logits",
    "load_checkpoint": "a checkpoint",
    "load_full_optimizer_state_dict": "an optimizer of load_full_optimizer_state_dict",
    "load_full_state_dict": "a model of load_full_state_dict",
    "load_safetensors": "a damaged file of load_safetensors",
    "load_sharded_state_dict": "a file of load_sharded_state_dict",
    "low_precision.CompressedGradients.average": "an exempt gradient",
    "low_precision.compress_gradients": "the options of compressed gradients",
    "low_precision.float8": "a filter of float8",
    "low_precision.quantize_": "a weight of int8",
    "manual_seed": "a seed",
    "matmul_2d": "a matrix",
    "optim.Muon.step": "a sparse gradient of Muon",
    "parallel.ParallelRun.step": "a batch",
    "parallel.sum_gradients": "main_grad of a rank",
    "parallelize": "a model without gradients",
    "planner.measure": "minutes of measure",
    "planner.measure_shares": "an example of measure_shares",
    "pmax": "an axis of a maximum",
    "pmean": "an axis of a mean",
    "pmin": "an axis of a minimum",
    "ppermute": "a permutation",
    "psum": "an axis of a sum",
    "psum_scatter": "a dim of a scatter",
    "reduce_from_region": "x of a sum",
    "reduce_scatter_region": "sizes to be scattered",
    "refit.RefitPlan.run": "a parameter of a refit",
    "refit.plan": "a target of a refit",
    "save_checkpoint": "a model of save_checkpoint",
    "save_safetensors": "max_shard_size of save_safetensors",
    "scatter_to_region": "sizes of a scatter",
    "spmd": "an argument of a map",
    "vocab_parallel_argmax": "logits of an arg-max",
    "vocab_parallel_cross_entropy": "vocab_size",
    "vocab_parallel_sample": "top_k of a sample",
}
WITHOUT = {
    **dict.fromkeys(
        (
            "ContextLayout",
            "declare_layouts",
            "planner.Layout.mesh",
            "ParallelModule",
            "debug.CollectiveCounts.select",
            "layouts",
            "optim.Muon",
            "sharded_state_dict",
        ),
        "communicates nothing itself",
    ),
    "debug.CollectiveCount": "describes something, without a collective",
    **dict.fromkeys(
        ("export_model", "load_exported"), "the ranks agree before they go on; tests/export compares errors of one rank"
    ),
    "Dropout": "as dropout",
    "VocabParallelCrossEntropy": "as vocab_parallel_cross_entropy",
    "VocabParallelEmbedding.from_embedding": "as VocabParallelEmbedding",
    "VocabParallelLMHead.from_linear": "as VocabParallelLMHead",
    "auto.plan": "each rank plans by itself, or one for all; auto.apply compares the plans",
    "axis_random": "its ranks meet as those of dropout do, after checks of arguments that are the same on all",
    "pvary": "in backward alone, where it is a psum",
    "tp_invariant": "a context of constructors; what is built in it has its own rows",
    "debug.compare_collectives": "tests/debug/test_collective_order.py is about what differs between ranks",
    "debug.compare_inputs": "a switch; the layers compare, tests/debug",
    "debug.typecheck": "a context; the program within it communicates",
    "elastic.ElasticData.begin": "words in the store; tests/elastic/test_fit.py has replicas that do not fit",
    "elastic.ElasticData.average": "words in the store; tests/elastic/test_fit.py has gradients of one replica",
    "huggingface.Trainer": "as from_pretrained, clip_grad_norm_ and save_checkpoint",
    "huggingface.WeightSource": "as weight_source, which makes it",
    "huggingface.share_batches": "as prepare, by the same functions",
    "huggingface.save_pretrained": "as full_state_dict and save_safetensors, by the same functions",
    "lightning.TensorParallelStrategy": "as prepare, by the same functions",
    "lightning.TensorParallelStrategy.all_gather": "Lightning's",
    "lightning.TensorParallelStrategy.reduce": "Lightning's",
    "parallel.ParallelRun": "made by parallelize",
    "parallel.average_gradients": "tests/parallel/test_average_gradients.py, over two axes",
    "parallel.pipeline_stages": "as parallelize, with the axis pp",
    "refit.RefitPlan": "made by refit.plan",
}


def test_every_call_that_communicates_has_a_row():
    calls = _calls()
    assert calls == ROWS.keys() | WITHOUT.keys(), sorted(calls ^ (ROWS.keys() | WITHOUT.keys()))
    assert ROWS.keys().isdisjoint(WITHOUT)
    assert set(ROWS.values()) <= {*tables.ALONE, *tables.AGREED}
    texts = "".join(inspect.getsource(module) for module in (tables, rows_of_files, rows_of_layers, rows_of_models))
    assert [name for name in ROWS if not re.search(rf"\b{name.rpartition('.')[2]}\b", texts)] == []
