"""Soak of checkpoints on one path: savers of several ranks, rival savers and readers at once, kill -9, full disks.

Every save fills model and optimizer with its step, so a load of two checkpoints shows. Every load must find a whole
checkpoint, with all numbers and ``extra`` of one step, on all ranks of the reader:

    .venv/bin/python -m tests.soak.checkpoints --minutes 5 --seed 1 --teams 2,1 --readers 1,1,2
"""

import argparse
import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist

import tp_ext
from tests.helpers import ranks
from tests.helpers.numbered import build, fill

TEAMS = 8  # a step is the number of a save times this, plus the number of its team
MARKER = -1.0


@dataclass
class Setting:
    """A soak: ``teams`` are the sizes of the teams of savers, ``readers`` those of the teams of readers."""

    path: Path
    seed: int = 0
    seconds: float = 5.0
    teams: tuple = (2, 1)
    readers: tuple = (1, 2)
    kills: bool = True
    full_disks: bool = True
    exchange: bool = True  # renameat2, or two renames as on file systems that lack it
    flock: bool = True  # or the existence of the lock file, as on file systems that refuse flock
    lock_timeout: float = 60.0

    @property
    def stop(self):
        return self.path.parents[1] / "stop"


@dataclass
class Team:
    """Processes that save or load together, and the pipes on which they report."""

    number: int
    size: int
    saves: bool
    workers: list = field(default_factory=list)
    pipes: list = field(default_factory=list)


def numbers(model, optimizer):
    """All different numbers in model and optimizer."""
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    found = {number for tensor in tensors for number in tensor.unique().tolist()}
    return found | {optimizer.param_groups[0]["lr"]}


def save_on(setting, team, group, rank, draw, report):
    model, optimizer = build(group)
    step = tp_ext.load_checkpoint(setting.path, model, optimizer, group=group)["step"] // TEAMS
    while not agree(setting.stop.exists(), group):
        step += 1
        fill(model, optimizer, step * TEAMS + team)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        full = setting.full_disks and draw.random() < 0.1  # on this rank
        if full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (draw.choice([0, 100, 5000]), limits[1]))
        disks_full = agree(full, group)
        begin = time.monotonic()
        try:
            tp_ext.save_checkpoint(
                setting.path,
                model,
                optimizer,
                group=group,
                lock_timeout=setting.lock_timeout,
                step=step * TEAMS + team,
            )
            report("saves")
            if rank == 0 and time.monotonic() - begin > 1:
                report("saves that took more than a second")
        except TimeoutError:
            report("saves refused: the lock was taken")
        except OSError as error:
            if not disks_full:
                raise
            report(f"saves on a full disk: {type(error).__name__}")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def load_on(setting, team, group, rank, draw, report):
    model, optimizer = build(group)
    before = None
    while not agree(setting.stop.exists(), group):
        fill(model, optimizer, MARKER)
        if draw.random() < 0.2:  # without extra; all ranks draw the same
            reader = tp_ext.CheckpointReader(setting.path)
            tp_ext.load_sharded_state_dict(model, optimizer, storage_reader=reader, group=group)
            reader.reset()
            steps = numbers(model, optimizer)
        else:
            extra = tp_ext.load_checkpoint(setting.path, model, optimizer, group=group)
            steps = numbers(model, optimizer) | {float(extra["step"])}
        if group is not None:
            everyone = [None] * group.size()
            dist.all_gather_object(everyone, steps)
            steps = set().union(*everyone)
        if len(steps) != 1 or MARKER in steps:
            raise AssertionError(f"a load of a torn checkpoint: steps {sorted(steps)}")
        report("loads")
        opened = len(os.listdir("/proc/self/fd"))
        before = before or opened
        assert opened <= before + 2, f"{opened} files open, {before} after the first load"


def agree(flag, group):
    """True if the flag is set on any rank."""
    if group is None:
        return flag
    number = torch.tensor(float(flag))
    dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    return bool(number)


def work(setting, team, size, saves, rank, store, seed, pipe):
    """A process of a team. It sends pairs of what happened and, of errors that must not be, the traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    limit(setting)
    draw = random.Random(f"{seed} {rank if saves else 0}")
    try:
        group = None
        if size > 1:
            dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
            group = dist.group.WORLD

        def report(what):
            if rank == 0:
                pipe.send((what, ""))

        (save_on if saves else load_on)(setting, team, group, rank, draw, report)
    except BaseException as error:
        pipe.send((f"{'savers' if saves else 'readers'}: {type(error).__name__}", traceback.format_exc()))
    pipe.close()


def limit(setting):
    """Makes this process's file system one without what the setting leaves out."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    if not setting.exchange:
        from tp_ext.checkpoint.files import atomic_directory

        atomic_directory._exchange = lambda a, b: False
    if not setting.flock:
        fcntl.flock = refuse


class Soak:
    """Runs the teams, kills some of their processes, and counts what they report."""

    def __init__(self, setting):
        self.setting, self.draw = setting, random.Random(setting.seed)
        self.counts, self.failures = Counter(), []
        self.teams = [Team(i, size, True) for i, size in enumerate(setting.teams)]
        self.teams += [Team(len(self.teams) + i, size, False) for i, size in enumerate(setting.readers)]

    def run(self):
        """(counts, failures); at the end the path is loaded and saved once more, and nothing else is left."""
        setting = self.setting
        model, optimizer = build(None)
        fill(model, optimizer, 0)
        tp_ext.save_checkpoint(setting.path, model, optimizer, step=0)
        try:
            for team in self.teams:
                self.start(team)
            self.go_on()
            end = time.monotonic() + setting.seconds
            while not self.failures and (left := end - time.monotonic()) > 0:
                self.listen(min(left, self.draw.random() * 1.5))
                if setting.kills:
                    self.kill(self.draw.choice(self.teams))
            self.go_on()
            setting.stop.touch()
            for team in self.teams:
                self.finish(team)
        finally:
            for worker in (worker for team in self.teams for worker in team.workers):
                worker.kill()
        step = tp_ext.load_checkpoint(setting.path, model, optimizer)["step"]
        if numbers(model, optimizer) != {float(step)}:
            self.failures.append("the last checkpoint is torn")
        tp_ext.save_checkpoint(setting.path, model, optimizer, step=step)
        left = set(os.listdir(setting.path.parent)) - {setting.path.name}
        if left:
            self.failures.append(f"left: {sorted(left)}")
        return self.counts, self.failures

    def start(self, team):
        folder = tempfile.mkdtemp(dir=self.setting.path.parents[1])
        seed = self.draw.getrandbits(32)
        team.workers, team.pipes = [], []
        for rank in range(team.size):
            here, there = ranks._context.Pipe(duplex=False)
            arguments = self.setting, team.number, team.size, team.saves, rank, f"{folder}/store", seed, there
            worker = ranks._context.Process(target=work, args=arguments, daemon=True)
            worker.start()
            there.close()
            team.workers.append(worker)
            team.pipes.append(here)

    def kill(self, team):
        """Kills some of a team with SIGKILL, then, as a launcher does, the rest; a new team takes its place."""
        victims = self.draw.sample(team.workers, self.draw.randint(1, team.size))
        for worker in victims:
            os.kill(worker.pid, signal.SIGKILL)
            self.counts["kills"] += 1
        time.sleep(self.draw.random() * 0.1)
        for worker in team.workers:
            worker.kill()
        for worker in team.workers:
            worker.join(30)
        for pipe in team.pipes:
            self.drain(pipe, dying=True)
        self.start(team)
        self.counts["restarts"] += 1

    def listen(self, seconds):
        end = time.monotonic() + seconds
        while not self.failures and (left := end - time.monotonic()) > 0:
            pipes = [pipe for team in self.teams for pipe in team.pipes]
            for pipe in connection.wait(pipes, left):
                self.drain(pipe)

    def go_on(self):
        """Waits for another save and another load."""
        before, end = self.counts.copy(), time.monotonic() + 120
        while any(self.counts[what] == before[what] for what in ("saves", "loads")) and not self.failures:
            self.listen(0.2)
            if time.monotonic() > end:
                self.failures.append("no save, or no load, within two minutes")

    def drain(self, pipe, dying=False):
        while True:
            try:
                if not pipe.poll():
                    return
                what, text = pipe.recv()
            except (EOFError, OSError):
                for team in self.teams:
                    team.pipes = [other for other in team.pipes if other is not pipe]
                pipe.close()
                return
            if text and dying:  # it lost its peers
                what = f"survivors: {what}"
            elif text:
                self.failures.append(text)
            self.counts[what] += 1

    def finish(self, team):
        end = time.monotonic() + 60
        while team.pipes and time.monotonic() < end:
            for pipe in connection.wait(team.pipes, 1):
                self.drain(pipe)
        for worker in team.workers:
            worker.join(10)
            if worker.exitcode != 0:
                self.failures.append(f"a worker of team {team.number} ended with {worker.exitcode}")


def soak(**options):
    """Runs a soak in a directory of its own, which is removed. It limits this process, too."""
    folder = Path(tempfile.mkdtemp(prefix="soak_checkpoints_"))
    setting = Setting(folder / "place" / "saved", **options)
    limit(setting)
    try:
        return Soak(setting).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--teams", default="2,1", help="ranks of each team of savers; more than one team are rivals")
    parser.add_argument("--readers", default="1,1,2", help="ranks of each team of readers")
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("--no-full-disks", action="store_true")
    parser.add_argument("--two-renames", action="store_true", help="as on file systems without renameat2")
    parser.add_argument("--no-flock", action="store_true", help="as on file systems that refuse flock")
    parser.add_argument("--lock-timeout", type=float, default=60.0)
    arguments = parser.parse_args()
    counts, failures = soak(
        seed=arguments.seed,
        seconds=60 * arguments.minutes,
        teams=tuple(map(int, arguments.teams.split(","))),
        readers=tuple(map(int, arguments.readers.split(","))),
        kills=not arguments.no_kills,
        full_disks=not arguments.no_full_disks,
        exchange=not arguments.two_renames,
        flock=not arguments.no_flock,
        lock_timeout=arguments.lock_timeout,
    )
    print(f"seed {arguments.seed}: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    print("\n".join(failures) or "no torn load, no leftovers")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
