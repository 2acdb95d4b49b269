"""Every call of the package that opens a file or takes bytes of others, in a table; and hostile files of each kind: one
sentence on all ranks, no code executed.

A new call fails ``test_every_call_is_in_the_table`` until it has a row: files of others go through ``read_json``,
``read_saved``, ``CheckpointReader`` with ``PlainPlanner``, or ``SafetensorsFile``, and get hostile files here.
"""

import ast
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import nn

import tp_ext
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run
from tp_ext import auto, huggingface, planner
from tp_ext.checkpoint.files.plain_values import read_saved

OPENERS = {
    "open", "read_text", "read_bytes", "load", "loads", "Unpickler", "_Unpickler", "safe_open", "load_file", "exec",
    "FileSystemReader", "from_pretrained", "fromfile", "frombuffer", "mmap", "memmap", "import_module", "__import__",
    "exec_module", "CDLL", "load_library", "preadv", "from_file", "run_path", "loadtxt", "genfromtxt", "read_csv",
    "safe_load", "unpickle", "load_state_dict_from_url", "get_class_from_dynamic_module", "all_gather_object",
    "gather_object", "scatter_object_list", "broadcast_object_list", "recv_object_list", "eval", "compile_file",
}  # fmt: skip
# Why a call is safe, or HOSTILE: what its files are
WRITES, NAMES = "writes", "a module that the source names"
OWN, RANKS = "a file of this process or of the system", "from ranks of the job, which run the same code"
MEMORY = "memory, no file"
CALLS = {
    "auto/record/flow.py:Symbols.holds: eval": MEMORY,
    "common_generator.py:_bytes_of_seed: torch.frombuffer": MEMORY,
    "common_generator.py:_from_first: torch.frombuffer": RANKS,
    "debug/collective_order.py:_ComparedBlock._call: json.loads": RANKS,
    "elastic/fit.py:_read: json.loads": RANKS,
    "outside/distributed_checkpoint.py:_on_first_ranks: dist.broadcast_object_list": RANKS,
    "_build.py:_check_library: open": OWN,
    "_build.py:_check_library: mmap.mmap": OWN,
    "_build.py:_check: importlib.import_module": NAMES,
    "_build.py:load: importlib.import_module": NAMES,
    "_imports.py:import_now: importlib.import_module": NAMES,
    "_object_collectives.py:all_gather_objects: dist.all_gather_object": RANKS,
    "_object_collectives.py:_gather_objects: dist.gather_object": RANKS,
    "_object_collectives.py:_scatter_objects: dist.scatter_object_list": RANKS,
    "_object_collectives.py:broadcast_from_first: dist.broadcast_object_list": RANKS,
    "huggingface/weight_source.py:_class_of_source: importlib.import_module": NAMES,
    "auto/search/picture.py:draw: importlib.import_module": NAMES,
    "checkpoint/directory.py:_write.finish: open": WRITES,
    "checkpoint/directory.py:_write_entries: open": WRITES,
    "checkpoint/directory.py:_is_plain: torch.load": MEMORY,
    "checkpoint/files/atomic_directory.py:sync_to_disk.sync: os.open": WRITES,
    "checkpoint/files/atomic_directory.py:start_writing: ctypes.CDLL": OWN,
    "checkpoint/files/atomic_directory.py:_exchange: ctypes.CDLL": OWN,
    "checkpoint/files/entry_files.py:_FileRange.readinto: os.preadv": "checkpoint",
    "checkpoint/files/entry_files.py:_with_own_storage: torch.frombuffer": MEMORY,
    "checkpoint/files/metadata.py:parse_metadata: _Unpickler": "checkpoint",
    "checkpoint/files/pinned_directory.py:open_regular: os.open": "checkpoint",
    "checkpoint/files/pinned_directory.py:open_regular: open": "checkpoint",
    "checkpoint/files/pinned_directory.py:PinnedDirectory.__init__: os.open": "checkpoint",
    "checkpoint/files/plain_values.py:parse_json: json.loads": "config",
    "export/manifest.py:processor: Path('/proc/cpuinfo').open": OWN,
    "export/manifest.py:digest: path.open": MEMORY,
    "export/manifest.py:map_weights: torch.from_file": MEMORY,
    "export/manifest.py:write_weights: path.open": WRITES,
    "checkpoint/files/plain_values.py:load_saved: torch.load": "saved",
    "checkpoint/files/reader.py:PlainPlanner.load_bytes: torch.load": "checkpoint",
    "checkpoint/files/safetensors_slices.py:SafetensorsFile.__init__: safe_open": "safetensors",
    "checkpoint/files/safetensors_slices.py:SlicedTensor._read_into: os.preadv": "safetensors",
    "checkpoint/files/write_lock.py:WriteLock._tried: os.open": WRITES,
    "checkpoint/files/write_lock.py:WriteLock._break: mine.read_bytes": OWN,
    "checkpoint/files/write_lock.py:_machine: Path('/proc/sys/kernel/random/boot_id').read_text": OWN,
    "checkpoint/files/write_lock.py:_started: Path(f'/proc/{int(str(pid))}/stat').read_text": OWN,
    "checkpoint/full_optimizer.py:load_full_optimizer_state_dict: own.held.load": MEMORY,
    "checkpoint/safetensors_files.py:Export.write: self.temporary(self.names[number]).open": WRITES,
    "checkpoint/safetensors_files.py:Export.finish: self.temporary(self.index.name).open": WRITES,
    "checkpoint/sharded_load.py:_read: dcp.load": "checkpoint",
    "debug/timeline.py:Timeline.save: importlib.import_module": NAMES,
    "debug/timeline.py:record_timeline: json.loads": OWN,
    "debug/timeline.py:record_timeline: file.read_text": OWN,
    "debug/type_check.py:_spmd_types: importlib.import_module": NAMES,
    "debug/type_check.py:_Rules.__init__: importlib.import_module": NAMES,
    "debug/type_check.py:_typed_operators: importlib.import_module": NAMES,
    "elastic/board.py:View.of_text: json.loads": RANKS,
    "elastic/board.py:Board.joined: json.loads": RANKS,
    "huggingface/folder.py:load_generation_config: transformers.GenerationConfig.from_pretrained": "generation",
    "huggingface/load.py:_prepared: cls.config_class.from_pretrained": "config",
    "huggingface/trl_trainers.py:_load: from_pretrained": "config",
    "planner/__main__.py:_check_writable: open": WRITES,
    "planner/__main__.py:_json: json.loads": MEMORY,
    "planner/prediction.py:Prediction.trace: open": WRITES,
    "refit/agreement.py:host: Path('/proc/sys/kernel/random/boot_id').read_text": OWN,
    "refit/buckets.py:memory: mmap.mmap": MEMORY,
    "refit/buckets.py:memory: torch.frombuffer": MEMORY,
    "smoke.py:_check_processes: path.read_text": OWN,
    "verify/__main__.py:_object: importlib.import_module": "a module that the user names on the command line",
    "verify/verification.py:type_error: importlib.import_module": NAMES,
}
EXECUTES = (
    "pickle.load", "pickle.loads", "np.load", "numpy.load", "yaml.load", "joblib.load", "torch.hub.load", "exec",
    "eval", "dill.load", "dcp.load", "FileSystemReader", "dcp.FileSystemReader", "torch.jit.load", "torch.export.load",
)  # fmt: skip


def _calls(root: Path) -> Iterator[tuple[str, str, ast.Call]]:
    """Place, name and call, of all calls that are named like one which opens something."""

    def visit(node: ast.AST, where: tuple[str, ...]) -> Iterator[tuple[str, str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            inner = (*where, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else where
            if isinstance(child, ast.Call):
                name = ast.unparse(child.func)
                last = child.func.attr if isinstance(child.func, ast.Attribute) else name
                # model.eval() and load() of the compiled library take nothing
                if last in OPENERS and (child.args or child.keywords or last not in ("eval", "load")):
                    yield ".".join(inner), name, child
            yield from visit(child, inner)

    for file in sorted(root.rglob("*.py")):
        for place, name, call in visit(ast.parse(file.read_text()), ()):
            yield f"{file.relative_to(root)}:{place}", name, call


def test_every_call_is_in_the_table() -> None:
    ours = ("_load_folder", "load_checkpoint: load")
    calls = {f"{place}: {name}" for place, name, _ in _calls(ROOT / "tp_ext")}
    calls = {call for call in calls if not call.endswith(ours)}
    assert calls - CALLS.keys() == set(), "new calls that open something: see the docstring of this file"
    assert CALLS.keys() - calls == set(), "rows without a call"
    reasons = {reason for reason in CALLS.values() if " " not in reason and reason != WRITES}
    assert reasons <= KINDS.keys()


@pytest.mark.parametrize("folder", ["tp_ext", "examples", "benchmarks"])
def test_nothing_executes_what_a_file_says(folder: str) -> None:
    for place, name, call in _calls(ROOT / folder):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name == "torch.load":
            assert options.get("weights_only") in ("True", "weights_only"), place
        hardened = name == "dcp.load" and "PlainPlanner()" in ast.unparse(call)
        of_compiler = place == "auto/record/flow.py:Symbols.holds"  # the text of torch's guards of lengths
        assert name not in EXECUTES or hardened or of_compiler, f"{place}: {name}"
        assert options.get("trust_remote_code", "False") == "False", place


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _module(group: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(tp_ext.ColumnParallelLinear(4, 6, group=group), tp_ext.RowParallelLinear(6, 4, group=group))


def _llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    return transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)


def _save_model(group: Any, path: Path) -> None:
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(_llama()).save_pretrained(path, max_shard_size="8KB")
    dist.barrier()


def _save_adapter(group: Any, path: Path) -> None:
    if dist.get_rank() == 0:
        path.mkdir()
        names = [f"base_model.model.0.lora_{factor}.weight" for factor in "AB"]
        save_file({names[0]: torch.ones(2, 4), names[1]: torch.ones(6, 2)}, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0}
        (path / "adapter_config.json").write_text(json.dumps(config))
    dist.barrier()


def _save_plan(group: Any, path: Path) -> None:
    if dist.get_rank() == 0:
        path.mkdir()
        plan = auto.plan(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)), (torch.ones(2, 4),), 2)
        plan.save(path / "plan.json")
    dist.barrier()


def _save_saved(group: Any, path: Path) -> None:
    if dist.get_rank() == 0:
        path.mkdir()
        torch.save({"state": {}, "param_groups": []}, path / "optimizer.pt")
    dist.barrier()


def _save_planner(group: Any, path: Path) -> None:
    if dist.get_rank() == 0:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(_llama().to_dict()))
    dist.barrier()


# Kind -> the file that is damaged, how the folder is made, how it is loaded
KINDS: dict[str, tuple[str, Callable[[Any, Path], Any], Callable[[Any, Path], Any]]] = {
    "config": ("config.json", _save_model, lambda group, path: huggingface.from_pretrained(path, group=group)),
    "generation": ("generation_config.json", _save_model, lambda g, path: huggingface.from_pretrained(path, group=g)),
    "index": ("model.safetensors.index.json", _save_model, lambda g, path: huggingface.from_pretrained(path, group=g)),
    "shard": (
        "model-00001-of-*.safetensors", _save_model, lambda group, path: huggingface.from_pretrained(path, group=group),
    ),
    "adapter": ("adapter_config.json", _save_adapter, lambda g, path: huggingface.load_adapter(_module(g), path)),
    "factors": ("adapter_model.safetensors", _save_adapter, lambda g, p: huggingface.load_adapter(_module(g), p)),
    "plan": ("plan.json", _save_plan, lambda group, path: auto.Plan.load(path / "plan.json")),
    "planner": ("config.json", _save_planner, lambda group, path: planner.from_config(path)),
    "saved": (
        "optimizer.pt", _save_saved,
        lambda group, path: read_saved(path / "optimizer.pt", "resume_from_checkpoint", ("state", "param_groups")),
    ),
    "safetensors": (
        "model.safetensors", lambda group, path: tp_ext.save_safetensors(path, _module(group)),
        lambda group, path: tp_ext.load_safetensors(path, _module(group)),
    ),
    "checkpoint": (
        ".metadata", lambda group, path: tp_ext.save_checkpoint(path, _module(group), step=1),
        lambda group, path: tp_ext.load_checkpoint(path, _module(group)),
    ),
    "entries": (
        "__0_0.distcp", lambda group, path: tp_ext.save_checkpoint(path, _module(group), step=1),
        lambda group, path: tp_ext.load_checkpoint(path, _module(group)),
    ),
    "extra": (
        "extra.pt", lambda group, path: tp_ext.save_checkpoint(path, _module(group), step=1),
        lambda group, path: tp_ext.load_checkpoint(path, _module(group)),
    ),
}  # fmt: skip


def _archive(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _linked(file: Path, target: str) -> None:
    file.unlink()
    file.symlink_to(target)


def _piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _in_json(file: Path, key: str, value: str) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, key: "PLACE"}).replace('"PLACE"', value))


def _first_key_twice(file: Path) -> None:
    text = file.read_text()
    key = next(iter(json.loads(text)))
    file.write_text(text.replace("{", '{"' + key + '": 1, ', 1))


ANY: dict[str, Callable[[Path, Evil], Any]] = {
    "a pickle that executes": lambda file, evil: file.write_bytes(pickle.dumps(evil)),
    "an archive that executes": lambda file, evil: file.write_bytes(_archive({"state": evil, "param_groups": []})),
    "empty": lambda file, _: file.write_bytes(b""),
    "truncated": lambda file, _: os.truncate(file, file.stat().st_size // 2),
    "zeros": lambda file, _: file.write_bytes(b"\0" * 1000),
    "ones": lambda file, _: file.write_bytes(b"\xff" * 1000),
    "a pipe": lambda file, _: _piped(file),
    "a folder": lambda file, _: _as_folder(file),
    "a device": lambda file, _: _linked(file, "/dev/zero"),
    "a link to itself": lambda file, _: _linked(file, file.name),
    "a text out of the folder": lambda file, _: _linked(file, "/etc/passwd"),
}
JSON: dict[str, Callable[[Path, Evil], Any]] = {
    "deep": lambda file, _: file.write_text('{"a":' * 100_000),
    "deep and whole": lambda file, _: file.write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
    "a list": lambda file, _: file.write_text("[1]"),
    "null": lambda file, _: file.write_text("null"),
    "a key twice": lambda file, _: _first_key_twice(file),
    "large": lambda file, _: os.truncate(file, 1 << 40),
    "NaN": lambda file, _: _in_json(file, "r", "NaN"),
    "5000 digits": lambda file, _: _in_json(file, "r", "9" * 5000),
}


def _sizes(key: str, *values: str) -> dict[str, Callable[[Path, Evil], Any]]:
    return {f"{key} = {value[:20]}": lambda file, _, value=value: _in_json(file, key, value) for value in values}


def _header(file: Path, change: Callable[[dict[str, Any]], Any], length: int | None = None) -> None:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data[8 + size :])


def _first_entry(header: dict[str, Any], **values: Any) -> None:
    header[next(name for name in header if name != "__metadata__")].update(values)


TENSORS: dict[str, Callable[[Path, Evil], Any]] = {
    "a header of 2^63": lambda file, _: _header(file, lambda header: None, 1 << 63),
    "no data": lambda file, _: _header(file, lambda header: _first_entry(header, data_offsets=[0, 1 << 60])),
    "a negative size": lambda file, _: _header(file, lambda header: _first_entry(header, shape=[-1, 4])),
    "2^62 rows": lambda file, _: _header(file, lambda header: _first_entry(header, shape=[1 << 62, 4])),
    "a dtype of FP8": lambda file, _: _header(file, lambda header: _first_entry(header, dtype="F8_E4M3")),
    "an unknown dtype": lambda file, _: _header(file, lambda header: _first_entry(header, dtype="F7")),
    "no shape": lambda file, _: _header(file, lambda header: _first_entry(header, shape=None)),
}
INDEX = {
    f"a shard {value[:12]!r}": lambda file, _, value=value: _in_json(
        file, "weight_map", json.dumps({"lm_head.weight": value})
    )
    for value in ("../model.safetensors", "/etc/passwd", "a/../b", "..", "", "a\0b", "x" * 300, "missing.safetensors")
}
MORE: dict[str, dict[str, Callable[[Path, Evil], Any]]] = {
    "config": {
        **JSON,
        **_sizes("hidden_size", "null", "-16", "1e30", '"x"', "[16]", "18446744073709551616"),
        **_sizes("num_attention_heads", "0", "-1", "3"),
        **_sizes("attn_implementation", '"someone/code"'),
        **_sizes("_attn_implementation", '"someone/code"'),
        **_sizes("dtype", '"float8_e4m3fn"', '"load"', "7"),
        **_sizes("quantization_config", '{"quant_method": "fp8"}'),
        **_sizes("architectures", '["nn.Module"]', "[]", '"os.system"', "[[]]", '["Pipeline"]'),
    },
    "generation": JSON,
    "index": {**JSON, **INDEX, **_sizes("weight_map", "null", "[]", '{"a": 1}', "{}")},
    "shard": TENSORS,
    "adapter": {
        **JSON,
        **_sizes("r", "0", "-1", "1.5", "true", '"2"', "1e400", "3"),
        **_sizes("lora_alpha", "0", "Infinity", "1e999", "1" + "0" * 400, "[1]", "null"),
        **_sizes("lora_dropout", "-1", "1", "2.5", '"x"', "Infinity"),
        **_sizes("auto_mapping_of_code", '{"x": 1}'),
        **_sizes("peft_type", "[1]", '"X"'),
    },
    "factors": TENSORS,
    "plan": {**JSON, **_sizes("copies", "[]"), **_sizes("shardings", "null")},
    "planner": {
        **JSON,
        **_sizes("hidden_size", "null", "-16", "1e30", '"x"', "[16]"),
        **_sizes("num_hidden_layers", "1000000000000", "0", "true"),
        **_sizes("model_type", "3", '"x"', "[1]"),
        **_sizes("text_config", "3"),
        **_sizes("tie_word_embeddings", '"no"'),
    },
    "saved": {"a list": lambda file, _: torch.save([1], file), "no keys": lambda file, _: torch.save({}, file)},
    "safetensors": TENSORS,
    "extra": {"a list": lambda file, _: torch.save([1], file)},
}
ERRORS = ("ValueError", "OSError", "UnpicklingError", "KeyError", "TypeError", "FileNotFoundError", "IsADirectoryError")
HARMLESS = {("generation", "a link to itself")}  # as if there were none


def _make(group: Any, kind: str, path: Path) -> None:
    KINDS[kind][1](group, path)


def _refusals(group: Any, kind: str, folders: list[Path]) -> list[tuple[str, str]]:
    """The error of each load, by class and message."""
    outcomes = []
    for folder in folders:
        try:
            KINDS[kind][2](group, folder)
            outcomes.append(("loaded", ""))
        except Exception as error:
            outcomes.append((type(error).__name__, str(error)))
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files(kind: str, tmp_path: Path) -> None:
    name = KINDS[kind][0]
    run(_make, 2, kind, tmp_path / "good")
    assert run(_refusals, 2, kind, [tmp_path / "good"], timeout=300) == [[("loaded", "")]] * 2
    damages = ANY | MORE.get(kind, {})
    folders = []
    for number, damage in enumerate(damages.values()):
        folders.append(shutil.copytree(tmp_path / "good", tmp_path / str(number)))
        damage(next(folders[-1].glob(name)), Evil(tmp_path / "executed"))
    here, there = run(_refusals, 2, kind, folders, timeout=300)
    assert not (tmp_path / "executed").exists()
    wrong = [
        f"{what}: {mine}, on the other rank {other}"
        for what, mine, other in zip(damages, here, there, strict=True)
        if (
            mine[0] != "loaded"
            if (kind, what) in HARMLESS
            else mine[0] not in ERRORS or mine != other or len(mine[1]) > 1500 or "\n" in mine[1]
        )
    ]
    assert not wrong, "\n".join(wrong)
