"""Random modules of plain torch under `auto`, on simulated ranks, against themselves on one, to 1e-9 in fp64
(programs.py)."""

import dataclasses

import pytest

from tests.fuzz import programs
from tp_ext.auto.record.operators import OPERATORS

MANY = 150
# A sum along features that are sharded, between two linears
SUMMED = {"seed": 0, "p": 2, "width": 16, "nested": False, "results": [3], "options": {}}
SUMMED["code"] = [("linear", [0], 0.99, None), ("cumsum", [1], 0.0, None), ("linear", [2], 0.4, None)]

# Programs that were wrong once: ranks, results, instructions
FOUND = {
    "a tensor, of which a module takes slices, is returned": (2, [1], [("permuted", [0]), ("einsum", [1])]),
    "and used": (2, [1, 2], [("permuted", [0]), ("einsum", [1])]),
    "by a module that is used no more": (3, [1], [("permuted", [0]), ("mlp", [1]), ("einsum", [2])]),
}


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(MANY if metafunc.config.getoption("--exhaustive") else 12))


@pytest.mark.filterwarnings("ignore:model. .* stay whole")
def test_programs_on_ranks_are_those_on_one(seed):
    failure, _, _ = programs.verdict(programs.draw(seed))
    assert failure is None, failure


@pytest.mark.parametrize("name", FOUND)
def test_programs_found_need_no_proof(name):
    p, results, code = FOUND[name]
    config = {"seed": 62, "p": p, "width": 24, "nested": True, "results": results, "options": {}}
    failure, share, _ = programs.verdict(config | {"code": [(*step, 0.8, None) for step in code]}, prove="shapes")
    assert failure is None and share > 0.9, failure


@pytest.mark.filterwarnings("ignore:model. .* stay whole")
def test_a_rule_that_does_not_fit_is_found_without_a_proof_and_harmless_with_one(monkeypatch):
    monkeypatch.setitem(OPERATORS, "cumsum", dataclasses.replace(OPERATORS["cumsum"], dims="pointwise"))
    failure, share, _ = programs.verdict(SUMMED, prove="shapes")
    assert failure is not None and "differs by" in failure.wrong[0] and share > 0.9
    failure, _, table = programs.verdict(SUMMED)
    assert failure is None and "values differ" in table


def test_every_operator_is_drawn():
    configs = [programs.draw(seed) for seed in range(MANY)]
    code = [instruction for config in configs for instruction in config["code"]]
    assert {name for name, _, _, _ in code} == programs.OPERATORS.keys()
    assert sum(shared is not None for _, _, _, shared in code) >= 10
    assert {config["p"] for config in configs} == {2, 3, 4} and {config["nested"] for config in configs} == {
        True,
        False,
    }
