"""Soak of replicas that come and go: a rank of one of three is killed at a random moment, and comes again.

In each round three replicas of two ranks train; one rank, drawn at random, is killed at a moment drawn at random, from
outside. In every other round its replica starts again and joins. Then the weights and states of all that are left must
be those of one process on the tokens of the replicas that took part in each step, to 1e-12 in fp64, the step in which
the rank died must have taken less than 5 seconds, and no shared memory may be left:

    .venv/bin/python -m tests.soak.replicas --rounds 100 --seed 1
"""

import argparse
import os
import random
import signal
import sys
import time

from tests.elastic.jobs import TP, Jobs, check

STEPS, PAUSE = 12, 0.02


def one_round(seed, backend):
    """Returns the seconds of the longest step, and the replicas of the last step; raises AssertionError."""
    draw = random.Random(seed)
    jobs = Jobs(backend, STEPS, pause=PAUSE, timeout=5.0, wait=20.0)
    ranks = {name: jobs.start(name) for name in "012"}
    # Until all have had a step: the first one waits for all three replicas
    for key in (f"begun/{name}/{rank}" for name in "012" for rank in range(TP)):
        jobs.store.get(key)
    name, rank = draw.choice("012"), draw.randrange(TP)
    # A step takes some 0.1 seconds
    time.sleep(draw.uniform(0, 0.1 * STEPS))
    victim = ranks[name][rank]
    alive = victim.is_alive()
    if alive:
        os.kill(victim.pid, signal.SIGKILL)
    again = alive and draw.random() < 0.5
    if again:
        jobs.start(name, later="again")
    reports = jobs.results()
    others = set("012") - {name}
    # One that came when the others had ended has begun anew, alone
    reports = [report for report in reports if not (report.later and 0 in report.history)]
    history = check(reports, STEPS, others)
    longest = max(report.longest for report in reports if report.replica in others)
    assert longest < 5, longest
    assert jobs.leftovers() == []
    return longest, history[STEPS - 1]


def soak(rounds, seed, say=lambda text: None):
    """Returns the longest step of all rounds and how often a replica came again."""
    longest, again = 0.0, 0
    for number in range(rounds):
        took, last = one_round(1000 * seed + number, ("gloo", "tp_shm")[number % 2])
        longest, again = max(longest, took), again + (len(last) == 3)
        say(f"round {number}: longest step {took:.2f} s, at the end {' '.join(sorted(last))}")
    return longest, again


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    longest, again = soak(options.rounds, options.seed, lambda text: print(text, flush=True))
    sys.exit(print(f"{options.rounds} rounds, longest step {longest:.2f} s, {again} with all three at the end"))
