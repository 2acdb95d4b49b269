"""Soak of tp_shm: random operations of many kinds, sizes and dtypes on several groups; every result is checked.

All ranks draw the same operations from the seed, each its own delays and order of waits. Inputs are small integers,
other ones for every rank and operation, so that every result is exact and known to all:

    .venv/bin/python -m tests.soak.shm_operations --operations 10000000 --ranks 2,3,4
"""

import argparse
import itertools
import os
import random
import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import tp_ext  # noqa: F401, registers tp_shm
from tests.helpers import ranks

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
KINDS = ["all_reduce"] * 6 + ["gather_tensor", "gather_list", "reduce_scatter", "broadcast", "exchange", "reduce"]
KINDS += ["gather", "scatter", "message", "message", "barrier"]
PATTERN = 8192  # period of the numbers from 0 to 3; no power of two divides the steps below
IN_FLIGHT = 12


@dataclass
class Rank:
    """A rank's state: groups with their members, numbers to take inputs from, works in flight, own randomness."""

    world: Any
    seed: int
    groups: list = field(default_factory=list)
    patterns: dict = field(default_factory=dict)
    pending: list = field(default_factory=list)
    unwaited: list = field(default_factory=list)
    checked: int = 0

    def __post_init__(self):
        self.rank, self.p = self.world.rank(), self.world.size()
        self.own = random.Random(f"{self.seed} {self.rank}")
        generator = torch.Generator().manual_seed(self.seed)
        numbers = torch.randint(4, (PATTERN,), generator=generator).repeat(-(-(LARGEST + PATTERN) // PATTERN))
        self.patterns = {dtype: numbers.to(dtype) for dtype in FLOATS + INTEGERS}

    def input(self, op, member, n=None):
        """Member `member`'s n numbers from 0 to 7 for an operation."""
        first = (op.salt + 61 * member) % PATTERN
        return self.patterns[op.dtype][first : first + (op.n if n is None else n)] + (op.salt >> member & 3)


@dataclass(frozen=True)
class Operation:
    """The facts that all ranks agree on."""

    number: int
    kind: str
    members: tuple
    group: Any
    n: int
    dtype: torch.dtype
    root: int  # among the members
    how: int  # 0 and 1: asynchronous
    salt: int


LARGEST = 1 << 19  # elements of a tensor that is sent whole


def operations(rank: Rank, count: int):
    """The operations of a seed, the same on all ranks; most are small, as most of a training's latency-bound ones."""
    draw = random.Random(rank.seed)
    for number in range(count):
        a, b = draw.getrandbits(30), draw.getrandbits(30)
        members, group = rank.groups[a % len(rank.groups)]
        size = draw.random()
        if size < 0.97:
            n = b % 129
        elif size < 0.9995:
            n = b % 20_000
        else:
            n = b % LARGEST
        kind = KINDS[(a >> 10) % len(KINDS)]
        dtype = (FLOATS + INTEGERS)[(a >> 16) & 7]
        yield Operation(
            number, kind, members, group, n, dtype, (a >> 19) % len(members), (b >> 20) & 3, (b >> 5) & 0x3FFF
        )


def issue(rank: Rank, op: Operation):
    """(work or None, what to check: pairs of a tensor and the values it must have)"""
    group, k, me = op.group, len(op.members), op.members.index(rank.rank)
    late = op.how < 2
    root = op.members[op.root]
    inputs = lambda n=None: [rank.input(op, member, n) for member in range(k)]  # noqa: E731
    mine = rank.input(op, me)
    if op.kind == "all_reduce":
        if op.salt % 4 == 0:
            work = dist.all_reduce(mine, dist.ReduceOp.MAX, group=group, async_op=late)
            return work, [(mine, torch.stack(inputs()).amax(0))]
        work = dist.all_reduce(mine, group=group, async_op=late)
        return work, [(mine, sum(inputs()))]
    if op.kind == "gather_tensor":
        out = mine.new_empty(k * op.n)
        return dist.all_gather_into_tensor(out, mine, group=group, async_op=late), [(out, torch.cat(inputs()))]
    if op.kind == "gather_list":
        outs = [torch.empty_like(mine) for _ in range(k)]
        work = dist.all_gather(outs, mine, group=group, async_op=late)
        return work, list(zip(outs, inputs(), strict=True))
    if op.kind == "reduce_scatter":
        n = op.n // k
        out = mine.new_empty(n)
        work = dist.reduce_scatter_tensor(out, mine[: n * k].contiguous(), group=group, async_op=late)
        return work, [(out, sum(inputs(n * k))[me * n : (me + 1) * n])]
    if op.kind == "broadcast":
        return dist.broadcast(mine, root, group=group, async_op=late), [(mine, rank.input(op, op.root))]
    if op.kind == "exchange":
        return _exchange(rank, op, k, me, late)
    if op.kind == "reduce":
        work = dist.reduce(mine, root, group=group, async_op=late)
        return work, [(mine, sum(inputs()))] if me == op.root else []
    if op.kind == "gather":
        outs = [torch.empty_like(mine) for _ in range(k)] if me == op.root else None
        work = dist.gather(mine, outs, root, group=group, async_op=late)
        return work, list(zip(outs, inputs(), strict=True)) if outs else []
    if op.kind == "scatter":
        out = torch.empty_like(mine)
        work = dist.scatter(out, inputs() if me == op.root else None, root, group=group, async_op=late)
        return work, [(out, mine)]
    if op.kind == "message":
        return _message(rank, op, k, me, root, late)
    return dist.barrier(group=group, async_op=late), []


def _exchange(rank, op, k, me, late):
    """Rows from a to b: (n + a + 2 b) % 7, or the same number for every pair."""
    rows = [[(op.n + a + 2 * b) % 7 if op.salt & 1 else op.n // k for b in range(k)] for a in range(k)]
    sent = rank.input(op, me, sum(rows[me]))
    out = sent.new_empty(sum(rows[a][me] for a in range(k)))
    splits = ([rows[a][me] for a in range(k)], rows[me]) if op.salt & 1 else (None, None)
    work = dist.all_to_all_single(out, sent, *splits, group=op.group, async_op=late)
    wanted = [rank.input(op, a, sum(rows[a])).split(rows[a])[me] for a in range(k)]
    return work, [(out, torch.cat(wanted))]


def _message(rank, op, k, me, root, late):
    """From the root to its neighbour in the group."""
    to, tag = (op.root + 1) % k, op.salt % 3
    if k == 1 or me not in (op.root, to):
        return None, []
    if me == op.root:
        call, peer, x, wanted = (dist.isend if late else dist.send), op.members[to], rank.input(op, me), []
    else:
        x = torch.empty_like(rank.input(op, me))
        call, peer, wanted = (dist.irecv if late else dist.recv), root, [(x, rank.input(op, op.root))]
    work = call(x, peer, group=op.group, tag=tag)
    return (work if late else None), wanted


def check(rank: Rank, op: Operation, wanted: list) -> None:
    for x, y in wanted:
        if not torch.equal(x, y):
            where = (x != y).nonzero()[:4].flatten().tolist() if x.shape == y.shape else x.shape
            raise AssertionError(
                f"seed {rank.seed}, rank {rank.rank} of {rank.p}: {op} differs at {where}: {x[where]}, not {y[where]}"
            )
    rank.checked += 1


def finish(rank: Rank, index: int) -> None:
    work, op, wanted = rank.pending.pop(index)
    work.wait()
    check(rank, op, wanted)


def soak(world: Any, backend: str, seed: int, count: int, report: float = 0.0) -> tuple[int, float, int]:
    """(operations checked, seconds, growth of the largest resident set in KiB), on one rank."""
    rank = Rank(world, seed)
    everyone = tuple(range(rank.p))
    pairs = list(itertools.combinations(everyone, 2)) if rank.p > 2 else []
    for members in [everyone, everyone, *pairs, everyone[:-1]][: 7 if rank.p > 2 else 2]:
        rank.groups.append((members, dist.new_group(members, backend=backend)))
    begin = last = time.monotonic()
    resident, own = 0, rank.own
    for op in operations(rank, count):
        if op.number == count // 4:
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if report and op.number % 1000 == 0 and rank.rank == 0 and time.monotonic() - last > report:
            last = time.monotonic()
            print(f"{op.number} operations, {op.number / (last - begin):.0f}/s", flush=True)
        if rank.rank not in op.members:
            continue
        chance = own.random()
        if chance < 0.001:
            time.sleep(own.random() * 0.002)
        work, wanted = issue(rank, op)
        if work is None:
            check(rank, op, wanted)
        elif op.how == 0 and chance > 0.9 and op.kind in ("all_reduce", "gather_tensor", "broadcast"):
            rank.unwaited.append((work.get_future(), op, wanted))  # the work itself is dropped
        else:
            rank.pending.append((work, op, wanted))
        while len(rank.pending) > own.random() * IN_FLIGHT:
            finish(rank, own.randrange(len(rank.pending)))
        if len(rank.unwaited) > IN_FLIGHT:
            settle(rank)
    while rank.pending:
        finish(rank, own.randrange(len(rank.pending)))
    settle(rank)
    for members, group in rank.groups:
        if rank.rank in members:
            dist.barrier(group=group)
            dist.destroy_process_group(group)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    return rank.checked, time.monotonic() - begin, grown


def settle(rank: Rank) -> None:
    """Works that no rank waited for end all the same; a future reports when."""
    for future, op, wanted in rank.unwaited:
        future.wait()
        check(rank, op, wanted)
    rank.unwaited.clear()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000, help="in all, over every number of ranks")
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks, one after the other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="tp_shm")
    arguments = parser.parse_args()
    names = set(os.listdir("/dev/shm"))
    over = list(map(int, arguments.ranks.split(",")))
    count, seconds = arguments.operations // len(over), 0.0
    for p in over:
        answers = ranks.run(soak, p, arguments.backend, arguments.seed + p, count, 30.0, timeout=36_000)
        ranks.close()
        took = max(answer[1] for answer in answers)
        seconds += took
        grown = max(answer[2] for answer in answers)
        print(f"{p} ranks: {count} operations, {sum(a[0] for a in answers)} results checked, none wrong; {took:.0f} s,")
        print(f"  {count / took:.0f} operations/s; resident set +{grown} KiB after the first quarter", flush=True)
    left = {name for name in set(os.listdir("/dev/shm")) - names if name.startswith("tp_shm")}
    print(f"{count * len(over)} operations in {seconds:.0f} s; left in /dev/shm: {sorted(left) or 'nothing'}")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
