"""Trainings over random layouts of pp, dp, ep, cp and tp against one process: losses, gradient norms and parameters in
fp64.

    python -m tests.fuzz.run_layouts --seeds 0:200                  # on 2, 4, 8, 3, 2, 4, 6 and 1 ranks in turn
    python -m tests.fuzz.run_layouts --seeds 0:200 --ranks 2,4      # those seeds among them that have 2 or 4 ranks
    python -m tests.fuzz.run_layouts --listed --steps 20            # the table of layouts.py
    python -m tests.fuzz.run_layouts --config "{'seed': 7, ...}"    # one configuration, as a failure prints it

A failure is made smaller, option by option, while it lasts, and printed with the command that repeats it. layouts.py
says what is drawn, train_layout.py what is trained.
"""

import argparse
import ast
import copy
import functools
import sys
import time

from tests.fuzz.failure import Failure, reduced
from tests.fuzz.layouts import AXES, DENSE, LISTED, NUMBERS, PLAIN, draw, valid
from tests.fuzz.train_layout import compare, one_process, train
from tests.helpers import ranks

TIMEOUT = 900.0  # seconds, of which most take less than five


def run(config):
    """Returns the differences of a configuration as text, the largest error relative to its bound, and its name."""
    p = ranks_of(config)
    try:
        return compare(ranks.run(train, p, config, timeout=TIMEOUT), reference(config))
    except ranks.RankError as error:
        return [str(error)], (float("inf"), "")


def ranks_of(config):
    p = 1
    for axis in AXES:
        p *= config["layout"][axis]
    return p


def reference(config):
    return _reference(str({name: value for name, value in config.items() if name != "layout"}))


@functools.lru_cache(4)
def _reference(config):
    return ranks.run(one_process, 1, ast.literal_eval(config), timeout=TIMEOUT)[0]


# The value that leaves an option out; the others stay
OFF = {
    "layout": {
        "tp": 1,
        "cp": 1,
        "dp": 1,
        "ep": 1,
        "schedule": "1F1B",
        **PLAIN,
    },
    "model": {
        "blocks": 1,
        **DENSE,
        "heads": 4,
        "kv_heads": 1,
        "activation": "gelu",
        "norm": "RMSNorm",
        "rope": False,
        "qk_norm": False,
        "bias": False,
        "causal": True,
        "sliding_window": None,
        "tied": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "frozen": False,
    },
    "batch": {"packed": False, "ignored": "few"},
}


def simpler(config):
    """Configurations one option simpler; valid ones only."""
    steps = [config | {"accumulate": 1}, config | {"steps": config["accumulate"]}, _without_pipeline(config)]
    for kind, options in OFF.items():
        for name, value in options.items():
            changed = copy.deepcopy(config)
            changed[kind][name] = value
            if kind == "layout" and name == "dp":
                changed["batch"]["rows"] //= config["layout"]["dp"]
            if kind == "layout" and name == "schedule" and config["layout"]["pp"] == 1:
                continue
            steps.append(changed)
    return [step for step in steps if step != config and valid(step)]


def _without_pipeline(config):
    changed = copy.deepcopy(config)
    changed["layout"] |= {"pp": 1, "schedule": None}
    return changed


def failure_of(config, wrong):
    return Failure(config, wrong, ranks_of(config), "tests.fuzz.run_layouts")


def fails(config):
    """Runs a configuration; returns its failure, or None."""
    wrong, _ = run(config)
    return failure_of(config, wrong) if wrong else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200", help="FIRST:END")
    parser.add_argument("--ranks", default=",".join(map(str, NUMBERS)), help="leaves out seeds with others")
    parser.add_argument("--listed", action="store_true", help="the table instead of seeds")
    parser.add_argument("--steps", type=int, help="of each training")
    parser.add_argument("--config", help="one configuration instead, as a dict")
    parser.add_argument("--as-it-is", action="store_true", help="do not make failures smaller")
    arguments = parser.parse_args()
    if arguments.config:
        configs = {"": ast.literal_eval(arguments.config)}
        assert valid(configs[""]), "the library refuses such a layout"
    elif arguments.listed:
        configs = LISTED
    else:
        first, end = map(int, arguments.seeds.split(":"))
        over = set(map(int, arguments.ranks.split(",")))
        configs = {str(seed): config for seed in range(first, end) if ranks_of(config := draw(seed)) in over}
    begin, worst, failures = time.monotonic(), ((0.0, ""), ""), []
    for name, config in configs.items():
        config = config | {"steps": arguments.steps or config["steps"]}
        started = time.monotonic()
        wrong, share = run(config)
        if wrong:
            failures.append(name)
            failure = failure_of(config, wrong)
            if not arguments.as_it_is:
                failure = reduced(failure, simpler, fails, time.monotonic() + 120)
            print(failure, flush=True)
        else:
            worst = max(worst, (share, name))
            seconds = time.monotonic() - started
            print(f"{name}: {ranks_of(config)} ranks, {seconds:.1f} s, error {share[0]:.1e} of its bound", flush=True)
    print(f"{len(configs)} layouts, {time.monotonic() - begin:.0f} s: {len(failures)} failed {failures}")
    print(f"the largest error is {worst[0][0]:.1e} of its bound, {worst[0][1]} of {worst[1]}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
