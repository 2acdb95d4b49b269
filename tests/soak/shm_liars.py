"""Compiles shm_liars.cpp, in which shared memory of tp_shm is overwritten at random, with sanitizers, and runs it long.

    .venv/bin/python -m tests.soak.shm_liars --corruptions 1000000 --seed 1

Its short form is test_liars of tests/shm/test_core.py.
"""

import argparse
import tempfile
import time
from pathlib import Path

from tests.shm import core_programs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corruptions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=120, help="the longest that it may take")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if reason := core_programs.why_not("address,undefined", folder):
            parser.error(reason)
        run = core_programs.build(folder, "address,undefined", [Path(__file__).with_suffix(".cpp")])
        begin = time.monotonic()
        text = run("shm_liars", arguments.corruptions, arguments.seed, timeout=60 * arguments.minutes)
        print(text.splitlines()[-1], f"in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
