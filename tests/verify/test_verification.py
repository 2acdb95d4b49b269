"""What counts as right, as a loss and as an argument; that the caller's state stays; the command."""

import contextlib
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import tp_ext
import tp_ext.verify
from tests.helpers.paths import ROOT
from tests.verify.injected import after, before, entered, summed
from tests.verify.models import HIDDEN, IDS, TARGET, VOCAB, GatedMLP, X
from tp_ext.verify import Finding, Report


def mlp(group):
    return tp_ext.ParallelMLP(HIDDEN, 12, group=group)


def test_the_module_is_the_function():
    assert callable(importlib.import_module("tp_ext.verify")) and "tp_ext.verify" in sys.modules
    assert list(inspect.signature(tp_ext.verify).parameters) == ["make_model", "example", "p", "seed"]
    report = tp_ext.verify(mlp, (X,), p=[2])
    assert isinstance(report, Report) and report.findings == [] and list(report.rows) == [2]
    assert report.rows[2]["collectives"] == "2" and 0 < report.seconds < 60


def gradient_of_one_rank(group):
    model = GatedMLP(group)
    model.norm.weight.register_hook(lambda g: g * (group.rank() == 0))
    return model


def test_the_callers_state_stays_and_is_not_used():
    torch.manual_seed(4)
    before = torch.get_rng_state()
    with torch.no_grad():
        report = tp_ext.verify(gradient_of_one_rank, (X,), p=(2,))
        assert not torch.is_grad_enabled()
    assert report.rows[2]["gradients"] == "WRONG" and report.findings[0].tensor == "norm.weight"
    assert torch.equal(torch.get_rng_state(), before) and not dist.is_initialized()
    assert X.grad is None and not X.requires_grad


def test_an_example_is_a_tuple_a_dict_or_a_function():
    for example in ((X,), {"x": X}, lambda: (X,), lambda: {"x": X}):
        assert tp_ext.verify(GatedMLP, example, p=(2,)).ok


@dataclass
class Result:
    loss: Tensor
    logits: Tensor


class Losses(nn.Module):
    """A head with its loss in one of the forms; wrong where ``own`` is true: the loss is that of this rank's words."""

    def __init__(self, group, form, own):
        super().__init__()
        self.embedding = tp_ext.VocabParallelEmbedding(VOCAB, HIDDEN, group=group)
        self.head = tp_ext.VocabParallelLMHead(HIDDEN, VOCAB, group=group)
        self.group, self.form, self.own = group, form, own

    def forward(self, ids, target):
        logits = self.head(self.embedding(ids))
        if self.own:
            loss = logits.logsumexp(-1).mean()
        else:
            loss = tp_ext.vocab_parallel_cross_entropy(logits, target, self.group, vocab_size=VOCAB)
        return self.form(loss, logits)


@pytest.mark.parametrize(
    "form",
    [lambda loss, _: loss, lambda loss, logits: {"loss": loss, "logits": logits}, Result],
    ids=["", "dict", "field"],
)
def test_a_loss_is_a_scalar_or_a_field(form):
    report = tp_ext.verify(lambda group: Losses(group, form, False), (IDS, TARGET))
    assert report.ok and float(report.rows[3]["loss"].replace("same bits", "0")) < 1e-12
    report = tp_ext.verify(lambda group: Losses(group, form, True), (IDS, TARGET), p=(2,))
    assert report.rows[2]["loss"] == "WRONG"
    assert (report.findings[0].module, report.findings[0].tensor) == ("", "loss")
    assert "local" in report.findings[0].cause


class InSinglePrecision(nn.Module):
    """Computes in fp32, whatever it is converted to."""

    def __init__(self, group, refuses=False):
        super().__init__()
        self.mlp, self.refuses = mlp(group), refuses

    def forward(self, x):
        if self.refuses and x.dtype == torch.float64:
            raise NotImplementedError("no fp64")
        return self.mlp(x).float().square().to(x.dtype)


@pytest.mark.parametrize("refuses", [False, True])
def test_the_bound_is_that_of_the_lowest_precision(refuses):
    report = tp_ext.verify(lambda group: InSinglePrecision(group, refuses), (X,), p=(2,))
    assert report.ok and "float32" in report.bounds and "3.5e-04" in report.bounds
    assert ("Does not run in fp64" in report.bounds) == refuses
    assert "fp64, relative bound 1e-09" in tp_ext.verify(mlp, (X,), p=(2,)).bounds


class Chatty(nn.Module):
    """Recomputed blocks, a frozen parameter, a buffer that training changes, integers among the outputs, and a write to
    the input."""

    def __init__(self, group):
        super().__init__()
        self.mlp = checkpoint_wrapper(GatedMLP(group))
        self.frozen = nn.Parameter(torch.rand(HIDDEN), requires_grad=False)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x):
        x += 1
        y = self.norm(self.mlp(x) * self.frozen)
        return {"y": y, "largest": y.argmax(-1), "nothing": None}


def test_right_models_of_other_kinds():
    for make in (Chatty, lambda group: Watched(group, sum_of_all)):
        report = tp_ext.verify(make, (X,))
        assert report.ok, report


def drifting_statistics(group):
    model = Chatty(group)
    if group.rank() == 1:
        model.norm.momentum = 0.5
    return model


class Watched(nn.Module):
    """An MLP that notes the mean of its activations in a buffer that no state dict has, local or of all ranks."""

    def __init__(self, group, note):
        super().__init__()
        self.mlp, self.note, self.group = mlp(group), note, group
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        # Other numbers on the ranks are right here: nothing writes to it
        self.register_buffer("rank", torch.tensor(group.rank()), persistent=False)
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        y = self.mlp(x)
        return self.note(self, y)


def local_mean(self, y):
    self.seen = self.seen * 0.5 + self.mlp.up.weight.detach().sum()
    return y


def local_mean_in_training(self, y):
    if self.training and not torch.is_grad_enabled():
        self.seen.add_(self.mlp.up.weight.detach().sum())
    return y


def mean_on_a_rank(self, y):
    if self.group.rank() == 1:
        self.seen.add_(1)
    return y


def sum_of_all(self, y):
    """As a layer should."""
    self.seen = self.seen * 0.5 + tp_ext.reduce_from_region(self.mlp.up.weight.detach().sum(), self.group)
    return y


def local_output_without_gradients(self, y):
    return y if torch.is_grad_enabled() or not self.training else y + self.group.rank()


def local_output_in_later_forwards(self, y):
    return y + self.group.rank() if self.forwards == 6 else y


class Replaces(nn.Module):
    """A module that puts a new tensor, which is local, in the place of its buffer."""

    def __init__(self, group):
        super().__init__()
        self.mlp = mlp(group)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + self.mlp.up.weight.detach().sum()
        return self.mlp(x)


def own_generator(group):
    model = GatedMLP(group)
    model.masked = lambda h: torch.rand_like(h, generator=GENERATOR) * h
    return model


GENERATOR = torch.Generator().manual_seed(1)


def undeclared(group):
    model = nn.Linear(HIDDEN, HIDDEN // group.size())
    return nn.Sequential(model)


def odd_only(group):
    if group.size() == 2:
        raise ValueError("p: 2 must be odd")
    return mlp(group)


def early_return(group):
    model = mlp(group)
    if group.size() > 1:
        model.down.register_forward_pre_hook(lambda *_: dist.barrier(group=group) if group.rank() else None)
    return model


def sum_of_shards(group):
    """A sum of what is 7 features on rank 0 and 6 on rank 1."""
    model = tp_ext.ParallelMLP(HIDDEN, 13, group=group)
    if group.size() > 1:
        model.up.register_forward_hook(lambda module, args, y: (tp_ext.reduce_from_region(y[0], group), y[1]))
    return model


def other_dtype(group):
    model = mlp(group)
    if group.size() > 1:
        model.down.register_forward_hook(lambda module, args, y: y.float())
    return model


def times_p_after_an_error(group):
    model = Tries(group)
    model.p = group.size()
    return nn.Sequential(model)


class Partial(nn.Module):
    """The product of a shard, whose sum the module around it takes."""

    def __init__(self, group):
        super().__init__()
        self.row = tp_ext.RowParallelLinear(HIDDEN, HIDDEN, False, group=group)

    def forward(self, x):
        return nn.functional.linear(x, self.row.weight)


class AroundPartial(nn.Module):
    """Right sums of a module's partial ones, then an MLP that is wrong at p > 1 by ``put``."""

    def __init__(self, group, put):
        super().__init__()
        self.group, self.first, self.norm, self.mlp = (
            group,
            Partial(group),
            tp_ext.RMSNorm(HIDDEN, group=group),
            mlp(group),
        )
        self.before = tp_ext.RMSNorm(HIDDEN, group=group)
        if group.size() > 1:
            put(self, group)

    def forward(self, x):
        x = tp_ext.scatter_to_region(self.before(x), self.group)
        x = tp_ext.reduce_from_region(self.first(x), self.group)
        return self.mlp(self.norm(x))


@pytest.mark.parametrize(
    ("make", "p", "finding", "word"),
    [
        (drifting_statistics, 2, ("norm", "norm.running_mean"), "local"),
        (lambda group: Watched(group, local_mean), 2, ("", "seen"), "partial sum"),
        (lambda group: Watched(group, local_mean_in_training), 2, ("", "seen"), "partial sum"),
        (lambda group: Watched(group, mean_on_a_rank), 2, ("", "seen"), "local branch"),
        (lambda group: Watched(group, local_output_without_gradients), 2, ("", "output"), "local"),
        (lambda group: Watched(group, local_output_in_later_forwards), 2, ("", "output"), "local"),
        (Replaces, 2, ("", "seen"), "local"),
        (own_generator, 1, ("", "output"), "local"),
        (undeclared, 2, ("0", "0.weight"), "local"),
        (odd_only, 2, ("", "rank 0 raised ValueError"), "p: 2 must be odd"),
        (early_return, 2, ("down", "barrier of rank 1"), "local"),
        (sum_of_shards, 2, ("up", "all_reduce of rank 1"), "local size"),
        (other_dtype, 2, ("down", "output"), "local"),
        (times_p_after_an_error, 2, ("0", "output"), "twice"),
        (lambda group: AroundPartial(group, after("mlp.down", summed)), 2, ("mlp.down", "output"), "twice"),
        (lambda group: AroundPartial(group, before("mlp", entered)), 2, ("mlp", "norm.weight"), "twice"),
    ],
)
def test_wrong_models_of_other_kinds(make, p, finding, word):
    report = tp_ext.verify(make, (X,), p=(1, 2))
    first = report.findings[0]
    assert (first.p, first.module, first.tensor) == (p, *finding), report
    assert word in first.cause, report
    assert isinstance(first, Finding) and str(first.p) in str(first)


def test_a_model_that_is_not_sharded_gets_a_note():
    report = tp_ext.verify(lambda group: nn.Linear(HIDDEN, HIDDEN), (X,), p=(1, 2))
    assert report.ok and report.notes == ["No parameter is sharded at p = 2: does make_model use its group?"]
    assert not tp_ext.verify(mlp, (X,), p=(1, 2)).notes


class Tries(nn.Module):
    """A module whose error the model catches."""

    def __init__(self, group):
        super().__init__()
        self.refuses, self.mlp, self.p = InSinglePrecision(group, True), mlp(group), 1

    def forward(self, x):
        try:
            return self.refuses(x)
        except NotImplementedError:
            return self.mlp(x) * self.p


def test_a_caught_error_is_none():
    report = tp_ext.verify(Tries, (X,), p=(2,))
    assert report.ok and "fp64" in report.bounds


def test_an_error_at_one_rank_is_a_finding():
    report = tp_ext.verify(mlp, (torch.ones(2, HIDDEN + 1),))
    assert (report.findings[0].p, report.findings[0].module) == (1, "up") and not report.ok


COMMANDS = {
    "right": (
        "tests.verify.models:GatedMLP --example tests.verify.test_verification:BATCH --p 1 2",
        0,
        "p = 1, 2: right",
    ),
    "wrong": (
        "tests.verify.test_verification:odd_only --example tests.verify.test_verification:BATCH",
        1,
        "WRONG: p = 2",
    ),
    "module": ("nowhere:model", 2, "must name a module that can be imported"),
    "form": ("nowhere", 2, "must be of the form module:name"),
    "name": ("tests.verify.models:nothing", 2, "tests.verify.models has no 'nothing'"),
    "p": (
        "tests.verify.models:GatedMLP --p 0 --example tests.verify.test_verification:BATCH",
        2,
        "p: 0 must be an integer of at least 1",
    ),
}
BATCH = {"x": X}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command(name, capsys):
    words, code, text = COMMANDS[name]
    main = importlib.import_module("tp_ext.verify.__main__").main
    try:
        ended = main(words.split())
    except SystemExit as error:
        ended = error.code
    printed = capsys.readouterr()
    assert ended == code and text in printed.out + printed.err


def test_the_command_in_a_process_warns_of_nothing(tmp_path):
    text = "import torch, tp_ext\n\ndef model(group):\n    return tp_ext.ParallelMLP(4, 6, group=group)\n\n"
    (tmp_path / "mine.py").write_text(text + "example = (torch.ones(2, 4),)\n")
    words = [sys.executable, "-W", "error", "-m", "tp_ext.verify", "mine:model", "--p", "1", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0 and result.stdout.startswith("p = 1, 2: right"), result.stderr
    assert not result.stderr


def test_the_report_of_the_guide():
    """But for the digits of differences, which depend on the machine."""
    page = (ROOT / "docs" / "guide" / "verify.md").read_text()
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        for code in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S):
            exec(code, names)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S)
    words = [re.sub(r"\d+e-\d+|same bits", "0", text).split() for text in (printed.getvalue(), shown)]
    assert words[0] == words[1]
