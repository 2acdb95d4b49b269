"""overlap_chunks: linears in chunks have the results of linears in one, to the last bit where sums are exact."""

import time

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import count_collectives_of, own_input, own_output, own_tokens, partial_slice
from tp_ext import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.core

KINDS = [
    pytest.param(kind, sp, id=f"{kind.__name__[:3]}{'-sp' * sp}")
    for kind in (ColumnParallelLinear, RowParallelLinear)
    for sp in (False, True)
]
BOTH = pytest.mark.parametrize(("kind", "sp"), KINDS)
TOKENS, IN, OUT = 333, 6, 8  # no p divides them all; 5 chunks of 64 tokens and some more


def _integers(*shape, dtype=torch.float64):
    """Sums of products of these are exact in any order."""
    return torch.randint(-3, 4, shape).to(dtype)


def _layer(group, kind, sp, bias=True, **options):
    torch.manual_seed(1)
    dense = torch.nn.Linear(IN, OUT, bias, dtype=torch.float64)
    with torch.no_grad():
        for param in dense.parameters():
            param.copy_(_integers(*param.shape))
    return kind.from_linear(dense, group=group, sequence_parallel=sp, **options)


def _data(layer, group, leading=(), dtype=torch.float64):
    """x and dy of this rank; features that the ranks hold are slices, others are theirs."""
    torch.manual_seed(2)
    x, dy = (_integers(TOKENS, *leading, n, dtype=dtype) for n in (IN, OUT))
    return own_input(x, layer, group).contiguous().requires_grad_(), own_output(dy, layer, group)


def _step(layer, x, dy):
    layer.zero_grad()
    x.grad = None
    y = layer(x, TOKENS)
    y.backward(dy.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def _equal(got, want):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _sent(run):
    """Collectives, as gloo reports them to the profiler; with a dispatch mode there would be one chunk."""
    with torch.profiler.profile() as profile:
        run()
    return sum(event.name.startswith("gloo:") for event in profile.events())


@pytest.mark.thinned
@pytest.mark.parametrize("leading", [(), (2,)], ids=["2d", "3d"])
@on_ranks(1, 2, 3, 4)
@BOTH
def test_the_same_in_chunks(group, kind, sp, leading):
    """y and all gradients; with a weight, a bias or an input that is not trained; uneven tokens and features."""
    whole, found = _layer(group, kind, sp), []
    x, dy = _data(whole, group, leading)
    want = _step(whole, x, dy)
    for chunks in (2, 3, 5):
        layer = _layer(group, kind, sp, overlap_chunks=chunks)
        found.append(_equal(_step(layer, x, dy), want))
        for name in ("weight", "bias"):
            getattr(layer, name).requires_grad_(False)
            want_frozen = [None if g is getattr(whole, name).grad else g for g in want]
            found.append(_equal(_step(layer, x, dy), want_frozen))
            getattr(layer, name).requires_grad_(True)
        layer.zero_grad()
        layer(x.detach(), TOKENS).backward(dy)
        found.append(torch.equal(layer.weight.grad, whole.weight.grad))
    assert found == [True] * 12


@BOTH
@on_ranks(2, backend="gloo")
def test_collectives(group, kind, sp):
    """In 4 chunks: forward, backward; in one chunk: 127 tokens, and under a dispatch mode. Backward of the
    column has a GEMM for each collective as it is."""
    want = {
        (ColumnParallelLinear, False): [0, 1, 0, 1],
        (ColumnParallelLinear, True): [4, 2, 1, 3],
        (RowParallelLinear, False): [4, 0, 1, 1],
        (RowParallelLinear, True): [4, 4 + 1, 1, 3],
    }
    layer = _layer(group, kind, sp, overlap_chunks=4)
    x, dy = _data(layer, group)
    forward = _sent(lambda: layer(x, TOKENS))
    both = _sent(lambda: _step(layer, x, dy))
    few = own_tokens(torch.ones(127, IN, dtype=x.dtype), group) if sp else torch.ones(127, IN, dtype=x.dtype)
    if kind is RowParallelLinear:
        few = torch.ones(127, x.shape[-1], dtype=x.dtype)
    assert [
        forward,
        both - forward,
        _sent(lambda: layer(few, 127)),
        sum(count_collectives_of(lambda: _step(layer, x, dy)).values()),
    ] == want[kind, sp]


@BOTH
@on_ranks(2)
def test_autocast_inference_and_main_grad(group, kind, sp):
    """Sums of 6 products of numbers to 3, 54 at most, are exact in bf16; gradients of the weight are one GEMM in any
    case."""
    results = []
    for chunks in (1, 3):
        layer = _layer(group, kind, sp, overlap_chunks=chunks).float()
        x, dy = _data(layer, group, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            result = _step(layer, x, dy)
        assert result[0].dtype == torch.bfloat16
        with torch.inference_mode():
            result.append(layer(x, TOKENS).clone())
        layer = _layer(group, kind, sp, overlap_chunks=chunks, grad_accumulation_fusion=True).float()
        layer.weight.main_grad = torch.ones_like(layer.weight)
        result += _step(layer, x, dy)
        result.append(layer.weight.main_grad)
        results.append(result)
    assert _equal(*results)


@on_ranks(2, backend="gloo")
def test_mlp_and_attention_have_the_option(group):
    """2 row linears, whose backward has an all-gather in 3 chunks. Rounding of GEMMs of other shapes, in fp64."""
    options = {"group": group, "sequence_parallel": True, "dtype": torch.float64}
    results = []
    for chunks in (1, 3):
        torch.manual_seed(3)
        mlp = tp_ext.ParallelMLP(IN, OUT, overlap_chunks=chunks, **options)
        attention = tp_ext.ParallelAttention(IN, 3, rope=100.0, overlap_chunks=chunks, **options)
        x = own_tokens(torch.randn(TOKENS, IN, dtype=torch.float64), group).requires_grad_()
        y = mlp(attention(x, batch_size=9, total_tokens=TOKENS), TOKENS)
        sent = _sent(lambda y=y: y.sin().sum().backward())
        results.append((sent, [y, x.grad, *(p.grad for m in (mlp, attention) for p in m.parameters())]))
    (sent, want), (sent_in_chunks, got) = results
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert sent_in_chunks - sent == 2 * 2


def _peak(run):
    """The most bytes that the CPU allocator had given out at once, over what it had before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    live = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def _peaks(group):
    peaks = {}
    for kind, sp in ((ColumnParallelLinear, True), (RowParallelLinear, True), (RowParallelLinear, False)):
        dense = torch.nn.Linear(64, 64)
        for chunks in (1, 4):
            layer = kind.from_linear(dense, group=group, sequence_parallel=sp, overlap_chunks=chunks)
            x = own_input(torch.randn(1024, 64), layer, group).contiguous()
            peaks[kind.__name__, sp, chunks] = _peak(lambda layer=layer, x=x: layer(x))
    return peaks


def test_forward_takes_no_more_memory():
    for peaks in ranks.run(_peaks, 2):
        for (kind, sp, chunks), peak in peaks.items():
            assert peak > 1024 * 64 * 4 // 2, "at least y"
            assert peak <= peaks[kind, sp, 1] + 4096, (kind, sp, chunks)


def _interrupted(group):
    """The second GEMM fails, here and there, while the sum of the first is under way; rank 1 comes late."""
    layer, calls = _layer(group, RowParallelLinear, False, bias=False, overlap_chunks=5), []

    def mm(x, y, *, out):
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("the second GEMM")
        return out.zero_()

    x = torch.ones(
        TOKENS, partial_slice(torch.ones(1, IN), layer.tp_shardings["weight"], group.rank(), 2).shape[-1]
    ).double()
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.out", mm, "CPU")
    try:
        if group.rank():
            time.sleep(0.5)
        start = time.monotonic()
        with pytest.raises(ArithmeticError):
            layer(x)
        return time.monotonic() - start
    finally:
        library._destroy()


def test_a_collective_in_flight_is_waited_for_when_a_gemm_fails():
    """Or the communication would write to memory that is given back."""
    early, _ = ranks.run(_interrupted, 2)
    assert early > 0.3


def test_number_of_chunks_is_checked():
    with pytest.raises(ValueError, match=r"overlap_chunks: 0 must be an integer of at least 1"):
        ColumnParallelLinear(4, 4, overlap_chunks=0)
    with pytest.raises(ValueError, match=r"overlap_chunks: 1.5 must be an integer of at least 1"):
        tp_ext.ParallelMLP(4, 4, overlap_chunks=1.5)
    with pytest.raises(ValueError, match=r"overlap_chunks: 0 must be an integer of at least 1"):
        tp_ext._ops.row_parallel_linear(torch.ones(2, 2), torch.ones(2, 2), None, "", False, None, None, 0)
