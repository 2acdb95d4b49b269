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
FILLS = [_ops.philox_uniform_, _ops.philox_normal_]


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
        assert torch.equal(filled(fill, 5000, 3, 0.0, 0.02, device, dtype=dtype), single.to(dtype))
    double = filled(fill, 5000, 3, 0.0, 0.02, device, dtype=torch.float64)
    assert torch.equal(double.float(), single)


@pytest.mark.cuda
@pytest.mark.parametrize("fill", FILLS)
def test_every_device_draws_the_same_bits(fill):
    cpu, cuda = (filled(fill, 100_003, 11, 0.1, 1.3, d, dtype=torch.float64) for d in ("cpu", "cuda"))
    assert torch.equal(cpu, cuda.cpu())


@pytest.mark.parametrize("fill", FILLS)
def test_strided_empty_and_opcheck(fill, device):
    want = filled(fill, (6, 5), 2, 0.0, 1.0, device)
    strided = torch.zeros(5, 6, device=device).t()
    fill(strided, torch.tensor(2, device=device), 0.0, 1.0, 30, 30, 0)
    assert torch.equal(strided, want)
    assert filled(fill, (0, 5), 2, 0.0, 1.0, device).shape == (0, 5)
    op = torch.ops.tp_ext._philox_uniform_ if fill is FILLS[0] else torch.ops.tp_ext._philox_normal_
    opcheck(op, (torch.zeros(4, 6, device=device), torch.tensor(1, device=device), 0.0, 1.0, 6, 12, 6))


@pytest.mark.parametrize("fill", FILLS)
def test_errors_name_the_argument(fill, device):
    t, seed = torch.zeros(4, 6, device=device), torch.tensor(0, device=device)
    with pytest.raises(ValueError, match="local_inner: 5"):
        fill(t, seed, 0.0, 1.0, 5, 24, 0)
    with pytest.raises(ValueError, match="offset: 1"):
        fill(t, seed, 0.0, 1.0, 24, 24, 1)
    with pytest.raises(TypeError, match="seed: dtype"):
        fill(t, seed.float(), 0.0, 1.0, 24, 24, 0)
    with pytest.raises(TypeError, match="self: dtype"):
        fill(t.long(), seed, 0.0, 1.0, 24, 24, 0)
