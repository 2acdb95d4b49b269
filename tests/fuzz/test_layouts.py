"""Trainings over all axes of a mesh have the losses, gradient norms and parameters of one process: a table of layouts
of one training, and random ones (run_layouts.py)."""

import pytest

from tests.fuzz import run_layouts as fuzz
from tests.fuzz.layouts import LISTED, draw, valid

pytestmark = pytest.mark.timeout(fuzz.TIMEOUT + 100)
SEEDS = (0, 1, 3, 4)  # on 2, 4, 3 and 2 ranks; the others with --exhaustive


def check(config):
    if failure := fuzz.fails(config):
        pytest.fail(str(failure), pytrace=False)


@pytest.mark.parametrize(
    ("name", "steps", "blocks"),
    [
        ("dp2 tp2 packed", 2, 2),
        *(
            pytest.param(name, 4, 4, marks=pytest.mark.exhaustive)
            for name in ("dp2 tp2 packed", "pp2 tp2 halves", "pp2 cp2")
        ),
    ],
)
def test_a_training_of_few_steps_is_that_of_one_process(name, steps, blocks):
    """The pipeline with a split backward over tp2 runs by default in test_stages.py."""
    config = LISTED[name]
    check(config | {"steps": steps, "model": config["model"] | {"blocks": blocks}})


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LISTED)
def test_a_training_of_20_steps_is_that_of_one_process(name):
    check(LISTED[name])


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n in SEEDS else pytest.mark.exhaustive) for n in range(200)]
)
def test_a_random_training_is_that_of_one_process(seed):
    check(draw(seed))


def test_drawn_configurations():
    """The table has what its training is about, and every option is drawn with every value, also the uneven ones."""
    assert len(LISTED) >= 24 and all(map(valid, LISTED.values()))
    configs = [draw(seed) for seed in range(600)]
    assert all(map(valid, configs)) and configs[:9] == [draw(seed) for seed in range(9)]
    options = [{**c["layout"], **c["model"], "packed": c["batch"]["packed"]} for c in configs]
    for name in options[0]:
        assert len({one[name] for one in options}) > 1, f"{name} has one value only"
    for what in (
        [o for o in options if o["pp"] > 1 and o["dp"] * o["ep"] > 1 and o["tp"] > 1],
        [o for o in options if o["cp"] > 1 and o["tp"] > 1],
        [o for o in options if o["kv_heads"] < o["tp"]],
        [o for o in options if o["heads"] % o["tp"]],
        [o for o in options if o["vocab"] % o["tp"]],
        [o for o in options if o["packed"] and o["cp"] > 1],
        [o for o in options if o["packed"] and o["pp"] > 1],
        [o for o in options if o["tied"] and o["pp"] > 1 and o["zero"] > 1],
        [o for o in options if o["offload"] and o["pp"] > 1],
        [o for o in options if o["recompute"] and o["pp"] > 1],
        [c for c in configs if c["layout"]["sp"] and c["batch"]["seq"] % c["layout"]["tp"]],
        [c for c in configs if c["batch"]["seq"] % c["layout"]["cp"]],
        [o for o in options if o["ep"] > 1 and o["zero"] > 1],
        [o for o in options if o["ep"] > 1 and o["pp"] > 1],
        [o for o in options if o["ep"] > 1 and o["dp"] > 1],
        [o for o in options if o["experts"] % o["ep"]],
        [o for o in options if o["capacity"] and o["ep"] * o["dp"] > 1],
        [o for o in options if o["balance_loss"] and o["ep"] > 1],
    ):
        assert len(what) >= 5
