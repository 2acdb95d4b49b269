"""Random numbers by global index: the generator against published and independently computed words,
the fills against their distributions, slices against the full tensor bit by bit."""

import math

import numpy as np
import pytest
import torch
from torch.library import opcheck

from tp_ext import _ops

pytestmark = pytest.mark.core

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def truncated_normal_(t, seed, mean, std, *index):
    """Cut at a third of a deviation below the mean and two above."""
    _ops.philox_truncated_normal_(t, seed, mean, std, mean - std / 3, mean + 2 * std, *index)


FILLS = [_ops.philox_uniform_, _ops.philox_normal_, truncated_normal_]


def philox4x32_10(key, counter):
    """Philox4x32-10 in Python integers, as the paper writes it."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c


def words(n, seed, first=0, device="cpu"):
    """The words of n elements, undone from u = (word + 1/2) / 2^32 in fp64, which is exact."""
    u = torch.empty(n, dtype=torch.float64, device=device)
    _ops.philox_uniform_(u, torch.tensor(seed, device=device), 0.0, 1.0, n, first + n, first)
    return [int(w) for w in (u.cpu() * 2**32 - 0.5).tolist()]


def filled(fill, shape, seed, a, b, device, index=None, dtype=torch.float32):
    t = torch.empty(shape, dtype=dtype, device=device)
    n = max(t.numel(), 1)
    fill(t, torch.tensor(seed, device=device), a, b, *(index or (n, n, 0)))
    return t


def test_the_python_generator_passes_the_known_answers():
    # Random123, kat_vectors, "philox4x32 10": counter, key, answer
    ones = 0xFFFFFFFF
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox4x32_10([0, 0], [0] * 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32_10([ones] * 2, [ones] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox4x32_10([0xA4093822, 0x299F31D0], pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_zero_seed_and_counter_give_the_known_answer(device):
    assert words(4, 0, device=device) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("seed", [0, 1, -1, 0x299F31D0A4093822, 2**62 - 1, -(2**63)])
@pytest.mark.parametrize("first", [0, 3, 2**34 - 6, 2**40 + 1, 2**62 - 1000])
def test_words_are_those_of_the_python_generator(seed, first, device):
    # 2**34 - 6: the counter carries from its low 32 bits to its high ones within the run
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    want = [philox4x32_10(key, [i // 4 & 0xFFFFFFFF, i // 4 >> 32, 0, 0])[i % 4] for i in range(first, first + 70)]
    assert words(70, seed, first, device) == want


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("full", [(1,), (7, 9), (8, 64), (3, 5, 33), (2, 3, 2100)])
def test_slices_are_bit_identical_to_the_full_tensor(full, dtype, fill, device):
    whole = filled(fill, full, 42, -0.3, 1.7, device, dtype=dtype)
    for dim, size in enumerate(full):
        inner = math.prod(full[dim + 1 :])
        for start, end in [(0, size // 2), (size // 2, size), (size // 3, size), (size - 1, size)]:
            shape = [*full[:dim], end - start, *full[dim + 1 :]]
            index = ((end - start) * inner, size * inner, start * inner)
            part = filled(fill, shape, 42, -0.3, 1.7, device, index, dtype)
            assert torch.equal(part, whole.narrow(dim, start, end - start)), (dim, start, end)


@pytest.mark.parametrize("fill", FILLS)
def test_threads_do_not_matter(fill):
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(filled(fill, 100_003, 7, 0.0, 1.0, "cpu"))
    torch.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)


def test_uniform_distribution(device):
    n = 1 << 20
    u = filled(_ops.philox_uniform_, n, 1, 0.0, 1.0, device, dtype=torch.float64).cpu()
    # Five standard deviations of the sample mean, of the sample variance, and KS at 1e-6
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    rank = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (u.sort().values - rank).abs().max() < 2.69 / n**0.5
    assert abs(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]) < 5 / n**0.5
    low, high = filled(_ops.philox_uniform_, n, 1, -3.0, 5.0, device).aminmax()
    assert -3 <= low < -2.9999 and 4.9999 < high <= 5


def test_normal_distribution(device):
    n = 1 << 20
    z = filled(_ops.philox_normal_, n, 1, 0.0, 1.0, device, dtype=torch.float64).cpu()
    assert abs(z.mean()) < 5 / n**0.5
    assert abs(z.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((z**4).mean() - 3) < 5 * (96 / n) ** 0.5
    rank = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (torch.special.ndtr(z.sort().values) - rank).abs().max() < 2.69 / n**0.5
    for lag in (1, 2, 3):
        assert abs(torch.corrcoef(torch.stack([z[:-lag], z[lag:]]))[0, 1]) < 5 / n**0.5
    scaled = filled(_ops.philox_normal_, n, 1, 2.0, 0.5, device, dtype=torch.float64).cpu()
    torch.testing.assert_close(scaled, 2 + 0.5 * z, rtol=1e-15, atol=1e-15)


def test_normal_is_box_muller_of_the_words(device):
    n = 1 << 16
    z = filled(_ops.philox_normal_, n, 5, 0.0, 1.0, device, dtype=torch.float64).cpu().numpy()
    u = filled(_ops.philox_uniform_, n, 5, 0.0, 1.0, device, dtype=torch.float64).cpu().numpy()
    radius, angle = np.sqrt(-2 * np.log(u[0::2])), 2 * np.pi * u[1::2]
    # Polynomial logarithm, sine and cosine: a few ulp, and that of the angle near its zeros
    np.testing.assert_allclose(z[0::2], radius * np.cos(angle), rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(z[1::2], radius * np.sin(angle), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("fill", FILLS)
def test_low_precision_is_rounded_fp32(fill, device):
    single = filled(fill, 5000, 3, 0.0, 0.02, device)
    for dtype in (torch.bfloat16, torch.float16):
        got, want = filled(fill, 5000, 3, 0.0, 0.02, device, dtype=dtype), single.to(dtype)
        if fill is truncated_normal_:  # but for what rounding puts out of the bounds
            inside = (want.double() >= -0.02 / 3) & (want.double() <= 0.04)
            got, want = got[inside], want[inside]
        assert torch.equal(got, want)
    double = filled(fill, 5000, 3, 0.0, 0.02, device, dtype=torch.float64)
    assert torch.equal(double.float(), single)


@pytest.mark.cuda
@pytest.mark.parametrize("fill", FILLS)
def test_every_device_draws_the_same_bits(fill):
    cpu, cuda = (filled(fill, 100_003, 11, 0.1, 1.3, d, dtype=torch.float64) for d in ("cpu", "cuda"))
    assert torch.equal(cpu, cuda.cpu())


# Truncated normal: bounds in standard deviations

INF = float("inf")
INTERVALS = [
    (-2, 2),
    (-1, 3),
    (-INF, 0.5),
    (-INF, INF),
    (0, 1),
    (1, INF),
    (-3, -1),
    (0.5, 0.75),
    (2, 2.01),
    (5, 7),
    (-9, -8),
]


def truncated(n, low, high, device="cpu", mean=0.0, std=1.0, dtype=torch.float64, seed=5):
    t = torch.empty(n, dtype=dtype, device=device)
    _ops.philox_truncated_normal_(t, torch.tensor(seed, device=device), mean, std, low, high, n, n, 0)
    return t


@pytest.mark.parametrize("low, high", INTERVALS)
def test_truncated_normal_is_the_quantile_of_the_uniform(low, high, device):
    """From the tail on the nearer side, by torch.special.ndtri in fp64: where its argument is rounded and its own error
    are small, within 1e-13 of max(1, |z|); a quantile moves by the error of the argument over the density."""
    n = 1 << 14
    z = truncated(n, low, high, device).cpu()
    u = filled(_ops.philox_uniform_, n, 5, 0.0, 1.0, "cpu", dtype=torch.float64)
    tail = [
        torch.special.erfc(torch.tensor(b * s / 2**0.5, dtype=torch.float64)) / 2
        for b, s in ((low, -1), (high, -1), (low, 1), (high, 1))
    ]
    left = tail[0] + u * (tail[1] - tail[0])
    if low > 0:  # from above, mirrored
        left = tail[3] + (1 - u) * (tail[2] - tail[3])
    want = torch.special.ndtri(left) * (-1 if low > 0 else 1)
    slope = left * 4e-16 / (torch.exp(-z * z / 2) / math.sqrt(2 * math.pi))
    assert ((z - want).abs() <= 1e-13 * z.abs().clamp_min(1) + 4 * slope).all()
    assert low <= z.min() and z.max() <= high and (z[:-1] != z[1:]).all()


@pytest.mark.parametrize(
    "low, high", [*INTERVALS, (30, 31), (36.9, 37.1), (-INF, -38), (40, INF), (1000, 1000.01), (-3e4, -2e4)]
)
def test_truncated_normal_distribution(low, high, device):
    """By the probability integral transform its CDF values are uniform (KS test at 1e-6). Far out the tail is
    exponential with rate |bound| up to O(1 / bound^2), which 2^16 draws cannot resolve."""
    n, mean, std = 1 << 16, 3.0, 0.25
    x = truncated(n, mean + std * low, mean + std * high, device, mean, std).cpu()
    z = (x - mean) / std
    near, far = (low, high) if low + high > 0 else (-high, -low)
    z = z if low + high > 0 else -z
    if near < -1 or (low, high) == (-INF, INF):
        cdf = torch.special.ndtr
        share = (cdf(z) - cdf(torch.tensor(near, dtype=z.dtype))) / (
            cdf(torch.tensor(far, dtype=z.dtype)) - cdf(torch.tensor(near, dtype=z.dtype))
        )
    else:  # log of the upper tail's share, of values and bounds
        first, last = (torch.special.log_ndtr(-torch.tensor(float(b), dtype=z.dtype)) for b in (near, far))
        share = -torch.expm1(torch.special.log_ndtr(-z) - first) / -torch.expm1(last - first)
    rank = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (share.sort().values - rank).abs().max() < 2.69 / n**0.5


def test_truncated_normal_moments(device):
    n, density, mass = 1 << 20, math.exp(-2) / math.sqrt(2 * math.pi), math.erf(2 / math.sqrt(2))
    z = truncated(n, -2.0, 2.0, device).cpu()
    variance = 1 - 4 * density / mass
    assert abs(z.mean()) < 5 * (variance / n) ** 0.5
    assert abs(z.var() - variance) < 5 * (2 / n) ** 0.5
    for lag in (1, 2, 3):
        assert abs(torch.corrcoef(torch.stack([z[:-lag], z[lag:]]))[0, 1]) < 5 / n**0.5


@pytest.mark.parametrize(
    "mean, std, low, high",
    [
        (0, 1, -0.702, 0.702),
        (0, 0.02, -0.0301, 0.0299),
        (1, 1e-2, 0.995, 1.013),
        (0, 1, 5.003, INF),
        (0, 1e-6, -1e-6, 1e-7),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_value_is_rounded_out_of_the_bounds(mean, std, low, high, dtype, device):
    exact = truncated(1 << 14, low, high, device, float(mean), std)
    rounded = exact if dtype == torch.float64 else exact.float().to(dtype)
    kept = (rounded.double() >= low) & (rounded.double() <= high)
    t = truncated(1 << 14, low, high, device, float(mean), std, dtype)
    assert low <= t.double().min() and t.double().max() <= high
    assert torch.equal(t[kept], rounded[kept])
    assert (t[rounded.double() > high] == t.max()).all() and (t[rounded.double() < low] == t.min()).all()
    if dtype == torch.bfloat16 and high != INF:
        assert not kept.all(), "some are rounded out of the bounds"


def test_narrow_intervals_are_uniform(device):
    for low, width in ((0.3, 1e-12), (-20.0, 1e-12), (100.0, 1e-11), (-1e-13, 3e-13)):
        t = truncated(4096, low, low + width, device).cpu()
        share = (t - low) / ((low + width) - low)
        assert abs(float(share.mean()) - 0.5) < 0.05 and t.min() >= low and t.max() <= low + width


def test_truncated_normal_errors_name_the_argument(device):
    for mean, std, low, high, word in (
        (INF, 1.0, 0.0, 1.0, "mean: inf must be finite"),
        (0.0, 0.0, 0.0, 1.0, "std: 0 must be positive"),
        (0.0, float("nan"), 0.0, 1.0, "std: nan must be positive"),
        (0.0, 1.0, 1.0, 1.0, "low: 1 must be below high = 1"),
        (0.0, 1.0, float("nan"), 1.0, "low: nan must be below"),
        (0.0, 1.0, 1.001, 1.002, "low: 1.001 and high = 1.002 must have a value of BFloat16 between them"),
        (0.0, 1.0, -INF, -3.4e38, "must have a value of BFloat16"),
    ):
        with pytest.raises(ValueError, match=word):
            truncated(4, low, high, device, mean, std, torch.bfloat16)


@pytest.mark.parametrize("fill", FILLS)
def test_strided_empty_and_opcheck(fill, device):
    want = filled(fill, (6, 5), 2, 0.0, 1.0, device)
    strided = torch.zeros(5, 6, device=device).t()
    fill(strided, torch.tensor(2, device=device), 0.0, 1.0, 30, 30, 0)
    assert torch.equal(strided, want)
    assert filled(fill, (0, 5), 2, 0.0, 1.0, device).shape == (0, 5)
    name = ("uniform", "normal", "truncated_normal")[FILLS.index(fill)]
    numbers = (0.0, 1.0) if name != "truncated_normal" else (0.0, 1.0, -1.0, 2.0)
    op = getattr(torch.ops.tp_ext, f"_philox_{name}_")
    opcheck(op, (torch.zeros(4, 6, device=device), torch.tensor(1, device=device), *numbers, 6, 12, 6))


@pytest.mark.parametrize("fill", FILLS)
def test_errors_name_the_argument(fill, device):
    t, seed = torch.zeros(4, 6, device=device), torch.tensor(0, device=device)
    with pytest.raises(ValueError, match="local_inner: 5"):
        fill(t, seed, 0.0, 1.0, 5, 24, 0)
    with pytest.raises(ValueError, match="local_inner: 24 must be at most full_inner = 23"):
        fill(t, seed, 0.0, 1.0, 24, 23, 0)
    with pytest.raises(ValueError, match="offset: -1"):
        fill(t, seed, 0.0, 1.0, 24, 24, -1)
    with pytest.raises(TypeError, match="seed: dtype"):
        fill(t, seed.float(), 0.0, 1.0, 24, 24, 0)
    with pytest.raises(TypeError, match="self: dtype"):
        fill(t.long(), seed, 0.0, 1.0, 24, 24, 0)
