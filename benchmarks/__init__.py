"""Benchmarks of the library and of its peers: docs/reference/performance.md."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model of bench_train
