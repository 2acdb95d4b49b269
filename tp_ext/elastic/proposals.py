"""Proposals of views: which replicas are to take part, and which one gives its weights to those that are new."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from tp_ext.elastic.board import YES, Board, Replica, View
from tp_ext.elastic.fit import difference
from tp_ext.elastic.pulse import Pulse


class Proposals:
    """The views that this rank would propose, by what it knows.

    Args:
        size: the number of ranks of each replica.
    """

    def __init__(self, board: Board, pulse: Pulse, size: int) -> None:
        self._board, self._pulse, self._size = board, pulse, size
        self._refused: set[str] = set()

    def note_move(self, view: View, replica: str, again: bool) -> None:
        """Records the step of the weights that a new replica receives. ``again``: this rank has received weights
        before, so its replica may mix the weights of two senders."""
        self._board.first(f"given/{replica}", str(view.step))
        if again:
            self._board.first(f"mixed/{replica}", YES)

    def note_moved(self, replica: str) -> None:
        """Notes that this rank of a new replica has got weights."""
        self._board.count(f"moved/{replica}", 1)

    def joiners(self, view: View | None, family: str | None) -> list[Replica]:
        """Returns the replicas of a family that wait to take part; None: that of the first one that waits."""
        # Those of other families may have other numbers of ranks
        alive = [
            replica
            for replica in self.waiting(view)
            if family in (None, replica.family) and not self._pulse.gone([replica.id], replica.ranks)
        ]
        return [replica for replica in alive if replica.family == alive[0].family]

    def waiting(self, view: View | None) -> list[Replica]:
        """Returns the replicas that have asked to take part, some of which may be gone."""
        known = set() if view is None else {*view.ids, *view.out}
        return [replica for replica in self._board.joined() if replica.id not in known]

    def refuse(self, replicas: Sequence[Replica], reference: Replica) -> None:
        """Notes what of each replica of another family differs from a replica."""
        for replica in replicas:
            if replica.family != reference.family and replica.id not in self._refused:
                self._refused.add(replica.id)
                text = difference(self._board, replica, reference) or f"{reference.name!r} began with another model"
                self._board.first(f"unfit/{replica.id}", text)

    def running(self, view: View | None) -> Replica | None:
        """Returns the first member of a view that is not gone. This replica need not be a member."""
        gone = set() if view is None else self._pulse.gone(view.ids, view.members[0].ranks)
        return next((member for member in (view.members if view else ()) if member.id not in gone), None)

    def first(self, last: View | None, joiners: Sequence[Replica]) -> View:
        """Returns a view of replicas that are all new, after the last one, whose members are all gone."""
        giver = self._giver(joiners)
        number, out = (1, ()) if last is None else (last.number + 1, (*last.out, *last.ids))
        return View(number, tuple(joiners), tuple(joiner.id for joiner in joiners), giver.id, giver.step, out)

    def with_joiners(self, view: View, step: int) -> View:
        """Returns the view with those that wait."""
        gone = self._pulse.gone(view.ids)
        # This rank may not know yet that its own replica is gone
        members = [member for member in view.members if member.id not in gone] or list(view.members)
        joiners = self.joiners(view, view.members[0].family)
        out = (*view.out, *(id_ for id_ in view.ids if id_ not in [member.id for member in members]))
        fresh = tuple(joiner.id for joiner in joiners)
        # Any member has the weights of this step: the first one gives them
        return View(view.number + 1, (*members, *joiners), fresh, members[0].id if fresh else "", step, out)

    def survivors(self, view: View, gone: AbstractSet[str]) -> View:
        """Returns the view without those that are gone."""
        members = tuple(member for member in view.members if member.id not in gone)
        fresh = tuple(id_ for id_ in view.fresh if id_ not in gone)
        source, step = "", view.step
        if fresh and len(fresh) < len(members):
            # The member that was to give its weights may be among those that are gone
            source = next(member.id for member in members if member.id not in fresh)
        elif fresh:
            giver = self._giver(members)
            source, step = giver.id, giver.step
        return View(view.number + 1, members, fresh, source, step, (*view.out, *sorted(gone)))

    def _giver(self, replicas: Sequence[Replica]) -> Replica:
        """Returns the replica that gives its weights if all are new, with the step of its weights: of those whose ranks
        all have their own, or all those that they got, the one with the largest step."""
        whole = []
        for replica in replicas:
            moved = self._board.count(f"moved/{replica.id}")
            if moved == 0:
                whole.append(replica)
            elif moved == self._size and self._board.read(f"mixed/{replica.id}") is None:
                whole.append(replica._replace(step=int(self._board.read(f"given/{replica.id}") or replica.step)))
        if not whole:
            raise RuntimeError(
                "begin: no replica is left that has the weights as a whole; load a checkpoint and begin with another "
                "store"
            )
        return max(whole, key=lambda replica: replica.step)
