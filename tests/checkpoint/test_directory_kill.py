"""kill -9 at random moments of saving: a whole checkpoint is always there, the last one that was done or a later."""

import os
import random
import shutil
import signal
import time

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.numbered import build, fill
from tp_ext.checkpoint.files import atomic_directory

STEPS = 1000


def _save_on_and_on(rank, folder, path, exchange, asynchronous, pipe):
    """A rank that saves step after step, from the one after the last, and reports each before it begins."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    if not exchange:
        atomic_directory._exchange = lambda a, b: False
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    group = dist.group.WORLD
    model, optimizer = build(group)
    start = tp_ext.load_checkpoint(path, model, optimizer)["step"] + 1
    for step in range(start, start + STEPS):
        fill(model, optimizer, step)
        pipe.send(step)
        tp_ext.save_checkpoint(path, model, optimizer, step=step, asynchronous=asynchronous)


def _loaded(path):
    """The step that the checkpoint is of, by every number in it."""
    model, optimizer = build(None)
    step = tp_ext.load_checkpoint(path, model, optimizer)["step"]
    values = [*model.state_dict().values(), *(v for state in optimizer.state.values() for v in state.values())]
    assert all(bool((value == step).all()) for value in values)
    assert optimizer.param_groups[0]["lr"] == step
    return step


def _begun(pipe, last):
    while pipe.poll():
        try:
            last = pipe.recv()
        except EOFError:
            break
    return last


@pytest.mark.parametrize(("kills", "least"), [(4, 4), pytest.param(10, 11, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("exchange", "asynchronous"),
    [(True, False), (False, False), (True, True)],
    ids=["exchange", "two renames", "asynchronous"],
)
def test_a_whole_checkpoint_is_there_whenever_the_ranks_are_killed(exchange, asynchronous, kills, least, tmp_path):
    """Several kills each way, of rank 0, of rank 1 or of both; what a kill left is where the next ranks begin."""
    random_moment = random.Random(7 + exchange)
    path = tmp_path / "saved"
    model, optimizer = build(None)
    fill(model, optimizer, 0)
    tp_ext.save_checkpoint(path, model, optimizer, step=0)
    reached = []
    for _ in range(kills):
        folder = tmp_path / "rendezvous"
        folder.mkdir()
        here, there = ranks._context.Pipe(duplex=False)
        workers = [
            ranks._context.Process(
                target=_save_on_and_on, args=(rank, folder, path, exchange, asynchronous, there), daemon=True
            )
            for rank in range(2)
        ]
        for worker in workers:
            worker.start()
        there.close()
        times = []
        # By two ranks. Two steps begun: a whole save between; three if a step begins before the last save is done
        for _ in range(6 if asynchronous else 4):
            assert here.poll(60), "no save within a minute"
            last = here.recv()
            times.append(time.monotonic())
        time.sleep(random_moment.random() * 2 * (times[-1] - times[0]))
        victims = random_moment.choice([workers[:1], workers[1:], workers])
        for worker in victims:
            os.kill(worker.pid, signal.SIGKILL)
        for worker in victims:
            worker.join(30)
        for worker in workers:  # the survivor has lost its peer: it fails, or waits for it
            worker.kill()
            worker.join(30)
        last = _begun(here, last)
        here.close()
        found = _loaded(path)
        # Saving step n began after step n - 1 was there; before an asynchronous save its predecessor may still run
        assert last - 1 - asynchronous <= found <= last, (found, last)
        reached.append(found)
        shutil.rmtree(folder)
    assert reached == sorted(reached) and reached[-1] >= least
