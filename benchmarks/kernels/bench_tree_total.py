"""The root of a tree of eight nodes, and the sums of columns whose order is fixed, next to torch's operators."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.lib.harness import Case, main, torch_peers
from tp_ext import _ops

JOINS = [0, 1, 0, 2, 0, 1, 0, 3]  # of eight nodes, pairs of pairs of pairs


def tree(nodes: Tensor, dtype: torch.dtype) -> Tensor:
    sums = list(nodes)
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0].to(dtype)


def in_any_order(nodes: Tensor, dtype: torch.dtype) -> Tensor:
    return nodes.sum(0).to(dtype)


def column_sums(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.float32)


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    torch.manual_seed(0)
    nodes = torch.randn(len(JOINS), size // 4 // len(JOINS), device=device)
    root = partial(_ops.tree_total, nodes, JOINS, dtype)
    peers = torch_peers(partial(tree, nodes, dtype), device) | {"sum": partial(in_any_order, nodes, dtype)}
    moved = nodes.nbytes + nodes[0].numel() * dtype.itemsize
    x = torch.randn(size // dtype.itemsize // 4096, 4096, dtype=dtype, device=device)
    sums = partial(_ops.column_sums, x, [2048, 2048])
    return [
        Case("root of 8", root, peers, None, moved, None, tuple(nodes.shape)),
        Case("columns", sums, torch_peers(partial(column_sums, x), device), None, x.nbytes, None, tuple(x.shape)),
    ]


if __name__ == "__main__":
    main(cases)
