"""The one list of what is wrapped: torch's functions have the parameters that we expect, and the switch."""

import importlib
import inspect
import subprocess
import sys
import textwrap

import pytest

from tp_ext.outside.wrapped import SWITCH, TRAINERS, WRAPPED

pytestmark = pytest.mark.core


def _parameters_of(function):
    """Returns the parameters of a function as in ``Wrapped.parameters``."""
    plain = [
        param.replace(annotation=inspect.Parameter.empty) for param in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(plain))[1:-1]


@pytest.mark.parametrize("one", (*WRAPPED, *TRAINERS), ids=lambda one: f"{one.title}, {one.ours}")
def test_signatures_are_those_of_this_torch(one):
    """make test TORCH=.. runs this under each supported torch. Ours takes all of them, after torch's function."""
    pytest.importorskip(one.module)
    if one.module == "safetensors.torch" and not hasattr(one.holder, one.name):
        pytest.skip("versions have one of both functions or both")
    stored = inspect.getattr_static(one.holder, one.name)
    assert _parameters_of(getattr(stored, "__func__", stored)) == one.parameters
    file, name = one.ours.split(".")
    ours = inspect.signature(getattr(importlib.import_module(f"tp_ext.outside.{file}"), name)).parameters.values()
    names = [name.split("=")[0] for name in one.parameters.split(", ")]
    if not any(kind in str(ours) for kind in ("*args", "**kwargs")):
        assert [parameter.name for parameter in ours][2:] == names[1:]


OFF = """
    import importlib, inspect, warnings
    import torch, tp_ext
    from tp_ext.outside.wrapped import WRAPPED

    for one in WRAPPED:
        importlib.import_module(one.module)
        found = inspect.getattr_static(one.holder, one.name, torch.nn.Module.train)
        assert "tp_ext" not in repr(getattr(found, "__func__", found).__code__.co_filename), one
    for cell in torch.nn.utils.get_total_norm.__closure__:
        assert "tp_ext" not in cell.cell_contents.__code__.co_filename

    def make(rank, group):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tp_ext.ColumnParallelLinear(4, 4, group=group)
            return [str(one.message) for one in caught if "TP_EXT_WRAP_TORCH=0" in str(one.message)]

    assert tp_ext.debug.simulate(make, 1) == [[]]
    second, first = sorted(tp_ext.debug.simulate(make, 2), key=len)  # on one rank of this process
    print(len(first), len(second), "clip_grad_norm_: tp_ext.clip_grad_norm_" in first[0])
"""


def test_the_switch():
    """Nothing is wrapped, and the first shard warns, once."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OFF)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), SWITCH: "0"},
    )
    assert result.stdout == "1 0 True\n", result.stderr
