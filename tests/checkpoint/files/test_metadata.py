"""Metadata from a pickle: chunks must be a partition, and no file of some bytes takes much time or memory."""

import itertools
import pickle
import random
import time
import tracemalloc

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import tp_ext
from tp_ext.checkpoint.files.metadata import overlapping, parse_metadata

pytestmark = pytest.mark.core


def _chunk(draw, shape):
    return tuple(tuple(sorted(draw.sample(range(n + 1), 2))) for n in shape)


def _cut(draw, chunk, count):
    """A partition of a chunk, by cuts at random places: of the whole, then of its parts."""
    chunks = [chunk]
    while len(chunks) < count:
        one = chunks.pop(draw.randrange(len(chunks)))
        dim = draw.randrange(len(one))
        start, stop = one[dim]
        at = draw.randint(start, stop)
        chunks += [(*one[:dim], (start, at), *one[dim + 1 :]), (*one[:dim], (at, stop), *one[dim + 1 :])]
    draw.shuffle(chunks)
    return chunks


def _share(a, b):
    return all(max(s, t) < min(u, v) for (s, u), (t, v) in zip(a, b, strict=True))


@pytest.mark.parametrize("dims", [1, 2, 3, 4])
def test_overlaps_are_those_of_all_pairs(dims):
    draw = random.Random(dims)
    for _ in range(150):
        shape = [draw.randint(1, 6) for _ in range(dims)]
        chunks = _cut(draw, tuple((0, n) for n in shape), draw.randint(1, 8))
        assert overlapping(chunks) is None
        chunks += [_chunk(draw, shape) for _ in range(draw.randint(0, 2))]
        pairs = [(a, b) for a, b in itertools.combinations(chunks, 2) if _share(a, b)]
        found = overlapping(chunks)
        assert (found in pairs or found[::-1] in pairs) if pairs else found is None


def test_many_chunks_take_no_square_of_time():
    """10^4 chunks: a grid, one of 3 dims, an irregular partition; and one where a sweep crosses half of them."""
    draw = random.Random(0)
    grid = [((i, i + 1), (j, j + 1)) for i in range(100) for j in range(100)]
    deep = [((i, i + 1), (j, j + 1), (k, k + 1)) for i in range(20) for j in range(20) for k in range(25)]
    irregular = _cut(draw, ((0, 10**6), (0, 10**6)), 10_000)
    tall = [((0, 5000), (i, i + 1)) for i in range(5000)] + [((i, i + 1), (5000, 10_000)) for i in range(5000)]
    for chunks in (grid, deep, irregular, tall):
        begin = time.process_time()
        assert overlapping(chunks) is None
        assert overlapping([*chunks, chunks[1234]]) is not None
        assert time.process_time() - begin < 2


def _nested(tuples):
    """Lists or tuples of two of the last, 60 deep: 2^60 items to print or to hash."""
    one = b"))\x86\x94" if tuples else b"]\x94"
    step = b"\x32\x86" if tuples else b"]\x94(h%ch%ce"  # two of the same as a tuple; a list with two of the memo's
    content = one
    for depth in range(60):
        content += step if tuples else step % (depth, depth)
    return content


HOSTILE = {
    "nested lists": b"\x80\x04" + _nested(False) + b".",
    "nested tuples for a key": b"\x80\x04}" + _nested(True) + b"Ns.",
    "a set of nested tuples": b"\x80\x04\x8f(" + _nested(True) + b"\x90.",
    "a far memo": b"\x80\x04Nr\xff\xff\xff\x3f.",
    "a far memo in digits": b"\x80\x04Np1073741823\n.",
    "many bytes": b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00.",
    "a long number": b"\x80\x04\x8b\x00\x00\x10\x00" + b"\x7f" * (1 << 20) + b".",
    "classes": b"\x80\x04" + b"ctorch\nSize\n" * 100_000 + b".",
    "not whole": b"\x80\x04]",
    "cut in a frame": pickle.dumps(["a name of a tensor"] * 9, 4)[:24],
    "no pickle": b"what is this",
    "empty": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_pickles_end_soon_and_stay_small(what):
    begin = time.process_time()
    tracemalloc.start()
    with pytest.raises((pickle.UnpicklingError, ValueError), match=r"\.metadata: ") as raised:
        parse_metadata(HOSTILE[what])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - begin < 2 and most < 16 << 20
    assert len(str(raised.value)) < 1000


def test_nested_lists_keep_their_structure():
    value = pickle.loads(b"\x80\x04" + _nested(False) + b".")
    for _ in range(60):
        value, other = value
        assert value is other
    assert value == []


def test_enums_as_python_3_11_2_pickles_them(monkeypatch, tmp_path):
    """By getattr, which is data to the parser: it is neither refused nor called."""
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name))
    )
    model = nn.Linear(3, 2)
    tp_ext.save_checkpoint(tmp_path / "checkpoint", model)
    content = (tmp_path / "checkpoint" / ".metadata").read_bytes()
    assert b"getattr" in content
    assert parse_metadata(content).state_dict_metadata["model.weight"].size == (2, 3)
    weight = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    tp_ext.load_checkpoint(tmp_path / "checkpoint", model)
    assert torch.equal(model.weight, weight)
    with pytest.raises(ValueError, match=r"getattr.* must be a Metadata"):
        parse_metadata(pickle.dumps(_Calls()))


class _Calls:
    def __reduce__(self):
        return getattr, ("text", "upper")
