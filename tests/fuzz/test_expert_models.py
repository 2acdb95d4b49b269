"""Random models with experts over two groups, at most 4 ranks, against plain torch on the batch of all ranks, to 1e-12
in fp64 (expert_models.py)."""

import functools

import pytest

from tests.fuzz import expert_models
from tp_ext.nn.moe.experts import ParallelExperts

MANY = 100


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(MANY if metafunc.config.getoption("--exhaustive") else 18))


@functools.cache
def drawn(seed):
    return expert_models.draw(seed)


def test_models_are_plain_torch_on_the_whole_batch(seed):
    expert_models.check(drawn(seed))


def _unscaled(group, config):
    ParallelExperts.forward = _with_one_scale(ParallelExperts.forward)
    try:
        return expert_models.on_rank(group, config)
    finally:
        ParallelExperts.forward = ParallelExperts.forward.__wrapped__


def _with_one_scale(forward):
    @functools.wraps(forward)
    def called(self, x, counts):
        self.gradient_scale = 1.0
        return forward(self, x, counts)

    return called


def test_a_mistake_on_purpose_is_found(monkeypatch):
    """Experts' gradients that are sums over the ranks of the expert group, where all others are means."""
    monkeypatch.setattr(expert_models, "on_rank", _unscaled)
    with pytest.raises(AssertionError, match=r"moe\.experts\..*: off by"):
        expert_models.check(drawn(1))


def test_every_case_is_drawn():
    configs = [drawn(seed) for seed in range(MANY)]
    layers = [(config, block["moe"]) for config in configs for block in config["blocks"] if block.get("moe")]
    for what in (
        [config for config, moe in layers if moe["experts"] % config["ep"]],
        [config for config, moe in layers if moe["experts"] == 1 or moe["top_k"] == moe["experts"]],
        [config for config, moe in layers if moe["experts"] > 12],
        [config for config, moe in layers if moe["top_k"] == 1],
        [config for config, moe in layers if moe["top_k"] == 4],
        [config for config, moe in layers if moe["shared_experts"]],
        [config for config, moe in layers if moe["capacity"]],
        [config for config, moe in layers if moe["capacity"] is None],
        [config for config, moe in layers if moe["balance_loss"] and not moe["attach"]],
        [config for config in configs if config["sp"] and config["p"] > 1],
        [config for config in configs if config["ep"] == config["p"] == 2],
        [config for config in configs if config["embedding"] and not config["head"]],
        [config for config in configs if any(block["kind"] == "attention" for block in config["blocks"])],
        [config for config in configs if config["checkpointing"] == "reentrant"],
    ):
        assert len(what) >= 3
