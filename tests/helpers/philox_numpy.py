"""Philox4x32-10 in numpy's 64-bit integers, and the masks of dropout by it."""

import numpy as np


def words(seed: int, counters: np.ndarray, stream: int = 0) -> np.ndarray:
    """[.., 4] for counters [..]; the stream is their third number of 32 bits."""
    low = np.uint64(0xFFFFFFFF)
    counters = np.asarray(counters, dtype=np.uint64)
    zeros = np.zeros_like(counters)
    c = [counters & low, counters >> np.uint64(32), zeros + np.uint64(stream), zeros]
    k = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high = a >> np.uint64(32), b >> np.uint64(32)
        c = [high[1] ^ c[1] ^ np.uint64(k[0]), b & low, high[0] ^ c[3] ^ np.uint64(k[1]), a & low]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, -1).astype(np.uint32)


def dropout_numbers(seed: int, index: np.ndarray) -> np.ndarray:
    """The 32 bits by which dropout decides on the elements of indices i: 16 of stream 0 above 16 of stream 1, half
    i % 8 of the words of counter i // 8, the lower half of a word before the upper one."""
    index = np.asarray(index, dtype=np.uint64)
    place = (index % np.uint64(8)).astype(np.int64)
    halves = []
    for stream in (0, 1):
        four = words(seed, index // np.uint64(8), stream)
        word = np.take_along_axis(four, (place // 2)[..., None], -1)[..., 0]
        halves.append(word >> (place % 2 * 16).astype(np.uint32) & np.uint32(0xFFFF))
    return halves[0] << np.uint32(16) | halves[1]


def kept(seed: int, p: float, index: np.ndarray) -> np.ndarray:
    return (dropout_numbers(seed, index) >= p * 2.0**32) & (p < 1)
