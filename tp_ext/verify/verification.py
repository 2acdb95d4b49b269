"""Verification of a model written with tensor-parallel layers: see :func:`verify`."""

import contextlib
import importlib
import importlib.util
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from tp_ext._checks import check_int
from tp_ext.debug.collective_order import compare_collectives
from tp_ext.debug.type_check import typecheck
from tp_ext.random import manual_seed
from tp_ext.sharding import Layout
from tp_ext.simulation import simulate
from tp_ext.simulation.comparison import UnfitResultError, bound_of, difference, noise_of
from tp_ext.verify import causes
from tp_ext.verify.arguments import arguments_of, check_make_model, numbers_of_ranks
from tp_ext.verify.compare import Comparison, compare
from tp_ext.verify.localize import Trace, WrongModule
from tp_ext.verify.precision import LowestPrecision
from tp_ext.verify.record import LATER, STEPS, Outcome, Progress, Task, UnfitModelError, parts_at, run
from tp_ext.verify.report import Finding, Report

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
    5. three steps of AdamW: each loss, and the outputs of two forwards without gradients after them, in train mode and
       in eval mode; then parameters and buffers, those that no state dict has if a forward has written to them;
    6. the number of collectives of a step: the same on all ranks;
    7. types, for information: :func:`tp_ext.debug.typecheck`, where ``spmd_types`` is installed.

    The model is converted to fp64 where its modules allow it, so rounding is far below any mistake. What computes in
    less precision bounds the comparison by half of its digits. A model whose layers were all built in
    :func:`tp_ext.tp_invariant` keeps its dtype, and its bits are compared.

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
        TypeError, ValueError: an argument is none of the above, or ``make_model`` returns no module, or one with
            parameters that it has returned before. An error within the model is a finding.
    """
    check_make_model(make_model)
    numbers, arguments = numbers_of_ranks(p), arguments_of(example)
    check_int(seed=seed)
    started, report = time.perf_counter(), Report()
    # The caller may be inside of no_grad or inference_mode, and gradients are compared
    with torch.inference_mode(False), torch.enable_grad():
        built: WeakIdKeyDictionary = WeakIdKeyDictionary()
        reference, dtype, bound = _reference(make_model, arguments, seed, built, report)
        for number in numbers if reference is not None else ():
            row = report.rows[number] = {}
            outcomes = _simulated(number, Task(make_model, arguments, dtype, seed, built, reference), report.findings)
            if outcomes is None or reference is None:
                continue
            wrong = _OutcomeComparison(number, reference, outcomes, bound, row).findings()
            # The reference is a run on one rank, too: what differs between these two is no matter of p
            if number == 1 and wrong:
                text = "a second run on one rank differs: the model has a local state, such as a generator of its own"
                wrong = [Finding(1, wrong[0].module, wrong[0].tensor, text)]
            report.findings += wrong
            if number > 1 and not any(outcomes[0].layouts.values()):
                report.notes.append(f"No parameter is sharded at p = {number}: does make_model use its group?")
            # Types are those of the program, whatever p. After a finding their error would be a consequence of it
            if not wrong and number == min((n for n in numbers if n > 1), default=0):
                error = type_error(make_model, arguments, dtype, number, seed)
                row["types"] = "-" if error is None else "error" if error else "right"
                if error:
                    report.notes.append(f"Types at p = {number}, perhaps of an operation that has no rule: {error}")
    report.seconds = time.perf_counter() - started
    return report


def _simulated(p: int, task: Task, findings: list[Finding]) -> list[Outcome] | None:
    """Returns the outcomes of p ranks; None after an error, which is appended to the findings."""
    try:
        return simulate(_run_compared, p, task, seed=task.seed)
    except RuntimeError as error:
        # This error does not depend on p: the caller must fix it, so it is raised and not reported as a finding
        if isinstance(error.__cause__, UnfitModelError | UnfitResultError):
            raise error.__cause__ from None
        findings.append(_of_error(p, error, task))
        return None


def _run_compared(rank: int, group: Any, task: Task) -> Outcome:
    with compare_collectives():
        return run(rank, group, task)


def _reference(
    make_model: Any, arguments: Any, seed: int, built: WeakIdKeyDictionary, report: Report
) -> tuple[Outcome | None, torch.dtype | None, float]:
    """Returns what one rank computes, in fp64 if the model allows it, with that dtype and the bound; in blocks of
    tp_invariant in its own dtype, with the bound 0."""
    # fp64 first, in which a bound can be far below any mistake; not every module runs in it
    for dtype in (torch.float64, None):
        findings: list[Finding] = []
        task = Task(make_model, arguments, dtype, seed, built, lowest=LowestPrecision())
        outcomes = _simulated(1, task, findings)
        # In blocks rounding does not depend on p: its own dtype is compared, without a bound
        if outcomes is None or (outcomes[0].in_blocks and dtype is not None):
            continue
        if outcomes[0].in_blocks:
            report.bounds = "Built in tp_invariant: computed in its own dtype, and all bits must be the same."
            return outcomes[0], dtype, 0.0
        assert task.lowest is not None
        lowest = task.lowest.dtype
        name, bound = str(lowest).removeprefix("torch."), bound_of(lowest, "known")
        if lowest == torch.float64:
            report.bounds = f"Computed in fp64, relative bound {bound:g}."
            return outcomes[0], dtype, bound
        where = "Does not run in fp64 and is computed in" if dtype is None else "Some of the model is computed in"
        report.bounds = f"{where} {name}, relative bound {bound:.1e}: half of the digits, sums in another order differ."
        return outcomes[0], dtype, bound
    report.rows[1] = {}
    report.findings += findings
    return None, None, 0.0


def _of_error(p: int, error: RuntimeError, task: Task) -> Finding:
    """Returns the finding of an error that a rank raised, or that the collectives of two ranks do not match."""
    # simulate says in words which rank raised, or which calls do not fit
    text = str(error).removeprefix("simulate: ")
    if "compare_collectives: " not in text and (raised := re.match(r"rank (\d+) raised \w+", text)) is not None:
        progress = task.progress[int(raised[1])]
        hint = ". One rank computes it: a local size is used as a number, or this p is not allowed" if p > 1 else ""
        cause = f"{text[raised.end() :].lstrip(': ')}, in {progress.phase}{hint}"
        return Finding(p, progress.module, raised[0], cause)
    calls = re.findall(r"ranks? \[?(\d+)[\d, ]*\]? (?:issue|calls|waits for .*? in) (\w+)\(", text)
    # A rank that has gone on to a later module lacks a call, so the other one's is named
    order = [call.name for call in task.reference.calls["eval"]] if task.reference is not None else []

    def lateness(call: tuple[str, str]) -> int:
        module = task.progress.get(int(call[0]), Progress()).module
        return order.index(module) if module in order else len(order)

    number, collective = min(reversed(calls), key=lateness, default=("0", "collective"))
    rank = int(number)
    progress = task.progress.get(rank, Progress())
    why = "one is missing or doubled on a rank, after a branch on a local value"
    if len(calls) > 1 and len({name for _, name in calls}) == 1:
        why = "shards of different local sizes where all need one shape, or calls in another order, missing or doubled"
    return Finding(p, progress.module, f"{collective} of rank {rank}", f"{text}, in {progress.phase}: {why}")


class _OutcomeComparison:
    """The comparison of the outcomes of p ranks with one rank's outcome; ``row`` gets the verdicts."""

    def __init__(self, p: int, reference: Outcome, outcomes: list[Outcome], bound: float, row: dict[str, str]) -> None:
        self.p, self.reference, self.outcomes, self.bound, self.row = p, reference, outcomes, bound, row
        self.tables = parts_at(reference, outcomes[0])

    def findings(self) -> list[Finding]:
        """Returns the findings of the first comparison that fails."""
        stages = (self._weights, self._outputs, self._gradients, self._steps, self._collectives)
        return next((wrong for stage in stages if (wrong := stage())), [])

    def _finding(self, module: str, tensor: str, cause: str) -> Finding:
        return Finding(self.p, module, tensor, cause)

    def _weights(self) -> list[Finding]:
        wrong = self._state("state", exact=True)
        shapes = [name for name in wrong if any(right is None for right in self._expected(name, "state")[1])]
        self.row["layouts"] = "WRONG" if shapes else "right"
        self.row["weights"] = "-" if shapes else "WRONG" if wrong else "right"
        return list(wrong.values())

    def _outputs(self) -> list[Finding]:
        # Without masks first: what is wrong there must not be put down to one
        for mode in ("eval", "train"):
            compared = self._compared(mode)
            errors = [comparison.known_error for comparison in compared]
            self.row["outputs"] = _shown(errors, self.bound)
            loss = None
            if mode == "train" and self.reference.scalar:
                loss = compare(self.reference.loss, [outcome.loss for outcome in self.outcomes])
                self.row["loss"] = _shown([loss.known_error], self.bound)
            if max(errors, default=0.0) > self.bound or (loss is not None and loss.wrong(self.bound)):
                wrong = self._wrong_output(mode, compared, loss)
                if wrong.tensor == "loss":
                    self.row["loss"] = "WRONG"
                return [wrong]
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
            wrong = next((comparison for comparison in compared if comparison.known_error > self.bound), loss)
        if wrong is None or (wrong.full is None and not wrong.locals):
            return self._finding(module, "output", "the ranks' results have other numbers of tensors: a local branch")
        if scalar and not module and wrong.full is not None and not wrong.full.dim():
            return self._finding(module, "loss", causes.of_loss(wrong.full, wrong.locals, self.bound))
        eval_right = Trace(self.reference, self.outcomes, "eval", self.bound, self.tables).output(module) is None
        cause = causes.of_activation(wrong, self.bound, mode == "train" and eval_right)
        return self._finding(module, "output", cause)

    def _gradients(self) -> list[Finding]:
        fulls = self.reference.gradients
        # Of a gradient that is zero but for rounding, as of a bias before a norm, no digit is right
        floor = noise_of(fulls.values())
        errors = {name: self._error_of_gradient(name, floor) for name in fulls}
        self.row["gradients"] = _shown(errors.values(), self.bound)
        wrong = [name for name, error in errors.items() if error > self.bound]
        if not wrong:
            return []
        trace = Trace(self.reference, self.outcomes, "train", self.bound, self.tables, floor)
        return [self._wrong_gradient(name, place) for name, place in trace.first_wrong_gradients(wrong, self.reference)]

    def _wrong_gradient(self, name: str, place: WrongModule) -> Finding:
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
        right = [local for local in expected if local is not None]
        return math.inf if len(right) < len(present) else difference(present, right, floor)

    def _steps(self) -> list[Finding]:
        phases = (*(f"step {step}" for step in range(1, STEPS)), *LATER)
        compared = [comparison for phase in phases for comparison in self._compared(phase)]
        state, bound = self._state("trained", exact=False), _STEPS * self.bound
        state |= self._written(bound)
        errors = [comparison.known_error for comparison in compared]
        self.row[f"{STEPS} steps"], self.row["state"] = _shown(errors, bound), "WRONG" if state else "right"
        wrong = next((comparison for comparison in compared if comparison.known_error > bound), None)
        if not state and wrong is not None:
            cause = f"after a step {causes.of_activation(wrong, bound)}"
            return [self._finding("", "loss" if self.reference.scalar else "output", cause)]
        return list(state.values())

    def _written(self, bound: float) -> dict[str, Finding]:
        """Returns the findings of buffers that no state dict has, which have no layout, by name."""
        findings: dict[str, Finding] = {}
        names = (name for outcome in (self.reference, *self.outcomes) for name in outcome.written)
        for name in dict.fromkeys(names):
            full, locals_ = self.reference.written.get(name), [one.written.get(name) for one in self.outcomes]
            compared = compare(full, locals_, self.tables)
            if compared.wrong(bound):
                number, alone = len(compared.locals), "one rank" if full is not None else "no rank"
                cause = f"forwards write to it on {number} of {self.p} ranks, and on {alone} at p = 1: a local branch"
                if full is not None and number == self.p:
                    cause = f"after the forwards {causes.of_activation(compared, bound)}"
                findings[name] = self._finding(name.rpartition(".")[0], name, cause)
        return findings

    def _state(self, which: str, exact: bool) -> dict[str, Finding]:
        """Returns the findings of wrong parameters and buffers, initial (``"state"``) or ``"trained"``, by name."""
        findings: dict[str, Finding] = {}
        for name in dict.fromkeys([*getattr(self.reference, which), *getattr(self.outcomes[0], which)]):
            module, _, _ = name.rpartition(".")
            full, expected = self._expected(name, which)
            locals_ = [getattr(outcome, which).get(name) for outcome in self.outcomes]
            present = [local for local in locals_ if local is not None]
            right = [local for local in expected if local is not None]
            if full is None or len(present) < self.p:
                alone = "one rank" if full is not None else "no rank"
                cause = (
                    f"exists on {len(present)} of {self.p} ranks, and on {alone} at p = 1: a local branch in make_model"
                )
            elif len(right) < self.p:
                cause = (
                    f"shapes {[tuple(local.shape) for local in present]} are not those of the layouts of the "
                    f"full {tuple(full.shape)}: a local size is used as a number, or declare_layouts is missing"
                )
            elif difference(present, right) > (0.0 if exact else _STEPS * self.bound):
                cause = causes.of_weight(full, present, right)
            else:
                continue
            findings[name] = self._finding(module, name, cause)
        return findings

    def _full(self, name: str, which: str) -> Tensor | None:
        tensor: Tensor | None = getattr(self.reference, which).get(name)
        return None if tensor is None else self.reference.layouts.get(name, Layout()).unshard([tensor])

    def _expected(self, name: str, which: str) -> tuple[Tensor | None, list[Tensor | None]]:
        """Returns the full tensor and the ranks' local ones by their layouts; None where a layout or shape is wrong."""
        full = self._full(name, which)
        expected: list[Tensor | None] = []
        if full is None:
            return None, expected
        for outcome in self.outcomes:
            local = getattr(outcome, which).get(name)
            right: Tensor | None = None
            # A layout that does not fit the full tensor is a finding, too
            with contextlib.suppress(ValueError):
                right = outcome.layouts.get(name, Layout()).shard(full)
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


def _shown(errors: Any, bound: float) -> str:
    largest = max(errors, default=0.0)
    return "WRONG" if largest > bound else f"{largest:.0e}" if largest else "same bits"


def type_error(make_model: Any, arguments: Any, dtype: torch.dtype | None, p: int, seed: int) -> str | None:
    """Returns the first type error of a forward, "" if there is none, None without ``spmd_types``.

    Arguments of forward are invariant. A tensor without a type is no error: an operation may have no rule.
    """
    if importlib.util.find_spec("spmd_types") is None:
        return None
    spmd = importlib.import_module("spmd_types")

    def copied(x: Tensor) -> Tensor:
        return x.detach().to(dtype or x.dtype) if x.is_floating_point() else x.clone()

    def check(rank: int, group: Any) -> str:
        manual_seed(seed)
        model = make_model(group)
        model = model if dtype is None else model.to(dtype)
        args, kwargs = tree_map_only(Tensor, copied, arguments)
        try:
            with typecheck(model, group, strict=False):
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, Tensor) and leaf.is_floating_point():
                        spmd.assert_type(leaf, {group: spmd.I})
                model(*args, **kwargs)
        except spmd.SpmdTypeError as error:
            return str(error).splitlines()[0]
        return ""

    try:
        return next(filter(None, simulate(check, p, seed=seed)), "")
    except RuntimeError as error:  # of a rule that does not know what the model does
        return str(error).splitlines()[0]
