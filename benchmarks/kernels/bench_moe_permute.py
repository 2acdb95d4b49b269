"""Tokens to the rows of their experts and back, against torch's index_select and index_add, and scatter_add; and the
order of the rows, against torch's stable argsort.
"""

import torch
from torch import Tensor

from benchmarks.lib.harness import Case, main, passes, torch_peers
from tp_ext import _ops

HIDDEN, EXPERTS = 1024, 64


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    """`size` is that of the permuted tensor."""
    result = []
    for choices in (2, 8):
        torch.manual_seed(0)
        tokens = max(size // dtype.itemsize // HIDDEN // choices, 1)
        slots = tokens * choices
        x = torch.randn(tokens, HIDDEN, device=device).to(dtype).requires_grad_()
        y = torch.randn(slots, HIDDEN, device=device).to(dtype).requires_grad_()
        weights = torch.rand(tokens, choices, device=device).requires_grad_()
        experts = torch.rand(tokens, EXPERTS, device=device).topk(choices).indices
        rows, _ = _ops.moe_sort(experts, EXPERTS)
        token = rows.flatten().argsort() // choices  # of each row

        def to_rows(x: Tensor, rows: Tensor = rows, slots: int = slots) -> Tensor:
            return _ops.moe_permute(x, rows, slots, None)

        def select(x: Tensor, token: Tensor = token) -> Tensor:
            return x.index_select(0, token)

        def back(y: Tensor, weights: Tensor, rows: Tensor = rows) -> Tensor:
            return _ops.moe_unpermute(y, rows, weights)

        def add(y: Tensor, weights: Tensor, rows: Tensor = rows, token: Tensor = token) -> Tensor:
            by_row = weights.flatten().index_select(0, rows.flatten().argsort())
            zeros = torch.zeros(len(rows), HIDDEN, device=y.device)
            return zeros.index_add(0, token, y * by_row[:, None]).to(y.dtype)

        def scatter(y: Tensor, weights: Tensor, rows: Tensor = rows, token: Tensor = token) -> Tensor:
            by_row = weights.flatten().index_select(0, rows.flatten().argsort())
            zeros = torch.zeros(len(rows), HIDDEN, device=y.device)
            return zeros.scatter_add(0, token[:, None].expand(-1, HIDDEN), y * by_row[:, None]).to(y.dtype)

        def sort(experts: Tensor = experts) -> tuple[Tensor, Tensor]:
            return _ops.moe_sort(experts, EXPERTS)

        def argsort(experts: Tensor = experts) -> tuple[Tensor, Tensor]:
            order = experts.flatten().argsort(stable=True)
            rows = torch.empty_like(order)
            rows[order] = torch.arange(len(order), device=order.device)
            return rows.view_as(experts), experts.flatten().bincount(minlength=EXPERTS)

        name, few, many = f"of {choices}", x.nbytes, y.nbytes
        grad_x, grad_y = torch.randn_like(x), torch.randn_like(y)
        moved = (few + many, few + many)
        result += passes(f"permute {name}", to_rows, torch_peers(select, device), [x], grad_y, moved)
        peers = torch_peers(add, device) | {"scatter_add": scatter}
        moved = (few + many, few + 2 * many)
        result += passes(f"unpermute {name}", back, peers, [y, weights], grad_x, moved)
        result.append(Case(f"sort {name}", sort, {"argsort": argsort}, None, 2 * rows.nbytes))
    return result


if __name__ == "__main__":
    main(cases)
