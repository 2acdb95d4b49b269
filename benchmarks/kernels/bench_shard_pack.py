"""Copies between a full tensor and the blocks of a collective: against torch.cat of chunks, Megatron-LM's way, and
against movedim + contiguous; 16 MiB by default.
"""

import torch

from benchmarks.lib.harness import Case, main
from tp_ext import _ops

WIDTH = 4096


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    rows = size // dtype.itemsize // WIDTH
    result = []
    for dim in (1, 0):
        for p in (2, 4, 8):
            x = torch.randn(rows, WIDTH, device=device, dtype=dtype)
            sizes = [x.shape[dim] // p] * p
            blocks = torch.stack(x.chunk(p, dim))

            def unpack(blocks=blocks, dim=dim, sizes=sizes) -> torch.Tensor:
                return _ops.unpack_shards(blocks, dim, sizes, None)

            def cat_blocks(blocks=blocks, dim=dim) -> torch.Tensor:
                return torch.cat(blocks.unbind(0), dim)

            def move_blocks(blocks=blocks, dim=dim, x=x) -> torch.Tensor:
                copied = torch.empty_like(x).view_as(blocks.movedim(0, dim))
                return copied.copy_(blocks.movedim(0, dim)).view_as(x)

            def pack(x=x, dim=dim, sizes=sizes) -> torch.Tensor:
                return _ops.pack_shards(x, dim, sizes, True)

            def cat_chunks(x=x, dim=dim, p=p) -> torch.Tensor:
                return torch.cat(x.chunk(p, dim), 0).view(p, -1)

            def move_chunks(x=x, dim=dim, p=p) -> torch.Tensor:
                return torch.stack(x.chunk(p, dim))

            name = f"{'last dim' if dim else 'dim 0'}, p = {p}"
            peers = {"cat of chunks": cat_blocks, "movedim, contiguous": move_blocks}
            result.append(Case(f"unpack {name}", unpack, peers, None, 2 * size))

            def same(pack=pack, peers=(cat_chunks, move_chunks)) -> None:
                for peer in peers:
                    assert torch.equal(pack().flatten(), peer().flatten())

            peers = {"cat of chunks": cat_chunks, "stack of chunks": move_chunks}
            result.append(Case(f"pack {name}", pack, peers, same, 2 * size))
    return result


if __name__ == "__main__":
    main(cases)
