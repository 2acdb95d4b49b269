"""Architectures of transformers, sharded without annotations, train as those of one rank, with dropout; these, as the
unsharded ones.

Six kinds of attention, fused weights and embeddings by default; all that have a tiny model with ``--exhaustive``.
"""

import pytest

from tests.auto.compare import has_model, names, result_of

FEW = {"falcon", "bloom", "phi3", "mixtral", "gpt_bigcode", "whisper-s2s"}
# Compared by test_sequence_parallel.py in the same way, on shards of tokens, or by test_shares.py, of unequal shares
ELSEWHERE = {"llama", "gpt2", "qwen3", "t5", "bert-mlm", "vit"}


@pytest.mark.parametrize("p", [2, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (1, 4))])
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.exhaustive) for n in names()])
def test_it_trains_as_unsharded(name: str, p: int) -> None:
    if name not in FEW | ELSEWHERE and not has_model(name, 300):
        pytest.skip("no tiny model")
    result = result_of(name, p)
    assert result.status.startswith("works"), result
    if name in FEW | ELSEWHERE:
        assert result.cut > 0.5, result
