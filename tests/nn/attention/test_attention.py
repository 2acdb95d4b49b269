"""ParallelAttention against attention written out head by head (helpers/oracle.py): output and all gradients.

Bounds are relative to the largest element; in fp64 1e-10, thousands of times the rounding of sums this short and far
below any real error.
"""

import pytest

from tests.helpers.attention_cases import CASES, LAYOUTS, assert_dense, fits
from tp_ext.nn.attention.attention import head_parts

pytestmark = pytest.mark.core

EVERY = [
    pytest.param(p, name, layout, id=f"{name}-p{p}-{layout}")
    for name, case in CASES.items()
    for p in (1, 2, 3, 4)
    if fits(case, p)
    for layout in (LAYOUTS if name in ("all", "mha") else ("batch", "sp_packed_uneven"))
]


@pytest.mark.thinned
@pytest.mark.parametrize(("p", "name", "layout"), EVERY)
def test_output_and_all_gradients_are_those_of_dense_attention(p, name, layout):
    assert_dense(p, CASES[name], *LAYOUTS[layout])


@pytest.mark.parametrize("p", range(1, 9))
def test_query_heads_stay_with_their_kv_head(p):
    for heads, kv in [(8, 8), (8, 4), (8, 2), (8, 1), (9, 3), (12, 2)]:
        if not fits({"num_heads": heads, "num_kv_heads": kv}, p):
            continue
        q, k = head_parts(heads, kv, 1, p)
        seen = []
        for rank in range(p):
            own, (first, last) = range(*q.span(rank, p)), k.span(rank, p)
            assert len(own) and {head // (heads // kv) for head in own} == set(range(first, last))
            seen += own
        assert seen == list(range(heads))
