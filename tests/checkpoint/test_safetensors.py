"""Exports as safetensors: what the library itself reads and writes, from any number of ranks to any other, ties, data
axes, errors.
"""

import json

import pytest
import safetensors.torch
import torch
from torch import nn

import tp_ext
from tests.checkpoint.test_full_data_parallel import wrapped
from tests.helpers import ranks
from tests.helpers.models import OPTIONS, assert_same, model_and_optimizer

pytestmark = pytest.mark.core


def state_of_one():
    return tp_ext.full_state_dict(model_and_optimizer(None)[0])


def read(folder):
    """What the library reads, file by file."""
    state = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= safetensors.torch.load_file(file)
    return state


def _save(group, path, options, **more):
    model, _ = model_and_optimizer(group, **options)
    tp_ext.save_safetensors(path, model, **more)
    assert any(file.suffix == ".safetensors" for file in path.iterdir())  # on every rank, once it is back


def _load(group, path, options):
    model, _ = model_and_optimizer(group, seed=8, **options)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3e9)
    tp_ext.load_safetensors(path, model)
    if options.get("pad"):  # padding is zero
        assert not model.embedding.weight[model.embedding.vocab_local :].any()
    return tp_ext.full_state_dict(model)


@pytest.mark.parametrize("size", [None, 800], ids=["one file", "several"])
@pytest.mark.parametrize(("p", "q"), [(1, 4), (2, 3), (3, 1), (4, 2)])
def test_an_export_of_p_ranks_loads_on_q_ranks(p, q, size, tmp_path):
    want = state_of_one()
    ranks.run(_save, p, tmp_path, OPTIONS[2] if p % 2 else {}, max_shard_size=size)
    library = read(tmp_path)
    assert_same(library | {"head.weight": library["embedding.weight"]}, want)
    assert "head.weight" not in library  # tied, written once
    files = sorted(file.name for file in tmp_path.iterdir())
    if size is None:
        assert files == ["model.safetensors"]
    else:
        names = [f"model-{i + 1:05}-of-{len(files) - 1:05}.safetensors" for i in range(len(files) - 1)]
        assert len(names) > 3 and files == [*names, "model.safetensors.index.json"]
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(v.nbytes for v in library.values())
        assert index["weight_map"] == {k: f for f in names for k in safetensors.torch.load_file(tmp_path / f)}
        for name in names:
            held = safetensors.torch.load_file(tmp_path / name)
            assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= size
    for options in OPTIONS[::2]:
        for state in ranks.run(_load, q, tmp_path, options):
            assert_same(state, want)


class Dtypes(nn.Module):
    def __init__(self):
        super().__init__()
        for dtype in (torch.bool, torch.bfloat16, torch.int64, torch.float16, torch.float32, torch.float8_e4m3fn):
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.tensor([[1, 0, 3]]).to(dtype))
        self.one = nn.Parameter(torch.tensor(3.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).T)
        self.note = torch.tensor([7.0])

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def test_the_bytes_are_the_librarys_own(tmp_path):
    model, path = Dtypes(), tmp_path / "small.safetensors"
    tp_ext.save_safetensors(path, model, metadata={"step": "3"})
    want = {name: value.contiguous() for name, value in model.state_dict().items()}
    got = safetensors.torch.load_file(path)
    assert all(torch.equal(got[name].float(), value.float()) for name, value in want.items())
    assert {name: value.dtype for name, value in got.items()} == {name: value.dtype for name, value in want.items()}
    plain = {name: value for name, value in want.items() if value.dtype in (torch.float32, torch.bool)}
    holder = nn.Module()
    for name, value in plain.items():
        holder.register_buffer(name, value)
    tp_ext.save_safetensors(path, holder)
    assert path.read_bytes() == safetensors.torch.save(plain, metadata={"format": "pt"})
    other = Dtypes()
    other.note = None
    tp_ext.save_safetensors(path, model)
    for value in other.state_dict().values():
        if value is not None:
            value.zero_()
    tp_ext.load_safetensors(path, other)
    assert all(torch.equal(other.state_dict()[name].float(), value.float()) for name, value in want.items())


def _untied(group, path):
    model, _ = model_and_optimizer(group, seed=8)
    model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))
    tp_ext.load_safetensors(path, model)
    return tp_ext.full_state_dict(model)


def _error(group, path):
    model, _ = model_and_optimizer(group, seed=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        tp_ext.load_safetensors(path, model)
    except Exception as error:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return f"{type(error).__name__}: {error}"


def test_ties(tmp_path):
    """A file says what was tied; one by others may hold either name, or both if they are equal."""
    want = state_of_one()
    ranks.run(_save, 2, tmp_path, {})
    for state in ranks.run(_untied, 2, tmp_path):
        assert_same(state, want)
    path = tmp_path / "model.safetensors"
    for dropped in ("embedding.weight", None):
        safetensors.torch.save_file({k: v.clone() for k, v in want.items() if k != dropped}, path)
        for state in ranks.run(_load, 2, tmp_path, {}):
            assert_same(state, want)
    wrong = {k: v.clone() for k, v in want.items()}
    wrong["head.weight"][12] += 1  # the last rank's
    safetensors.torch.save_file(wrong, path)
    text = "ValueError: path: 'embedding.weight' and 'head.weight' are one tensor in the module and must be equal"
    assert ranks.run(_error, 3, tmp_path) == [text] * 3


def _wrapped(group, path, how, action):
    model, _, _ = wrapped(group, how, 7 if action == "save" else 8)
    if action == "save":
        return tp_ext.save_safetensors(path, model, max_shard_size=800)
    tp_ext.load_safetensors(path, model)
    return tp_ext.full_state_dict(model)


@pytest.mark.parametrize("how", ["FSDP2", "DDP"])
def test_data_axes(how, tmp_path):
    ranks.run(_wrapped, 4, tmp_path, how, "save")
    for state in ranks.run(_wrapped, 4, tmp_path, how, "load"):
        assert_same(state, state_of_one())


class Noted(nn.Module):
    def get_extra_state(self):
        return {"text": "here"}


def _wrong(group, path, what):
    model, _ = model_and_optimizer(group, seed=8)
    if what == "extra state":
        model.noted = Noted()
        return tp_ext.save_safetensors(path, model)
    if what == "dtype":
        model.register_buffer("odd", torch.ones(2, dtype=torch.complex128))
        return tp_ext.save_safetensors(path, model)
    if what == "metadata":
        return tp_ext.save_safetensors(path, model, metadata={"step": 3})
    if what == "size":
        return tp_ext.save_safetensors(path, model, max_shard_size="5GB")
    tp_ext.load_safetensors(path, model)


WRONG = {
    "vocabulary": (ValueError, r"'embedding.weight' has shape \(17, 8\) and must have \(13, 8\)"),
    "keys": (KeyError, r"missing keys \['calls'\], unexpected keys \['more'\]"),
    "cut off": (ValueError, "model.safetensors' must be a whole safetensors file"),
    "nothing": (FileNotFoundError, "must have 'model.safetensors' or 'model.safetensors.index.json'"),
    "index": (ValueError, "index.json' must be an index"),
    "elsewhere": (ValueError, "weight_map names files in its own folder"),
    "a file less": (FileNotFoundError, "model-00002-of-00009.safetensors"),
    "extra state": (TypeError, "'noted._extra_state' is dict and must be a tensor"),
    "dtype": (ValueError, "'odd' is of torch.complex128"),
    "metadata": (TypeError, r"metadata: \['step'\] must be strings"),
    "size": (ValueError, "max_shard_size: '5GB'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_entries_that_do_not_fit_are_named_on_all_ranks(what, tmp_path):
    path, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    state = {name: value.clone() for name, value in state_of_one().items()}
    if what == "vocabulary":
        state["embedding.weight"] = state["head.weight"] = torch.ones(17, 8)
        state["head.weight"] = state["head.weight"].clone()
    elif what == "keys":
        state["more"] = state.pop("calls")
    safetensors.torch.save_file(state, path)
    if what == "cut off":
        path.write_bytes(path.read_bytes()[:-1])
    elif what in ("nothing", "index", "elsewhere", "a file less"):
        path.unlink()
    if what == "index":
        index.write_text('{"weight_map": 3}')
    elif what == "elsewhere":
        index.write_text('{"weight_map": {"calls": "../model.safetensors"}}')
    elif what == "a file less":
        index.write_text('{"weight_map": {"calls": "model-00002-of-00009.safetensors"}}')
    ranks.run_raises(_wrong, 2, *WRONG[what], tmp_path, what, in_turns=False)
    assert what in ("extra state", "dtype", "metadata", "size") or not list(tmp_path.glob("*.tmp"))


INDEX = "model.safetensors.index.json"


def _two_files(path, weight_map):
    """One tensor in both files, the wrong one in the last; the files say what they are."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        tensors = {"weight": torch.full((2, 2), value), f"in_{name}": torch.full((3,), value)}
        safetensors.torch.save_file(tensors, path / f"{name}.safetensors", metadata={"format": "pt"})
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_tensor_is_that_of_the_file_that_the_index_names(tmp_path):
    for first in "ab":
        _two_files(tmp_path, {"weight": f"{first}.safetensors", "in_a": "a.safetensors", "in_b": "b.safetensors"})
        model = nn.Linear(2, 2, bias=False)
        tp_ext.load_safetensors(tmp_path, model, strict=False)
        assert torch.equal(model.weight, torch.full((2, 2), "_ab".index(first), dtype=torch.float32))
    for places, match in (
        (
            {"weight": "a.safetensors", "in_a": "b.safetensors"},
            r"'in_a' must be in 'b.safetensors', as .*index.json",
        ),
        ({"in_a": "a.safetensors", "in_b": "b.safetensors"}, r"'weight' is in two files and must be in .*index.json"),
    ):
        _two_files(tmp_path, places)
        with pytest.raises(ValueError, match=match):
            tp_ext.load_safetensors(tmp_path, model, strict=False)


def test_not_strict_loads_the_entries_that_fit(tmp_path):
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    safetensors.torch.save_file({"two.bias": torch.ones(2), "three": torch.ones(3)}, tmp_path / "some.safetensors")
    before = model["one"].bias.detach().clone()
    tp_ext.load_safetensors(tmp_path / "some.safetensors", model, strict=False)
    assert torch.equal(model["two"].bias, torch.ones(2)) and torch.equal(model["one"].bias, before)
