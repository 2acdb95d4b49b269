"""Short soak of training in fewer bits; the long form is tests/soak/low_precision.py."""

import pytest

from tests.helpers import ranks
from tests.soak import low_precision


@pytest.mark.exhaustive  # by default the formulas of tests/low_precision
def test_losses_stay_together():
    plain, compressed = (
        ranks.run(low_precision.train_with_gradients, 2, 20, options)[0] for options in (None, {"compress": "int8"})
    )
    assert plain[0] == compressed[0] and plain != compressed
    assert abs(compressed[-1] / plain[-1] - 1) < 0.01
