"""The search for the weights by which the values of a plan differ: they stay whole, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from tp_ext.auto.proof.copies import copy_of_structure
from tp_ext.auto.proof.first_difference import first_difference_of
from tp_ext.auto.proof.prove_values import (
    MAX_PROVEN_RANKS,
    Apply,
    DifferentValuesError,
    Run,
    UnprovenError,
    prove,
    runs_of,
    step_of,
)
from tp_ext.auto.proof.random_values import bytes_of, examples, few_tokens, filled
from tp_ext.auto.proof.scaled_down import scaled_down
from tp_ext.auto.proof.shortened import shortened
from tp_ext.auto.record import progress
from tp_ext.auto.record.edits import Draw
from tp_ext.auto.record.numbers import ReadNumbers, read_ids
from tp_ext.auto.record.record import Record, tensors
from tp_ext.auto.record.rules import Rule
from tp_ext.auto.record.trace import arguments
from tp_ext.auto.search.hints import PlanOptions
from tp_ext.auto.search.plans import Plan
from tp_ext.auto.search.reasons import TOKEN_SUMS, kind_of, traced
from tp_ext.auto.search.rounds import POSSIBLE, Planner
from tp_ext.conversions import P, S
from tp_ext.share_sizes import Weights


class PlannerOf(Protocol):
    """Makes the planner of a model for p ranks, in which only these parameters may be sharded, each on its dim."""

    def __call__(
        self,
        model: nn.Module,
        example: Any,
        p: int,
        only: Mapping[str, int],
        whole_tokens: Mapping[str, str] | None = None,
    ) -> Planner: ...


BUDGET = 2**30  # bytes of parameters
TYPES = (torch.float64, torch.float32)
READ_TOLERANCE = 0.05  # relative, of numbers that code reads of the example, in another type


class Prover:
    """The proof by values of one model.

    Args:
        plan: to be proven.
        planner_of: makes planners of parts of the model.
        budget: bytes of parameters with which the model may be run.
        apply: carries a plan out (:func:`tp_ext.auto.execute.apply_in_proof`).
        gradients: whether the model may run with gradients.
        read: the numbers that its code reads from the example.
        carried: another plan of the same shards, whose boundaries are to be proven.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        plan: Plan,
        planner_of: PlannerOf,
        budget: float,
        apply: Apply,
        gradients: bool = True,
        read: ReadNumbers | None = None,
        carried: Plan | None = None,
    ) -> None:
        self.gradients, self.read, self.carried = gradients, read, carried
        self.planner_of, self.apply, self.shares = planner_of, apply, plan.shares
        self.shapes = [t.shape for t in model.parameters()]
        self.p, self.reduced, self.example = self._reduced(model, example, plan, budget)
        # Grouped products of torch exist for some types only: None leaves those of the model
        self.dtypes = [*(t for t in TYPES if bytes_of(self.reduced, t) <= budget), None]
        same_model = len(list(self.reduced.modules())) == len(list(model.modules()))
        # A plan for all layers does not fit a reduced model, for which another is made
        self.is_all = same_model and self.p == plan.p and self.example is example
        self.modules = dict(self.reduced.named_modules(remove_duplicate=False))

    def _reduced(self, model: nn.Module, example: Any, plan: Plan, budget: float) -> tuple[int, nn.Module, Any]:
        """Ranks, model and example to run: with two layers of each kind, else one, else with fewer heads and features.

        Raises:
            UnprovenError: the model has no form that fits the budget, or does not run with fewer layers.
        """
        p = min(plan.p, MAX_PROVEN_RANKS)
        failed = ""  # text: an exception would keep the frames of its run, with a model
        # All layers: of a model that reads the results of layers by number, or has few parameters anyway
        for kept in (2, 1, None):
            reduced = shortened(model, kept, self._edits_in)
            if bytes_of(reduced, torch.float32) <= budget:
                try:
                    return p, reduced, self._runnable(reduced, example, p)
                except UnprovenError as error:
                    failed = failed or str(error)
        if failed:
            raise UnprovenError(failed)
        # Fewer ranks need fewer heads; not where ranks have copies, which fewer would not have
        copies = any(part.copies > 1 for sharding in plan.shardings.values() for part in sharding.parts)
        for kept in (2, 1):
            reduced = shortened(model, kept, self._edits_in)
            short = self._runnable(reduced, example, p)
            for ranks in [p] if copies or p <= 4 else [p, 4]:
                smaller, ids = scaled_down(self.planner_of(reduced, short, ranks, self._only(reduced, plan)))
                if bytes_of(smaller, torch.float32) <= budget:
                    if self.read is not None and not self.read.hold(arguments(ids)):
                        raise UnprovenError("numbers that code reads of the example are others with smaller tables")
                    return ranks, smaller, self._runnable(smaller, ids, ranks)
        least = bytes_of(smaller, torch.float32) / 2**20
        raise UnprovenError(f"one layer of each kind, with fewer heads, has {least:.0f} MiB, more than budget")

    def _only(self, reduced: nn.Module, plan: Plan) -> dict[str, int]:
        """The parameters of the reduced model that a plan shards, with the dim."""
        dims = {name: sharding.dim for name, sharding in plan.shardings.items()}
        return {name: dims[name] for name, _ in reduced.named_parameters(remove_duplicate=False) if name in dims}

    def _runnable(self, reduced: nn.Module, example: Any, p: int) -> Any:
        """The example, with few tokens if it has many and that runs.

        Raises:
            UnprovenError: the model with fewer layers does not run.
        """
        # Other masks and lengths would lead to other code
        short = example if self.read is not None else few_tokens(example, p, fewer_shares(self.shares, p))
        lengths = [[t.shape for _, t in tensors(arguments)] for arguments in (short, example)]
        for candidate in [short, example] if lengths[0] != lengths[1] else [example]:
            if candidate is example and [t.shape for t in reduced.parameters()] == self.shapes:
                return candidate  # the model as it is, which has been traced
            try:
                self.planner_of(reduced, candidate, p, {})  # which traces it
                return candidate
            except Exception as error:  # of the model's own code
                failed = f"{type(error).__name__}: {error}"
        raise UnprovenError(f"with fewer layers, {failed}")

    def differences(self, plan: Plan) -> dict[str, Any]:
        """The kinds of parameters, by :func:`kind_of`, by which values differ under a plan, with the reason; {}: none.

        Under ``TOKEN_SUMS``: the kinds of modules whose sums must not be scattered over the tokens, with the reason.

        Raises:
            UnprovenError: the model does not run.
        """
        only = self._only(self.reduced, plan)
        text = self._tried(only, plan=plan if self.is_all else None)
        if not text:
            return {}
        sources = {kind_of(edit.module) for edit in plan.conversions if edit.types == (P, S)}
        # Without scattered sums nothing differs: the shards of tokens are the cause, and no weight need be whole
        if sources and not self._tried(only, dict.fromkeys(sources, text)):
            reason = f"values differ when it is sharded on its tokens: {text}"
            wrong = {s for s in sources if self._tried(only, dict.fromkeys(sources - {s}, text))}
            return {TOKEN_SUMS: dict.fromkeys(wrong or sources, reason)}
        return self._wrong(only, self._groups(only) or [list(only)], text)

    def _wrong(
        self, only: Mapping[str, int], groups: Sequence[list[str]], text: str, is_located: bool = False
    ) -> dict[str, str]:
        """Returns the kinds of few groups by which values differ, of groups with which they do, with the reason.

        Each half is tried alone, so that one group among n is found in about 2 log2(n) runs. Where no half differs,
        groups of both do so together, and the last one without which nothing differs is left whole.
        """

        def tried(some: Sequence[list[str]], locate: bool) -> str:
            return self._tried({name: only[name] for group in some for name in group}, locate=locate)

        wrong: dict[str, str] = {}
        low, high = len(groups) // 2, len(groups)
        for half in (groups[:low], groups[low:]) if low else ():
            if different := tried(half, locate=len(half) == 1):
                wrong |= self._wrong(only, half, different, len(half) == 1)
        if wrong:
            return wrong
        while high - low > 1:  # the first `low` do not differ, the first `high` do
            middle = (low + high) // 2
            low, high = (low, middle) if tried(groups[:middle], locate=False) else (middle, high)
        reason = text if is_located else tried(groups[:high], locate=True) or text
        when = "when it is sharded" if high == 1 else "when it is sharded with others"
        return dict.fromkeys(map(kind_of, groups[high - 1]), f"values differ {when}: {reason}")

    def _edits_in(self, layer: str) -> str:
        """What the plan that is carried out does in a layer, as text that is the same for layers alike."""
        if self.carried is None:
            return ""
        plan, start = self.carried, len(layer)
        edits: list[Any] = [*plan.conversions, *plan.draws]
        inside = [replace(e, module=e.module[start:]) for e in edits if f"{e.module}.".startswith(f"{layer}.")]
        shards = [(name[start:], s.dim) for name, s in plan.shardings.items() if name.startswith(f"{layer}.")]
        return repr((inside, shards))

    def difference_with(self, plan: Plan, carried: Plan) -> str:
        """Returns how values differ with the boundaries of the plan that is carried out, or "".

        Raises:
            UnprovenError: the model does not run.
        """
        self.gradients &= torch.is_grad_enabled()  # a call without them has no copies
        only = self._only(self.reduced, plan)
        if not self.is_all:
            plan = self.planner_of(self.reduced, self.example, self.p, only).decide()
        carried_out = (*carried.copies, *carried.sums, *carried.tokens)
        # Slices and gathers are those of this call
        edits = [*plan.slices, *plan.gathers, *(edit for edit in carried_out if edit.module in self.modules)]
        on_tokens = {draw.module for draw in carried.draws if draw.tokens}
        # Of a smaller model, whose lengths are others
        draws = [replace(draw, shape=None) for draw in carried.draws if draw.module in on_tokens & {*self.modules}]
        draws += [draw for draw in plan.draws if draw.module not in on_tokens]
        return self._tried(only, plan=replace(plan, draws=draws, conversions=edits))

    def _groups(self, only: Mapping[str, int]) -> list[list[str]]:
        """Groups the kinds of parameters by the decision that shards them; equal layers share a kind."""
        part = self.planner_of(self.reduced, self.example, self.p, only)
        part.decide()
        joined: dict[str, set[str]] = {}
        for group in part.together:
            kinds = {kind_of(name) for name in group}
            for other in [joined[k] for k in kinds if k in joined]:
                kinds |= other
            joined.update(dict.fromkeys(kinds, kinds))
        groups = {id(kinds): kinds for kinds in joined.values()}.values()
        return [[name for name in only if kind_of(name) in kinds] for kinds in groups]

    def _tried(
        self,
        only: Mapping[str, int],
        whole_tokens: Mapping[str, str] | None = None,
        plan: Plan | None = None,
        locate: bool = False,
    ) -> str:
        """Runs the model with these parameters sharded; returns the difference, or "" if there is none.

        Args:
            locate: whether to name the line of the user's code that makes it, by one more run.
        """
        if plan is None:
            plan = self.planner_of(self.reduced, self.example, self.p, only, whole_tokens).decide()
            if self.shares is not None and len(self.shares) > self.p and plan.shardings.keys() != only.keys():
                raise UnprovenError(f"by shares {list(self.shares)} of fewer ranks it shards other weights")
        # With nothing sharded both models are the same
        if not plan.shardings:
            return ""
        whole = for_one_rank(plan, self.modules)
        progress.step(f"running {len(only)} sharded parameters on {self.p} ranks")
        failed = ""
        for dtype in self.dtypes:
            try:
                runs = runs_of(self._calls(dtype), self.gradients)
                if dtype is torch.float64 and any(isinstance(m, _ConvNd) for m in self.reduced.modules()):
                    runs = self._runs_in_fp64(plan, whole, runs)
                for error in prove(self._running(dtype), plan, whole, runs, dtype, self.apply):
                    raise error
                return ""
            except DifferentValuesError as error:
                return f"{error}{self._line(plan, whole, error, dtype) if locate else ''}"
            except UnprovenError as error:
                # The unsharded model may not run in this type: the next type may prove the plan
                failed = str(error)
        raise UnprovenError(failed)

    def _runs_in_fp64(self, plan: Plan, whole: Plan, runs: list[Run]) -> list[Run]:
        """Makes all runs in fp32; returns those left for fp64: a step of training, and what fp32 has not proven.

        Convolutions take torch several times as long in fp64. A difference in fp32 may be rounding, and decides
        nothing."""
        try:
            narrow = runs_of(self._calls(torch.float32), self.gradients)
            running = self._running(torch.float32)
            # Eval mode by statistics that have hardly moved from 0 and 1 amplifies rounding, layer by layer
            for module in running.modules():
                if isinstance(module, _BatchNorm) and module.momentum:
                    module.momentum = 1.0
            errors = prove(running, plan, whole, narrow, torch.float32, self.apply)
        except (DifferentValuesError, UnprovenError):
            return runs
        wide = {id(run.call): other.call for run, other in zip(narrow, runs, strict=True)}
        unproven = [replace(e.run, call=wide[id(e.run.call)], spare=None) for e in errors if e.run is not None]
        step = step_of(runs)
        is_step = any(run.training and run.backward == step.backward for run in unproven)
        return unproven if is_step else [step, *unproven]

    def _calls(self, dtype: torch.dtype | None) -> list[Any]:
        calls = examples(self.example, dtype, read_ids(self.read, arguments(self.example)))
        if self.read is not None and not self.read.hold(calls[0], READ_TOLERANCE):
            raise UnprovenError(f"numbers that code reads of the example are others in {dtype}")
        return calls

    def _running(self, dtype: torch.dtype | None) -> nn.Module:
        running = copy_of_structure(self.reduced)
        filled(running, dtype)
        return running

    def _line(self, plan: Plan, whole: Plan, error: DifferentValuesError, dtype: torch.dtype | None) -> str:
        """Returns ": the result of `x / n` at model.py:31 .." of the difference; "" where no line is known."""
        if error.run is None:
            return ""
        try:
            clause = first_difference_of(self._running(dtype), plan, whole, error.run, dtype, self.apply)
        except Exception:  # of the user's code, which other modes disturb: the reason is known without the line
            return ""
        return f": {clause}" if clause else ""


def prover_of(
    planner: Planner,
    plan: Plan,
    rules: Mapping[str, Rule],
    budget: float,
    apply: Apply,
    carried: Plan | None = None,
) -> Prover:
    """The proof by values of what a planner found."""
    last: list[tuple[nn.Module, Any, Record]] = []  # the model traced last, whose parts are planned one by one

    def planner_of(
        model: nn.Module, example: Any, p: int, only: Mapping[str, int], whole_tokens: Mapping[str, str] | None = None
    ) -> Planner:
        if not last or last[0][0] is not model or last[0][1] is not example:
            last[:] = [(model, example, traced(model, example, rules, planner.record.shares_inputs))]
        record = last[0][2]
        tokens = POSSIBLE if planner.proves_tokens else False
        ranks: dict[str, Any] = {"invariant_blocks": planner.blocks, "shares": fewer_shares(planner.shares, p)}
        options = PlanOptions(sequence_parallel=tokens, only=only, local=planner.given, **ranks)
        part = Planner(model, example, p, record, options)
        part.whole_tokens = {**planner.whole_tokens, **(whole_tokens or {})}
        part.larger = planner
        return part

    # The gradient of an input that is sliced is that of its slice: such a call runs without
    gradients = not planner.record.shares_inputs
    read = planner.record.read
    return Prover(planner.model, planner.example, plan, planner_of, budget, apply, gradients, read, carried)


def fewer_shares(shares: Weights | None, p: int) -> Weights | None:
    """Returns the shares of p of the ranks, in their order: the least, the largest and others between."""
    if shares is None or len(shares) <= p:
        return shares
    by_weight, most = sorted(range(len(shares)), key=shares.__getitem__), len(shares) - 1
    return tuple(shares[rank] for rank in sorted(by_weight[i * most // (p - 1)] for i in range(p)))


def alone(planner: Planner) -> Plan:
    """The plan of one rank: that of two without its shards, if there is one."""
    try:
        options = PlanOptions(planner.hints, only=planner.only)
        two = Planner(planner.model, planner.example, 2, planner.record, options).decide()
    except ValueError:
        # A constraint that two ranks cannot hold must not forbid a plan of a single rank
        two = planner.decide()
    return for_one_rank(two, planner.modules)


def for_one_rank(plan: Plan, modules: Mapping[str, nn.Module]) -> Plan:
    """Returns the plan of one rank: its linear layers are replaced as by ``plan``, so that adapters fit them, its
    attention and its random calls, so that masks are the same numbers; every shard is whole."""
    roles = {n: role for n, role in plan.roles.items() if role == "attention" or isinstance(modules[n], nn.Linear)}
    equal: dict[str, Any] = {"copies": 1, "groups": 1, "blocks": 0, "shares": None}
    shardings = {
        name: replace(sharding, parts=tuple(replace(part, **equal) for part in sharding.parts))
        for name, sharding in plan.shardings.items()
        if name.rpartition(".")[0] in roles
    }
    return replace(
        plan,
        p=1,
        shardings=shardings,
        tied=[],
        roles=roles,
        heads=[],
        buffers={},
        conversions=[],
        refused_inputs=[],
        draws=whole_draws(plan.draws),
        patches={},
        sizes={},
        whole={name: "p = 1" for name in plan.shapes if name not in shardings},
        collectives=[],
        proofs=[],
        outputs=[replace(output, local=output.shape, state="replicated") for output in plan.outputs],
        whole_tokens={},
        invariant_blocks=None,
        functions=[],
        shares=None,
    )


def whole_draws(draws: list[Draw]) -> list[Draw]:
    """Returns the draws for replicated tensors: one for each kind of call of a module."""
    always = {draw.module for draw in draws if draw.always}
    by_call = {(draw.module, draw.call): Draw(draw.module, draw.call, always=draw.module in always) for draw in draws}
    return list(by_call.values())
