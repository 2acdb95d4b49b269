"""How every family of kernels runs: on the current stream, without waiting for the device, leaving nothing behind, with
the same bits each time. And that `families.py` has all of them."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda.families import DTYPES, FAMILIES, WIDTHS, Family, block
from tests.helpers.paths import CSRC

pytestmark = pytest.mark.core

EVERY = pytest.mark.parametrize("name", [*FAMILIES, "block"])
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def family_of(name: str, device: torch.device | str) -> Family:
    return block(device) if name == "block" else FAMILIES[name]


# Streams


def on_side_stream(family: Family, inputs: list[Tensor]) -> list[Tensor]:
    """A step on inputs that a side stream writes late: what ran on another stream would have read zeros."""
    late = [torch.zeros_like(t).requires_grad_(t.requires_grad) for t in inputs]

    def step() -> list[Tensor]:
        with torch.no_grad():
            for to, value in zip(late, inputs, strict=True):
                to.copy_(value)
        torch.manual_seed(3)
        return family.step(*late)

    if not inputs[0].is_cuda:
        return step()
    family.step(*inputs)  # what is loaded and allocated at first use waits for the device
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # some 30 ms
        results = step()
    side.synchronize()  # this stream alone
    return results


@EVERY
def test_a_step_runs_on_the_current_stream(name: str, device: torch.device) -> None:
    family = family_of(name, device)
    inputs = family.inputs(device, torch.float32)
    torch.manual_seed(3)
    want = family.step(*inputs)
    for got, expected in zip(on_side_stream(family, inputs), want, strict=True):
        # A stray kernel reads zeros; only GEMMs, which may be chosen otherwise on another stream, round otherwise
        torch.testing.assert_close(got, expected, **({"rtol": 0, "atol": 0} if family.exact else {}))


def functions(file: Path) -> dict[str, str]:
    """Bodies of the functions at the top of a namespace, of structs that are called like functions, and of the static
    methods of structs, as `Struct::method`."""
    code = re.sub(r"//[^\n]*", "", file.read_text())
    patterns = r"^\w[^;{}=]*?\b(\w+)\([^;{}]*\) \{\n(.*?)^\}", r"^struct (\w+) \{\n(.*?)^\};"
    bodies = {match[1]: match[2] for pattern in patterns for match in re.finditer(pattern, code, re.M | re.S)}
    method = re.compile(r"^  static \w[^;{}=]*?\b(\w+)\([^;{}]*\) \{\n(.*?)^  \}", re.M | re.S)
    return bodies | {f"{name}::{m[1]}": m[2] for name, body in bodies.items() for m in method.finditer(body)}


def registered_functions(file: Path) -> list[str]:
    """The functions that a file registers; those of this file that a list of primitives is made of, in its place."""
    code, bodies = file.read_text(), functions(file)
    names = re.findall(r'm\.impl\(\s*"\w+",\s*&?(\w+)', code)
    if made_of := re.search(r"using Primitives = \w+<(.*?)>;", code, re.S):
        parts = re.findall(r"\b([A-Za-z]\w+)(?:<\w+>)?(?:,|$)", made_of[1])
        methods = [name for name in bodies if name.partition("::")[0] in parts and "::" in name]
        own = methods or [name for name in parts if name in bodies]  # not the checks, which other files have
        assert own
        return [name for name in names if name != "Primitives"] + own
    return names


def guarded(name: str, bodies: dict[str, str]) -> bool:
    """Whether the function guards the device before it allocates, launches or asks for a stream, or one that it calls
    does, which is all that it does on the device."""
    body = bodies[name]
    acts = [found.start() for found in re.finditer(r"at::empty|<<<|getCurrentCUDAStream|_kernel\b", body)]
    if guard := re.search(r"CUDAGuard \w+\(", body):
        return guard.start() < min(acts, default=len(body))
    called = [other for other in re.findall(r"\b(\w+)(?:<[^;()]*>)?\(", body) if other in bodies and other != name]
    # Primitives are made of functions that are checked themselves
    return "Primitives::" in body or any(guarded(other, bodies) for other in called)


@pytest.mark.parametrize("file", sorted((CSRC / "cuda").glob("*.cu")), ids=lambda f: f.stem)
def test_every_operator_guards_the_device_of_its_tensors(file: Path) -> None:
    """Before it asks for the current stream, or that of another device would be taken. With one GPU no run can tell."""
    bodies = functions(file)
    registered = registered_functions(file)
    assert registered or "TORCH_LIBRARY_IMPL" not in file.read_text()
    for name in registered:
        assert guarded(name, bodies), f"{file.name}: {name} has no device guard"


def test_no_kernel_is_launched_on_the_default_stream() -> None:
    for file in [*(CSRC / "cuda").iterdir(), *(CSRC / "kernels").glob("*.cuh")]:
        code = re.sub(r"//[^\n]*", "", file.read_text())
        for launch in re.findall(r"<<<(.*?)>>>", code, re.S):
            assert re.search(r"\b(stream|getCurrentCUDAStream\(\))$", launch.strip()), f"{file.name}: <<<{launch}>>>"


# Waiting for the device


@EVERY
@pytest.mark.cuda
def test_no_step_waits_for_the_device(name: str) -> None:
    family = family_of(name, "cuda")
    inputs = family.inputs("cuda", torch.float32)
    family.step(*inputs)  # the first use may
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    waited = None
    try:
        family.step(*inputs)
    except RuntimeError as error:
        waited = error
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert waited is None, waited


@pytest.mark.parametrize("name", FAMILIES)
def test_no_step_needs_a_value_on_the_host(name: str) -> None:
    """The counterpart on a machine without GPU: fake tensors have no values to read."""
    with FakeTensorMode():
        results = FAMILIES[name].step(*FAMILIES[name].inputs("cpu", torch.float32))
    assert all(isinstance(r, torch._subclasses.FakeTensor) for r in results)


def test_no_kernel_code_waits_or_copies_to_the_host() -> None:
    """Below the dispatcher fake tensors see nothing."""
    waits = r"\.item\(|\.item<|Synchronize\(|cudaMemcpy\b|cudaMalloc\(|cudaFree\(|\.cpu\(\)|_local_scalar_dense"
    for file in [*(CSRC / "cuda").iterdir(), *(CSRC / "autograd").iterdir()]:
        code = re.sub(r"//[^\n]*", "", file.read_text())
        assert not (found := re.findall(waits, code)), f"{file.name}: {found}"


# Memory


class Made(TorchDispatchMode):
    """The storages that operators have made while it was active."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, list | tuple) else [result]:
            if isinstance(t, Tensor):
                self.storages.append(StorageWeakRef(t.untyped_storage()))
        return result


def eventually(holds: Callable[[], bool]) -> None:
    """The thread of backward on a GPU lets go of its last node after it has given the results."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@EVERY
def test_a_step_leaves_no_memory_behind(name: str, device: torch.device) -> None:
    family = family_of(name, device)
    inputs = family.inputs(device, torch.float32)
    own = {StorageWeakRef(t.untyped_storage()).cdata for t in (*inputs, *family.parameters)}
    made = Made()
    with made:
        results = family.step(*inputs)
    assert any(not storage.expired() for storage in made.storages)  # the results
    del results
    eventually(lambda: not [s for s in made.storages if not s.expired() and s.cdata not in own])
    if device == torch.device("cuda"):  # to the byte, workspaces included, once the first steps have made them
        family.step(*inputs)
        time.sleep(0.2)  # until the thread has let go of that step
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            family.step(*inputs)
        eventually(lambda: torch.cuda.memory_allocated() == before)


# Bits


@EVERY_DTYPE
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.exact])
def test_every_run_gives_the_same_bits(name: str, dtype: torch.dtype, device: torch.device) -> None:
    family, first = FAMILIES[name], None
    for width in WIDTHS:
        inputs, first = family.inputs(device, dtype, width), None
        for _ in range(4):
            torch.manual_seed(3)
            results = family.step(*inputs)
            first = first or results
            assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))


# Completeness


class Heard(TorchDispatchMode):
    """The names of the primitive operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tp_ext":
            self.names.add(func._schema.name.removeprefix("tp_ext::"))
        return func(*args, **(kwargs or {}))


def test_every_primitive_operator_is_in_a_family() -> None:
    """Or it is not tried on a GPU by anything here: add a family to families.py."""
    heard = Heard()
    for family in FAMILIES.values():
        inputs = family.inputs("cpu", torch.float32)
        with heard:
            family.step(*inputs)
    primitives = set(re.findall(r"^(_\w+)\(", (CSRC / "library.cpp").read_text(), re.M))
    assert heard.names == primitives
