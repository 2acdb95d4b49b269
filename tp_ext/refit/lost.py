"""The death of a rank during a run: which ranks are gone, and what all others then do alike."""

import contextlib
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

_BEAT = 0.25  # seconds
_SILENT = 2.0  # seconds without a beat after which a rank counts as lost


class RankLost(RuntimeError):  # noqa: N818, a state of the job more than a mistake
    """Ranks died, or left, while :meth:`RefitPlan.run` moved weights.

    Attributes:
        ranks: their global ranks.
        installed: whether the target has all its new weights; else it has its old ones, unless ``atomic=False``.
    """

    def __init__(self, ranks: Sequence[int], installed: bool, state: str) -> None:
        super().__init__(f"process_group: ranks {list(ranks)} were lost while weights were moved; {state}")
        self.ranks, self.installed = tuple(ranks), installed


# [Note: the store of a group decides whether all install]
class Watch:
    """The signs of life of the ranks of a group, and their common decision, in the store of the group.

    Args:
        store: None: no rank can die, as among simulated ones.
        token: the same on all ranks, of this plan alone.
    """

    def __init__(self, store: dist.Store | None, token: str, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._prefix = f"tp_ext/refit/{token}/"
        self._run, self._decided = 0, ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begins to show that this rank lives."""
        self._run += 1
        if self._store is not None:
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._beat, args=(self._ended,), daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Ends it, and says that this rank has left the run alive."""
        if self._store is not None and self._thread is not None:
            self._ended.set()
            self._thread.join()
            with contextlib.suppress(Exception):  # of a store that is gone
                self._store.set(self._beat_of(self._rank), f"{self._run} left")

    def confirm(self) -> None:
        """Says that this rank has received all."""
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.add(f"{self._prefix}{self._run}/confirmed", 1)

    def decide(self, install: bool) -> bool:
        """Proposes whether all install, and returns the first proposal of all ranks. Without a store, or if it is gone,
        that of this rank."""
        if self._store is None:
            return install
        # Replaces the word of the run before, once: of several proposals the first finds it
        word = f"{self._run} {'install' if install else 'keep'}"
        try:
            self._decided = self._store.compare_set(f"{self._prefix}decided", self._decided, word).decode()
        except Exception:  # stores raise several types; without one this rank decides alone
            return install
        return self._decided == f"{self._run} install"

    def all_confirmed(self) -> bool:
        """Returns whether all ranks have received all, as far as is known."""
        try:
            return self._store is not None and self._store.add(f"{self._prefix}{self._run}/confirmed", 0) >= self._size
        except Exception:  # unknown counts as no: the caller then reports the loss
            return False

    def silent(self) -> list[int]:
        """Returns the ranks that show no life for two seconds. A store that is gone was that of rank 0, which holds it
        unless a launcher does."""
        if self._store is None:
            return []
        try:
            before = self._beats()
            time.sleep(_SILENT)  # eight beats: a rank that computes still shows some
            after = self._beats()
        except Exception:  # the store is gone, and with it the rank that holds it
            return [0]
        left = f"{self._run} left"
        return [
            rank
            for rank in range(self._size)
            if rank != self._rank and after[rank] != left and before[rank] == after[rank]
        ]

    def _beat(self, ended: threading.Event) -> None:
        number = 0
        with contextlib.suppress(Exception):
            while self._store is not None:
                self._store.set(self._beat_of(self._rank), f"{self._run} {number}")
                number += 1
                if ended.wait(_BEAT):
                    return

    def _beats(self) -> list[str]:
        assert self._store is not None
        keys = [self._beat_of(rank) for rank in range(self._size)]
        return [self._store.get(key).decode() if self._store.check([key]) else "" for key in keys]

    def _beat_of(self, rank: int) -> str:
        return f"{self._prefix}beat/{rank}"
