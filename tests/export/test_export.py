"""Exported models: the outputs, bits and texts of Python's, over a group of another name, and what is refused.

A compilation takes half of a minute of a core: by default few models are compiled, and each is asked many questions.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import nn
from torch.export import Dim

import tp_ext
from tests.helpers import small_gpt
from tests.helpers.on_ranks import on_ranks
from tests.helpers.simulated import run
from tp_ext.export.trace import TracedCall, specs, trace

MAX_SEQ = 12
SECONDS = 560


def prompt(length, batch=1):
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(length))


def folder_of_all(group):
    """A fresh folder, the same on all ranks."""
    name = [tempfile.mkdtemp()]
    if group is not None:
        dist.broadcast_object_list(name, group=group)
    return Path(name[0]) / "export"


def export(model, example, folder, **options):
    inductor.aot_inductor.compile_wrapper_opt_level = "O0"  # half of the compiler's time
    tp_ext.export_model(model, example, folder, **options)
    return json.loads((folder / "manifest.json").read_text())


def check_texts(exported, model, batch=1):
    with torch.inference_mode():
        for length in (1, 2, MAX_SEQ // 2, MAX_SEQ - 1):
            ids, count = prompt(length, batch), min(6, MAX_SEQ - length)
            assert torch.equal(exported.generate(ids, max_new_tokens=count), model.generate(ids, count, 0.0))
            sampled = exported.generate(ids, max_new_tokens=count, temperature=0.8, top_k=9, seed=length)
            tp_ext.manual_seed(length)
            assert torch.equal(sampled, model.generate(ids, count, 0.8, 9))


def check_options(exported):
    """stop, callback, and what is refused before any communication."""
    ids = prompt(3)
    text = exported.generate(ids, max_new_tokens=6)
    stop = int(text[0, 4])
    stopped = exported.generate(ids, max_new_tokens=6, stop=[stop])
    assert torch.equal(stopped, text[:, : 4 + text[0, 3:].tolist().index(stop)])
    assert int(stopped[0, -1]) == stop
    seen = []
    exported.generate(ids, max_new_tokens=6, callback=lambda new: seen.append(new) or len(seen) < 2)
    assert seen == text[0, 3:5].tolist()
    for wrong, error in (
        (lambda: exported.generate(prompt(3, 2), max_new_tokens=1), "ids: shape"),
        (lambda: exported.generate(ids.int(), max_new_tokens=1), "ids: torch.int32"),
        (lambda: exported.generate(ids, max_new_tokens=MAX_SEQ), "max_new_tokens: 3 \\+ 12"),
        (lambda: exported.generate(ids, max_new_tokens=0), "max_new_tokens"),
        (lambda: exported(ids), "inputs: 1 tensors"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            wrong()


def check_refusals(folder, group):
    """Each on all ranks, whichever rank is at fault."""
    manifest = json.loads((folder / "manifest.json").read_text())
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1

    def with_manifest(**changes):
        copy = folder_of_all(group)
        if rank == 0:
            shutil.copytree(folder, copy)
            (copy / "manifest.json").write_text(json.dumps(manifest | changes))
        dist.barrier(group)
        return copy

    cases = [
        (with_manifest(torch="2.0.0"), "torch: .* must be the version of the export, 2.0.0"),
        (with_manifest(isa=["x86_64", "avx9000"]), "isa: this processor has no avx9000"),
        (with_manifest(version=99), "version 99"),
        (with_manifest(p=7), "must be the 7 of the export"),
        (folder / "none", "has no manifest.json"),
    ]
    library = next(name for name in manifest["files"] if name.startswith(f"rank_{last:05}.") and name.endswith(".so"))
    for name in (library, f"rank_{last:05}.weights"):
        changed = with_manifest()
        if rank == 0:
            content = bytearray((changed / name).read_bytes())
            content[len(content) // 2] ^= 1
            (changed / name).write_bytes(content)
        dist.barrier(group)
        cases.append((changed, "another file than" if rank == last else f"rank {last} of {last + 1} cannot load"))
    other = with_manifest(id="ff" * 8)
    cases.append((other if rank == 0 else folder, "another export than rank 0"))
    for path, error in cases:
        with pytest.raises(ValueError, match=error):
            tp_ext.load_exported(path, group)


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@on_ranks(backend="gloo", timeout=SECONDS)
def test_generates_over_a_group_of_another_name(group):
    model, folder = small_gpt.make(group).eval(), folder_of_all(group)
    manifest = export(model, prompt(3), folder, generate=True, max_seq=MAX_SEQ)
    assert manifest["bits"] == "eager" and manifest["p"] == group.size() and manifest["backend"] == "gloo"
    assert manifest["vocab_size"] == 61 and manifest["max_seq"] == MAX_SEQ and manifest["logits"] == "sharded"
    size = sum(tensor.numel() * 4 for tensor in model.state_dict().values())
    assert (folder / f"rank_{group.rank():05}.weights").stat().st_size < size + 64 * len(model.state_dict())
    other = dist.new_group(list(range(group.size())))
    assert other.group_name != group.group_name
    exported = tp_ext.load_exported(folder, other)
    with pytest.raises(ValueError, match="in use over another group"):
        tp_ext.load_exported(folder, group)
    check_texts(exported, model)
    check_options(exported)
    check_refusals(folder, other)
    del exported
    again = tp_ext.load_exported(folder, group)
    check_texts(again, model)
    with pytest.raises(FileExistsError, match="must be new or empty"):
        tp_ext.export_model(model, prompt(3), folder, generate=True, max_seq=MAX_SEQ)


class Classifier(nn.Module):
    """Several inputs, one of them nested, a constant, and several outputs."""

    def __init__(self, dtype):
        super().__init__()
        tp_ext.manual_seed(3)
        self.norm = tp_ext.RMSNorm(16, group=None)
        self.mlp = tp_ext.ParallelMLP(16, 26, activation="swiglu", group=None)
        self.to(dtype)

    def forward(self, x, more, scale=1.0, *, double=False):
        y = self.mlp(self.norm(x)) * scale + more["bias"]
        return {"y": y * 2 if double else y, "row": [y.sum(0)]}


def test_inputs_and_outputs(tmp_path):
    model = Classifier(torch.float32).eval()
    n = Dim("n", min=1, max=9)
    example = {"x": torch.randn(4, 16), "more": {"bias": torch.randn(16)}, "double": True}
    manifest = export(model, example, tmp_path / "export", dynamic_shapes={"x": {0: n}})
    assert [entry["name"] for entry in manifest["inputs"]] == ["x", "more.bias"]
    assert [entry["name"] for entry in manifest["outputs"]] == ["y", "row.0"]
    exported = tp_ext.load_exported(tmp_path / "export")
    for length in (1, 2, 9):
        x, bias = torch.randn(16, length).T, torch.randn(16)  # not contiguous
        y, row = exported(x, more={"bias": bias})
        expected = model(x, {"bias": bias}, double=True)
        torch.testing.assert_close(y, expected["y"])
        torch.testing.assert_close(row, expected["row"][0])
        assert not y.requires_grad
        more = {"bias": bias}
        # The example's arguments in any order, its constants too
        for again in (
            exported(more=more, x=x),
            exported(x=x, more=more, double=True),
            exported(double=True, more=more, x=x),
            exported(x, double=True, more=more),
            exported(x, bias, True),
            exported(x, more, double=True),
        ):
            assert torch.equal(again[0], y)
    for args, error in (
        (
            (torch.randn(10, 16), torch.randn(16)),
            r"x: shape \(10, 16\) must be x float32\[s\d+, 16\], s\d+ from 1 to 9",
        ),
        ((torch.randn(4, 15), torch.randn(16)), "x: shape"),
        ((torch.randn(4, 16).double(), torch.randn(16)), "x: torch.float64 on cpu must be a tensor of float32"),
        ((torch.randn(4, 16),), "inputs: 1 tensors must be 2"),
        ((torch.randn(4, 16), 3.0), "more.bias: 3.0 must be a tensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            exported(*args)
    x, more = example["x"], example["more"]
    for args, kwargs, error in (
        ((), {"x": x, "more": more, "double": False}, "double: False must be True, a constant"),
        ((x, more, False), {}, "double: False must be True, a constant"),
        ((), {"x": x, "more": more, "double": x}, "double: a tensor must be True"),
        ((), {"x": x, "more": more, "scale": 1.0}, r"scale: must be an argument of the example, of \['x', 'more.bias'"),
        ((x,), {"x": x, "more": more}, "x: must be an argument of the example, .* each once"),
        ((), {"x": x, "more": {"bias": x[0], "other": x}}, "more: must be an argument"),
        ((), {"more": more}, "inputs: 1 tensors must be 2"),
        ((x, more, x), {}, "inputs: 3 tensors must be 2"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            exported(*args, **kwargs)
    with pytest.raises(ValueError, match="without generate=True"):
        exported.generate(prompt(3), max_new_tokens=1)


@on_ranks(2, backend="gloo", timeout=SECONDS)
def test_linears_of_few_and_many_rows_have_the_bits_of_the_layers(group):
    """The layers have kernels for few rows at this size; the compiler would call a product of torch's."""
    tp_ext.manual_seed(1)
    layers = (tp_ext.ColumnParallelLinear(512, 256, group=group), tp_ext.RowParallelLinear(256, 512, group=group))
    model, folder = nn.Sequential(*layers).eval(), folder_of_all(group)
    shapes = {"input": {0: Dim("n", min=1, max=9)}}
    assert export(model, torch.randn(4, 512), folder, dynamic_shapes=shapes)["bits"] == "eager"
    exported = tp_ext.load_exported(folder, group)
    with torch.no_grad():
        for rows in (1, 8, 9):
            x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
            assert torch.equal(exported(x), model(x))


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


def moe():
    return tp_ext.ParallelMoE(8, 16, num_experts=2, top_k=1, group=None)


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout()).train(), {}, r"module '' \(Sequential\) is in training"),
        (lambda: nn.Sequential(Branching()), {}, r"module '0' \(Branching\), at `return x if x.sum\(\) > 0 else -x`: "),
        (Counting, {}, "writes to 'calls' in eval mode"),
        (moe, {}, r"\(ParallelMoE\) routes tokens to experts"),
        (lambda: nn.Linear(8, 8).half(), {}, "weight has dtype torch.float16"),
        (lambda: nn.Linear(8, 8).to("meta"), {}, "weight is on meta"),
        (lambda: nn.Linear(8, 8), {"max_seq": 3}, "options of generate=True"),
        (lambda: nn.Linear(8, 8), {"generate": True}, "max_seq"),
        (lambda: nn.Linear(8, 8), {"dynamic_shapes": {"other": {0: Dim("n")}}}, "'other' must be an argument"),
        (lambda: nn.Linear(8, 8), {"generate": True, "max_seq": 4}, "must be a prompt"),
    ],
)
def test_refused(model, options, error, tmp_path):
    model = model()
    model = model if model.training and "Dropout" in repr(model) else model.eval()
    with pytest.raises((ValueError, TypeError), match=error):
        tp_ext.export_model(model, torch.randn(2, 8), tmp_path / "export", **options)
    assert not (tmp_path / "export" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "attention_mask must be left out"),
        ({"attention_mask": torch.tensor([[True, True, False]])}, "attention_mask must be left out"),
        ({"position_ids": torch.tensor([[0, 1, 2]])}, "position_ids must be left out"),
        ({"attention_mask": torch.ones(1, 3)}, "dynamic_shapes: must be None"),  # what comes next
        ({"labels": torch.tensor([[1, 2, 3]]), "use_cache": True}, "dynamic_shapes: must be None"),
    ],
    ids=["left", "right", "positions", "no padding", "labels"],
)
def test_a_step_takes_ids_alone(more, error, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=1, **sizes)).eval()
    example = {"input_ids": torch.tensor([[1, 2, 3]]), **more}
    with pytest.raises(ValueError, match=error):
        tp_ext.export_model(model, example, tmp_path / "export", generate=True, max_seq=8, dynamic_shapes={})


def test_simulated_ranks_are_refused(tmp_path):
    def export_and_load(group):
        model = tp_ext.ParallelMLP(8, 8, group=group).eval()
        for act in (
            lambda: tp_ext.export_model(model, torch.ones(2, 8), tmp_path / "export"),
            lambda: tp_ext.load_exported(tmp_path / "export", group),
        ):
            with pytest.raises(ValueError, match="simulated ranks share a process"):
                act()

    run(export_and_load, 2)


def test_length_without_a_bound():
    call = TracedCall(nn.Linear(8, 8).eval(), torch.randn(4, 8))
    call(list(call.tensors))
    program = trace(call, call.tensors, call.dynamic_shapes({"input": {0: Dim("n")}}))
    inputs, _, dims = specs(program, call.names, call.output_names)
    (name,) = dims
    assert inputs[0].shape == [name, 8] and dims[name][1] is None


class OfLengths(nn.Module):
    """Takes another path where a condition on the lengths of its arguments holds."""

    def __init__(self, condition):
        super().__init__()
        self.condition = condition

    def forward(self, x, y):
        return (x * 2 if self.condition(*x.shape, *y.shape) else x), y


def _described(model, example, shapes):
    call = TracedCall(model.eval(), example)
    call(list(call.tensors))
    program = trace(call, call.tensors, call.dynamic_shapes(shapes))
    return specs(program, call.names, call.output_names)


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (lambda a, b, c, d: a * b > 99, "x.shape"),
        (lambda a, b, c, d: a + d > 99, "y.shape"),
        (lambda a, b, c, d: b - c > 3, "y.shape"),
        (lambda a, b, c, d: a * b * d % 7 == 1, "x.shape"),
        (lambda a, b, c, d: max(a, b) > 50, "x.shape"),
    ],
    ids=["product", "sum", "difference", "remainder", "largest"],
)
def test_paths_of_several_lengths_are_refused(condition, words):
    a, b, d = (Dim(name, min=1, max=64) for name in "abd")
    shapes = {"x": {0: a, 1: b}, "y": {0: a, 1: d}}
    with pytest.raises(ValueError, match=rf"dynamic_shapes: the model takes another path where not .*{words}"):
        _described(OfLengths(condition), (torch.randn(4, 5), torch.randn(4, 6)), shapes)
    # Equal lengths, and a condition that the bounds decide
    _described(OfLengths(lambda a, b, c, d: a + b > 1 and a == c), (torch.randn(4, 5), torch.randn(4, 6)), shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_in_few_bits_take_any_lengths(kind, dtype):
    model = nn.Sequential(nn.Linear(16, 8)).to(dtype)
    tp_ext.low_precision.quantize_(model, kind, block=8)
    shapes = {"input": {0: Dim("a", max=64), 1: Dim("b", max=64)}}
    for rows in (2, 20):  # of the kernel of few rows, and of the other
        _, _, dims = _described(model, torch.randn(rows, 5, 16, dtype=dtype), shapes)
        assert len(dims) == 2


def test_bits_of_another_kernel_in_a_folder_with_spaces(tmp_path):
    """Few rows and many take two kernels, and an export has that of its example."""
    model = nn.Sequential(nn.Linear(16, 8)).eval()
    tp_ext.low_precision.quantize_(model, "int8")
    shapes = {"input": {0: Dim("a", max=64), 1: Dim("b", max=64)}}
    folder = tmp_path / "a (first) export"
    manifest = export(model, torch.randn(2, 5, 16), folder, dynamic_shapes=shapes)
    assert manifest["bits"] == "inductor"
    exported = tp_ext.load_exported(folder)
    for lengths in ((1, 1), (4, 8), (11, 3), (64, 64)):
        x = torch.randn(*lengths, 16)
        torch.testing.assert_close(exported(x), model(x))


@on_ranks(2, backend="gloo")
def test_two_groups_are_refused(group):
    other = dist.new_group([0, 1])
    layers = tp_ext.ColumnParallelLinear(8, 8, group=group), tp_ext.RowParallelLinear(8, 8, group=other)
    with pytest.raises(ValueError, match="and a model of one group can be exported"):
        tp_ext.export_model(nn.Sequential(*layers).eval(), torch.randn(2, 8), folder_of_all(group))


def test_import_of_the_package_imports_no_compiler():
    code = "import sys, tp_ext; assert not {'torch._inductor.compile_fx', 'tp_ext.export'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@on_ranks(2, backend="gloo", timeout=SECONDS)
def test_dtypes(group, kind):
    model = small_gpt.make(group).eval()
    if kind == "bf16":
        model = model.to(torch.bfloat16)
    else:
        tp_ext.low_precision.quantize_(model, kind, block=2)
    folder = folder_of_all(group)
    assert export(model, prompt(3), folder, generate=True, max_seq=MAX_SEQ)["bits"] == "eager"
    check_texts(tp_ext.load_exported(folder, group), model)


@pytest.mark.exhaustive
@on_ranks(2, backend="gloo", timeout=SECONDS)
def test_two_sequences(group):
    model, folder = small_gpt.make(group).eval(), folder_of_all(group)
    export(model, prompt(3, 2), folder, generate=True, max_seq=MAX_SEQ, batch=2)
    check_texts(tp_ext.load_exported(folder, group), model, 2)


@pytest.mark.exhaustive
@on_ranks(2, backend="gloo", timeout=SECONDS)
def test_llama_of_transformers(group):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=1,
        eos_token_id=None,
    )
    files = folder_of_all(group)
    if group.rank() == 0:
        transformers.LlamaForCausalLM(config).save_pretrained(files)
    dist.barrier(group)
    model, folder = tp_ext.huggingface.from_pretrained(str(files), group=group), folder_of_all(group)
    export(model, {"input_ids": prompt(3)}, folder, generate=True, max_seq=MAX_SEQ)
    exported = tp_ext.load_exported(folder, group)
    for length in (1, 4, MAX_SEQ - 1):
        count = min(6, MAX_SEQ - length)
        text = model.generate(prompt(length), max_new_tokens=count, do_sample=False)
        assert torch.equal(exported.generate(prompt(length), max_new_tokens=count), text)
