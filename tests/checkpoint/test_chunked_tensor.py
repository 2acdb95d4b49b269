"""A tensor of chunks as torch.distributed.checkpoint meets it: what is written, what is filled, what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from tp_ext.checkpoint.chunked_tensor import ChunkedTensor
from tp_ext.chunks import LocalChunk

pytestmark = pytest.mark.core


@pytest.fixture
def made():
    whole = torch.arange(12.0).view(4, 3)
    chunks = [LocalChunk((0, 0), whole[:2], True), LocalChunk((5, 0), whole[2:], False)]
    return whole, ChunkedTensor((7, 3), chunks, dtype=whole.dtype, device=whole.device)


def test_owned_chunks_are_written_and_all_are_filled(made, monkeypatch):
    whole, tensor = made
    with pytest.raises(RuntimeError, match="'x' has shards on other ranks and must be saved with a process group"):
        tensor.__create_write_items__("x", tensor)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert tensor.shape == (7, 3) and tensor.dtype == whole.dtype and tensor.device == whole.device
    (item,) = tensor.__create_write_items__("x", tensor)
    assert item.index == MetadataIndex("x", (0, 0)) and item.tensor_data.size == (7, 3)
    assert item.tensor_data.chunk.sizes == (2, 3)
    assert [chunk.offsets for chunk in tensor.__create_chunk_list__()] == [(0, 0), (5, 0)]
    tensor.__get_tensor_shard__(MetadataIndex("x", (5, 0))).zero_()
    assert whole[2:].count_nonzero() == 0 and whole[:2].count_nonzero() == 5  # views
    with pytest.raises(ValueError, match=r"index: .* must be one of the chunks of ChunkedTensor"):
        tensor.__get_tensor_shard__(MetadataIndex("x", (1, 0)))


def test_stagers_copy_the_values(made):
    whole, tensor = made
    like = torch.zeros_like(tensor, device="cpu").copy_(tensor)
    whole.fill_(-1)
    assert [chunk.tolist() for _, chunk, _ in like.local_chunks] == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert like.shape == (7, 3) and [owned for *_, owned in like.local_chunks] == [True, False]


def test_nothing_is_computed_with_it(made):
    with pytest.raises(NotImplementedError, match="a ChunkedTensor can be saved and loaded, not computed with"):
        made[1] + 1
