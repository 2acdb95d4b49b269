"""Data parallelism over replicas that come and go: who takes part in a step, and the mean of their gradients."""

import json
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from tp_ext._checks import check_number
from tp_ext._object_collectives import all_gather_objects, call_and_gather
from tp_ext.elastic.board import NO, YES, Board, View
from tp_ext.elastic.buffers import AllReduce, SharedBuffers
from tp_ext.elastic.cross_group import CrossGroup
from tp_ext.elastic.fit import Fit, check_arguments, persistent, states_to_give, take_states
from tp_ext.elastic.gradients import MeanGradients
from tp_ext.elastic.joining import Joining
from tp_ext.elastic.lost import ReplicaLost
from tp_ext.elastic.phases import LOOK, GivenUpError, Pause, Phases
from tp_ext.elastic.proposals import Proposals
from tp_ext.elastic.pulse import Pulse
from tp_ext.elastic.step_context import StepContext
from tp_ext.model.stages import Stages, joined
from tp_ext.refit.lost import RankLost
from tp_ext.refit.refit_plan import plan

_NEXT = {"begin": "average", "average": "commit", "commit": "begin"}
_ATTEMPTS = 3  # with the same replicas


class ElasticData:
    """Data parallelism over replicas of a model that come and go.

    Each replica is a group of ranks that hold the model once, over ``tp``, ``cp`` and ``pp``; it may be a job of its
    own. A step is that of one process on the tokens of all replicas that take part::

        elastic = tp_ext.parallel.ElasticData(model, optimizer, group=group, store=store, replica="host 3")
        while elastic.step < steps:
            with elastic.begin():  # who takes part; a new replica gets weights, states and the step
                loss, count = ...  # the mean over count valid tokens of this replica's batch of elastic.step
                loss.backward()
                elastic.average(count)
                optimizer.step()
                optimizer.zero_grad()
                elastic.commit()

    If a rank dies, at any moment, its replica is lost. The others finish the step, within ``timeout``: if not all of
    them have the sum of the gradients yet, they take it anew without the lost replica, over the tokens that are left;
    else it still counts, for all alike. The other ranks of its replica get :class:`ReplicaLost`. Replicas that join get
    weights, buffers, optimizer state, options of the parameter groups, states of ``schedulers`` and step from the
    memory of another one (:mod:`tp_ext.refit`), before a step. One whose ranks, parameters (names, shapes, dtypes,
    ``requires_grad``, layouts, groups of the optimizer), buffers or arguments here are others is refused before that,
    and those that run do not wait for it. Where these or the options differ later, ``average`` finds out before it
    sums: the larger part of the replicas goes on without the others, of equal parts that of the oldest.

    Args:
        model, optimizer: of this replica, of the same layout in all: a module, or the list of a rank's stages.
        group: all ranks of this replica.
        store: that all replicas share, such as a ``TCPStore`` of the launcher, and that outlives them. Its keys are
            under ``"tp_ext/elastic"``.
        replica: its name, for people; one that comes back may have its old name.
        timeout: seconds. A rank that shows no life for a quarter of them is lost.
        min_replicas: with fewer a step does not begin.
        schedulers: of the learning rate, or other objects with ``state_dict()`` and ``load_state_dict()``, whose states
            a replica that joins gets.

    Attributes:
        step: the number of steps that the weights have had. It may be set before the first ``begin``, as after a
            checkpoint was loaded: if no replica takes part yet, the one with the largest number gives its weights.
        replicas: the names of those that took part in the last ``average``, a tuple.

    Memory: a second copy of the gradients from ``average`` to its return.

    Communicates: over ``group`` an exchange of objects; over the replicas by gloo, whatever ``group`` uses.

    Raises:
        On all ranks of ``group``: TypeError: an argument of another type. ValueError: a ``timeout`` not above 0,
            ``min_replicas`` below 1; arguments that differ between the ranks.
    """

    def __init__(
        self,
        model: Stages,
        optimizer: Optimizer,
        *,
        group: ProcessGroup,
        store: dist.Store,
        replica: str,
        timeout: float = 5.0,
        min_replicas: int = 1,
        schedulers: Sequence[Any] = (),
    ) -> None:
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"group: {type(group).__name__} must be a ProcessGroup, that of all ranks of this replica")
        schedulers = list(schedulers)

        def describe() -> tuple[str, str]:
            self._modules = joined(model)
            check_arguments(optimizer, store, replica, timeout, min_replicas, schedulers)
            return json.dumps([replica, timeout, min_replicas]), secrets.token_hex(8)

        reports = call_and_gather(group, describe)
        self._model, self._optimizer, self._name, self._schedulers = model, optimizer, replica, schedulers
        self._rank, self._size = group.rank(), group.size()
        self._timeout, self._silence, self._least = timeout, timeout / 4, min_replicas
        self.step = 0
        self.replicas: tuple[str, ...] = ()
        for rank, (other, _) in enumerate(reports):
            if other != reports[0][0]:
                raise ValueError(
                    f"replica, timeout, min_replicas: must be the same on all ranks of group, and are {reports[0][0]} "
                    f"on rank 0, {other} on rank {rank}"
                )
        self._id = f"{replica}/{reports[0][1]}"
        self._store = dist.PrefixStore("tp_ext/elastic", store.clone())
        self._board = Board(self._store)
        self._pulse = Pulse(self._store.clone(), self._id, self._rank, self._size, self._silence)
        # At the end of the process, too: a thread must not use the store then
        weakref.finalize(self, self._pulse.end)
        all_gather_objects(None, group)  # now all ranks have shown life, which the others may look for
        self._proposals = Proposals(self._board, self._pulse, self._size)
        self._phases = Phases(self._board, self._pulse, self._size)
        same = {"timeout": timeout, "min_replicas": min_replicas}
        self._fit = Fit(self._board, self._id, self._rank, self._modules, optimizer, schedulers, same)
        self._joining = Joining(self._board, self._proposals, self._fit, self._id, replica, self._size, self._silence)
        self._buffers = SharedBuffers()
        self._view: View | None = None
        self._cross: CrossGroup | None = None
        self._next, self._closed = "begin", False
        self._unexplained, self._moved = 0, False
        self._cause: Exception | None = None

    def begin(self, *, wait: float = 300.0) -> StepContext:
        """Begins a step: agrees who takes part, and lets replicas join.

        Args:
            wait: seconds to wait for ``min_replicas`` and, in a replica that joins, for the others.

        Returns:
            A context manager, which may be used or not. Inside, an error of a collective of this replica whose cause is
            the death of one of its ranks becomes :class:`ReplicaLost`.

        Communicates: a few words with the store. When replicas join: weights, buffers and states of the optimizer, from
        each rank of one replica to the rank of the same number of each that joins.

        Raises:
            ReplicaLost: this replica has lost a rank. TimeoutError: too few replicas within ``wait`` seconds, on all
            ranks. ValueError, on all ranks of a replica that joins: it does not fit those that run. RuntimeError: not
            after ``commit``; no replica is left that has the weights as a whole.
        """
        check_number(least=0, wait=wait)
        self._expect("begin")
        deadline = time.monotonic() + wait
        view = self._view or self._join(deadline)
        # Again in the new view, in which there may be too few, or more that want to join
        while self._changes(view, deadline):
            view = self._enter(self._following(view, lambda view: self._proposals.with_joiners(view, self.step)))
        self._next = "average"
        return StepContext(self._leave)

    def average(self, count: float | Tensor) -> None:
        """Replaces the gradients by the gradients of the mean loss over the tokens of all replicas that take part.
        Takes the persistent buffers that were written since the last step from the first of them, as DDP does.

        Args:
            count: the number of valid tokens over which this replica's loss is the mean, the same on all its ranks; 0
                for a batch without any.

        Communicates, over the ranks of the same number of all replicas: an all-reduce of a few numbers, one of four
        numbers per parameter, one of one number per buffer, and all-reduces of the gradients and the written buffers,
        64 MiB at once; again without the replicas that are lost meanwhile. The host waits for the result.

        Raises:
            ReplicaLost: this replica has lost a rank. TypeError, ValueError: a ``count`` that is no number of at least
            0; gradients of other dtypes than another replica's. ValueError, on all ranks of this replica: its
            parameters or the options of its optimizer are not those of the others, which go on. RuntimeError: not after
            ``begin``.
        """
        self._expect("average")
        number = float(count.item()) if isinstance(count, Tensor) and count.numel() == 1 else count
        check_number(least=0, count=number)
        assert self._view is not None
        mean = MeanGradients([param for param in self._modules.parameters() if param.requires_grad], float(number))
        while not self._summed(mean, self._view):
            self._enter(self._following(self._view, self._survivors))
        mean.install()
        self._buffers.install(self._persistent())
        self.replicas = tuple(replica.name for replica in self._view.members)
        self._next = "commit"

    def commit(self) -> None:
        """Ends a step, after ``optimizer.step()``: the weights are those of the next one. Communicates nothing.

        Raises:
            RuntimeError: not after ``average``.
        """
        self._expect("commit")
        self.step += 1
        self._next = "begin"

    def close(self) -> None:
        """Leaves, so that the others need not find out; also done when an error leaves a step."""
        self._closed = True
        self._pulse.end()
        self._abandon()

    def _expect(self, act: str) -> None:
        if self._closed:
            raise RuntimeError(f"{act}: must not follow close, or the loss of this replica")
        if self._next != act:
            raise RuntimeError(f"{act}: must not come now; after {_before(self._next)} comes {self._next}")

    # Views

    def _join(self, deadline: float) -> View:
        """Enters the first view that has this replica as a member, and returns it or a later one."""
        try:
            return self._enter(self._joining.view(self.step, self._least, deadline))
        except ValueError:
            self.close()
            raise

    def _changes(self, view: View, deadline: float) -> bool:
        """Returns whether the step begins with other replicas, as all members decide together."""
        key = f"begin/{view.number}/{self.step}"
        if self._rank == 0 and view.ids[0] == self._id and self.step >= 2:
            old = f"{view.number}/{self.step - 2}"  # all have read them, since all have summed the step after
            self._board.forget(f"begin/{old}", *(f"{what}/sum/{old}" for what in ("arrived", "done", "decided")))
        while (word := self._board.read(key)) is None:
            self._proposals.refuse(self._proposals.waiting(view), view.members[0])
            joiners = self._proposals.joiners(view, view.members[0].family)
            if len(view.members) + len(joiners) >= self._least:
                self._board.first(key, YES if joiners else NO)
            elif self._pulse.gone(view.ids):
                self._board.first(key, YES)
            elif time.monotonic() > deadline:
                raise TimeoutError(
                    f"begin: min_replicas = {self._least} must be there, and {len(view.members) + len(joiners)} are"
                )
            else:
                time.sleep(LOOK)
        return word == YES

    def _enter(self, view: View) -> View:
        """Enters a view, or the next one in which that is possible, and returns it."""
        while not self._entered(view):
            view = self._following(view, self._survivors)
        if self._id in view.fresh:
            self.step = view.step
        self._view = view._replace(fresh=(), source="")
        return self._view

    def _entered(self, view: View) -> bool:
        self._abandon()
        phase = f"enter/{view.number}"
        error: Exception | None = None
        if self._phases.arrived(phase, view):
            try:
                self._cross = self._group_of(view.ids, f"{view.number}", phase)
                if view.source and (self._id == view.source or self._id in view.fresh):
                    self._move(view, phase)
            except (GivenUpError, RuntimeError) as failure:
                error = failure
            except (ValueError, TypeError) as failure:
                # A replica that does not fit must not stop those that run
                if self._id in view.fresh:
                    self.close()
                    raise
                error = failure
        return self._agreed(phase, view, error)

    def _move(self, view: View, phase: str) -> None:
        """Moves weights and states from one member to those that are new, each rank to the one of the same number."""
        ids = [view.source, *(replica for replica in view.fresh if replica != view.source)]
        if len(ids) == 1:
            return
        gives = self._id == view.source
        # A group of their own, in which no other rank waits
        few = self._group_of(ids, f"{view.number}/state", phase)
        try:
            model, optimizer = (self._model, self._optimizer)
            pair = (optimizer, None) if gives else (None, optimizer)
            source, target = (model, None) if gives else (None, model)
            moves = plan(source, target, process_group=few.process_group(), optimizers=pair)
            states = states_to_give(optimizer, self._schedulers) if gives else None
            given = all_gather_objects(states, few.process_group())[0]
            if not gives:
                # Before they come: of a replica that has got weights the others must know of which step these are
                self._proposals.note_move(view, self._id, self._moved)
            lost = None
            try:
                moves.run()
            except RankLost as error:
                # All had confirmed: these weights are whole, though ranks are gone since
                if not error.installed:
                    raise
                lost = error
            if not gives and given is not None:
                take_states(given, optimizer, self._schedulers)
                if not self._moved:
                    self._moved = True
                    self._proposals.note_moved(self._id)
            if lost is not None:
                raise lost
        finally:
            few.abandon()

    def _following(self, view: View, propose: Callable[[View], View]) -> View:
        """Returns the view after this one; this replica must be a member."""
        following = self._board.view(view.number + 1, lambda: propose(view))
        if self._id not in following.ids:
            self._joining.check()
            raise self._lost("the others have gone on without it")
        return following

    def _survivors(self, view: View) -> View:
        """Returns the next view, without the replicas that are gone; waits until it is clear which are.

        Raises:
            ReplicaLost: this one is. RuntimeError: again and again something fails, and all replicas live.
        """
        until = time.monotonic() + 2 * self._silence
        gone: set[str] = set()
        while not gone and time.monotonic() < until:
            if (later := self._board.last_view(view.number)) is not None:
                return later
            self._joining.check()
            gone = self._pulse.gone(view.ids)
            if self._id in gone:
                raise self._lost("one of its ranks died")
            gone |= {id_ for id_ in view.ids if self._board.read(f"unfit/{id_}") is not None}
            time.sleep(LOOK)
        self._unexplained = 0 if gone else self._unexplained + 1
        if self._unexplained > _ATTEMPTS:
            self.close()
            raise RuntimeError(f"replica: {self._name!r} has failed {_ATTEMPTS} times, while all live") from self._cause
        return self._proposals.survivors(view, gone)

    # The sum

    def _agreed(self, phase: str, view: View, error: Exception | None) -> bool:
        if error is not None:
            self._cause = error
        agreed = self._phases.agreed(phase, view, error)
        self._unexplained = 0 if agreed else self._unexplained
        return agreed

    def _summed(self, mean: MeanGradients, view: View) -> bool:
        """Returns whether all ranks have the mean of the gradients of these replicas."""
        phase = f"sum/{view.number}/{self.step}"
        error: Exception | None = None
        self._fit.publish()
        if not self._phases.arrived(phase, view):
            error = GivenUpError()
        else:
            try:

                def all_reduce(tensor: Tensor, largest: bool) -> None:
                    self._all_reduce(tensor, largest, phase, view)

                total = self._total(mean.count, view, all_reduce)
                self._buffers.receive(self._persistent(), view.ids[0] == self._id, all_reduce)
                mean.sum(total, all_reduce)
            except (GivenUpError, RuntimeError) as failure:
                error = failure
            except (ValueError, TypeError) as failure:
                self._phases.refuse(phase, failure)
        return self._agreed(phase, view, error)

    def _total(self, count: float, view: View, all_reduce: AllReduce) -> float:
        """Returns the number of tokens of all replicas. GivenUpError: a rank of this number describes itself otherwise
        than most."""
        numbers = torch.zeros(1 + len(view.members), dtype=torch.float64)
        numbers[0], numbers[1 + view.ids.index(self._id)] = count, self._fit.number
        all_reduce(numbers, False)
        total, *words = numbers.tolist()
        if not self._fit.all_fit(view.ids, words, self._name):
            raise GivenUpError
        return total

    def _persistent(self) -> list[Tensor]:
        return [buffer for _, buffer in persistent(self._modules)]

    def _all_reduce(self, tensor: Tensor, largest: bool, phase: str, view: View) -> None:
        if len(view.members) == 1:
            return
        assert self._cross is not None
        work = self._cross.all_reduce(tensor, largest)
        begun = time.monotonic()
        while not work.is_completed():
            waited = time.monotonic() - begun
            if waited > LOOK and self._phases.is_given_up(phase, view):
                raise GivenUpError
            time.sleep(0.0001 if waited < 0.01 else 0.001)
        work.wait()  # raises its error
        self._cross.forget()

    def _group_of(self, ids: list[str], name: str, phase: str) -> CrossGroup:
        """Returns a group of the ranks of this number of some members, once it is made."""
        full = f"tp_ext/elastic/{self._id}/{name}/{self._rank}"
        store = dist.PrefixStore(f"groups/{name}/{self._rank}/", self._store.clone())
        cross = CrossGroup(store, full, ids.index(self._id), len(ids), self._timeout)
        pause = Pause()
        try:
            while not cross.is_made:
                if self._board.read(f"decided/{phase}") is not None:
                    raise GivenUpError
                pause()
        # An interrupt, too, must let go of the thread that connects
        except BaseException:
            cross.abandon()
            raise
        return cross

    def _lost(self, reason: str) -> ReplicaLost:
        self.close()  # the other replicas need not wait for the silence
        return ReplicaLost(self._name, reason)

    def _abandon(self) -> None:
        if self._cross is not None:
            self._cross.abandon()
            self._cross = None

    def _leave(self, error: BaseException) -> BaseException:
        """Leaves after an error in a step, and returns that of this replica: ReplicaLost if a rank of it died."""
        self.close()  # the others need not wait until this rank has found the cause
        until = time.monotonic() + 2 * self._silence
        while isinstance(error, RuntimeError) and not isinstance(error, ReplicaLost) and time.monotonic() < until:
            if self._pulse.others_gone(self._id):
                return self._lost("one of its ranks died")
            time.sleep(LOOK)
        return error


def _before(act: str) -> str:
    return next(previous for previous, following in _NEXT.items() if following == act)
