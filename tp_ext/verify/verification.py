"""Verification of a model written with tensor-parallel layers: see :func:`verify`."""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext.debug.simulation import simulate
from tp_ext.sharding import Layout
from tp_ext.verify import causes
from tp_ext.verify.arguments import arguments_of, check_make_model, check_seed, numbers_of_ranks
from tp_ext.verify.compare import Comparison, compare, difference
from tp_ext.verify.localize import Place, Trace
from tp_ext.verify.record import STEPS, LowestPrecision, Outcome, Task, parts_at, run
from tp_ext.verify.report import Finding, Report
from tp_ext.verify.types import type_error

_BOUND = 1e-9
"""Bound in fp64: a sum in another order differs by some 1e-15, deep models multiply it; mistakes are above 1e-6."""
_STEPS = 100
"""The factor of the bound after steps: of a gradient's difference AdamW makes lr / eps = 100 times as much."""


def verify(
    make_model: Callable[[Any], nn.Module],
    example: tuple[Any, ...] | Mapping[str, Any] | Callable[[], Any],
    p: Sequence[int] = (1, 2, 3),
    *,
    seed: int = 0,
) -> Report:
    """Proves by running it that a model computes and learns the same on p ranks as on one, and finds what does not.

    The ranks are simulated in this process (:func:`tp_ext.debug.simulate`): no launcher, no process group. For every p
    the model is built and run after the same ``tp_ext.manual_seed(seed)``, and compared with that of one rank:

    1. layouts: each parameter has the shape that its layout gives the rank (:func:`tp_ext.layouts`);
    2. initial weights: bit for bit those of one rank, and of replicated ones the same on all ranks;
    3. outputs in eval mode and train mode, and the loss: a result that is a scalar, or its ``loss``, else the sum of
       the outputs times fixed random numbers. An output may be sharded along one dim;
    4. gradients of all parameters and of all floating-point arguments of forward;
    5. three steps of AdamW: each loss, and parameters and buffers after them;
    6. the number of collectives of a step: the same on all ranks;
    7. types, for information: :func:`tp_ext.debug.typecheck`, where ``spmd_types`` is installed.

    The model is converted to fp64 where its modules allow it, so rounding is far below any mistake.

    Args:
        make_model: makes the model, given a group.
        example: arguments of forward: a tuple, a dict of keyword arguments, or a function that returns one. The same
            for all ranks, and for every p.
        p: numbers of ranks.
        seed: of the weights and of the masks.

    Returns:
        The report: ``report.ok``; ``report.findings``, the first wrong thing first; ``print(report)``. Of each p the
        first of the comparisons above that fails gives the findings, since all later ones follow from it.

    Communicates nothing outside of this process.

    Raises:
        TypeError, ValueError: an argument is none of the above. An error within the model is a finding.
    """
    check_make_model(make_model)
    numbers, arguments = numbers_of_ranks(p), arguments_of(example)
    check_seed(seed)
    started, report = time.perf_counter(), Report()
    reference, dtype, bound = _reference(make_model, arguments, seed, report)
    for number in numbers if reference is not None else ():
        task = Task(make_model, arguments, dtype, seed, reference)
        row = report.rows[number] = {}
        try:
            outcomes = simulate(run, number, task, seed=seed)
        except RuntimeError as error:
            report.findings.append(_of_error(number, error, task))
            continue
        assert reference is not None
        found = _Comparison(number, reference, outcomes, bound, row).findings()
        if number == 1 and found:
            text = "a second run on one rank differs from the first: the model has a local state, such as a generator"
            found = [Finding(1, found[0].module, found[0].tensor, text)]
        report.findings += found
        if not found and number == min((n for n in numbers if n > 1), default=0):
            error = type_error(make_model, arguments, dtype, number, seed)
            row["types"] = "-" if error is None else "error" if error else "right"
            if error:
                report.notes.append(f"Types at p = {number}, which may be those of an operation without a rule: {error}")
    report.seconds = time.perf_counter() - started
    return report


def _reference(
    make_model: Any, arguments: Any, seed: int, report: Report
) -> tuple[Outcome | None, torch.dtype | None, float]:
    """Returns what one rank computes, in fp64 if the model allows it, with that dtype and the bound."""
    for dtype in (torch.float64, None):
        task = Task(make_model, arguments, dtype, seed, lowest=LowestPrecision())
        assert task.lowest is not None
        if dtype is None:
            task.lowest.dtype = torch.float64
        try:
            (reference,) = simulate(run, 1, task, seed=seed)
        except RuntimeError as error:
            if dtype is None:
                report.rows[1] = {}
                report.findings.append(_of_error(1, error, task))
                return None, None, 0.0
            continue
        lowest = task.lowest.dtype
        eps = torch.finfo(lowest).eps
        bound = _BOUND if lowest == torch.float64 else math.sqrt(eps)
        name = str(lowest).removeprefix("torch.")
        report.bounds = (
            f"Computed in fp64; relative bound {bound:g}."
            if lowest == torch.float64
            else f"The model computes in {name} somewhere{'' if dtype else ', and not in fp64'}; relative bound {bound:.1e}, "
            "half of its digits: sums in another order differ in the last ones."
        )
        return reference, dtype, bound
    raise AssertionError


def _of_error(p: int, error: RuntimeError, task: Task) -> Finding:
    """Returns the finding of an error that a rank raised, or that the collectives of two ranks do not match."""
    text = str(error).removeprefix("simulate: ")
    named = re.search(r"rank (\d+)", text)
    rank = int(named[1]) if named else 0
    progress = task.progress.get(rank)
    module = progress.calling[-1] if progress is not None and progress.calling else ""
    phase = "" if progress is None else progress.phase
    what, _, rest = text.partition(": ")
    cause = f"{rest or text}, in {phase}"
    if not re.search(r"raised \w+$", what):
        what = f"collectives of rank {rank}"
        cause = f"{text}, in {phase}: a collective is missing or doubled on a rank, after a branch on a local value"
    elif p > 1:
        cause += ". It runs on one rank: a local size is used as a number, or p is not allowed"
    return Finding(p, module, what, cause)


class _Comparison:
    """The comparison of the outcomes of p ranks with that of one; ``row`` gets the verdicts."""

    def __init__(self, p: int, reference: Outcome, outcomes: list[Outcome], bound: float, row: dict[str, str]) -> None:
        self.p, self.reference, self.outcomes, self.bound, self.row = p, reference, outcomes, bound, row
        self.tables = parts_at(reference, outcomes[0])

    def findings(self) -> list[Finding]:
        """Returns what is wrong by the first comparison that fails."""
        stages = (self._weights, self._outputs, self._gradients, self._steps, self._collectives)
        return next((found for stage in stages if (found := stage())), [])

    def _finding(self, module: str, tensor: str, cause: str) -> Finding:
        return Finding(self.p, module, tensor, cause)

    def _weights(self) -> list[Finding]:
        found = self._state("state", exact=True)
        wrong = [name for name, _ in found]
        shapes = [name for name in wrong if any(one is None for one in self._expected(name, "state")[1])]
        self.row["layouts"] = "WRONG" if shapes else "right"
        self.row["weights"] = "-" if shapes else "WRONG" if wrong else "right"
        return [finding for _, finding in found]

    def _outputs(self) -> list[Finding]:
        for mode in ("eval", "train"):
            compared = self._compared(mode)
            errors = [math.inf if one.error is None else one.error for one in compared]
            self.row["outputs"] = _shown(errors, self.bound)
            loss = None
            if mode == "train" and self.reference.scalar:
                loss = compare(self.reference.loss, [outcome.loss for outcome in self.outcomes])
                self.row["loss"] = _shown([math.inf if loss.error is None else loss.error], self.bound)
            if max(errors, default=0.0) > self.bound or (loss is not None and loss.wrong(self.bound)):
                return [self._wrong_output(mode, compared, loss)]
        return []

    def _compared(self, mode: str) -> list[Comparison]:
        """Returns the comparisons of the outputs; a single one without an error if their numbers differ."""
        fulls = self.reference.outputs.get(mode, [])
        locals_ = [outcome.outputs.get(mode, []) for outcome in self.outcomes]
        if any(len(some) != len(fulls) for some in locals_):
            return [Comparison(None, None, [])]
        return [compare(full, some, self.tables) for full, *some in zip(fulls, *locals_, strict=True)]

    def _wrong_output(self, mode: str, compared: list[Comparison], loss: Comparison | None) -> Finding:
        trace = Trace(self.reference, self.outcomes, mode, self.bound, self.tables)
        module, wrong = trace.first_wrong_output()
        scalar = self.reference.scalar
        if wrong is None:
            bad = [one for one in compared if one.error is None or one.wrong(self.bound)]
            wrong = bad[0] if bad else loss
        if wrong is None or (wrong.full is None and not wrong.locals):
            return self._finding(module, "output", "the ranks' results have other numbers of tensors: a local branch")
        if scalar and not module and wrong.full is not None and not wrong.full.dim():
            return self._finding(module, "loss", causes.of_loss(wrong.full, wrong.locals, self.bound))
        eval_right = Trace(self.reference, self.outcomes, "eval", self.bound, self.tables).output(module) is None
        cause = causes.of_activation(wrong, self.bound, mode == "train" and eval_right)
        return self._finding(module, "output", cause)

    def _gradients(self) -> list[Finding]:
        fulls = self.reference.gradients
        floor = 1e-3 * max((_largest(one) for one in fulls.values() if one is not None), default=0.0)
        errors = {name: self._error_of_gradient(name, floor) for name in fulls}
        self.row["gradients"] = _shown(errors.values(), self.bound)
        wrong = [name for name, error in errors.items() if error > self.bound]
        if not wrong:
            return []
        trace = Trace(self.reference, self.outcomes, "train", self.bound, self.tables, floor)
        return [self._wrong_gradient(name, place) for name, place in trace.first_wrong_gradients(wrong, self.reference)]

    def _wrong_gradient(self, name: str, place: Place) -> Finding:
        if place.wrong is not None:
            what = f"the input of {place.module or 'a function between modules'}"
            return self._finding(place.module, name, causes.of_gradient_within(place.wrong, self.bound, what))
        layouts = [outcome.layouts.get(name, Layout()) for outcome in self.outcomes]
        locals_ = [outcome.gradients.get(name) for outcome in self.outcomes]
        return self._finding(
            place.module, name, causes.of_gradient(self._full(name, "gradients"), locals_, layouts, self.bound)
        )

    def _error_of_gradient(self, name: str, floor: float) -> float:
        locals_ = [outcome.gradients.get(name) for outcome in self.outcomes]
        full, expected = self._expected(name, "gradients")
        present = [local for local in locals_ if local is not None]
        if full is None or len(present) < len(locals_):
            return 0.0 if full is None and not present else math.inf
        right = [one for one in expected if one is not None]
        if len(right) < len(present) or any(a.shape != b.shape for a, b in zip(present, right, strict=True)):
            return math.inf
        return difference(present, right, floor)

    def _steps(self) -> list[Finding]:
        compared = [one for step in range(1, STEPS) for one in self._compared(f"step {step}")]
        found = [finding for _, finding in self._state("trained", exact=False)]
        errors = [math.inf if one.error is None else one.error for one in compared]
        bound = _STEPS * self.bound
        self.row[f"{STEPS} steps"], self.row["state"] = _shown(errors, bound), "WRONG" if found else "right"
        wrong = next((one for one, error in zip(compared, errors, strict=True) if error > bound), None)
        if not found and wrong is not None:
            cause = f"after a step {causes.of_activation(wrong, bound)}"
            return [self._finding("", "loss" if self.reference.scalar else "output", cause)]
        return found

    def _state(self, which: str, exact: bool) -> list[tuple[str, Finding]]:
        """Returns the wrong parameters and buffers, initial (``"state"``) or ``"trained"``, with their findings."""
        found = []
        bound = 0.0 if exact else _STEPS * self.bound
        names = dict.fromkeys([*getattr(self.reference, which), *getattr(self.outcomes[0], which)])
        for name in names:
            module, _, _ = name.rpartition(".")
            full, expected = self._expected(name, which)
            locals_ = [getattr(outcome, which).get(name) for outcome in self.outcomes]
            present = [local for local in locals_ if local is not None]
            if full is None or len(present) < self.p:
                cause = f"exists on {len(present)} of {self.p} ranks, and {'' if full is not None else 'not '}on one alone"
                found.append((name, self._finding(module, name, f"{cause}: a local branch in make_model")))
                continue
            shape = [tuple(local.shape) for local in present]
            if any(one is None for one in expected):
                cause = (
                    f"shapes {shape} and the layouts do not make up the full shape {tuple(full.shape)}: a local size is "
                    "used as a number, or the layout is missing (tp_ext.declare_layouts)"
                )
                found.append((name, self._finding(module, name, cause)))
                continue
            right = [one for one in expected if one is not None]
            error = difference(present, right)
            if error > bound:
                found.append((name, self._finding(module, name, causes.of_weight(full, present, right))))
        return found

    def _full(self, name: str, which: str) -> Tensor | None:
        tensor: Tensor | None = getattr(self.reference, which).get(name)
        return None if tensor is None else self.reference.layouts.get(name, Layout()).unshard([tensor])

    def _expected(self, name: str, which: str) -> tuple[Tensor | None, list[Tensor | None]]:
        """Returns the full tensor and the ranks' local ones by their layouts; None where a layout or shape is wrong."""
        full = self._full(name, which)
        expected: list[Tensor | None] = []
        for outcome in self.outcomes if full is not None else ():
            local = getattr(outcome, which).get(name)
            try:
                right = outcome.layouts.get(name, Layout()).shard(full)
            except ValueError:
                right = None
            fits = right is not None and (local is None or local.shape == right.shape)
            expected.append(right if fits else None)
        return full, expected

    def _collectives(self) -> list[Finding]:
        counts = [outcome.collectives for outcome in self.outcomes]
        self.row["collectives"] = str(sum(counts[0].values()))
        for rank, count in enumerate(counts):
            if count != counts[0]:
                cause = f"a step has {count} on rank {rank} and {counts[0]} on rank 0: a branch on a local value"
                return [self._finding("", f"collectives of rank {rank}", cause)]
        return []


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _shown(errors: Any, bound: float) -> str:
    largest = max(errors, default=0.0)
    return "WRONG" if largest > bound else f"{largest:.0e}" if largest else "same bits"
