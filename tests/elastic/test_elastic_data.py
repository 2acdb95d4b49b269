"""Replicas that die, at any point, and that join: those that are left train as one process on their tokens."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_ext
from tests.elastic.jobs import Jobs, check
from tests.helpers import ranks

STEPS, DIES_IN, JOINS_IN = 6, 2, 3
FOURTH = "tp_ext/elastic/join/4"  # a key that is there when a fourth replica wants to take part

POINTS = {
    "in the forward pass": ("before", "average", 1, DIES_IN),
    "before it has come": ("before", "_summed", 1, DIES_IN),
    "when it has come": ("after", "arrived", 1, DIES_IN),
    "before the first sum": ("before", "_all_reduce", 1, DIES_IN),
    "between two sums": ("after", "_all_reduce", 2, DIES_IN),
    "before it says that it has the sum": ("before", "agreed", 1, DIES_IN),
    "when all have the sum": ("after", "agreed", 1, DIES_IN),
    "before the step of the optimizer": ("after", "average", 1, DIES_IN),
    "before the commit": ("before", "commit", 1, DIES_IN),
    "in begin": ("after", "_changes", 1, DIES_IN),
    "no life": ("silent before", "average", 1, DIES_IN),
}
BY_DEFAULT = {"in the forward pass": "tp_shm", "between two sums": "gloo", "when all have the sum": "tp_shm"}
CASES = [
    pytest.param(point, backend, marks=[] if BY_DEFAULT.get(point) == backend else pytest.mark.exhaustive)
    for point in POINTS
    for backend in ("gloo", "tp_shm")
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("point", "backend"), CASES)
def test_a_rank_is_killed(point, backend):
    jobs = Jobs(backend, STEPS)
    for name in "012":
        jobs.start(name, dies=1 if name == "1" else None, point=POINTS[point])
    reports = jobs.results()
    history = check(reports, STEPS, "02")
    assert {report.replica for report in reports if report.error is None} == set("02")
    assert set(history[0]) == set("012") and set(history[STEPS - 1]) == set("02")
    errors = [report.error for report in reports if report.replica == "1"]
    assert errors and all(text.startswith("ReplicaLost: replica: '1' was lost") for text in errors)
    assert max(report.longest for report in reports if report.replica != "1") < jobs.timeout
    assert jobs.leftovers() == []


JOINS = {
    "it joins": (False, None),
    "the new one dies with its weights under way": (False, ("before", "_move", 1, 0)),
    "the new one dies before it is connected": (False, ("before", "_group_of", 1, 0)),
    "the one that gives dies": (True, ("before", "_move", 2, 0)),  # all give or get in the first view
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "it joins" else pytest.mark.exhaustive) for case in JOINS]
)
def test_a_replica_joins_from_the_memory_of_another_one(case):
    old, point = JOINS[case]
    jobs = Jobs("gloo", STEPS, {JOINS_IN: FOURTH})
    jobs.start("0", dies=1 if old else None, point=point)
    jobs.store.get("tp_ext/elastic/join/1")  # waits: the first one gives its weights
    first = jobs.start("1", dies=1, point=POINTS["before it has come"])
    jobs.start("2")
    first[1].join(120)
    jobs.start("1", dies=None if old or point is None else 1, point=point, later="again")
    reports = jobs.results()
    survivors = "".join(sorted({report.replica for report in reports if report.error is None}))
    assert survivors in {"it joins": ("012",), "the one that gives dies": ("12",)}.get(case, ("02",)), reports
    history = check(reports, STEPS, survivors)
    assert set(history[JOINS_IN - 1]) == set("02") and set(history[JOINS_IN]) == set(survivors)


def test_a_replica_of_another_model_is_refused_and_the_others_go_on():
    jobs = Jobs("gloo", STEPS, {1: FOURTH})
    for name in "012":
        jobs.start(name)
    jobs.store.get("tp_ext/elastic/view/1")  # waits: of replicas that are all new one would be as wrong as another
    jobs.start("3", later="wrong")
    reports = jobs.results()
    history = check(reports, STEPS, "012")
    assert all(set(names) == set("012") for names in history.values())
    assert any(report.error.startswith("ValueError: ") for report in reports if report.replica == "3")


def _one(group):
    """A replica alone, and calls in a wrong order."""
    net = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"group": group, "store": dist.HashStore(), "replica": "a"}
    elastic = tp_ext.parallel.ElasticData(net, optimizer, **options)
    errors = []
    for act in (lambda: elastic.average(1), elastic.commit):
        with pytest.raises(RuntimeError) as error:
            act()
        errors.append(str(error.value))
    elastic.begin()
    net(torch.ones(1, 3).double()).sum().backward()
    want = net.weight.grad.clone()
    elastic.average(torch.tensor(3))
    assert torch.equal(net.weight.grad, want) and elastic.replicas == ("a",)
    elastic.commit()
    elastic.begin()
    net.weight.grad.fill_(torch.nan)  # the mean over no tokens
    elastic.average(0)
    assert not net.weight.grad.any()
    elastic.commit()
    assert elastic.step == 2
    elastic._least = 2
    with pytest.raises(TimeoutError, match="begin: min_replicas = 2 must be there, and 1 are"):
        elastic.begin(wait=0.1)
    with pytest.raises(ValueError, match="count: 'many' must be a finite number of at least 0"):
        elastic._next = "average"
        elastic.average("many")
    elastic.close()
    return errors


def test_one_replica_and_calls_in_a_wrong_order():
    first, second = ranks.run(_one, 1)[0]
    assert first == "average: must not come now; after commit comes begin"
    assert second == "commit: must not come now; after commit comes begin"


def _refused(group, change):
    net = nn.Linear(3, 2)
    options = {"group": group, "store": dist.HashStore(), "replica": "a"} | change
    tp_ext.parallel.ElasticData(net, options.pop("optimizer", torch.optim.SGD(net.parameters(), lr=0.1)), **options)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"optimizer": 3}, TypeError, "optimizer: int must be a torch.optim.Optimizer"),
        ({"group": None}, TypeError, "group: NoneType must be a ProcessGroup"),
        ({"store": {}}, TypeError, "store: dict must be a torch.distributed.Store"),
        ({"replica": 3}, TypeError, "replica: 3 must be a string"),
        ({"timeout": 0}, ValueError, "timeout: 0 must be a finite number above 0"),
        ({"min_replicas": 0}, ValueError, "min_replicas: 0 must be an integer of at least 1"),
    ],
)
def test_wrong_arguments_are_refused(change, error, match):
    ranks.run_raises(_refused, 2, error, match, change, in_turns="group" in change)
