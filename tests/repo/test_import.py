"""The import of tp_ext is cheap, and what must happen with it happens all the same."""

import ast
import importlib.util
import subprocess
import sys
import textwrap

import pytest

import tp_ext
from tests.helpers.paths import ROOT
from tp_ext._imports import after_import

pytestmark = pytest.mark.core


def run(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_little() -> None:
    """Each of these costs more than all of ours; modules are counted, not seconds, which depend on the load."""
    loaded = set(
        run("import sys, torch; before = {*sys.modules}; import tp_ext; print(*({*sys.modules} - before))").split()
    )
    heavy = {
        "matplotlib",
        "safetensors",
        "sympy",
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor",
        "transformers",
    }
    assert not heavy & loaded
    assert "tp_ext._ops" in loaded and len(loaded) < 100


def test_the_tables_of_names_are_equal() -> None:
    """That of type checkers and that of the running program."""
    tree = ast.parse((ROOT / "tp_ext" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    named = {alias.name: node.module for node in block.body for alias in node.names}
    modules = {name for name, module in named.items() if module == "tp_ext"} | {"verify"}
    assert {name: module for name, module in named.items() if name not in modules} == tp_ext._MODULES
    assert set(tp_ext.__all__) == named.keys() | {"__version__", "build_info", "shm"}
    for name in named.keys() - modules:
        assert getattr(tp_ext, name) is getattr(sys.modules[named[name]], name)


def test_other_names_are_modules_or_errors() -> None:
    assert tp_ext.megatron is sys.modules["tp_ext.megatron"]
    with pytest.raises(AttributeError, match="module 'tp_ext' has no attribute 'ColumnParalelLinear'"):
        _ = tp_ext.ColumnParalelLinear


def test_functions_are_wrapped_whenever_their_module_is_imported() -> None:
    """Modules imported before tp_ext, modules imported after it, and functions imported under another name."""
    program = """
        from torch.nn.utils import clip_grad_norm_
        import tp_ext, importlib
        from tp_ext.outside.wrapped import WRAPPED
        for module in sorted({one.module for one in WRAPPED}):
            importlib.import_module(module)
        import inspect
        for one in WRAPPED:
            found = inspect.getattr_static(one.holder, one.name, None)
            found = getattr(found, "__func__", found)
            cells = [cell.cell_contents for cell in getattr(found, "__closure__", None) or ()]
            code = [getattr(one, "__code__", None) for one in (found, *cells)]
            ours = any(one and one.co_filename.endswith("outside/wrapped.py") for one in code)
            assert ours or one.module == "safetensors.torch", one
        print("all")
    """
    assert run(program) == "all\n"


def test_what_the_first_shard_imports_runs_no_operator() -> None:
    """A layer may be made under a mode, such as a device; a tensor made by an import would be of that mode."""
    program = """
        import tp_ext, torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from tp_ext.outside.wrapped import _load, _ours

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                raise AssertionError(func)

        with Mode(), torch.device("meta"), torch.inference_mode():
            _load()
            tp_ext.parallelize
        print(len(_ours) > 20 and not torch.distributed.pipelining.microbatch.sum_reducer.init_value.is_inference())
    """
    assert run(program) == "True\n"


def test_compiled_code_calls_operators_whose_dynamo_is_imported_later() -> None:
    program = """
        import sys, tp_ext, torch
        assert "torch._dynamo" not in sys.modules
        act = torch.compile(lambda x: tp_ext._ops.gated_act(x, None, "swiglu"), backend="eager", fullgraph=True)
        print(act(torch.zeros(2, 4)).tolist() == [[0.0] * 2] * 2)
    """
    assert run(program) == "True\n"


def test_after_import(tmp_path, monkeypatch) -> None:
    """Once, after the import has ended; a module that is only looked for, or that fails, is waited for."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "waited_for.py").write_text("raise RuntimeError")
    calls = []
    after_import("waited_for", lambda: calls.append(sys.modules["waited_for"].value))
    assert importlib.util.find_spec("waited_for") is not None
    with pytest.raises(RuntimeError):
        importlib.import_module("waited_for")
    assert calls == []
    (tmp_path / "waited_for.py").write_text("value = 3  # longer than before, so that no bytecode is taken for it\n")
    importlib.import_module("waited_for")
    assert calls == [3]
    after_import("waited_for", lambda: calls.append(4))
    assert calls == [3, 4]
    del sys.modules["waited_for"]
    importlib.import_module("waited_for")
    assert calls == [3, 4]
