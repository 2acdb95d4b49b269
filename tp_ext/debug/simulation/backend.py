"""The process-group backend of a simulated rank."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_ext.debug.simulation.baton import Baton, Waiting, user_line


class Call(Waiting):
    def __init__(self, kind, sends, receives, op=None, root=None):
        self.kind, self.sends, self.receives, self.op, self.root = kind, sends, receives, op, root
        tensors = [t for t in (sends or receives) if t is not None]
        self.dtype = tensors[0].dtype if tensors else None
        self.shape = tuple(tensors[0].shape) if tensors else ()
        self.line = user_line(sys._getframe(2))
        self.rank = -1
        self.key = (kind, self.dtype, op, root, self.shape if kind in ("all_reduce", "broadcast", "reduce") else None)

    def describe(self):
        op = "" if self.op is None else f", {self.op}"
        root = "" if self.root is None else f", root {self.root}"
        return f"{self.kind}({self.dtype} {list(self.shape)}{op}{root}) at {self.line}"


class Members:
    """The calls of one group: the n-th call of each rank belongs to the n-th of the others."""

    def __init__(self, baton: Baton, ranks: list[int]) -> None:
        self.baton, self.ranks = baton, ranks
        self.size = len(ranks)
        self.issued = [0] * self.size
        self.open: dict[int, list[Call | None]] = {}

    def issue(self, rank: int, call: Call) -> None:
        self.baton.check()
        number = self.issued[rank]
        self.issued[rank] += 1
        calls = self.open.setdefault(number, [None] * self.size)
        call.rank = self.ranks[rank]
        for other in calls:
            if other is not None and other.key != call.key:
                self.baton.fail(
                    f"simulate: rank {call.rank} calls {call.describe()}, which does not fit "
                    f"rank {other.rank}'s {other.describe()}"
                )
                self.baton.check()
        calls[rank] = call
        if all(c is not None for c in calls):
            del self.open[number]
            execute(calls)
            for c in calls:
                c.done = True


@torch.no_grad()
def execute(calls):
    p = len(calls)
    if calls[0].op is not None:
        results = []
        for k, call in enumerate(calls):
            if not call.receives:
                results.append(None)
                continue
            if calls[0].kind == "all_reduce" and k:
                results.append(results[0])
                continue
            results.append(combine([c.sends[k] for c in calls], calls[0].op))
        for call, result in zip(calls, results):
            if result is not None:
                call.receives[0].detach().copy_(result.view_as(call.receives[0]))
        return
    for k, call in enumerate(calls):
        for source, block in enumerate(call.receives):
            sent = calls[source].sends[k] if calls[source].sends else None
            if sent is not None and block is not None and sent is not block:
                block.detach().copy_(sent.detach().reshape(block.shape))


def combine(tensors, op):
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = tensors[0].detach().to(wide, copy=True)
    for t in tensors[1:]:
        t = t.detach().to(wide)
        if op in ("SUM", "AVG"):
            total += t
        elif op == "PRODUCT":
            total *= t
        elif op == "MAX":
            total = torch.maximum(total, t)
        elif op == "MIN":
            total = torch.minimum(total, t)
    if op == "AVG":
        total /= len(tensors)
    return total.to(dtype)


class _Work(dist.Work):
    def __init__(self, baton, rank, call):
        super().__init__()
        self._baton, self._rank, self._call = baton, rank, call

    def wait(self, timeout=None):
        self._baton.wait(self._rank, self._call)
        return True

    def get_future(self):
        self.wait()
        future = torch.futures.Future()
        future.set_result(self._call.receives)
        return future


def _op(op):
    op = getattr(op, "op", op)
    return str(op).rsplit(".", 1)[-1]


class SimulatedBackend(torch._C._distributed_c10d.Backend):
    def __init__(self, members: Members, rank: int) -> None:
        super().__init__(rank, members.size)
        self._members, self._rank, self._p = members, rank, members.size

    def getBackendName(self) -> str:
        return "simulated"

    def _issue(self, call: Call, opts: Any = None) -> dist.Work:
        self._members.issue(self._rank, call)
        work = _Work(self._members.baton, self._members.ranks[self._rank], call)
        if opts is None or not opts.asyncOp:
            work.wait()
        return work

    def allreduce(self, tensors, opts):
        for t in tensors:
            work = self._issue(Call("all_reduce", [t] * self._p, [t], _op(opts.reduceOp)), opts)
        return work

    allreduce_coalesced = allreduce

    def broadcast(self, tensors, opts):
        t, root = tensors[0], opts.rootRank
        receives: list[Tensor | None] = [None] * self._p
        receives[root] = t
        return self._issue(Call("broadcast", [t] * self._p, receives, root=root), opts)

    def all_gather_single(self, out, x, opts):
        return self._issue(Call("all_gather", [x] * self._p, list(out.view(-1).chunk(self._p))), opts)

    _allgather_base = all_gather_single

    def allgather(self, outs, xs, opts):
        return self._issue(Call("all_gather", [xs[0]] * self._p, outs[0]), opts)

    def reduce_scatter_single(self, out, x, opts):
        return self._issue(
            Call("reduce_scatter", list(x.reshape(-1).chunk(self._p)), [out], _op(opts.reduceOp)), opts
        )

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(self, out, x, out_sizes, in_sizes, opts):
        outs = list(out.split(out_sizes) if out_sizes else out.chunk(self._p))
        xs = list(x.split(in_sizes) if in_sizes else x.chunk(self._p))
        return self._issue(Call("all_to_all", xs, outs), opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts):
        return self._issue(Call("barrier", [], []), opts)
