"""Replicas that do not fit each other are refused by a sentence, before their gradients meet; those that run go on."""

import itertools
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_ext
from tests.helpers import ranks

STEPS, JOINS, CHANGES, TIMEOUT = 7, 2, 3, 4.0


def model(group):
    return nn.ModuleDict(
        {"0": tp_ext.ParallelMLP(4, 8, group=group), "1": tp_ext.ParallelMLP(4, 8, group=group), "2": nn.BatchNorm1d(4)}
    ).double()


def train(elastic, net, rank, steps, act=lambda step: None, after=lambda step: None):
    """Trains; returns the replicas of each step, the longest step in seconds, and the error that ended it."""
    history, longest, text = {}, 0.0, ""
    try:
        while elastic.step < steps:
            begun = time.monotonic()
            act(elastic.step)
            with elastic.begin(wait=60.0):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * elastic.step + rank)).double()
                for layer in net.values():
                    x = layer(x)
                (
                    x.square().mean() if x.requires_grad else x.sum() * 0 + sum(p.sum() for p in net.parameters())
                ).backward()
                elastic.average(3)
                elastic._optimizer.step()
                elastic._optimizer.zero_grad()
                step = elastic.step
                elastic.commit()
                history[step] = "".join(sorted(elastic.replicas))
                longest = max(longest, time.monotonic() - begun) if step else 0.0
            after(step)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    elastic.close()
    return history, longest, text


def _replica(group, key, sizes=(1, 1)):
    """The name of this rank's replica, its group, and a store of all."""
    starts = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    groups = [dist.new_group(list(range(a, b))) for a, b in itertools.pairwise(starts)]
    number = next(n for n, end in enumerate(starts[1:]) if group.rank() < end)
    store = dist.PrefixStore(f"elastic {key}", dist.distributed_c10d._get_default_store())
    return "ab"[number], groups[number], store


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def frozen(number):
    def change(net):
        net[number].requires_grad_(False)

    return change


def in_double(net):
    net["1"].float()


def wider(net):
    net["1"] = tp_ext.ParallelMLP(4, 12, group=None).double()


def renamed(net):
    net["3"] = net.pop("1")


def more(net):
    net["3"] = nn.Linear(4, 4).double()


def tied(net):
    net["1"].up.weight = net["0"].up.weight


def without_statistics(net):
    net["2"] = nn.BatchNorm1d(4, track_running_stats=False).double()


def two_groups(net):
    first, *others = net.parameters()
    return torch.optim.AdamW([{"params": others}, {"params": [first], "lr": 0.01}], lr=0.01)


def others_in_groups(net):
    first, second, *others = net.parameters()
    return torch.optim.AdamW([{"params": [first, *others]}, {"params": [second], "lr": 0.01}], lr=0.01)


def without_one(net):
    return torch.optim.AdamW(list(net.parameters())[1:], lr=0.01)


# change of a, of b, optimizers, options of b, what the sentence says
JOINERS = {
    "others are trained": (
        frozen("0"),
        frozen("1"),
        (adamw, adamw),
        {},
        "requires_grad of '0.up.weight' .*False.*True",
    ),
    "one is frozen": (None, frozen("1"), (adamw, adamw), {}, "requires_grad of '1.up.weight' .*True, and is False"),
    "one was frozen before": (frozen("1"), None, (adamw, adamw), {}, "requires_grad of '1.up.weight' .*and is True"),
    "shape": (None, wider, (adamw, adamw), {}, r"parameter '1.up.weight' .*\(8, 4\).*\(12, 4\)"),
    "dtype": (None, in_double, (adamw, adamw), {}, r"parameter '1.up.weight' .*float64.*float32"),
    "name": (None, renamed, (adamw, adamw), {}, r"parameter '1.up.weight' .*not there"),
    "one more": (None, more, (adamw, adamw), {}, r"parameter '3.weight' .*not there, and is shape \(4, 4\)"),
    "tie": (None, tied, (adamw, adamw), {}, r"parameter '1.up.weight' .*is tied to '0.up.weight'"),
    "buffers": (None, without_statistics, (adamw, adamw), {}, r"buffer '2.running_mean'.*not there"),
    "optimizer": (None, None, (adamw, lambda net: torch.optim.Adam(net.parameters())), {}, "optimizer.*AdamW.*Adam"),
    "amsgrad": (
        None,
        None,
        (adamw, lambda net: torch.optim.AdamW(net.parameters(), amsgrad=True)),
        {},
        r"options with states of parameter group 0 .* \[\], and is \['amsgrad'\]",
    ),
    "groups": (None, None, (adamw, two_groups), {}, "parameter groups on rank 0 must be as in 'a', 1, and is 2"),
    "members of groups": (
        None,
        None,
        (two_groups, others_in_groups),
        {},
        "parameter group of '0.up.weight' .* 1, and is 0",
    ),
    "not optimized": (None, None, (adamw, without_one), {}, "parameter group of '0.up.weight' .* 0, and is None"),
    "timeout": (None, None, (adamw, adamw), {"timeout": TIMEOUT + 1}, "timeout on rank 0 must be as in 'a', 4.0"),
    "min_replicas": (None, None, (adamw, adamw), {"min_replicas": 2}, "min_replicas .* 1, and is 2"),
    "schedulers": (None, None, (adamw, adamw), {"schedulers": 1}, r"schedulers .* \[\], and is \['LambdaLR'\]"),
}


def _joins(group, case):
    change_a, change_b, optimizers, options, _ = JOINERS[case]
    name, mine, store = _replica(group, f"join {case}")
    net = model(mine)
    change = change_a if name == "a" else change_b
    if change is not None:
        change(net)
    optimizer = optimizers[name == "b"](net)
    options = {"timeout": TIMEOUT} | (dict(options) if name == "b" else {})
    if "schedulers" in options:
        options["schedulers"] = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)]
    elastic = tp_ext.parallel.ElasticData(net, optimizer, group=mine, store=store, replica=name, **options)
    elastic._joining._silence = 0.1  # b is sure at once that a lives, which waits for it

    def act(step):
        if name == "b":
            store.wait([f"step {JOINS}"])
        else:
            store.set(f"step {step}", "")
            if step == JOINS + 1:
                store.wait(["b ended"])

    history, longest, text = train(elastic, net, group.rank(), STEPS, act)
    store.set(f"{name} ended", "")
    return history, longest, text


@pytest.mark.parametrize("case", JOINERS)
def test_a_replica_that_joins_must_fit(case):
    (history, _, error), (others, _, text) = ranks.run(_joins, 2, case)
    assert error == "" and history == dict.fromkeys(range(STEPS), "a")
    assert others == {} and text.startswith("ValueError: replica: 'b' does not fit")
    assert re.search(JOINERS[case][-1], text), text


def _ranks_join(group):
    name, mine, store = _replica(group, "ranks", (1, 2))
    net = model(mine)
    elastic = tp_ext.parallel.ElasticData(net, adamw(net), group=mine, store=store, replica=name, timeout=TIMEOUT)

    def act(step):
        if name == "b":
            store.wait([f"step {JOINS}"])
        else:
            store.set(f"step {step}", "")
            if step == STEPS - 1:
                store.wait(["b ended"])

    result = train(elastic, net, group.rank(), STEPS, act)
    if name == "b":
        store.set("b ended", "")
    return result


def test_a_replica_with_another_number_of_ranks_stalls_nobody():
    (history, longest, error), *others = ranks.run(_ranks_join, 3)
    assert error == "" and history == dict.fromkeys(range(STEPS), "a")
    # The last one waits for b, which looks long enough at a to know that it lives
    assert longest < 3 * TIMEOUT
    for history, _, text in others:
        assert history == {} and "it must have 1 ranks as 'a' has, and has 2" in text


def set_option(name, value):
    def change(net, optimizer):
        optimizer.param_groups[0][name] = value

    return change


def of_model(act):
    return lambda net, optimizer: act(net)


def replaced(net):
    net["0"].up.weight = nn.Parameter(net["0"].up.weight.detach().clone())


def converted(net):
    net["1"].up.weight.data = net["1"].up.weight.data.float()


# The change of one replica in the middle of the training, and what the sentence says
CHANGES_LATER = {
    "frozen": (of_model(frozen("1")), "requires_grad of '1.up.weight' .* True, and is False"),
    "lr": (set_option("lr", 0.02), "option 'lr' of parameter group 0 .* 0.01, and is 0.02"),
    "betas": (set_option("betas", (0.8, 0.9)), r"option 'betas' .* \(0.9, 0.999\), and is \(0.8, 0.9\)"),
    "weight decay": (set_option("weight_decay", 0.5), "option 'weight_decay' .* 0.01, and is 0.5"),
    "maximize": (set_option("maximize", True), "option 'maximize' .* False, and is True"),
    "tensor": (set_option("lr", torch.tensor(0.5)), "option 'lr' .* 0.01, and is 0.5"),
    "another option": (set_option("mine", "x"), "option 'mine' .* not there, and is 'x'"),
    "added": (of_model(more), "parameter '3.weight' .* not there"),
    "removed": (of_model(lambda net: net.pop("2")), "must be one of the model's"),
    "replaced": (of_model(replaced), "must be one of the model's"),
    "shape": (of_model(lambda net: net.update({"2": nn.Identity()})), "must be one of the model's"),
    "a buffer": (of_model(lambda net: net["2"].register_buffer("more", torch.ones(2))), "buffer '2.more'"),
}


def _changes(group, case, changing):
    name, mine, store = _replica(group, f"change {case} {changing}")
    net = model(mine)
    optimizer = adamw(net)
    options = {"timeout": TIMEOUT, "min_replicas": 2}
    elastic = tp_ext.parallel.ElasticData(net, optimizer, group=mine, store=store, replica=name, **options)
    if name == "b":
        store.wait(["tp_ext/elastic/join/1"])  # a is the older one

    def after(step):
        elastic._least = 1
        if step == CHANGES and name == changing:
            CHANGES_LATER[case][0](net, optimizer)

    return train(elastic, net, group.rank(), STEPS, after=after)


@pytest.mark.parametrize(("case", "changing"), [*((case, "b") for case in CHANGES_LATER), ("lr", "a"), ("frozen", "a")])
def test_a_replica_that_changes_alone_is_refused(case, changing):
    reports = ranks.run(_changes, 2, case, changing)
    # Of two replicas the oldest goes on, unless it refuses itself
    ends, goes = (reports[1], reports[0])
    assert goes[-1] == "" and len(goes[0]) == STEPS, reports
    assert ends[-1].startswith("ValueError: ") and max(ends[0]) == CHANGES
    if changing == "b":
        assert re.search(CHANGES_LATER[case][1], ends[-1]), ends[-1]
    assert {step: goes[0][step] for step in range(CHANGES + 2)} == dict.fromkeys(range(CHANGES + 1), "ab") | {
        CHANGES + 1: "a"
    }


def _schedule(group, kind, travels):
    """Replicas with a schedule of the learning rate that each steps itself; b joins later."""
    name, mine, store = _replica(group, f"schedule {kind} {travels}")
    net = model(mine)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = {
        "LambdaLR": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        "ExponentialLR": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        "OneCycleLR": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        "by the step": lambda: None,
    }[kind]()
    options = {"timeout": TIMEOUT, "schedulers": [scheduler] if travels else []}
    elastic = tp_ext.parallel.ElasticData(net, optimizer, group=mine, store=store, replica=name, **options)

    def act(step):
        if name == "b" and step == 0:
            store.wait([f"step {JOINS}"])
        if name == "a":
            store.set(f"step {step}", "")
            if step == JOINS:
                store.wait(["tp_ext/elastic/join/2"])
        if scheduler is None:
            optimizer.param_groups[0]["lr"] = 0.1 * 0.9**elastic.step

    result = train(elastic, net, group.rank(), STEPS, act, lambda step: scheduler and scheduler.step())
    return *result, optimizer.param_groups[0]["lr"], net.state_dict()


@pytest.mark.parametrize("kind", ["LambdaLR", "ExponentialLR", "OneCycleLR"])
def test_a_schedule_of_each_replica_travels(kind):
    (history, _, error, lr, state), (joined, _, other, lr_of_b, state_of_b) = ranks.run(_schedule, 2, kind, True)
    assert (error, other) == ("", "")
    assert set(joined) == set(range(JOINS, STEPS)) and {history[step] for step in joined} == {"ab"}
    assert lr == lr_of_b
    # Statistics of BatchNorm, too
    assert {name: value.tolist() for name, value in state.items()} == {n: v.tolist() for n, v in state_of_b.items()}


def test_a_schedule_that_does_not_travel_is_noticed():
    (history, _, error, *_), (joined, _, text, *_) = ranks.run(_schedule, 2, "LambdaLR", False)
    assert error == "" and len(history) == STEPS
    assert set(joined) == {JOINS} and re.search("option 'lr' of parameter group 0 .* and is 0.09", text), text


def _statistics(group):
    name, mine, store = _replica(group, "statistics")
    net = nn.BatchNorm1d(2)
    net.register_buffer("cache", torch.full((2,), float(group.rank())), persistent=False)
    net.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"timeout": TIMEOUT, "min_replicas": 2}
    elastic = tp_ext.parallel.ElasticData(net, optimizer, group=mine, store=store, replica=name, **options)
    all_reduce, sent, before, after = elastic._all_reduce, [], [], []

    def counted(tensor, *args):
        sent[-1].append(tensor.numel())
        all_reduce(tensor, *args)

    elastic._all_reduce = counted
    for step in range(3):
        with elastic.begin(wait=60):
            net.train(step < 2)
            net(torch.randn(4, 2, generator=torch.Generator().manual_seed(group.rank()))).sum().backward()
            net.flags[1] |= step == 1 and name == "b"
            before.append({key: value.clone() for key, value in net.state_dict().items()})
            sent.append([])
            elastic.average(4)
            after.append({key: value.clone() for key, value in net.state_dict().items()})
            elastic.commit()
    elastic.close()
    return before, after, net.cache, sent


def test_buffers_are_those_of_the_first_replica():
    (before, after, cache, sent), (other_before, other_after, other_cache, _) = ranks.run(_statistics, 2)
    equal = [
        all(torch.equal(value, other[key]) for key, value in one.items())
        for one, other in zip(after, other_after, strict=True)
    ]
    assert equal == [True] * 3
    assert not torch.equal(before[0]["running_mean"], other_before[0]["running_mean"])
    # Either may be the first one, which asked first; but it is the same in all steps
    first = before if torch.equal(before[0]["running_mean"], after[0]["running_mean"]) else other_before
    for step in range(3):
        for key in ("running_mean", "running_var", "num_batches_tracked", "flags"):
            assert torch.equal(after[step][key], first[step][key]), (step, key)
    assert cache.tolist() != other_cache.tolist()
    # A step that writes no statistics sends none: numbers of tokens, flags of buffers, kinds, gradients
    assert len(sent[1]) > 4 and len(sent[2]) == 4
