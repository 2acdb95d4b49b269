"""Replicas of two ranks that train together, each a job of its own, and what one process computes instead."""

import os
import pickle
import signal
import time
from datetime import timedelta
from multiprocessing import connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import tp_ext
from tests.helpers import ranks

TP, VOCAB, HIDDEN, ROWS, SEQ = 2, 11, 8, 2, 4
OPTIONS = {"lr": 0.05, "eps": 1e-4}


def model(group, width=12):
    return nn.Sequential(
        tp_ext.VocabParallelEmbedding(VOCAB, HIDDEN, group=group),
        tp_ext.RMSNorm(HIDDEN, group=group),
        tp_ext.ParallelMLP(HIDDEN, width, group=group),
        tp_ext.VocabParallelLMHead(HIDDEN, VOCAB, group=group),
    ).double()


def batch(step, name):
    """ids and target of a replica; each has another number of valid tokens, some have none."""
    number = int(name)
    generator = torch.Generator().manual_seed(100 * step + number)
    ids, target = torch.randint(VOCAB, (2, ROWS * SEQ), generator=generator)
    target[(step + 2 * number) % (ROWS * SEQ + 1) :] = -100
    return ids, target


def loss_of(net, ids, target, group):
    logits = net(ids)
    return tp_ext.vocab_parallel_cross_entropy(logits, target, group, vocab_size=VOCAB, reduction="sum")


def alone(history):
    """The full weights and states of one process that has trained on the tokens of these replicas, by step."""
    tp_ext.manual_seed(1)
    net = model(None)
    tp_ext.reset_parameters(net)
    optimizer = torch.optim.AdamW(net.parameters(), **OPTIONS)
    for step, names in enumerate(history):
        batches = [batch(step, name) for name in names]
        count = sum(int((target != -100).sum()) for _, target in batches)
        for ids, target in batches:
            (loss_of(net, ids, target, None) / max(1, count)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict(), tp_ext.full_optimizer_state_dict(net, optimizer)["state"]


def dying_at(elastic, point):
    """Makes this process die in a step, before or after the call of a function of that number, or makes it show no life
    for a while."""

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    where, name, number, step = point
    calls = {"n": 0}
    objects = elastic, elastic._board, elastic._pulse, elastic._phases
    owner = next(owner for owner in objects if hasattr(owner, name))
    function = getattr(owner, name)

    def called(*args, **options):
        if elastic.step < step:
            return function(*args, **options)
        calls["n"] += 1
        if where == "before" and calls["n"] == number:
            die()
        if where == "silent before" and calls["n"] == number:
            elastic._pulse._ended.set()
            time.sleep(2.4 * elastic._silence)  # until the others take it for dead
        result = function(*args, **options)
        if where == "after" and calls["n"] == number:
            die()
        return result

    setattr(owner, name, called)


class Report(NamedTuple):
    """The result of a rank.

    Attributes:
        replica, rank: of the rank.
        later: as of :func:`train`.
        history: step -> names of the replicas that took part.
        longest: seconds of the longest step.
        state, states: the full weights and states of the optimizer; None after an error.
        error: its type and text; None without one.
    """

    replica: str
    rank: int
    later: str | None
    history: dict
    longest: float
    state: dict | None
    states: dict | None
    error: str | None


def train(port, name, rank, backend, steps, least, timeout, wait, point, pause, later, out):
    """One rank of a replica: sends its :class:`Report` through the pipe ``out``.

    ``least``: step -> the number of replicas that it waits for, or a key of the store; ``later``: None, or a word of a
    replica that comes later, with other weights.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    inside = dist.PrefixStore(f"job/{name}/{later}/", store.clone())
    dist.init_process_group(backend, store=inside, rank=rank, world_size=TP, timeout=timedelta(seconds=30))
    group = dist.group.WORLD
    tp_ext.manual_seed(1 if later is None else 77)
    net = model(group, 16 if later == "wrong" else 12)
    tp_ext.reset_parameters(net)
    optimizer = torch.optim.AdamW(net.parameters(), **OPTIONS)
    elastic = tp_ext.parallel.ElasticData(net, optimizer, group=group, store=store, replica=name, timeout=timeout)
    if point is not None:
        dying_at(elastic, point)
    history, longest = {}, 0.0

    def report(state, states, error):
        # Tensors by value: this process ends
        out.send_bytes(pickle.dumps(Report(name, rank, later, history, longest, state, states, error)))

    try:
        while elastic.step < steps:
            begun = time.monotonic()
            waits = least.get(elastic.step, 1)
            elastic._least = waits if isinstance(waits, int) else 1
            if isinstance(waits, str):
                store.get(waits)
            with elastic.begin(wait=wait):
                ids, target = batch(elastic.step, name)
                count = int((target != -100).sum())
                value = loss_of(net, ids, target, group) / count if count else loss_of(net, ids, target, group) * 0
                value.backward()
                elastic.average(count)
                optimizer.step()
                optimizer.zero_grad()
                history[elastic.step] = elastic.replicas
                if waits == 1 and later is None:
                    longest = max(longest, time.monotonic() - begun)
                time.sleep(pause)
                elastic.commit()
                if elastic.step == 1:
                    store.set(f"begun/{name}/{rank}", "")
        state = dict(tp_ext.full_state_dict(net))
        states = tp_ext.full_optimizer_state_dict(net, optimizer)["state"]
        report(state, states, None)
        elastic.close()
    except Exception as error:  # its type and text are what is tested
        report(None, None, f"{type(error).__name__}: {error}")
    out.close()
    dist.destroy_process_group()


class Jobs:
    """Three replicas of two ranks, and later ones; the ``timeout`` is long: ranks of a busy machine wait for a core.
    ``wait``: as of ``begin``, of one that comes when the others have ended, too."""

    def __init__(self, backend, steps, least=None, pause=0.0, timeout=16.0, wait=60.0):
        # The server of the store looks up the name of each connection's address, and stands still meanwhile: 5 s where
        # no name server answers
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # A pipe for each rank: one that is killed may hold the lock of a queue, for ever
        self.reports = []
        self.backend, self.steps, self.pause, self.timeout, self.wait = backend, steps, pause, timeout, wait
        self.least = {0: 3} | (least or {})
        self.processes = []

    def start(self, name, dies=None, point=None, later=None):
        """Starts a replica; its rank ``dies`` kills itself at a point."""
        started = []
        for rank in range(TP):
            args = (self.store.port, name, rank, self.backend, self.steps, self.least, self.timeout, self.wait)
            report, out = ranks._context.Pipe(duplex=False)
            args = (*args, point if rank == dies else None, self.pause, later, out)
            ranks.start_forkserver()
            process = ranks._context.Process(target=train, args=args, daemon=True)
            process.start()
            out.close()  # it is the rank's alone, so that its death ends the pipe
            self.reports.append(report)
            started.append(process)
        self.processes += started
        return started

    def leftovers(self):
        """The names of shared memory that these processes have left; each has the number of its maker."""
        makers = {str(process.pid) for process in self.processes}
        return [name for name in os.listdir("/dev/shm") if name.startswith("tp_shm") and makers & set(name.split("."))]

    def results(self, timeout=300.0):
        """The reports of the ranks that were not killed; waits until all have ended."""
        reports, until, waiting = [], time.monotonic() + timeout, set(self.reports)
        while waiting and time.monotonic() < until:
            for pipe in connection.wait(waiting, timeout=until - time.monotonic()):
                try:
                    reports.append(pickle.loads(pipe.recv_bytes()))
                except EOFError:  # the rank has ended
                    waiting.remove(pipe)
        for process in self.processes:
            process.kill()
            process.join()
        return reports


def check(reports, steps, survivors):
    """All survivors have done the same, and have the weights and states of one process."""
    whole = [report for report in reports if report.error is None]
    missing = {(name, rank) for name in survivors for rank in range(TP)} - {(r.replica, r.rank) for r in whole}
    assert not missing, [(report.replica, report.rank, report.error) for report in reports]
    history = {step: names for report in whole for step, names in report.history.items()}
    assert sorted(history) == list(range(steps))
    for report in whole:
        assert {step: history[step] for step in report.history} == report.history
    want, want_states = alone([history[step] for step in range(steps)])
    for report in whole:
        torch.testing.assert_close(report.state, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(report.states, want_states, rtol=1e-12, atol=1e-12)
    return history
