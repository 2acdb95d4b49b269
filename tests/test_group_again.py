"""A process group created again under its name, in the same processes: with the same ranks everything goes on, with
others every operator that was built on the old one raises, before anything is communicated.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import tp_ext
from tests.helpers import ranks
from tests.helpers.region_maps import simple_cases


def _start(folder, name, rank, p):
    store = dist.FileStore(f"{folder}/{name}", p)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=p)


class _Built:
    """Layers, a loss and regions, all of which hold a group's key."""

    def __init__(self, p):
        torch.manual_seed(0)
        group = dist.group.WORLD
        self.column = tp_ext.ColumnParallelLinear(4, 6, gather_output=True, group=group)
        self.row = tp_ext.RowParallelLinear(6, 4, input_is_parallel=False, group=group)
        self.sp = tp_ext.RowParallelLinear(6, 4, group=group, sequence_parallel=True)
        self.embedding = tp_ext.VocabParallelEmbedding(7, 4, group=group)
        self.loss = tp_ext.VocabParallelCrossEntropy(vocab_size=7, group=group)
        self.p, self.key = p, self.column.tp_group.name

    def calls(self):
        ids, p = torch.tensor([1, 6, 3]), self.p
        logits = torch.ones(3, tp_ext.Sharding(0, (7,)).local_sizes(p)[self.column.tp_group.rank])
        yield "column", lambda: self.column(torch.ones(3, 4))
        yield "row", lambda: self.row(torch.ones(3, 6))
        yield "sequence parallel", lambda: self.sp(torch.ones(3, 6 // p))
        yield "embedding", lambda: self.embedding(ids)
        yield "loss", lambda: self.loss(logits, ids)
        yield "full_state_dict", lambda: tp_ext.full_state_dict(self.column, group=self.key)["weight"]
        for case in simple_cases(p):

            def call(case=case):
                x = torch.ones(case.local_shape(0, p), requires_grad=True)
                y = case(x, self.key)
                y.sum().backward()
                return torch.cat([y.detach().flatten(), x.grad.flatten()])

            yield str(case), call

    def values(self):
        return {name: call() for name, call in self.calls()}

    def check_refused(self, rank, p, before):
        words = (
            rf"^group: '0' was rank {before} of {self.p} when the module was built, and is rank {rank} of {p} now: "
            r"the process group was created again; build the modules anew"
        )
        for name, call in self.calls():
            with pytest.raises(ValueError, match=words):
                print(name, call())
            if name != "full_state_dict":
                with CommDebugMode() as counts, pytest.raises(ValueError, match=words):  # as a trace sees it
                    call()
                assert counts.get_total_counts() == 0, name


def _restart(folder, p, order):
    rank = dist.FileStore(f"{folder}/numbers", -1).add("processes", 1) - 1
    _start(folder, "first", rank, p)
    built = _Built(p)
    before = built.values()
    dist.destroy_process_group()
    if rank not in order:
        return
    again = order.index(rank)
    _start(folder, "second", again, len(order))
    if order == list(range(p)):
        for name, value in built.values().items():
            assert torch.equal(value, before[name]), name
    else:
        built.check_refused(again, len(order), rank)
    for name, value in _Built(len(order)).values().items():  # built anew: right, and nothing was left in the group
        if name in ("column", "row", "embedding", "full_state_dict"):
            torch.testing.assert_close(value, before[name], msg=lambda text, name=name: f"{name}: {text}")
    dist.destroy_process_group()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["same", "swapped"])
def test_two_ranks_again(order, tmp_path):
    ranks.run_apart(_restart, 2, str(tmp_path), 2, order)


def test_three_ranks_become_two(tmp_path):
    ranks.run_apart(_restart, 3, str(tmp_path), 3, [0, 1])
