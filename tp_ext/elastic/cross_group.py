"""Process groups over ranks of several jobs, which torch's own functions cannot make, and ends of them."""

import datetime
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

_BACKEND = "gloo"


# [Note: groups over replicas are abandoned, not ended]
class CrossGroup:
    """A gloo group of ranks of several replicas, each of which may be a job of its own.

    ``new_group`` is called by all ranks of one job; here the ranks that are left of several jobs make a group from a
    store. It is made by a thread, and collectives are asynchronous, so that a rank that waits gives up when a replica
    is lost: gloo itself waits for the dead until its timeout, and the connection of a new group for 30 s. The threads
    are no daemons: the process ends after them, since the end of the interpreter would abort one in the code of gloo.

    Args:
        store: of the ranks of this group alone.
        name: that no other group of this process has.
        rank, size: in the group.
        timeout: of a collective, in seconds, after which what was abandoned ends.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int, timeout: float) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._registered: Any = name  # of a type that only some versions of torch have
        self._store = store
        self._timeout = datetime.timedelta(seconds=timeout)
        self._backend: Any = None
        self._error: Exception | None = None
        self._group: ProcessGroup | None = None
        self._works: list[Any] = []
        self._made = threading.Thread(target=self._connect)
        self._made.start()

    def _connect(self) -> None:
        try:
            self._backend = dist.ProcessGroupGloo(self._store, self.rank, self.size, self._timeout)
        except Exception as error:  # a thread has no caller that it could raise in
            self._error = error

    @property
    def is_made(self) -> bool:
        """True once the ranks are connected. RuntimeError: they could not be."""
        if self._made.is_alive():
            return False
        if self._error is not None:
            raise RuntimeError(f"{self.name}: its ranks could not be connected: {self._error}") from self._error
        return True

    def all_reduce(self, tensor: torch.Tensor, largest: bool = False) -> Any:
        """Begins an all-reduce, a sum or the largest element; returns the work."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work = self._backend.allreduce([tensor], options)
        # With the tensor: threads of gloo use its memory as long as the work goes on
        self._works.append((work, tensor))
        return work

    def forget(self) -> None:
        """Forgets the collectives that have ended."""
        self._works.clear()

    def process_group(self) -> ProcessGroup:
        """Returns it as a group for functions of ``torch.distributed``, whose global ranks are 0, 1, .. size - 1."""
        if self._group is None:
            group = ProcessGroup(self._store, self.rank, self.size)
            kind = ProcessGroup.BackendType.GLOO
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), kind, self._backend)
            group._set_default_backend(kind)
            group._set_group_name(self._registered)
            # What new_group would enter, which all ranks of one job have to call
            world: Any = c10d._world
            world.pg_map[group] = (_BACKEND, self._store)
            world.pg_names[group] = self.name
            world.pg_group_ranks[group] = {rank: rank for rank in range(self.size)}
            world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(_BACKEND)))
            world.pg_to_tag[group] = ""
            torch._C._distributed_c10d._register_process_group(self._registered, group)
            self._group = group
        return self._group

    def abandon(self) -> None:
        """Gives the group up without waiting: its collectives end at their timeout, in threads of gloo."""
        if self._group is not None:
            world: Any = c10d._world
            torch._C._distributed_c10d._unregister_process_group(self._registered)
            for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
                table.pop(self._group, None)
        self._group = None
        threading.Thread(target=self._end).start()

    def _end(self) -> None:
        """Keeps the group, and the memory that its threads still use, until nothing is under way."""
        self._made.join()
        while not all(work.is_completed() for work, _ in self._works):
            time.sleep(0.1)
        self._works.clear()
        self._backend = None
