"""record_timeline: what it records on CPU, what it makes of a trace of CUDA kernels, and the picture."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.profiler import record_function

import tp_ext
from tests.helpers import ranks
from tp_ext.debug.timeline import Span, Timeline, record_timeline, spans_of_trace
from tp_ext.parallel import pipeline_stages

SECONDS = 0.05


def _recorded(group):
    """A step of a layer, in which rank 1 begins the backward later."""
    model = tp_ext.ParallelMLP(6, 10, group=group)
    optimizer = torch.optim.AdamW(model.parameters())
    with record_timeline() as timeline:
        assert timeline.ranks == []
        with record_function("forward"):
            y = model(torch.ones(3, 6, requires_grad=True)).sum()
        time.sleep(SECONDS * group.rank())
        with record_function("backward"):
            y.backward()
        optimizer.step()
    return timeline.ranks, timeline.seconds, [timeline.idle(rank) for rank in range(2)]


def test_phases_and_collectives_of_all_ranks():
    first, second = ranks.run(_recorded, 2)
    assert first == second
    spans, seconds, idle = first
    assert [[span.kind for span in own] for own in spans] == [
        ["forward", "communication", "backward", "communication", "optimizer"]
    ] * 2
    assert min(own[0].begin for own in spans) == 0 and max(own[-1].end for own in spans) == seconds
    for own in spans:
        for phase, collective in (own[0:2], own[2:4]):
            assert phase.begin <= collective.begin <= collective.end <= phase.end
            assert collective.name == "all_reduce" and collective.size == 3 * 6 * 4
        assert own[4].name == "AdamW"
    assert spans[0][3].end > spans[1][2].begin  # waits for rank 1 in its collective
    assert idle[1] >= 0.99 * SECONDS / seconds


def _in_the_background(group):
    """An all-reduce that tp_shm's own thread completes before the backward begins."""
    shared = dist.new_group(backend="tp_shm")
    x = torch.ones(1000)
    with record_timeline() as timeline:
        future = dist.all_reduce(x, group=shared, async_op=True).get_future()
        while not future.done():  # does not run the call, as is_completed() may
            time.sleep(0.001)
        with record_function("backward"):
            time.sleep(SECONDS)
    dist.destroy_process_group(shared)
    return timeline.ranks


def test_a_call_that_a_thread_completes():
    for collective, backward in ranks.run(_in_the_background, 2)[0]:
        assert (collective.name, collective.size) == ("all_reduce", 4000)
        assert collective.end <= backward.begin


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        time.sleep(SECONDS)
        return x + 0 * weight

    @staticmethod
    def backward(ctx, dy):
        time.sleep(SECONDS)
        return dy, dy.sum().reshape(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return Sleeping.apply(x, self.weight)


def _pipeline(group, name):
    model = nn.Sequential(*(Block() for _ in range(4)))
    options = {"schedule": name, "microbatches": 2, "loss": lambda y, t: y.mean()}
    schedule = pipeline_stages(model, group, **options)
    x = torch.ones(4, 3, requires_grad=True)
    schedule.step(x, target=x)
    with record_timeline(group) as timeline:
        schedule.step(x, target=x)
    bubble = schedule.bubble
    return timeline.ranks, [timeline.idle(rank) for rank in range(2)], bubble, schedule.ideal_bubble


@pytest.mark.parametrize(("name", "ideal"), [("GPipe", 1 / 3), ("InterleavedZeroBubble", None)])
def test_stages_of_a_pipeline_and_their_messages(name, ideal):
    spans, idle, bubble, formula = ranks.run(_pipeline, 2, name, timeout=120)[0]
    assert formula == ideal
    per_rank = 1 if ideal else 2
    for rank, own in enumerate(spans):
        stages = range(rank, 2 * per_rank, 2)
        for kind in ("forward", "backward"):
            names = {f"{kind} {i} of stage {stage}" for i in range(2) for stage in stages}
            assert {span.name for span in own if span.kind == kind} - {"forward: loss"} == names
        messages = {span.name for span in own if span.kind == "communication"}
        assert {"send", "recv"} <= messages
        sizes = {span.size for span in own if span.name in ("send", "recv")}
        assert sizes == {2 * 3 * 4}
        assert ("weight gradient" in {span.kind for span in own}) == (ideal is None)
    assert sum(idle) / 2 == pytest.approx(bubble, abs=0.2)


def _event(category, name, begin, length, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "tid": 1, "args": args}


def test_a_phase_on_cuda_lasts_as_long_as_the_kernels_launched_in_it():
    trace = {
        "baseTimeNanoseconds": 5_000_000_000,
        "traceEvents": [
            _event("user_annotation", "forward 0", 0, 10),
            _event("user_annotation", "backward 0", 20, 10),
            _event("gpu_user_annotation", "forward 0", 100, 90),
            _event("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=1),
            _event("cuda_runtime", "cudaLaunchKernel", 9, 1, correlation=2),
            {**_event("cuda_runtime", "cudaLaunchKernel", 25, 1, correlation=3), "tid": 2},  # of autograd's thread
            _event("cuda_driver", "cuLaunchKernelEx", 26, 1, correlation=4),
            _event("kernel", "gemm", 100, 40, correlation=1),
            _event("kernel", "norm", 150, 10, correlation=2),
            _event("kernel", "gemm_backward", 200, 30, correlation=3),
            _event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 210, 50, correlation=4)
            | {"args": {"correlation": 4, "Collective name": "allreduce", "In msg nelems": 12, "dtype": "BFloat16"}},
            {"ph": "i", "name": "forward", "ts": 1},
        ],
    }
    spans = [
        span._replace(begin=round((span.begin - 5) * 1e6), end=round((span.end - 5) * 1e6))
        for span in spans_of_trace(trace, [])
    ]
    assert spans == [
        Span("forward", "forward 0", 100, 160),
        Span("backward", "backward 0", 200, 230),
        Span("communication", "allreduce", 210, 260, 24),
    ]


def test_a_call_lasts_until_its_work_ends():
    """tp_shm's work begins in the call; gloo's later, in a thread of its own, and a reduce-scatter is an all-reduce."""
    events = [
        _event("cpu_op", "c10d::allreduce_", 10, 5),
        _event("user_annotation", "tp_shm:all_reduce", 11, 60),
        _event("cpu_op", "c10d::_reduce_scatter_base_", 20, 5),
        {**_event("user_annotation", "gloo:all_reduce", 40, 20), "tid": 3},
        _event("cpu_op", "c10d::allreduce_", 30, 5),
        {**_event("user_annotation", "gloo:all_reduce", 60, 40), "tid": 3},
        _event("user_annotation", "gloo:send", 60, 40),  # of a call that was issued before calls were kept
        _event("cpu_op", "c10d::send", 70, 5),
    ]
    calls = [("c10d::allreduce_", "all_reduce", 4), ("c10d::_reduce_scatter_base_", "reduce_scatter", 2)]
    calls += [("c10d::allreduce_", "all_reduce", 8), ("c10d::send", "send", 1)]
    spans = spans_of_trace({"traceEvents": events}, calls)
    found = [(one.name, round(one.begin * 1e6), round(one.end * 1e6), one.size) for one in spans]
    assert found == [
        ("all_reduce", 10, 71, 4),
        ("reduce_scatter", 20, 60, 2),
        ("all_reduce", 30, 100, 8),
        ("send", 70, 75, 1),
    ]


def test_the_picture(tmp_path):
    timeline = Timeline()
    with pytest.raises(RuntimeError, match="save: must come after the block of record_timeline"):
        timeline.save(tmp_path / "empty.png")
    timeline.ranks = [
        [Span("forward", "forward 3 of stage 0", 0, 1), Span("communication", "all_gather", 0.2, 0.9, 3 * 2**20)],
        [Span("backward", "backward", 1, 2)],
    ]
    assert timeline.idle(0) == 0.5 and timeline.communicated(0) == 3 * 2**20
    for ask in (timeline.idle, timeline.communicated):
        with pytest.raises(ValueError, match=r"rank: 99 must be one of the 2 ranks, in \[0, 2\)"):
            ask(99)
    timeline.save(tmp_path / "step.png")
    timeline.save(tmp_path / "step.svg", title="a title")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    texts = (tmp_path / "step.svg").read_text()
    for text in ("a title", "rank 1", "all_gather 3.0 MiB", "idle 50%"):
        assert f"<!-- {text}" in texts, text


def test_an_exception_ends_the_recording():
    for _ in range(2):  # the profiler is free again
        with pytest.raises(ArithmeticError), record_timeline():
            raise ArithmeticError
    with record_timeline() as timeline, record_function("forward"):
        torch.ones(3).exp()
    assert [span.kind for spans in timeline.ranks for span in spans] == ["forward"]


def _other_profiler():
    runs = pytest.raises(RuntimeError, match="record_timeline: must not be called while a profiler runs")
    with runs, record_timeline(), record_timeline():
        pass
    ran = pytest.raises(RuntimeError, match="record_timeline: another profiler must not run in the block")
    with ran, record_timeline(), torch.profiler.profile():
        pass


def test_another_profiler_is_refused():
    """In a process of its own: torch's profiler would end it."""
    ranks.run_fresh(_other_profiler)


def _recorded_over(group, kind):
    over = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)) if kind == "mesh" else kind
    with record_timeline(over):
        pass


@pytest.mark.parametrize("kind", ["x", 3, "mesh"])
def test_arguments_that_are_no_group_are_refused(kind):
    ranks.run_raises(_recorded_over, 2, TypeError, "process_group: .* must be a ProcessGroup or None", kind)
