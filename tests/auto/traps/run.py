"""Compares the traps, planned and applied on p ranks, with the unsharded models, in fp64.

    python -m tests.auto.traps.run [--p 2 3] [--out table.txt] [names]

Compared are results, losses (a random projection), all gradients, those of the inputs included, buffers, and the state
after three optimizer steps of different batch sizes; then eval mode, with gradients and without, and calls that the
example does not show. `plan` must leave the model alone.
"""

import argparse
import contextlib
import dataclasses
import importlib
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import tp_ext
from tests.auto.traps.shares import FULLY
from tests.auto.traps.trap import TRAPS, Trap
from tests.helpers.paths import ROOT
from tests.helpers.ranks import RankError
from tests.helpers.ranks import run as run_processes
from tests.helpers.same_values import differences_of_states
from tests.helpers.simulated import plans_made_once
from tp_ext.simulation.comparison import differences_of_models

EXAMPLE, STEPS = (3, 5), ((2, 7), (3, 5), (4, 3))
for file in sorted(
    Path(__file__).parent.glob("[pd]*ed*.py"), reverse=True
):  # published.py, designed.py: they enter theirs
    known = set(TRAPS)
    importlib.import_module(f"tests.auto.traps.{file.stem}")
    for new in TRAPS.keys() - known:
        TRAPS[new].published, TRAPS[new].file = file.stem.startswith("published"), file.stem


@dataclasses.dataclass
class Result:
    """Of one trap: the largest error of each kind, relative; the share of elements that is sharded."""

    name: str
    p: int
    share: float = 0.0
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    refused: str = ""
    crashed: str = ""
    raised: str = ""  # by a call that the example does not show

    @property
    def trap(self) -> Trap:
        return TRAPS[self.name]

    @property
    def verdict(self) -> str:
        if self.crashed:
            return "CRASH"
        if any(not error <= self.trap.bound for error in self.errors.values()):
            return "WRONG"
        return "refused" if self.refused else "right" if self.share else "whole"

    @property
    def text(self) -> str:
        wrong = " ".join(f"{kind} {error:.1e}" for kind, error in self.errors.items() if not error <= self.trap.bound)
        few = f"{self.least_share:.0%} can be sharded" if self.share < self.least_share else ""
        return self.crashed or wrong or self.refused or few or self.raised

    def worse(self, kind: str, error: float) -> None:
        if not error <= self.errors.get(kind, -1.0):
            self.errors[kind] = error

    def passes(self) -> bool:
        if self.verdict == "refused":
            return self.trap.branches
        return self.verdict in ("right", "whole") and self.share >= self.least_share

    @property
    def least_share(self) -> float:
        return 0.9 if self.name in FULLY else self.trap.share


class Case:
    """A model and its reference, on one rank. `plans` are those of an earlier rank in this process."""

    def __init__(self, trap: Trap, group: Any, rank: int, p: int, plans: dict) -> None:
        self.trap, self.rank, self.p, self.plans = trap, rank, p, plans
        self.result = Result(trap.name, p)
        self.model, self.reference = self.build(), self.build()
        example = self.inputs(EXAMPLE)
        for model in (self.model, self.reference):
            model.train(trap.planned == "train")
        before = state_of(self.model)
        try:
            plan = self.plan(self.model, example, p)
            if names := changes(before, state_of(self.model)):
                self.result.worse(f"plan changed {names}", float("inf"))
            sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
            sharded = sum(size for name, size in sizes.items() if name in plan.shardings)
            self.result.share = sharded / max(1, sum(sizes.values()))
            if trap.random:
                tp_ext.auto.apply(self.plan(self.reference, example, 1), self.reference, None)
        except ValueError as error:
            self.result.refused = " ".join(str(error).split()) or "ValueError"
            return
        tp_ext.auto.apply(plan, self.model, group, **trap.apply(example))

    def plan(self, model: nn.Module, example: Any, p: int) -> tp_ext.auto.Plan:
        if p not in self.plans:
            self.plans[p] = tp_ext.auto.plan(model, example, p, **self.trap.plan)
        return self.plans[p]

    def build(self) -> nn.Module:
        torch.manual_seed(zlib.crc32(self.trap.name.encode()))
        model = self.trap.build()
        with torch.no_grad():  # ones and zeros would hide errors
            for parameter in model.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        return model

    def inputs(self, size: tuple[int, int], make: Any = None) -> Any:
        torch.manual_seed(size[0])
        return (make or self.trap.inputs)(*size)

    def compare(self, inputs: Any, seed: int, kind: str) -> None:
        """One call of both, and backward."""
        given = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        backward = torch.is_grad_enabled()
        for error, name in differences_of_models(self.reference, self.model, *given, seed=seed, backward=backward):
            self.result.worse(f"{kind}: {name}", error)

    def train(self) -> None:
        self.set_mode("train")
        optimizers = [self.trap.optimizer(model.parameters()) for model in (self.reference, self.model)]
        for step, size in enumerate(STEPS):
            self.compare(self.inputs(size), step, "train")
            for optimizer in optimizers:
                optimizer.step()

    def set_mode(self, mode: str) -> None:
        for model in (self.reference, self.model):
            model.train(mode == "train")

    def evaluate(self) -> None:
        self.set_mode("eval")
        self.compare(self.inputs((2, 6)), 11, "eval")
        with torch.no_grad():
            self.compare(self.inputs((5, 4)), 12, "no_grad")

    def call_others(self) -> None:
        """Calls that the example lacks."""
        self.set_mode(self.trap.planned)
        for i, make in enumerate(self.trap.others):
            with self.refusals():
                self.compare(self.inputs((2, 5), make), 13 + i, f"other {i}")

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Notes an error that tp_ext raises itself; others are passed on."""
        try:
            yield
        except (ValueError, RuntimeError) as error:
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            if not last.startswith(str(ROOT / "tp_ext")):
                raise
            self.result.raised = " ".join(str(error).split())

    def compare_state(self) -> None:
        for error, name in differences_of_states(self.reference, self.model):
            self.result.worse(name, error)


def state_of(model: nn.Module) -> dict[str, Any]:
    """What `plan` must leave alone: tensors by value, numbers, types of attributes, generators, modes."""
    state: dict[str, Any] = {"generator": torch.get_rng_state().clone()}
    state |= {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}
    state |= {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_"):
                plain = isinstance(value, int | float | str | None | list | dict) and not isinstance(value, Tensor)
                state[f"{path}.{key}"] = repr(value) if plain else type(value)
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        state[f"{path}.hooks"] = [len(kind) for kind in hooks]
    return state


def changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Names of what differs, or is a fake."""
    names = list(before.keys() ^ after.keys())
    for name in before.keys() & after.keys():
        a, b = before[name], after[name]
        same = type(a) is type(b) and (torch.equal(a, b) if isinstance(a, Tensor) else a == b)
        if not same or b is FakeTensor:
            names.append(name)
    return " ".join(sorted(names))


def check(group: Any, name: str, rank: int, p: int, plans: dict) -> Result:
    """The result of one trap on one rank."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        case = Case(TRAPS[name], group, rank, p, plans)
        if not case.result.refused:
            with case.refusals() if case.trap.may_raise else contextlib.nullcontext():
                if "train" in case.trap.modes:
                    case.train()
                if "eval" in case.trap.modes:
                    case.evaluate()
                case.compare_state()
                case.call_others()
        return case.result
    finally:
        torch.set_default_dtype(default)


def check_in_process(group: Any, name: str) -> Result:
    return check(group, name, torch.distributed.get_rank(group), torch.distributed.get_world_size(group), {})


def result_of(name: str, p: int, timeout: float = 60) -> Result:
    """The worst result of all ranks."""
    try:
        if hasattr(tp_ext.debug, "simulate"):
            plans: dict = {}
            with plans_made_once():
                results = tp_ext.debug.simulate(lambda rank, group: check(group, name, rank, p, plans), p)
        else:
            results = run_processes(check_in_process, p, name, timeout=timeout)
    except (RankError, Exception) as error:
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("still")]
        return Result(name, p, crashed=f"{type(error).__name__}: {lines[0]}: {lines[-1]}"[:600])
    for other in results[1:]:
        for kind, value in other.errors.items():
            results[0].worse(kind, value)
        if other.refused != results[0].refused:
            results[0].crashed = f"the ranks disagree: {other.refused}"
    return results[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="traps; default: all")
    parser.add_argument("--p", type=int, nargs="*", default=[2])
    parser.add_argument("--out", type=Path, help="also write the lines here")
    options = parser.parse_args()
    lines = []
    for name in options.names or TRAPS:
        for p in options.p:
            result = result_of(name, p)
            mark = "" if result.passes() else "  <-"
            lines.append(f"{name:32} p={p} {result.verdict:8} {result.share:4.0%} {result.text[:150]}{mark}")
            print(lines[-1], flush=True)
    verdicts = [line.split("p=")[1].split()[1] for line in lines]
    lines.append(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts))))
    print(lines[-1])
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
