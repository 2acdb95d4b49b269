"""Random modules of plain torch, drawn operator by operator, that `auto` shards: outputs and all gradients on p ranks
against those of one, in fp64.

    python -m tests.fuzz.programs --seeds 0:2000
    python -m tests.fuzz.programs --config "{'seed': 7, ...}"    # one, as a failure prints it

A program is a list of instructions, each an operator and the numbers of the values that it takes; the last value and
some others are its results. It is planned with a proof by values, and by shapes alone: the first must be right, and
what the second has wrong is a rule that does not fit its operator.
"""

import argparse
import ast
import functools
import random
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import tp_ext
from tests.fuzz.failure import Failure, reduced
from tests.fuzz.program_operators import HEADS, MODULES, OPERATORS, PAIRS, WIDTHS
from tests.helpers.simulated import run
from tp_ext.simulation.comparison import differences_of_models

EXAMPLE, OTHERS = (3, 5), ((2, 6), (3, 5))
BOUND = 1e-9


class Step(nn.Module):
    """One instruction, as a module of its own: a boundary at which gradients can be summed."""

    def __init__(self, name: str, layer: nn.Module | None) -> None:
        super().__init__()
        self.name, self.layer = name, layer

    def forward(self, *values: Tensor) -> Tensor:
        return OPERATORS[self.name](self.layer, *values)


class Program(nn.Module):
    """The module of a configuration's instructions: operator, values, a random number, and the instruction whose module
    it shares."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.config, self.steps = config, nn.ModuleList()
        values = [torch.zeros(1, 4, config["width"])]
        for name, taken, n, shared in config["code"]:
            layer = MODULES[name](values[taken[0]].shape[-1], n) if name in MODULES else None
            self.steps.append(Step(name, layer if shared is None else self.steps[shared].layer))
            with torch.no_grad():
                values.append(self.steps[-1](*(values[i] for i in taken)))
        self.widths = [value.shape[-1] for value in values]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for step, (_, taken, _, _) in zip(self.steps, self.config["code"], strict=True):
            run = step if self.config["nested"] else functools.partial(OPERATORS[step.name], step.layer)
            values.append(run(*(values[i] for i in taken)))
        return tuple(values[i] for i in self.config["results"])


def draw(seed: int) -> dict:
    """The configuration of a seed: at most ten instructions, most of which take the last value."""
    r = random.Random(f"programs {seed}")
    config = {"seed": seed, "p": r.choice((2, 2, 3, 4)), "width": r.choice(WIDTHS), "nested": r.random() < 0.5}
    config |= {"code": [], "results": [0]}
    names = [name for name in OPERATORS for _ in range(5 if name in MODULES else 3 if name in PAIRS else 1)]
    widths = [config["width"]]
    while len(config["code"]) < 2 + seed % 9:
        name, last, shared = r.choice(names), len(widths) - 1, None
        taken = [r.choice([last, last, last, r.randrange(len(widths))])]
        if name in PAIRS:
            equal = [i for i in range(len(widths)) if widths[i] == widths[taken[0]]]
            taken.append(r.choice([i for i in equal if i != taken[0]] or equal))
        like = [i for i, (other, values, _, _) in enumerate(config["code"]) if other == name in MODULES
                and widths[values[0]] == widths[taken[0]]]  # fmt: skip
        if like and r.random() < 0.5:
            shared = r.choice(like)
        trial = config | {"code": [*config["code"], (name, taken, round(r.random(), 3), shared)]}
        width = Program(trial).widths[-1]
        if width % HEADS == 0 and 4 <= width <= 48:
            config = trial
            widths.append(width)
    others = r.sample(range(1, len(widths)), k=min(len(widths) - 1, r.choice((0, 0, 1, 2))))
    config["results"] = sorted({*others, len(widths) - 1})
    return config | {"options": {"sequence_parallel": r.choice((False, False, "auto"))}}


def build(config: dict) -> nn.Module:
    torch.manual_seed(config["seed"])
    model = Program(config).double()
    with torch.no_grad():  # ones and zeros would hide errors
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def input_of(config: dict, size: tuple[int, int]) -> tuple[Tensor]:
    numbers = torch.Generator().manual_seed(config["seed"])
    return (torch.randn(*size, config["width"], generator=numbers, dtype=torch.float64).requires_grad_(),)


def on_rank(group, config: dict, prove: str) -> tuple[list[str], float, str]:
    """Returns the differences on this rank, the share of elements that is sharded, and the table of the plan."""
    model, reference, p = build(config), build(config), config["p"]
    plan = tp_ext.auto.plan(model, input_of(config, EXAMPLE), p, prove=prove, **config["options"])
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    share = sum(sizes.get(name, 0) for name in plan.shardings) / max(1, sum(sizes.values()))
    tp_ext.auto.apply(plan, model, group)
    wrong = []
    for size in OTHERS:
        differences = differences_of_models(reference, model, input_of(config, size))
        wrong += [f"{size}: {name} differs by {error:.1e}" for error, name in differences if not error <= BOUND]
    return wrong, share, str(plan)


def check(config: dict, prove: str = "values") -> tuple[list[str], float, str]:
    """Returns the results of :func:`on_rank` on the first rank that has differences, else on rank 0."""
    results = run(on_rank, config["p"], config, prove)
    return next((result for result in results if result[0]), results[0])


def verdict(config: dict, prove: str = "values") -> tuple[Failure | None, float, str]:
    """Returns the failure, if there is one, share and table of the plan."""
    try:
        wrong, share, table = check(config, prove)
    except Exception as error:  # of any kind: the program is the failure, and the next ones are to run
        wrong, share, table = [f"rank ?: {type(error).__name__}: {error}"], 0.0, ""
    return Failure(config, wrong, config["p"], "tests.fuzz.programs") if wrong else None, share, table


def simpler(config: dict) -> list[dict]:
    """Returns the programs of :func:`candidates` that are others and whose widths fit together."""
    return [program for program in candidates(config) if program != config and fits(program)]


def failure_of(config: dict, prove: str) -> Failure | None:
    return verdict(config, prove)[0]


def candidates(config: dict) -> Iterator[dict]:
    """Programs without one of the instructions, whose first value stands for its result."""
    code, results = config["code"], config["results"]
    if len(results) > 1:
        yield from (config | {"results": [result]} for result in results)
    for i in range(len(code)):
        new = {value: value - (value > i) for value in range(len(code) + 1)} | {i + 1: code[i][1][0]}
        left = [
            (name, [new[value] for value in taken], n, shared if shared is None or shared < i else max(shared - 1, 0))
            for name, taken, n, shared in code[:i] + code[i + 1 :]
        ]
        yield config | {"code": left, "results": sorted({new[value] for value in results})}
    yield config | {"p": 2}
    yield config | {"options": {"sequence_parallel": False}}
    for i, (name, taken, n, _) in enumerate(code):
        yield config | {"code": [*code[:i], (name, taken, n, None), *code[i + 1 :]]}


def fits(config: dict) -> bool:
    """Returns whether the widths of a program fit together."""
    try:
        Program(config)
    except Exception:  # torch's operators raise errors of several types for shapes that do not fit
        return False
    return bool(config["code"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:200")
    parser.add_argument("--config")
    parser.add_argument("--prove", default="values")
    options = parser.parse_args()
    configs = [ast.literal_eval(options.config)] if options.config else None
    begin, end = (int(n) for n in options.seeds.split(":"))
    failures, shares = 0, []
    for config in configs or (draw(seed) for seed in range(begin, end)):
        failure, share, table = verdict(config, options.prove)
        shares.append(share)
        if failure is not None:
            failures += 1
            fails, deadline = functools.partial(failure_of, prove=options.prove), time.monotonic() + 60
            print(reduced(failure, simpler, fails, deadline), flush=True)
        if options.config:
            print(table)
        elif len(shares) % 100 == 0:
            print(f"{len(shares)} programs, {sum(shares) / len(shares):.0%} of their parameters sharded", flush=True)
    print(f"{failures} failures of {len(shares)} programs")


if __name__ == "__main__":
    main()
