"""Random models against unsharded reference models (run.py), a fixed range of seeds; and that the fuzzer would find
what libraries of this field got wrong.

TP_EXT_FUZZ=2000 tries 2000 seeds instead of the few that every run can afford.
"""

import ast
import os
import time

import pytest

from tests.fuzz import run as fuzz
from tests.fuzz.config import draw, valid
from tests.fuzz.mistakes import MISTAKES
from tests.fuzz.reduce import simpler

SEEDS = int(os.environ.get("TP_EXT_FUZZ", "16"))
WITHIN = 100  # seeds
FOUND_BY = {  # the seed of a small model, on 2 or 4 ranks in turn, that shows the mistake
    "norm_gradients_unsummed": 16,
    "copied_heads_unsummed": 32,
    "mask_gradient_unsummed": 51,
    "row_bias_p_times": 4,
    "smoothing_over_the_local_vocabulary": 1,
    "smoothing_without_logits_over_the_local_vocabulary": 2,
    "padding_in_the_loss": 8,
    "copies_in_the_norm": 16,
    "masks_of_the_local_index": 18,
    "column_gradient_unsummed": 0,
}


@pytest.mark.timeout(max(300, 5 * SEEDS))
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_models_equal_their_unsharded_models(p):
    """Every fourth seed has this p."""
    tried = 0
    for config, wrong, _ in fuzz.fuzz(range(p - 1, SEEDS, 4)):
        tried += 1
        if wrong:
            pytest.fail(
                str(fuzz.reduced(fuzz.failure_of(config, wrong), deadline=time.monotonic() + 120)), pytrace=False
            )
    assert tried == len(range(p - 1, SEEDS, 4))


def failure_of(config, mistake):
    _, wrong, _ = fuzz.run([config], mistake)[0]
    return fuzz.failure_of(config, wrong) if wrong else None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_purpose_is_found(mistake):
    """As wrong numbers: an exception would be the mistake's own."""
    assert FOUND_BY[mistake] < WITHIN
    failure = failure_of(draw(FOUND_BY[mistake], (2, 4)), mistake)
    assert failure and failure.kind == "difference", "draws have changed? See which seed finds it now"


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_purpose_is_found_by_a_search(mistake):
    verdicts = fuzz.fuzz(range(WITHIN), (2, 4), mistake, batch_size=4)
    first = next((fuzz.failure_of(config, wrong) for config, wrong, _ in verdicts if wrong), None)
    assert first and first.kind == "difference", f"not found within {WITHIN} models"


def test_a_failure_is_made_smaller():
    """The rest is one linear pair or MLP with the row's bias, on the fewest ranks, for one step."""
    failure = failure_of(draw(21, (4,)), "row_bias_p_times")
    small = fuzz.reduced(failure, "row_bias_p_times", time.monotonic() + 120)
    config = small.config
    assert valid(config) and config["p"] == 2 and config["steps"] == 1 and len(config["blocks"]) == 1
    block = config["blocks"][0]
    assert {name for name, value in block.items() if value is True} <= {"row_bias", "bias", "out_bias"}
    assert not any(config[name] for name in ("sp", "embedding", "head", "norm", "clip", "checkpointing", "frozen"))
    _, wrong, _ = fuzz.run([ast.literal_eval(str(small).split('--config "')[1].rstrip('"'))], "row_bias_p_times")[0]
    assert wrong == small.wrong


def test_ranks_that_fail_do_not_take_others_with_them():
    """Of three configurations the second cannot be built: the verdicts of its neighbours stand."""
    configs = [draw(seed) for seed in (1, 5, 9)]
    configs[1]["hidden"] = 0
    verdicts = fuzz.run(configs)
    assert [bool(wrong) for _, wrong, _ in verdicts] == [False, True, False]
    assert "ValueError" in verdicts[1][1][0]


CONFIGS = [draw(seed) for seed in range(600)]


def test_a_seed_is_a_configuration():
    assert [draw(seed) for seed in range(20)] == CONFIGS[:20]
    for config in CONFIGS:
        assert valid(config) and ast.literal_eval(str(config)) == config
    for config in CONFIGS[:20]:
        assert all(valid(step) and step != config for step in simpler(config))


def leaves(value):
    """(name, value) of every option in a configuration; of numbers, lists and dicts, that there is one."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name, inner if isinstance(inner, bool | str | None) else type(inner).__name__
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)


def test_every_option_is_drawn_for_every_p():
    drawn = [set().union(*(set(leaves(config)) for config in CONFIGS if config["p"] == p)) for p in (1, 2, 3, 4)]
    assert drawn[1] == drawn[2] == drawn[3]
    assert drawn[1] - drawn[0] == {("copies", "int"), ("groups", "int")} and drawn[0] <= drawn[1]
    for name in {name for name, value in drawn[0] if isinstance(value, bool | None)}:
        assert len({value for other, value in drawn[0] if other == name}) > 1, f"{name} has one value only"


def test_uneven_cuts_copies_and_few_tokens_are_drawn():
    blocks = [(config, block) for config in CONFIGS for block in config["blocks"]]
    attentions = [(config, block) for config, block in blocks if block["kind"] == "attention"]
    parts = [(config, part) for config, block in blocks for part in block.get("parts") or ()]
    vocabularies = [(config, config["head"]) for config in CONFIGS if config["head"]]
    for what in (
        [config for config, block in attentions if block["kv_heads"] < config["p"]],
        [config for config, block in attentions if block["heads"] % config["p"]],
        [config for config, block in blocks if block.get("ffn", 9) < config["p"]],
        [config for config, part in parts if part.get("copies", 1) > 1],
        [config for config, part in parts if part.get("groups", 1) > 1],
        [config for config, head in vocabularies if head["vocab"] % config["p"] and not head["pad"]],
        [config for config, head in vocabularies if head["pad"] and head["tied"]],
        [config for config in CONFIGS if config["sp"] and sum(config["layout"]["lengths"]) % config["p"]],
        [config for config in CONFIGS if config["sp"] and sum(config["layout"]["lengths"]) < config["p"]],
        [config for config in CONFIGS if 0 in config["layout"]["lengths"]],
    ):
        assert len(what) >= 5
