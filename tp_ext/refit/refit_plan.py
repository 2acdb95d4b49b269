"""Plans that move weights between models in memory, and their runs."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from tp_ext._checks import check_bool, check_int
from tp_ext._checksum import bits_of, checksum
from tp_ext._object_collectives import call_and_gather, call_on_all_ranks
from tp_ext.checkpoint.optimizer_state import check_optimizer
from tp_ext.model.stages import Stages, joined
from tp_ext.refit.agreement import RefitReport, check_reports, check_unchanged, checked_names, device, host
from tp_ext.refit.buckets import Round, cast_into, memory
from tp_ext.refit.contents import SIDES, Contents, Views, live_tensors
from tp_ext.refit.lost import RankLost, Watch
from tp_ext.refit.routes import Routes

_ON_CPU = 4 << 20


class Moved(NamedTuple):
    """The bytes that a run has moved for this rank: sent to other ranks, received from them, copied in the process."""

    sent: int
    received: int
    copied: int


def plan(
    source: Stages | None,
    target: Stages | None,
    *,
    process_group: ProcessGroup | None = None,
    names: Mapping[str, Any] | None = None,
    optimizers: Sequence[Optimizer | None] | None = None,
    buffers: bool = True,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = 64 << 20,
    atomic: bool = True,
) -> "RefitPlan":
    """Plans how the parameters of one model get the values of another's, whatever the layouts of the two and the ranks
    that hold them.

    ::

        plan = tp_ext.refit.plan(run.state, None)    # on the ranks that train
        plan = tp_ext.refit.plan(None, generator)    # on the others
        moved = plan.run()                           # on all, as often as the weights have changed

    Every target has afterwards, bit by bit, what it would have after a save of the source and a load. Every rank of
    ``process_group`` calls :func:`plan` and then :meth:`RefitPlan.run`, with None for a model that it does not have.

    Args:
        source, target: a module, wrapped or not, the list of the stages of a pipeline that this rank holds, or
            ``run.state`` of :func:`tp_ext.parallelize`. They share no memory. Names are those of the unsharded model.
        process_group: the ranks of both models; None: all ranks of the job.
        names: a name of the target -> a name of the source; ``(name, i)`` for part i of a fused parameter, as its
            :class:`tp_ext.Sharding` has them (q, k, v; gate, up); or a list of these, which are concatenated along the
            dim in which their lengths add up. Others have equal names. Tied parameters need one of their names; one
            whose names are two tensors of the source gets the first, which ``check`` of :meth:`RefitPlan.run` compares.
        optimizers: ``(optimizer of the source, optimizer of the target)``, None on a rank without the model: their
            states move, too, by the name of the parameter. A target without state gets it; options of parameter groups
            stay the target's.
        buffers: whether persistent buffers move, too. Extra state does not.
        dtype: the values are those of ``source.to(dtype)``; optimizer states are not cast. None: as of the source.
        bucket_bytes: the most bytes that a rank sends, and receives, in one collective.
        atomic: holds what a rank receives until all ranks have received all, so that no failure leaves a target with
            weights of two models. Memory: the bytes that the rank receives, and a bucket; else two buckets.

    Each rank receives the elements of its target that its own source does not hold, once, in the narrowest of the
    dtypes that the values pass through: those of the source, of ``dtype``, and of the target. They come from a rank of
    the same host that holds them, if there is one, of several from the one that has sent least. Copies of the source on
    several ranks are taken to be equal (see ``check`` of :meth:`RefitPlan.run`).

    Communicates: one all-gather of objects: names, shapes and chunks.

    Raises:
        TypeError: an argument of another type.
        ValueError, on all ranks: neither model on any rank, or arguments that differ between ranks; an entry of the
            target without a source, or whose full shape is another one; a name in ``names`` that is not there; elements
            that no rank holds; models that share memory; optimizers of different classes, a state that is no tensor, or
            that the target's has, or makes by an option such as ``amsgrad``, and the source's has not; a tensor of
            floating point and one that is not;
            an entry on the meta device. Others as :func:`tp_ext.sharded_state_dict`.
    """
    for model in (source, target):
        if model is not None:
            joined(model)
    if process_group is not None and not isinstance(process_group, ProcessGroup):
        raise TypeError(f"process_group: {process_group!r} must be a ProcessGroup, of which this rank is a member")
    check_bool(buffers=buffers, atomic=atomic)
    check_int(least=64, bucket_bytes=bucket_bytes)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: {dtype!r} must be a floating-point torch.dtype, or None")
    names = checked_names(names)
    pair = (None, None) if optimizers is None else tuple(optimizers)
    if len(pair) != 2:
        raise ValueError(f"optimizers: {len(pair)} optimizers must be a pair, the source's and the target's")
    for optimizer, model, side in zip(pair, (source, target), SIDES, strict=True):
        check_optimizer(optimizer)
        if optimizer is not None and model is None:
            raise ValueError(f"optimizers: the {side}'s must be None on a rank that does not have the {side}")
    return RefitPlan((source, target), process_group, _RefitOptions(names, pair, buffers, dtype, bucket_bytes, atomic))


class _RefitOptions(NamedTuple):
    """Options of a plan, as those of :func:`plan`."""

    names: Mapping[str, Any]
    optimizers: tuple[Optimizer | None, ...]
    buffers: bool
    dtype: torch.dtype | None
    bucket_bytes: int
    atomic: bool


class RefitPlan:
    """The way of weights from one model to another, which :func:`plan` makes; it serves any number of runs.

    Attributes:
        bytes: the sum over all ranks of the bytes that a run receives.
    """

    def __init__(
        self, models: tuple[Stages | None, Stages | None], group: ProcessGroup | None, options: _RefitOptions
    ) -> None:
        self._models, self._optimizers = models, options.optimizers
        self._buffers, self._atomic = options.buffers, options.atomic
        self._group = (group or dist.group.WORLD) if dist.is_initialized() else None
        self._rank = 0 if self._group is None else self._group.rank()
        self._contents: list[Contents | None] = [None, None]
        same = {name: value for name, value in options._asdict().items() if name != "optimizers"}  # on all ranks
        arguments = ", ".join(f"{name}={value}" for name, value in same.items())
        reports = call_and_gather(self._group, lambda: self._report(arguments))
        check_reports(reports)
        self._device = device(self._group, reports)
        # tp_shm moves rows by all_to_all without a copy in between; gloo has none on lists
        self._takes_rows = (
            self._group is not None
            and self._device.type == "cpu"
            and self._group._get_backend(self._device).name() == "tp_shm"
        )
        # Memory of that size is in the caches when it is read, and malloc has it again: 64 MiB take twice as long
        bucket = min(options.bucket_bytes, _ON_CPU) if self._device.type == "cpu" else options.bucket_bytes
        routes = Routes(
            [report.source for report in reports],
            [report.target for report in reports],
            [report.host for report in reports],
            options.names,
            options.dtype,
            bucket,
        )
        rank, size = self._rank, len(reports)
        self._states, self._shared, self._ties = routes.states[rank], list(routes.shared()), routes.ties
        self.bytes = sum(move.bytes for round_ in routes.rounds for move in round_)
        self._rounds = [Round(moves, rank, size) for moves in routes.rounds]
        copies = [move for move in routes.copies if move.sender == rank]
        self._copies = [move.dtypes for move in copies]
        self._copied = sum(move.bytes for move in copies)
        self._copy_from = Views((move.source, move.sizes) for move in copies)
        self._copy_to = Views((move.target, move.sizes) for move in copies)
        repeats = [repeat for repeat in routes.repeats if repeat.rank == rank]
        self._repeat_from = Views((repeat.source, repeat.sizes) for repeat in repeats)
        self._repeat_to = Views((repeat.target, repeat.sizes) for repeat in repeats)
        store = None if self._group is None else dist.distributed_c10d._get_process_group_store(self._group)
        self._watch = Watch(store, reports[0].token, rank, size)

    @torch.no_grad()
    def run(self, *, check: bool = False) -> Moved:
        """Moves the weights, as they are now. Every rank of the group calls it.

        Args:
            check: compares checksums of the elements of the source that several ranks hold, and of tensors of the
                source that are one in the target, before anything is moved. The same on all ranks.

        Communicates: an all-to-all per bucket, and one all-reduce of one number, by which all ranks confirm: after the
        buckets if ``atomic``, else before them. With ``check`` also one all-gather of objects. The store of the group
        gets a sign of life of each rank four times a second, and the decision that all install.

        Raises:
            ValueError: on all ranks, nothing has changed then: a parameter of a model was replaced since the plan was
                made, or states of the optimizer came or went; with ``check``, ranks, or tensors to be one, that hold
                different values: it names all tensors.
            RankLost: a rank died, or did not call this within the timeout of the group.
        """
        check_bool(check=check)
        self._watch.begin()
        try:
            return self._move(check)
        finally:
            self._watch.end()

    def _move(self, check: bool) -> Moved:
        problem: Exception | None = None
        source = target = None
        try:
            # Kept, not raised: the others would wait for this rank in the first collective
            self._contents = source, target = self._read(again=True)
        except Exception as error:  # of any kind: what a model's own code raises, too
            problem = error
        if check:
            self._check_replicas(source, problem)
        if not self._atomic:
            # The first bucket cannot be undone, so all must be able to go on
            self._confirm(problem)
            self._prepare(target)
        bucket, received = self._memory()
        for round_, into in zip(self._rounds, received, strict=True):
            self._exchange(round_, source, target, bucket[: sum(round_.sent.bytes)], into)
            if not self._atomic:
                self._install(round_, into, target)
        lost = None
        if self._atomic:
            lost = self._confirm(problem)
            self._prepare(target)
            for round_, into in zip(self._rounds, received, strict=True):
                self._install(round_, into, target)
        del bucket, received
        copied = self._copy_within(source, target)
        if lost is not None:
            raise lost
        return Moved(
            sum(sum(round_.sent.bytes) for round_ in self._rounds),
            sum(sum(round_.received.bytes) for round_ in self._rounds),
            copied,
        )

    def _memory(self) -> tuple[Tensor, list[Tensor]]:
        """Returns a bucket for what all rounds send, and memory for what each receives: with ``atomic`` of its own."""
        out = max((sum(round_.sent.bytes) for round_ in self._rounds), default=0)
        into = [sum(round_.received.bytes) for round_ in self._rounds]
        if self._atomic:
            bucket, *received = memory([out, *into], self._device)
            return bucket, received
        bucket, received_in = memory([out, max(into, default=0)], self._device)
        return bucket, [received_in[:size] for size in into]

    def _read(self, *, again: bool = False) -> list[Contents | None]:
        """Returns the contents of both models; ``again``: those that were planned, else ValueError."""
        contents: list[Contents | None] = []
        for side, model, optimizer, planned in zip(SIDES, self._models, self._optimizers, self._contents, strict=True):
            content = None
            if model is not None:
                # Reading takes longer than moving small parameters. States of an optimizer come and go
                if planned is not None and optimizer is None and planned.is_of(live_tensors(model)):
                    contents.append(planned)
                    continue
                known = planned.parameters if again and planned is not None else None
                content = Contents(model, optimizer, self._buffers, side, known)
                if again and planned is not None:
                    check_unchanged(planned.description, content.description, side)
            contents.append(content)
        return contents

    def _report(self, arguments: str) -> RefitReport:
        self._contents = source, target = self._read()
        if source is not None and target is not None:
            taken = dict(source.storages)
            for address, name in target.storages:
                if address in taken:
                    raise ValueError(
                        f"target: {name!r} shares memory with {taken[address]!r} of the source, and must not"
                    )
        return RefitReport(
            host(),
            arguments,
            secrets.token_hex(8),
            None if source is None else source.description,
            None if target is None else target.description,
        )

    def _exchange(
        self, round_: Round, source: Contents | None, target: Contents | None, bucket: Tensor, into: Tensor
    ) -> None:
        """Sends what a round sends, by way of ``bucket`` unless the source's memory will do, and receives to ``into``,
        without ``atomic`` to the target's own memory where that will do."""
        lists = self._takes_rows and round_.apart
        sent = received = None
        # No source: this rank has a problem, and what it sends is not used
        if source is not None:
            sent = round_.sent.memory_of(source, self._device, lists)
            if sent is None:
                cast_into(round_.sent.of(bucket), source.of(round_.sent.views), round_.sent.dtypes)
        if target is not None and not self._atomic:
            received = round_.received.memory_of(target, self._device, lists)
        try:
            if lists:
                outs = round_.received.by_rank(round_.received.split(into) if received is None else received)
                ins = round_.sent.by_rank(round_.sent.split(bucket) if sent is None else sent)
                dist.all_to_all(outs, ins, group=self._group)
            else:
                out, value = into if received is None else received[0], bucket if sent is None else sent[0]
                dist.all_to_all_single(out, value, round_.received.bytes, round_.sent.bytes, group=self._group)
        except RuntimeError as error:
            self._watch_failed(error, not self._atomic)

    def _install(self, round_: Round, buffer: Tensor, target: Contents | None) -> None:
        received, lists = round_.received, self._takes_rows and round_.apart
        if target is not None and (self._atomic or received.memory_of(target, self._device, lists) is None):
            cast_into(target.of(received.views), received.of(buffer), received.dtypes)

    def _prepare(self, target: Contents | None) -> None:
        if target is not None:
            target.make_states(self._states)

    def _copy_within(self, source: Contents | None, target: Contents | None) -> int:
        """Copies what this rank has itself; returns the number of bytes."""
        if target is None:
            return 0
        if self._copies:
            assert source is not None
            cast_into(target.of(self._copy_to), source.of(self._copy_from), self._copies)
        values = target.of(self._repeat_from)
        cast_into(target.of(self._repeat_to), values, [()] * len(values))
        target.copy_states()
        return self._copied + sum(value.nbytes for value in values)

    def _confirm(self, problem: Exception | None) -> RankLost | None:
        """Returns when all ranks have confirmed; an error if one was lost afterwards, so that all install.

        Raises:
            ValueError, TypeError: a rank has a problem. RankLost: not all have confirmed.
        """
        if problem is not None and self._atomic:
            self._watch.decide(False)
        # In the store, too: the all-reduce may fail on a rank after it has served all others
        self._watch.confirm()
        flag = torch.tensor([int(problem is not None)], device=self._device)
        try:
            if self._group is not None:
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
            failed = bool(flag)
        except RuntimeError as error:
            if not self._atomic:
                self._watch_failed(error, False)
            if not self._watch.decide(self._watch.all_confirmed()):
                self._watch_failed(error, False)
            return self._lost(error, True, "all had confirmed before, and the target has its new weights")
        if self._atomic and not self._watch.decide(not failed) and not failed:
            # A rank that did not see all confirm has decided for all
            self._watch_failed(RuntimeError("another rank of the group failed"), False)
        if failed:
            call_on_all_ranks(self._group, lambda: _raise(problem))
        return None

    def _watch_failed(self, error: RuntimeError, mixed: bool) -> None:
        state = "the target has its old weights"
        if mixed:
            state = "atomic=False: the target is mixed, of old and new weights"
        raise self._lost(error, False, state) from error

    def _lost(self, error: RuntimeError, installed: bool, state: str) -> RankLost:
        """Returns the error that names the ranks that died; raises the collective's error if none did."""
        silent = self._watch.silent()
        if not silent and not installed:
            raise error
        ranks = dist.get_process_group_ranks(self._group) if self._group is not None else [0]
        lost = RankLost([ranks[rank] for rank in silent], installed, state)
        lost.__cause__ = error
        return lost

    def _check_replicas(self, source: Contents | None, problem: Exception | None) -> None:
        def checksums() -> dict[Any, tuple[int, ...]]:
            _raise(problem)
            sums: dict[Any, tuple[int, ...]] = {}
            for number, shared in enumerate(self._shared):
                if source is not None and (place := shared.places.get(self._rank)) is not None:
                    sums[number] = _sum(source.view(place, shared.sizes))
            for number, tie in enumerate(self._ties):
                for side, (rank, place) in enumerate(tie.holders):
                    if source is not None and rank == self._rank:
                        # Of two tensors, which may have two dtypes
                        sums[number, side] = _sum(source.view(place, tie.sizes).double())
            return sums

        reports = call_and_gather(self._group, checksums)
        ranks = dist.get_process_group_ranks(self._group) if self._group is not None else [0]
        different: dict[str, str] = {}
        for number, shared in enumerate(self._shared):
            by_value: dict[tuple[int, ...], list[int]] = {}
            for rank in shared.places:
                by_value.setdefault(reports[rank][number], []).append(ranks[rank])
            if len(by_value) > 1:
                different.setdefault(shared.text, " and ".join(map(str, by_value.values())))
        if different:
            (name, parts), *others = different.items()
            also = ", ".join(repr(other) for other, _ in others)
            raise ValueError(
                f"source: {name!r} must be equal on the ranks that hold the same elements, and differs between ranks "
                f"{parts}" + (f"; as do {also}" if also else "")
            )
        for number, tie in enumerate(self._ties):
            (rank, _), (other_rank, _) = tie.holders
            if reports[rank][number, 0] != reports[other_rank][number, 1]:
                raise ValueError(f"{tie.text}; they differ")


def _sum(view: Tensor) -> tuple[int, ...]:
    return tuple(checksum(bits_of(view)).tolist())


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem
