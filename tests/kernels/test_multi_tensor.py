"""The squared norm and the scaling of a list of tensors, against fp64 and torch's operators on one tensor."""

import itertools

import pytest
import torch
from torch.library import opcheck

import tp_ext
from tp_ext import _ops

pytestmark = pytest.mark.core

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Around the chunk of 16384 elements, the vectors and lanes in it, and the 180 tensors of a launch
LENGTHS = [0, 1, 3, 7, 8, 9, 31, 32, 33, 1000, 16383, 16384, 16385, 3 * 16384 + 5]


def of_lengths(lengths, dtype, device, offset=0):
    return [torch.randn(n + offset, device=device).to(dtype)[offset:] for n in lengths]


def exact(xs):
    return sum((x.double().square().sum() for x in xs), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squared_norm(dtype, device):
    """Squares of all but fp64 are exact in fp64: what is left is the rounding of its sums."""
    for lengths in ([n] for n in LENGTHS):
        torch.testing.assert_close(*_both(of_lengths(lengths, dtype, device)), rtol=1e-13, atol=0)
    for lengths in (LENGTHS, [5] * 400, [0, 0], [2] * 179 + [16385] * 3):
        torch.testing.assert_close(*_both(of_lengths(lengths, dtype, device)), rtol=1e-13, atol=0)


def _both(xs):
    ours = _ops.multi_tensor_squared_norm(xs)
    assert ours.dtype == torch.float64 and ours.shape == () and ours.device == xs[0].device
    return ours.cpu(), exact(xs).cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_is_that_of_torch(dtype, device):
    """One multiplication in fp32 (fp64 for fp64) and one rounding, as torch's operator does it."""
    for lengths, offset in itertools.product((LENGTHS, [4] * 400), (0, 1, 3)):
        xs = of_lengths(lengths, dtype, device, offset)
        for scale in (0.37, 0.0, -2.0, float("inf"), float("nan")):
            want = [x * scale for x in xs]
            got = [torch.nn.functional.pad(x, (1, 1), value=7.0) for x in xs]  # neighbours must stay
            _ops.multi_tensor_scale_([x[1:-1] for x in got], torch.tensor(scale, dtype=torch.float64, device=device))
            want = [torch.nn.functional.pad(x, (1, 1), value=7.0) for x in want]
            torch.testing.assert_close(torch.cat(got), torch.cat(want), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_of_one_changes_no_bit(dtype, device):
    """Not even of a NaN, a subnormal or a negative zero."""
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    info = torch.iinfo(bits)
    before = torch.randint(info.min, info.max, (20000,), dtype=bits, device=device)
    after = before.clone()
    _ops.multi_tensor_scale_([after.view(dtype)], torch.ones((), device=device))
    assert torch.equal(after, before)


def test_storage_offsets_change_nothing(device):
    """The order of additions depends on lengths alone, not on addresses."""
    for dtype in DTYPES:
        x = torch.randn(20000, device=device).to(dtype)
        norms = []
        for offset in range(9):
            moved = x.new_empty(len(x) + offset)[offset:].copy_(x)
            norms.append(_ops.multi_tensor_squared_norm([moved]))
            _ops.multi_tensor_scale_([moved], torch.tensor(0.3, device=device, dtype=torch.float64))
            assert torch.equal(moved, x * 0.3)
        assert all(torch.equal(norm, norms[0]) for norm in norms)


def test_mixed_dtypes_and_strides(device):
    """Transposed tensors are one contiguous range; slices, with holes in between, and 0-d tensors are not."""
    wide = torch.randn(40, 30, device=device)
    xs = [
        wide[:, 3:17],
        torch.randn(7, 5, 3, device=device, dtype=torch.float64).permute(2, 0, 1),
        torch.randn(50, device=device).bfloat16()[::3],
        torch.randn((), device=device).half(),
        torch.randn(3, 4, device=device).t(),
    ]
    torch.testing.assert_close(*_both(xs), rtol=1e-13, atol=0)
    before, want = wide.clone(), [x * 0.5 for x in xs]
    versions = [x._version for x in xs]
    _ops.multi_tensor_scale_(xs, torch.tensor(0.5, device=device))
    assert all(torch.equal(x, y) for x, y in zip(xs, want, strict=True))
    assert torch.equal(wide[:, :3], before[:, :3]) and torch.equal(wide[:, 17:], before[:, 17:])
    assert all(x._version > version for x, version in zip(xs, versions, strict=True))  # autograd must know
    with torch.inference_mode():
        _ops.multi_tensor_scale_([torch.ones(3, device=device)], torch.tensor(0.5, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_huge_and_tiny_values(dtype, device):
    """Where torch's norm in the dtype overflows or is 0, ours is right; NaN and infinities come through."""
    for value in (1e30, 1e-30):
        x = torch.full((1000,), value, device=device).to(dtype)
        theirs = torch.linalg.vector_norm(x)
        assert not theirs.isfinite() or theirs == 0
        torch.testing.assert_close(*_both([x]), rtol=1e-13, atol=0)
    for value in (float("nan"), float("inf"), float("-inf")):
        x = torch.tensor([1.0, value, 2.0], device=device).to(dtype)
        torch.testing.assert_close(
            _ops.multi_tensor_squared_norm([x]).cpu(), torch.tensor(abs(value)).double(), equal_nan=True
        )


def test_fp64_overflows_where_torch_does(device):
    for value in (1e200, 1e-200, 1e150, 1e-150):
        x = torch.full((3,), value, dtype=torch.float64, device=device)
        ours = _ops.multi_tensor_squared_norm([x]).sqrt()
        torch.testing.assert_close(ours, torch.linalg.vector_norm(x), rtol=1e-13, atol=0)


def test_the_same_bits_for_every_number_of_threads(device):
    xs = of_lengths([300, 5, 70001, 1 << 18, 0, 123457], torch.float32, device)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            copies = [x.clone() for x in xs]
            _ops.multi_tensor_scale_(copies, torch.tensor(0.7, device=device))
            results.append([_ops.multi_tensor_squared_norm(xs), *copies])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.cuda
def test_captured_in_a_graph_and_without_waiting():
    xs = of_lengths([1000] * 200 + [100000], torch.float32, "cuda")
    scale = torch.tensor(0.5, device="cuda")
    before, want = [x.clone() for x in xs], exact(xs).cpu()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _ops.multi_tensor_squared_norm(xs)
        _ops.multi_tensor_scale_(xs, torch.ones((), device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = _ops.multi_tensor_squared_norm(xs)
        _ops.multi_tensor_scale_(xs, scale)
    for turn in range(2):
        graph.replay()
        torch.testing.assert_close(total.cpu(), want / 4**turn, rtol=1e-13, atol=0)
    assert all(torch.equal(x, y / 4) for x, y in zip(xs, before, strict=True))


def test_opcheck_and_compile(device):
    xs = [torch.randn(3, 5, device=device), torch.randn(7, device=device).bfloat16()]
    scale = torch.tensor(0.5, device=device)
    opcheck(torch.ops.tp_ext._multi_tensor_squared_norm, (xs,))
    opcheck(torch.ops.tp_ext._multi_tensor_scale_, (xs, scale))
    opcheck(torch.ops.tp_ext._multi_tensor_scale_, ([], scale))

    def clipped(xs, scale):
        xs = [x + 1 for x in xs]
        _ops.multi_tensor_scale_(xs, scale)
        return _ops.multi_tensor_squared_norm(xs), *xs

    for a, b in zip(
        clipped(xs, scale), torch.compile(clipped, fullgraph=True, backend="aot_eager")(xs, scale), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "call, error, word",
    [
        (lambda x: _ops.multi_tensor_squared_norm([x, x.long()]), TypeError, r"xs\[1\]: dtype"),
        (lambda x: _ops.multi_tensor_scale_([x], x), ValueError, "scale: shape"),
        (lambda x: _ops.multi_tensor_scale_([x], x.sum().long()), TypeError, "scale: dtype"),
        (lambda x: _ops.multi_tensor_scale_([x.sum().expand(3)], x.sum()), ValueError, r"xs\[0\]: strides"),
        (lambda x: _ops.multi_tensor_scale_([x.to(torch.complex64)], x.sum()), TypeError, r"xs\[0\]: dtype"),
    ],
)
def test_errors_name_the_argument(call, error, word, device):
    with pytest.raises(error, match=word):
        call(torch.ones(3, device=device))


@pytest.mark.cuda
def test_one_device():
    x = torch.ones(3, device="cuda")
    for call in (
        lambda: _ops.multi_tensor_squared_norm([x, x.cpu()]),
        lambda: _ops.multi_tensor_scale_([x, x.cpu()], x.sum()),
    ):
        with pytest.raises(ValueError, match=r"xs\[1\]: device"):
            call()


def test_inputs_without_a_kernel_take_the_way_of_torch():
    """Complex gradients, say; and no gradient at all."""
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    param.grad = torch.full((3,), 3 + 4j)
    norm = tp_ext.clip_grad_norm_(param, 1.0)
    torch.testing.assert_close(norm.real, torch.tensor(75.0).sqrt())
    torch.testing.assert_close(param.grad, torch.full((3,), 3 + 4j) / 75**0.5, rtol=1e-5, atol=0)
    assert tp_ext.clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0) == 0


def test_a_half_norm_that_overflows_clips_right():
    """The norm that is returned is rounded to the gradients' dtype; what they are multiplied by is not."""
    param = torch.nn.Parameter(torch.zeros(10000, dtype=torch.float16))
    param.grad = torch.full((10000,), 1000.0, dtype=torch.float16)
    assert tp_ext.clip_grad_norm_(param, 1.0).isinf()  # 100000
    torch.testing.assert_close(param.grad, torch.full((10000,), 0.01, dtype=torch.float16))


def test_a_gradient_given_twice_is_scaled_once():
    param = torch.nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    torch.testing.assert_close(tp_ext.clip_grad_norm_([param, param], 1.0), torch.tensor(8.0).sqrt())
    torch.testing.assert_close(param.grad, torch.full((4,), 8**-0.5))
