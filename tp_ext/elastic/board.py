"""The common decisions of the ranks of all replicas, in a store: the first proposal counts."""

import json
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

YES, NO = "yes", "no"


class Replica(NamedTuple):
    """A replica as the others know it.

    Attributes:
        id: its name and a word of its own, so that a replica that comes back is another one.
        step: of its weights, when it joined.
        ranks: their number.
        family: a word that replicas have in common that fit each other.
    """

    id: str
    name: str
    step: int
    ranks: int
    family: str


class View(NamedTuple):
    """The replicas that take part, from some step on.

    Attributes:
        number: views follow one another.
        members: in the order of their ranks in the groups over replicas.
        fresh: ids of the members that need weights, optimizer state and step.
        source: the id of the member that gives them; "" if none is needed.
        step: the step in which the view begins.
        out: ids of all replicas that took part once and do no longer.
    """

    number: int
    members: tuple[Replica, ...]
    fresh: tuple[str, ...]
    source: str
    step: int
    out: tuple[str, ...]

    @property
    def ids(self) -> list[str]:
        return [replica.id for replica in self.members]

    def text(self) -> str:
        return json.dumps(self)

    @classmethod
    def of_text(cls, text: str) -> "View":
        number, members, fresh, source, step, out = json.loads(text)
        return cls(number, tuple(Replica(*fields) for fields in members), tuple(fresh), source, step, tuple(out))


# [Note: the first proposal in the store decides]
class Board:
    """The decisions of all ranks of all replicas.

    A key is written once: by ``compare_set``, of which the first one counts. So all ranks that read it do the same,
    whichever of them have died since.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._joined: dict[int, Replica] = {}

    def read(self, key: str) -> str | None:
        """Returns what was decided; None as long as nothing is."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def set(self, key: str, text: str) -> None:
        """Writes what this rank alone writes, and may write anew."""
        self._store.set(key, text)

    def first(self, key: str, proposal: str) -> str:
        """Proposes, and returns the first proposal."""
        return self._store.compare_set(key, "", proposal).decode()

    def count(self, key: str, more: int = 0) -> int:
        """Adds to a number, and returns it."""
        return self._store.add(key, more)

    def forget(self, *keys: str) -> None:
        """Deletes keys that no rank reads any more."""
        for key in keys:
            self._store.delete_key(key)

    def view(self, number: int, propose: Callable[[], View]) -> View:
        """Returns the view of this number; if there is none, ``propose()`` or what another rank has proposed first."""
        text = self.read(f"view/{number}")
        return View.of_text(text if text is not None else self.first(f"view/{number}", propose().text()))

    def propose(self, view: View) -> None:
        """Proposes a view."""
        self.first(f"view/{view.number}", view.text())

    def last_view(self, after: int) -> View | None:
        """Returns the newest view; None if there is none after the number ``after``."""
        latest = None
        while (text := self.read(f"view/{after + 1}")) is not None:
            latest, after = text, after + 1
        return None if latest is None else View.of_text(latest)

    def join(self, replica: Replica) -> None:
        """Says that a replica wants to take part."""
        self._store.set(f"join/{self.count('joined', 1)}", json.dumps(replica))

    def joined(self) -> list[Replica]:
        """Returns all replicas that wanted to take part at some time."""
        for number in range(1, self.count("joined") + 1):
            # A number without a replica: its rank has not written yet, or died before it did
            if number not in self._joined and (text := self.read(f"join/{number}")) is not None:
                self._joined[number] = Replica(*json.loads(text))
        return [replica for _, replica in sorted(self._joined.items())]
