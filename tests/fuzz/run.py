"""Random models on p ranks against their unsharded reference models: outputs, losses, gradients, five steps of
training, in fp64.

    python -m tests.fuzz.run --seeds 0:2000                 # a range; p is 1, 2, 3, 4 in turn
    python -m tests.fuzz.run --minutes 30 --ranks 2,4       # from the first seed on, for so long
    python -m tests.fuzz.run --config "{'seed': 7, ...}"    # one configuration, as a failure prints it

A failure is made smaller, option by option and size by size, while it lasts, and printed with the command that repeats
it. config.py says what is drawn, compare.py what is compared, and how closely.
"""

import argparse
import ast
import sys
import time

from tests.fuzz.compare import checked
from tests.fuzz.config import draw, valid
from tests.fuzz.failure import Failure
from tests.fuzz.failure import reduced as smallest
from tests.fuzz.mistakes import MISTAKES
from tests.fuzz.reduce import simpler
from tests.helpers import ranks

BATCH = 20  # configurations sent to the ranks at once
TIMEOUT = 30.0  # seconds for one configuration, of which most take tens of milliseconds


def run(configs, mistake=None):
    """(config, what is wrong, largest error) of each configuration. Where ranks fail, one by one."""
    p = configs[0]["p"]
    try:
        per_rank = ranks.run(checked, p, configs, mistake, timeout=TIMEOUT + len(configs))
    except ranks.RankError as error:
        if len(configs) == 1:
            return [(configs[0], [str(error)], (float("inf"), ""))]
        return [run([config], mistake)[0] for config in configs]
    verdicts = (next(rank[i] for rank in per_rank if rank[i] is not None) for i in range(len(configs)))
    return [(config, *verdict) for config, verdict in zip(configs, verdicts, strict=True)]


def fuzz(seeds, over=(1, 2, 3, 4), mistake=None, deadline=float("inf"), batch_size=BATCH):
    """Yields (config, what is wrong, largest error) for the seeds, batch by batch, until the deadline."""
    waiting = {p: [] for p in over}
    for seed in seeds:
        config = draw(seed, over)
        batch = waiting[config["p"]]
        batch.append(config)
        if len(batch) == batch_size:
            yield from run(batch, mistake)
            batch.clear()
        if time.monotonic() > deadline:
            return
    for batch in filter(None, waiting.values()):
        yield from run(batch, mistake)


def failure_of(config, wrong):
    return Failure(config, wrong, config["p"], "tests.fuzz.run")


def reduced(failure, mistake=None, deadline=float("inf")):
    """The simplest configuration found that still fails in the same way."""

    def fails(config):
        _, wrong, _ = run([config], mistake)[0]
        return failure_of(config, wrong) if wrong else None

    return smallest(failure, simpler, fails, deadline)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:2000", help="FIRST:END")
    parser.add_argument("--ranks", default="1,2,3,4", help="the numbers of ranks, in turn")
    parser.add_argument("--minutes", type=float, help="so long from the first seed on, whatever the end")
    parser.add_argument("--config", help="one configuration instead, as a dict")
    parser.add_argument("--mistake", choices=sorted(MISTAKES), help="break the library on purpose")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first ten failures")
    arguments = parser.parse_args()
    if arguments.config:
        config = ast.literal_eval(arguments.config)
        assert valid(config), "the library refuses such a model"
        _, wrong, share = run([config], arguments.mistake)[0]
        print("\n".join(wrong) or f"no difference; the largest error is {share[0]:.1e} of its bound, {share[1]}")
        sys.exit(bool(wrong))
    first, end = map(int, arguments.seeds.split(":"))
    over = tuple(map(int, arguments.ranks.split(",")))
    begin, count, worst, failures = time.monotonic(), 0, (0.0, "", 0), []
    deadline = begin + 60 * arguments.minutes if arguments.minutes else float("inf")
    seeds = range(first, sys.maxsize if arguments.minutes else end)
    for config, wrong, share in fuzz(seeds, over, arguments.mistake, deadline):
        count += 1
        if wrong:
            failures.append(config["seed"])
            failure = failure_of(config, wrong)
            if len(failures) <= 3:
                failure = reduced(failure, arguments.mistake, time.monotonic() + 120)
            print(failure, flush=True)
        else:
            worst = max(worst, (*share, config["seed"]))
        if count % 200 == 0:
            print(f"{count} models, {time.monotonic() - begin:.0f} s", flush=True)
        if len(failures) >= 10 and not arguments.keep_going:
            break
    seconds = time.monotonic() - begin
    print(f"{count} models from seed {first} on, p = {arguments.ranks} in turn: {len(failures)} failed {failures}")
    print(f"{seconds:.0f} s; the largest error is {worst[0]:.1e} of its bound, {worst[1]} of seed {worst[2]}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
