"""Signs of life of the ranks of all replicas, in a store."""

import contextlib
import threading
import time
from collections.abc import Iterable

import torch.distributed as dist

LEFT = "left"


class Pulse:
    """The signs of life of this rank, and of others as this rank sees them.

    A thread changes a key of the store several times within ``silence``. A replica is gone if the key of one of its
    ranks has not changed for so long, or says that the rank has left.

    Args:
        store: of this object alone: another thread that waits in it would hold up the signs of life.
        replica: the id of the replica.
        rank, size: in the replica.
        silence: seconds.
    """

    def __init__(self, store: dist.Store, replica: str, rank: int, size: int, silence: float) -> None:
        self._store, self._size, self._silence = store, size, silence
        self._own = self._key(replica, rank)
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._ended = threading.Event()
        self._store.set(self._own, "0")
        self._thread = threading.Thread(target=self._beat, args=(store.clone(),), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the signs of life, and says that this rank has left."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            with contextlib.suppress(Exception):  # of a store that is gone
                self._store.set(self._own, LEFT)

    def gone(self, replicas: Iterable[str], ranks: int | None = None) -> set[str]:
        """Returns which of the replicas are gone. It has to be called again and again: a first look cannot tell
        since when a rank is silent.

        Args:
            ranks: the number of ranks of each; None: as many as this one has.
        """
        size = self._size if ranks is None else ranks
        return self._look({self._key(replica, rank): replica for replica in replicas for rank in range(size)})

    def others_gone(self, replica: str) -> bool:
        """Returns whether another rank of this rank's replica is gone; as :meth:`gone`."""
        keys = {key: replica for rank in range(self._size) if (key := self._key(replica, rank)) != self._own}
        return bool(keys) and bool(self._look(keys))

    def _look(self, keys: dict[str, str]) -> set[str]:
        asked = time.monotonic()
        values, now = self._store.multi_get(list(keys)), time.monotonic()
        # A store that does not answer has no sign of life of anybody: that time says nothing about the ranks. The
        # server of torch's TCPStore stands still while it looks up the name of a new connection's address
        unknown = now - asked
        silent = set()
        for (key, replica), value in zip(keys.items(), values, strict=True):
            before, since = self._seen.get(key, (b"", now))
            since = now if before != value else since + unknown
            self._seen[key] = value, since
            if value == LEFT.encode() or now - since >= self._silence:
                silent.add(replica)
        return silent

    def _beat(self, store: dist.Store) -> None:
        number = 0
        with contextlib.suppress(Exception):  # of a store that is gone; then all ranks notice
            while not self._ended.wait(self._silence / 6):
                number += 1
                store.set(self._own, str(number))

    def _key(self, replica: str, rank: int) -> str:
        return f"beat/{replica}/{rank}"
