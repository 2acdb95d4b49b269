"""Which test files a change reaches, on this tree."""

import pytest

from tests.changed import UNKNOWN, chosen, reached, users


@pytest.fixture(scope="module")
def graph():
    return users()


@pytest.mark.parametrize(
    "file, nearest, also",
    [
        pytest.param("tp_ext/nn/lora.py", "tests/nn/test_lora.py", "tests/huggingface/test_adapters.py", id="module"),
        pytest.param("tp_ext/sharding.py", "tests/test_sharding.py", "tests/nn/test_linear.py", id="public name"),
        pytest.param("csrc/cpu/products.cpp", "tests/kernels/test_products.py", "tests/nn/test_linear.py", id="C++"),
        pytest.param(
            "csrc/kernels/rope.cuh", "tests/emulation/test_emulation.py", "tests/kernels/test_rope.py", id="CUDA"
        ),
        pytest.param("tests/helpers/oracle.py", "tests/nn/test_linear.py", "tests/nn/test_mlp.py", id="helper"),
        pytest.param("docs/guide/lora.md", "tests/nn/test_lora.py", "tests/repo/test_docs.py", id="page"),
    ],
)
def test_reached(graph, file, nearest, also):
    tests = reached([file], graph)
    distance = {test: steps for steps, test in tests}
    assert distance[nearest] == min(distance.values()) and also in distance, tests


def test_a_file_that_nothing_reads_reaches_nothing(graph):
    assert reached(["LICENSE"], graph) == []


def test_nearest_first_within_the_time():
    tests = [(0.0, "changed"), (0.5, "long"), (0.5, "short"), (1.0, "far"), (2.0, "farther")]
    seconds = {"changed": 100.0, "long": 50.0, "short": 1.0, "far": 20.0}
    assert chosen(tests, seconds, 10.0) == ["changed"]
    assert chosen(tests, seconds, 152.0 + UNKNOWN) == ["changed", "short", "long", "farther"]
