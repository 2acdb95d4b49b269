"""Groups of tp_shm made and destroyed over one store that lives on: default groups and others, with and without
traffic, one rank late. Afterwards nothing is left: no name in /dev/shm, no descriptor, no thread, no key in the store.

    .venv/bin/python -m tests.soak.shm_groups --rounds 3000 --ranks 2,3 --seed 1

Its short form is in test_shm.py.
"""

import argparse
import os
import random
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tp_ext  # noqa: F401, registers tp_shm
from tests.shm.backends import launch, results


def held() -> dict[str, int]:
    """Counts what this process holds of the system."""
    with open("/proc/self/maps") as maps:
        mapped = sum("tp_shm." in line for line in maps)
    tasks, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    return {"threads": tasks, "descriptors": files, "mappings": mapped}


def traffic(group: Any, drawn: random.Random) -> None:
    """A few calls; some are not waited for before the group is destroyed."""
    rank, p = group.rank(), group.size()
    for _ in range(drawn.randrange(4)):
        dist.all_reduce(x := torch.full((drawn.choice((1, 40_000)),), rank + 1.0), group=group)
        assert x[-1].item() == p * (p + 1) / 2
    if drawn.random() < 0.5:
        work = dist.all_reduce(x := torch.ones(3), group=group, async_op=True)
        work.get_future().wait() if drawn.random() < 0.5 else work.wait()
        assert x.tolist() == [p] * 3
    if drawn.random() < 0.3 and p > 1:
        peer = dist.get_global_rank(group, 1 - rank) if rank < 2 else None
        if rank == 0:
            dist.send(torch.ones(5), peer, group=group)
        elif rank == 1:
            dist.recv(y := torch.zeros(5), peer, group=group)
            assert y.sum() == 5


def rounds(rank: int, p: int, folder: Path, count: int, seed: int, minutes: float) -> tuple[int, int, int]:
    """Rounds done, groups made, keys in the store. What is drawn is the same on all ranks."""
    drawn = random.Random(seed)
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("localhost", 0, p, True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(port.read_text()), p, False)
    before, keys, groups, number = {}, 0, 0, 0
    end = time.monotonic() + 60 * minutes
    for number in range(count + 1):
        late, seconds = drawn.randrange(4 * p), drawn.uniform(0, 0.02)
        if late == rank:
            time.sleep(seconds)
        limit = timedelta(seconds=60)
        dist.init_process_group("tp_shm", store=store, rank=rank, world_size=p, timeout=limit)
        groups += 1
        for _ in range(drawn.randrange(3)):
            members = sorted(drawn.sample(range(p), drawn.randint(1, p)))
            group = dist.new_group(members, timeout=limit)
            groups += 1
            if rank in members:
                state = random.Random(number)
                traffic(group, state)
                if state.random() < 0.7:
                    dist.destroy_process_group(group)
        traffic(dist.group.WORLD, random.Random(number))
        over = torch.tensor([float(time.monotonic() > end)])
        dist.all_reduce(over)
        dist.destroy_process_group()
        if number == min(20, count // 2):  # what torch starts with its first groups is there
            before, keys = held(), store.num_keys()
        if over.item():
            break
    after = held()
    for what in ("threads", "descriptors", "mappings"):
        assert after[what] <= before[what] + 1, (what, before, after)
    assert store.num_keys() <= keys + 64 + 8 * number, (keys, store.num_keys())
    dist.init_process_group("tp_shm", store=store, rank=rank, world_size=p)
    dist.barrier()  # the server goes with rank 0
    ours = store.num_keys() if rank == 0 else 0
    dist.destroy_process_group()
    return number, groups, ours


def soak(p: int, count: int, seed: int, minutes: float = 60) -> tuple[int, int, int]:
    """Rounds, groups of rank 0 and keys in the store at the end, over p ranks."""
    before = abandoned()
    answers = results(launch(rounds, p, count, seed, minutes, timeout=60 * minutes + 60))
    left = abandoned() - before
    assert not left, left
    return answers[0]


def abandoned() -> set[str]:
    """Names in /dev/shm whose process, the number in them, has ended; other jobs may have names of their own there."""
    names = (name for name in os.listdir("/dev/shm") if name.startswith("tp_shm."))
    return {name for name in names if not Path("/proc", name.split(".")[2]).exists()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60, help="the longest that one number of ranks may take")
    arguments = parser.parse_args()
    for p in map(int, arguments.ranks.split(",")):
        begin = time.monotonic()
        done, groups, keys = soak(p, arguments.rounds, arguments.seed, arguments.minutes)
        seconds = time.monotonic() - begin
        print(f"{p} ranks: {done} rounds, {groups} groups, {keys} keys in the store at the end, {seconds:.0f} s")


if __name__ == "__main__":
    main()
