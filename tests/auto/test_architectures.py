"""Architectures of transformers, sharded without annotations, train as those of one rank, with dropout; these, as the
unsharded ones.

A dozen kinds of attention, fused weights and embeddings by default; all that have a tiny model with ``--exhaustive``.
"""

import pytest

from tests.auto.compare import has_model, names, result_of

FEW = {
    "llama",
    "gpt2",
    "falcon",
    "bloom",
    "phi3",
    "qwen3",
    "mixtral",
    "gpt_bigcode",
    "t5",
    "bert-mlm",
    "vit",
    "whisper-s2s",
}


@pytest.mark.parametrize("p", [2, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (1, 4))])
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.exhaustive) for n in names()])
def test_it_trains_as_unsharded(name: str, p: int) -> None:
    if name not in FEW and not has_model(name, 300):
        pytest.skip("no tiny model")
    result = result_of(name, p)
    assert result.status.startswith("works"), result
    if name in FEW:
        assert result.cut > 0.5, result
