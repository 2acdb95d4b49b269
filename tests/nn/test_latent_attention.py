"""ParallelLatentAttention against DeepSeek's attention of transformers, and against the formulas head by head: output
and all gradients, within 1e-12 of the largest element in fp64.
"""

import pytest
import torch

from tests.helpers.latent_cases import CASES, LAYOUTS, assert_dense

EVERY = [
    pytest.param(p, name, layout, id=f"{name}-p{p}-{layout}")
    for name in CASES
    for p in (1, 2, 3, 4)
    for layout in (LAYOUTS if name == "v3" else ("batch", "sp_packed_uneven"))
]


@pytest.mark.core
@pytest.mark.thinned
@pytest.mark.parametrize(("p", "name", "layout"), EVERY)
def test_output_and_all_gradients_are_those_of_the_formulas(p, name, layout):
    assert_dense(p, CASES[name], *LAYOUTS[layout])
