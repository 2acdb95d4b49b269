"""Entries of checkpoints: each is read by ``torch.load`` as what was written, however its bytes were made."""

import io
import zipfile

import pytest
import torch

from tp_ext.checkpoint.files import entry_files
from tp_ext.checkpoint.files.entry_files import EntryWriter, SavedValues

pytestmark = pytest.mark.core
LARGE = torch.randn(300, 300)


def tensors(seed):
    """Returns tensors of many dtypes and layouts, the same ones for every seed, with the values of the seed."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(6, 8, generator=generator)
    kinds = (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    views = [made[2:4], made[:, 1:3], made.t(), made[0, 0], made.expand(2, 6, 8), torch.nn.Parameter(made[1:])]
    odd = [made[:0], torch.complex(made, made).conj(), made.to_sparse()]
    return [*(made.to(kind) for kind in kinds), *views, *odd, LARGE + seed, (LARGE + seed)[5:], LARGE.t() + seed]


def test_every_tensor_is_read_as_it_was_written():
    """The second and third of a form are made from the file of the first."""
    file = io.BytesIO()
    writer = EntryWriter(file)
    wanted = [tensor for seed in range(3) for tensor in tensors(seed)]
    places = [writer.write(tensor) for tensor in wanted]
    content = file.getvalue()
    for want, (offset, length) in zip(wanted, places, strict=True):
        one = io.BytesIO(content[offset : offset + length])
        assert zipfile.ZipFile(one).testzip() is None
        one.seek(0)
        got = torch.load(one, weights_only=True)
        assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got.to_dense(), want.to_dense())
        if want.layout is torch.strided and not want.is_conj():
            assert length < want.nbytes + 2500  # of a view its elements alone
    assert sum(isinstance(one, entry_files._Template) for one in writer._templates.values()) > 8


def test_a_file_of_another_form_is_no_template():
    tensor = torch.randn(3, 5)
    content = entry_files.saved_value(tensor)
    assert entry_files._template(content, tensor.nbytes) is not None
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(packed, "w") as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    assert entry_files._template(packed.getvalue(), tensor.nbytes) is None


def test_equal_values_share_their_bytes_and_others_do_not():
    values = SavedValues()
    assert values.of(0.1) is values.of(0.1) and values.of((0.9, 0.95)) is values.of((0.9, 0.95))
    for one, other in [(1, True), (1, 1.0), (0.0, -0.0), ((1,), (1.0,)), ((1,), (True,)), ([1], [1]), ("a", b"a")]:
        assert values.of(one) is not values.of(other)
    file = io.BytesIO()
    writer = EntryWriter(file)
    assert writer.write(values.of(0.1)) == writer.write(values.of(0.1)) != writer.write(values.of(0.2))


def test_large_values_are_neither_shown_nor_kept():
    values, written = SavedValues(), EntryWriter(io.BytesIO())
    assert values.of(10**5000) is values.of(10**5000)  # of which Python makes no text
    large = values.of(bytes(1 << 20))
    assert written.write(large).length == len(large) and not written._values
