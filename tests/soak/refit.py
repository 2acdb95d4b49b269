"""Soak of refit: one of four ranks is killed at a random moment of a run.

In each round two ranks train, three generate, and one of them, which generates alone, kills itself at a moment drawn at
random from the length of a run, over gloo and ``tp_shm`` in turn. All others must name it within the timeout, and have
whole weights, all of them the old ones or all of them the new ones:

    .venv/bin/python -m tests.soak.refit --rounds 100 --seed 1
"""

import argparse
import random
import time

from tests.refit.test_lost import check_whole, survivors_of

LONGEST = 0.03  # seconds of a run, on a machine that has no other work


def soak(rounds: int, seed: int) -> tuple[int, int]:
    """Returns in how many rounds the survivors had the old weights, and in how many the new ones."""
    draw, outcomes = random.Random(seed), [0, 0]
    for number in range(rounds):
        after, backend = draw.uniform(0, LONGEST), ("gloo", "tp_shm")[number % 2]
        try:
            survivors = survivors_of(backend, ("after seconds", after), True)
            outcomes[check_whole(survivors, may_end=True)] += 1
        except BaseException:
            print(f"round {number} of seed {seed}: killed after {after:.4f} s over {backend}")
            raise
    return outcomes[0], outcomes[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begun = time.perf_counter()
    old, new = soak(options.rounds, options.seed)
    print(
        f"{old + new} kills: {old} with the old weights, {new} with the new ones, {time.perf_counter() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
