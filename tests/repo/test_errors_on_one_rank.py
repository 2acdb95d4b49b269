"""Bad data on one rank: every rank ends with an error, and that of the others names the rank or what is wrong.

``ALONE``: what one rank alone can see, before a collective. It raises there; the others raise as soon as the rank has
left or calls something else, whatever their backend says of it. An agreement would cost each call a collective.
``AGREED``: where a collective takes place anyway, or the call is no part of a step: all ranks raise, and go on.
"""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn, ones, tensor

import tp_ext
from tests.helpers import ranks, simulated
from tests.repo import rows_of_files, rows_of_layers, rows_of_models
from tests.shm.backends import launch, start
from tp_ext import P
from tp_ext.parallel import sum_gradients

BAD = 1  # the rank with bad data
SECONDS = 120  # the time limit of a call: planning takes 4 s on a quiet machine, 39 s were seen on a busy one


def _moe(group, x, **options):
    return tp_ext.ParallelMoE(8, 16, 4, 2, group=None, expert_group=group)(x, **options)


def _cache(group, bad):
    attention = tp_ext.ParallelAttention(8, 4, group=group, rope=1e4).eval()
    cache = attention.new_cache(2, 4 - bad)
    with torch.no_grad():
        attention(ones(2, 3, 8), cache=cache)
        attention(ones(2, 1, 8), cache=cache)


def _main_grad(group, bad):
    layer = tp_ext.ColumnParallelLinear(4, 4, group=group, grad_accumulation_fusion=True, sequence_parallel=True)
    layer.weight.main_grad = None if bad else torch.zeros_like(layer.weight)
    layer(ones(3, 4))


def _in_backward(group, bad):
    x = tp_ext.copy_to_region(ones(2, 4, requires_grad=True), group)
    x.register_hook(lambda grad: grad[5] if bad else grad)
    x.sum().backward()


def _run(group, bad, axis):
    mesh = tp_ext.init_mesh("cpu", **{axis: group.size()})
    model = nn.Sequential(*(tp_ext.ParallelMLP(4, 8, group=mesh["tp"]) for _ in range(3)))
    run = tp_ext.parallelize(model, mesh, loss=nn.functional.mse_loss, microbatches=3)
    run.step(ones(2 if bad else 3, 4), ones(3, 4))


def _column(group, **options):
    return tp_ext.ColumnParallelLinear(4, 6, group=group, **options)


def _attention(group):
    return tp_ext.ParallelAttention(8, 4, group=group)


def _loss(group, target, columns=5, **options):
    return tp_ext.vocab_parallel_cross_entropy(ones(3, columns), tensor(target), group, **options)


def _context(group, tokens):
    layout = tp_ext.ContextLayout([4 * group.size()], group=group)
    tp_ext.ParallelAttention(8, 4, group=None, context_group=group)(ones(tokens, 8), layout=layout)


class _Block(nn.Module):
    def __init__(self, width=8, activation=nn.GELU):
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(4, width), activation(), nn.Linear(width, 4)

    def forward(self, x, whole=False):
        hidden = self.activation(self.up(x))
        return self.down(hidden.softmax(-1) if whole else hidden)


PLANS = {}  # a simulated rank finds them made: torch 2.11 cannot record a model in a thread


def _plan(hint=None):
    if hint not in PLANS:  # functools.cache would be emptied by the recording
        PLANS[hint] = tp_ext.auto.plan(_Block(), (ones(2, 4),), 3, hints={"up": hint} if hint else None)
    return PLANS[hint]


def _applied(group, hint=None, model=None):
    return tp_ext.auto.apply(_plan(hint), model or _Block(), group)


def _later(group, *args, **keywords):
    model = _applied(group)
    model(ones(2, 4))
    model(*args, **keywords)


X = P("x")


def _mapped(function, out_specs=X, argument=None):
    """Over all ranks, of ones of two rows on each; the function takes a shard and whether this rank's data are bad."""

    def call(group, bad):
        mesh = dist.init_device_mesh("cpu", (group.size(),), mesh_dim_names=("x",))
        full = ones(2 * group.size(), 3) if argument is None else argument(bad)
        tp_ext.spmd(mesh, in_specs=X, out_specs=out_specs)(lambda a: function(a, bad))(full)

    return call


ALONE = {  # the call, of the group and whether the data of this rank are bad; the message on the rank
    "a width": (
        lambda g, bad: _column(g, gather_output=True)(ones(3, 4 + bad)),
        r"x: shape \[3, 5\] must end in",
    ),
    "a dtype": (
        lambda g, bad: _column(g, gather_output=True)(ones(3, 4).to(torch.float64 if bad else torch.float32)),
        "x: dtype Double must be that of weight",
    ),
    "total_tokens": (
        lambda g, bad: _column(g, sequence_parallel=True)(ones(4, 4), total_tokens=4 * g.size() + 3 * bad),
        "total_tokens: 15 gives the ranks",
    ),
    "sizes": (
        lambda g, bad: tp_ext.gather_from_region(ones(2), g, sizes=[2 + bad] * g.size()),
        r"sizes: entry 1 of \[3, 3, 3\] must be the length",
    ),
    "split sizes": (
        lambda g, bad: tp_ext.all_to_all_region(ones(3, 3), g, 0, 1, split_sizes=[1, 1, 1 + bad]),
        r"split_sizes: \[1, 1, 2\] must sum",
    ),
    "a sequence": (
        lambda g, bad: _attention(g)(ones(4, 8), cu_seqlens=[0, 4 - bad]),
        r"cu_seqlens: .* must rise",
    ),
    "a mask": (lambda g, bad: _attention(g)(ones(1, 4, 8), attn_mask=ones(4, 4 + bad)), "attn_mask: shape"),
    "a cache": (_cache, "cache: 3 tokens and 1 more must not exceed"),
    "an id": (
        lambda g, bad: tp_ext.VocabParallelEmbedding(10, 4, group=g)(tensor([1, 2 + 8 * bad])),
        r"ids: 10 must be in \[0, vocab_size\)",
    ),
    "a target": (lambda g, bad: _loss(g, [0, 1, 2 + 20 * bad]), "target: 22 must be in"),  # after the exchange
    "a negative target": (lambda g, bad: _loss(g, [0, 1, 2 - 3 * bad]), "target: -1 must be in"),
    "main_grad": (_main_grad, "main_grad: None must be a tensor"),
    "sequences of experts": (lambda g, bad: _moe(g, ones(6, 8), batch_size=2 + 2 * bad), "batch_size: 4 must divide"),
    "tokens of a context": (lambda g, bad: _context(g, 4 + bad), r"x: shape \(5, 8\) must be \[4, hidden\]"),
    "an argument of a map": (
        _mapped(lambda a, bad: a, argument=lambda bad: ones(()) if bad else ones(6)),
        r"in_specs: P\('x'\) has 1 dims and must have at most 0",
    ),
    "a permutation": (
        _mapped(lambda a, bad: tp_ext.lax.ppermute(a, "x", [(0, 9 if bad else 1)])),
        r"ppermute: perm \[\(0, 9\)\] must name each destination",
    ),
    "a number of a map": (_mapped(lambda a, bad: a * a.sum().item() if bad else a), "item: the value varies"),
    "a backward": (_in_backward, "index 5 is out of bounds"),
    "a batch of a pipeline": (
        lambda g, bad: _run(g, bad, "pp"),
        r"inputs\[0\]: shape \(2, 4\) must",
    ),
    "a width of a later call": (
        lambda g, bad: _later(g, ones(2, 4 + bad)),
        "the plan's example shows no call with arguments of these kinds and lengths",
    ),
    "a dtype of a later call": (
        lambda g, bad: _later(g, ones(2, 4).to(torch.float64 if bad else torch.float32)),
        "x: dtype Double must be that of weight",
    ),
    "a flag of a later call": (
        lambda g, bad: _later(g, ones(2, 4), whole=bad),
        "shows no call with arguments of these kinds.* up.weight cannot be sharded then",
    ),
    "a keyword of a later call": (
        lambda g, bad: _later(g, ones(2, 4), **({"more": 1} if bad else {})),
        "forward fails on fake tensors like it",
    ),
    **rows_of_layers.ALONE,
}


@pytest.mark.parametrize("name", ALONE)
def test_what_one_rank_alone_sees(name):
    """Other ranks meet it where they wait, or at their next collective."""
    _plan()
    call, message = ALONE[name]
    errors = {}

    def on_rank(group):
        try:
            call(group, group.rank() == BAD)
            dist.barrier(group)
        except Exception as error:
            errors[group.rank()] = f"{type(error).__name__}: {error}"
            raise

    with pytest.raises(RuntimeError, match=message):
        simulated.run(on_rank, 3)
    own = errors.pop(BAD)
    for rank in errors.keys() - {BAD}:
        assert f"rank {BAD} raised {own.splitlines()[0]}" in errors[rank], rank


# Before a collective, between collectives, in backward
WITH_PROCESSES = ("an id", "a target", "a cache", "a backward")
ENDS = {"cpu:tp_shm": rf"rank {BAD} ", "cpu:gloo": "[Cc]onnection|[Bb]roken pipe|Read error|Write error"}


def _raises_and_ends(rank, p, folder, backend, name):
    start(rank, p, folder, backend)
    ALONE[name][0](dist.group.WORLD, rank == BAD)
    dist.barrier()


@pytest.mark.parametrize("backend", ENDS)
@pytest.mark.parametrize("name", WITH_PROCESSES)
def test_a_process_that_ends_by_its_error_ends_the_others(name, backend):
    """Long before the timeout of a minute; gloo does not say which rank has ended."""
    for rank, outcome in enumerate(launch(_raises_and_ends, 3, backend, name, timeout=50)):
        assert re.search(ALONE[name][1] if rank == BAD else ENDS[backend], outcome.message), (rank, outcome)


def _other_state(group, bad, change):
    mlp = tp_ext.ParallelMLP(4, 6, group=group)
    mlp(ones(3, 4)).sum().backward()
    if bad:
        change(mlp)
    return mlp


def _summed(change):
    return lambda g, bad: sum_gradients(_other_state(g, bad, change), g)


def _muon(group, bad):
    layer = _column(group, bias=False, gather_output=True)
    optimizer = tp_ext.optim.Muon([layer.weight], lr=0.1)
    for step in range(2):
        layer.weight.grad = None if bad and step else torch.ones_like(layer.weight)
        optimizer.step()


def _norm(group, bad):
    mlp = _other_state(group, bad, lambda mlp: mlp.up.weight.grad.fill_(float("nan")))
    tp_ext.clip_grad_norm_(mlp, 1.0, error_if_nonfinite=True)


def _pretrained(group, bad):
    from_pretrained = pytest.importorskip("tp_ext.huggingface").from_pretrained
    from_pretrained(f"/nowhere/{'y' if bad else 'x'}", group=group)


FITS = rf"out_specs: the result on the rank at x = {BAD} must fit"
EQUALLY_MANY = r"out_specs: the ranks' results must have equally many tensors, and have \[{}\]"
AGREED = {  # the call; the message on the rank, and on the others, if it is another one
    "no dim": (_mapped(lambda a, bad: a[0, 0] if bad else a), r"out_specs: P\('x'\) has 1 dims", FITS),
    "one result more": (
        _mapped(lambda a, bad: (a, a) if bad else (a,), out_specs=(P("x"),)),
        "out_specs: 1 specs must be as many as the values, 2",
        FITS,
    ),
    "one tensor more": (_mapped(lambda a, bad: (a, a) if bad else a), EQUALLY_MANY.format("1, 2")),
    "no result": (_mapped(lambda a, bad: None if bad else a), EQUALLY_MANY.format("0, 1")),
    "a shard of a result": (
        _mapped(lambda a, bad: a[:, :2] if bad else a),
        r"out_specs: dim 1 of the ranks' shards must have one length",
    ),
    "the dtype of a result": (_mapped(lambda a, bad: a.double() if bad else a), "out_specs: .* must have one dtype"),
    "vocab_size": (lambda g, bad: _loss(g, [0, 1, 2], vocab_size=15 - bad), r"vocab_size: \[15, 14, 15\]"),
    "columns": (lambda g, bad: _loss(g, [0, 1, 2], columns=5 + bad), r"vocab_size: .* \[5, 6, 5\]"),
    "main_grad of a rank": (
        _summed(lambda mlp: setattr(mlp.up.weight, "main_grad", torch.zeros_like(mlp.up.weight))),
        "model: main_grad of parameter 0, of shape .*, and is None and torch.float32 on some",
    ),
    "a lost gradient": (_muon, r"parameter 0 has one on \[0, 2\] alone of the 3 ranks"),
    "a gradient that is NaN": (_norm, "error_if_nonfinite: the norm of order 2.0 of the gradients is nan"),
    "a batch": (lambda g, bad: _run(g, bad, "dp"), rf"inputs\[0\]: shape \(2, 4\) .*, on data rank {BAD}"),
    "a path": (
        lambda g, bad: tp_ext.load_checkpoint(f"/nowhere/{g.rank() if bad else 'x'}", _column(g)),
        "path: '/nowhere/.' must be a checkpoint",
    ),
    "a plan": (
        lambda g, bad: _applied(g, "whole" if bad else None),
        "plan: that of rank 1 differs from that of rank 0",
    ),
    "a model of a plan": (
        lambda g, bad: _applied(g, model=_Block(width=8 + bad)),
        r"model: up.weight has shape \(9, 4\) and must have \(8, 4\)",
    ),
    "a module of a plan's model": (
        lambda g, bad: _applied(g, model=_Block(activation=nn.ReLU if bad else nn.GELU)),
        "model: ",
    ),
    "a pretrained model": (_pretrained, "/nowhere/[xy]"),
    "a model": (
        lambda g, bad: tp_ext.debug.check(_column(g, bias=not bad, device="meta"), group=g),
        "model",
    ),
    **rows_of_models.AGREED,
    **rows_of_files.AGREED,
}


def _agreed(group, name):
    """The messages of the ranks; the group works afterwards."""
    begin, message = time.monotonic(), ""
    try:
        AGREED[name][0](group, group.rank() == BAD)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    dist.barrier(group)
    return message, time.monotonic() - begin


def _with_each_run():
    """Each row on simulated ranks, where one that waits for another is found at once; every third one on processes."""
    for number, name in enumerate(AGREED):
        yield pytest.param(name, simulated.run, id=f"{name}-simulated")
        yield pytest.param(name, ranks.run, id=f"{name}-gloo", marks=[pytest.mark.exhaustive] if number % 3 else [])


@pytest.mark.parametrize(("name", "run"), [*_with_each_run()])
def test_what_the_ranks_agree_on(name, run):
    _plan(), _plan("whole")
    _, own, *others = AGREED[name]
    outcomes = run(_agreed, 3, name)
    for rank, (message, seconds) in enumerate(outcomes):
        pattern = own if rank == BAD else (*others, own)[0]
        assert re.search(pattern, message), (rank, message)
        assert seconds < SECONDS
    assert len({message.partition(":")[0] for message, _ in outcomes}) == 1
