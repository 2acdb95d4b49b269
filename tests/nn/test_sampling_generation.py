"""A whole model writes the same text on every number of ranks, with a cache or without.

The model's logits agree over p to rounding, so tokens do unless the two best scores are that close: in fp64 1e-13, no
text is long enough to meet that; in fp32 1e-6, about once in a million tokens.
"""

import pytest
import torch
from gpt import GPT, GPTConfig

import tp_ext
from tests.helpers import ranks
from tests.helpers.dtypes import default_dtype

pytestmark = pytest.mark.core

CONFIG = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 12,
    "num_kv_heads": 4,
    "ffn_hidden_size": 44,
}
COUNT = 16
OPTIONS = {
    "greedy": {"temperature": 0},
    "top_k": {"temperature": 0.8, "top_k": 9},
    "sampled": {"temperature": 1.5, "top_k": None},
}


def _generate(group, dtype, sp, options, cached=True):
    with default_dtype(dtype):
        tp_ext.manual_seed(7)
        model = GPT(GPTConfig(**CONFIG, sequence_parallel=sp), group)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.mul_(1.0 if "norm" in name else 8.0)  # a model with opinions
        ids = torch.randint(61, (2, 5))
        if cached:
            return model.generate(ids, COUNT, **options)
        model.eval()
        with torch.inference_mode():
            for _ in range(COUNT):
                last = model(ids).unflatten(0, (2, -1))[:, -1]
                new = tp_ext.vocab_parallel_sample(last, group, vocab_size=61, **options)
                ids = torch.cat([ids, new[:, None]], 1)
        return ids


@pytest.mark.thinned(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("p", "sp"), [(2, False), (2, True), (3, True), (4, False)])
def test_the_same_text_for_every_p(options, dtype, p, sp):
    want = _generate(None, dtype, False, options)
    assert len(set(want.flatten().tolist())) > 10  # no stammering, which would hide a wrong token
    assert torch.equal(_generate(None, dtype, False, options, cached=False), want)
    for got in ranks.run(_generate, p, dtype, sp, options):
        assert torch.equal(got, want)
