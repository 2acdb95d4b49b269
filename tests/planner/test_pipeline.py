"""Simulated pipelines: bubbles by formula, microbatches in flight, and the lists of actions that torch executes."""

import functools
import itertools
import time

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules

import tp_ext
from tests.helpers import ranks
from tp_ext.planner import simulate_pipeline
from tp_ext.planner.actions import pipeline_actions

ONE = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0}
EVERY = [
    ("GPipe", 1),
    ("1F1B", 1),
    ("LoopedBFS", 2),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 4),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
]


class Recorder:
    """A stage that notes what a schedule has it compute."""

    def __init__(self, rank, stages):
        self.stage_index, self.num_stages, self.submod, self.calls = rank, stages, None, []

    def forward_one_chunk(self, index, *args, **options):
        self.calls.append(("F", self.stage_index, index))

    def backward_one_chunk(self, index, **options):
        self.calls.append(("B", self.stage_index, index))

    def __getattr__(self, name):
        return lambda *args, **options: []


def executed(schedule, rank, pp, microbatches, monkeypatch):
    """The actions of a rank, by running torch's own loop over a stage that communicates nothing."""
    torch_class = getattr(schedules, f"Schedule{schedule}")
    schedule, stage = object.__new__(torch_class), Recorder(rank, pp)
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        monkeypatch.setattr(torch_class, name, lambda *args: None)
    for name in ("_batch_p2p", "_wait_batch_p2p", "_wait_and_release_fwd_send"):
        monkeypatch.setattr(schedules, name, lambda *args, **options: [])
    monkeypatch.setattr(schedules, "_sorted_batch_p2p", lambda *args, **options: {})
    nothing = [()] * microbatches
    monkeypatch.setattr(torch_class, "_check_inputs", lambda *args: (nothing, nothing))
    vars(schedule).update(
        _stage=stage, _n_microbatches=microbatches, _num_stages=pp, scale_grads=False, _finalize_gradients=True
    )
    schedule._step_microbatches()
    return tuple(stage.calls)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("pp, microbatches", [(1, 3), (2, 2), (3, 5), (4, 4), (4, 9)])
def test_actions_are_those_that_torch_executes(schedule, pp, microbatches, monkeypatch):
    lists = pipeline_actions(schedule, pp, 1, microbatches)
    assert lists == tuple(executed(schedule, rank, pp, microbatches, monkeypatch) for rank in range(pp))


@pytest.mark.parametrize("schedule, virtual", EVERY)
@pytest.mark.parametrize("pp, microbatches", [(2, 4), (4, 8), (4, 12)])
def test_every_pass_of_every_microbatch_runs_once(schedule, virtual, pp, microbatches):
    lists = pipeline_actions(schedule, pp, virtual, microbatches)
    done = [action for actions in lists for action in actions]
    whole = [(stage, i) for stage in range(pp * virtual) for i in range(microbatches)]
    assert len(done) == len(set(done))
    assert sorted((s, i) for kind, s, i in done if kind == "F") == whole
    assert sorted((s, i) for kind, s, i in done if kind in ("B", "I")) == whole
    assert sorted((s, i) for kind, s, i in done if kind in ("B", "W")) == whole


@pytest.mark.parametrize(
    "schedule, virtual", [case for case in EVERY if case[0] in ("GPipe", "1F1B", "Interleaved1F1B")]
)
@pytest.mark.parametrize("pp, microbatches", [(1, 4), (2, 4), (4, 8), (8, 32)])
def test_bubble_is_that_of_the_formula(schedule, virtual, pp, microbatches):
    line = simulate_pipeline(schedule, pp, microbatches, virtual=virtual, **ONE)
    assert line.bubble == pytest.approx((pp - 1) / (microbatches * virtual + pp - 1), abs=1e-12)
    assert line.time == pytest.approx(3 * (microbatches * virtual + pp - 1))


@pytest.mark.parametrize("pp, microbatches", [(2, 4), (4, 8), (8, 32)])
def test_zero_bubble_leaves_two_of_three_parts(pp, microbatches):
    """ZBV of equal parts waits for pp - 1 units of one stage (Qi et al., arXiv:2401.10241, section 6)."""
    line = simulate_pipeline("ZBVZeroBubble", pp, microbatches, virtual=2, **ONE)
    assert line.time == pytest.approx(6 * microbatches + pp - 1)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_in_flight(pp):
    """1F1B: pp - rank; GPipe: all; interleaved: (virtual - 1) pp + 2 (pp - rank - 1) + 1 chunks."""
    m, ranks = 4 * pp, range(pp)
    in_flight = {name: simulate_pipeline(name, pp, m, virtual=v, **ONE).in_flight for name, v in EVERY if v < 4}
    assert in_flight["1F1B"] == tuple(pp - rank for rank in ranks)
    assert in_flight["GPipe"] == (m,) * pp
    assert in_flight["Interleaved1F1B"] == tuple(pp + 2 * (pp - rank - 1) + 1 for rank in ranks)
    assert in_flight["ZBVZeroBubble"] == (2 * pp,) * pp


@pytest.mark.parametrize("schedule, virtual", EVERY)
def test_rows_keep_order_and_dependences(schedule, virtual):
    """By definition, from the rows alone: one action at a time, each after its input and its message."""
    pp, m, send = 3, 6, 0.25
    stages = pp * virtual
    times = {
        name: [1 + 0.1 * ((s * k) % 5) for s in range(stages)]
        for k, name in enumerate(("forward", "input_grad", "weight_grad"), 1)
    }
    line = simulate_pipeline(schedule, pp, m, virtual=virtual, send=send, **times)
    ends, rank_of = {}, {}
    for rank, rows in enumerate(line.rows):
        for (_, _, end), (_, start, _) in itertools.pairwise(rows):
            assert start >= end
        for action, start, end in rows:
            kind = next(letter for letter in action if letter in "FBIW")
            stage, i = map(int, action.split(kind))
            rank_of[stage] = rank
            parts = {"F": ["forward"], "I": ["input_grad"], "W": ["weight_grad"], "B": ["input_grad", "weight_grad"]}
            assert end - start == pytest.approx(sum(times[name][stage] for name in parts[kind]))
            ends["B" if kind == "I" else kind, stage, i] = start, end
    for (kind, stage, i), (start, _) in ends.items():
        before = {"F": ("F", stage - 1), "B": ("B", stage + 1), "W": ("B", stage)}[kind]
        if before[1] == stages:
            before = ("F", stage)
        if before[1] >= 0:
            delay = 0 if rank_of[before[1]] == rank_of[stage] else send
            assert start >= ends[*before, i][1] + delay - 1e-12
    assert line.time == max(end for rows in line.rows for _, _, end in rows)


def test_a_picture_has_a_row_for_each_rank(tmp_path):
    pytest.importorskip("matplotlib")
    simulate_pipeline("1F1B", 2, 4, **ONE).draw(tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert "rank 0" in text and "rank 1" in text and "rank 2" not in text


@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"pp": 0}, ValueError, "pp: 0 must be an integer of at least 1"),
        ({"microbatches": 2.0}, ValueError, "microbatches: 2.0 must be an integer"),
        ({"schedule": "2F2B"}, ValueError, "schedule: 2F2B|schedule: '2F2B' must be one of"),
        ({"schedule": 3}, TypeError, "schedule: 3 must be a name"),
        ({"microbatches": 2}, ValueError, "microbatches: 2 must be at least the number of stages, 4"),
        ({"virtual": 2, "microbatches": 9}, ValueError, "microbatches: 9 must be a multiple of 2"),
        ({"schedule": "ZBVZeroBubble", "virtual": 1}, ValueError, "^virtual: 1 must be 2 with ZBVZeroBubble"),
        ({"forward": [1.0, 2.0]}, ValueError, "forward: 2 numbers must be one for each of the 4 stages"),
        ({"input_grad": -1.0}, ValueError, "input_grad: -1.0 must be a finite number of at least 0"),
        ({"weight_grad": float("nan")}, ValueError, "weight_grad: nan must be a finite number"),
        ({"send": "1"}, ValueError, "send: '1' must be a finite number"),
    ],
)
def test_bad_input(change, error, says):
    with pytest.raises(error, match=says):
        simulate_pipeline(**{"schedule": "1F1B", "pp": 4, "microbatches": 8, **ONE, **change})


def test_a_picture_needs_a_path():
    with pytest.raises(TypeError, match="path: 3 must be a path"):
        simulate_pipeline("GPipe", 1, 1, **ONE).draw(3)


def test_one_forward_one_backward_of_several_stages_is_interleaved():
    plain, interleaved = (simulate_pipeline(name, 2, 4, virtual=2, **ONE) for name in ("1F1B", "Interleaved1F1B"))
    assert plain.rows == interleaved.rows


class Slow(torch.autograd.Function):
    """The identity, whose passes take fixed times in seconds."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        time.sleep(forward)
        ctx.seconds = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        time.sleep(ctx.seconds)
        return dy, None, None


FIXED = {"forward": 0.2, "input_grad": 0.28, "weight_grad": 0.12}


class FixedCost(nn.Module):
    def __init__(self, stages):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(stages))
        for block in self.blocks:
            block.forward = functools.partial(self.stage, block.weight)

    def pipeline_parts(self):
        return [], self.blocks, []

    @staticmethod
    def stage(weight, x):
        x = Slow.apply(x, FIXED["forward"], FIXED["input_grad"])
        return x * Slow.apply(weight, 0, FIXED["weight_grad"])


def fixed_cost_step(group, schedule, virtual, microbatches):
    """Returns the seconds of the faster of two steps."""
    model = FixedCost(group.size() * virtual)
    options = {"loss": lambda y, target: (y - target).square().mean(), "microbatches": microbatches}
    pipeline = tp_ext.parallel.pipeline_stages(model, group, schedule=schedule, stages_per_rank=virtual, **options)
    x, seconds = torch.ones(microbatches, 1), []
    for _ in range(2):
        torch.distributed.barrier(group)
        begin = time.perf_counter()
        pipeline.step(x, target=x, return_outputs=False)
        torch.distributed.barrier(group)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


@pytest.mark.exhaustive  # a busy machine takes longer than the pipeline
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule, virtual", [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_pipelines_of_fixed_cost_take_what_is_simulated(schedule, virtual):
    pp, microbatches = 3, 6
    measured = max(ranks.run(fixed_cost_step, pp, schedule, virtual, microbatches))
    # The first stage's input needs no gradient
    input_grad = [0.0] + [FIXED["input_grad"]] * (pp * virtual - 1)
    simulated = simulate_pipeline(schedule, pp, microbatches, virtual=virtual, **FIXED | {"input_grad": input_grad})
    assert measured == pytest.approx(simulated.time, rel=0.02)
