"""clip_grad_norm_ of lists of gradients like a GPT's, against torch.nn.utils.clip_grad_norm_; and its two kernels."""

import torch
from torch import nn

import tp_ext
from benchmarks.lib.harness import Case, main
from tp_ext import _ops


def params(lengths: list[int], device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    result = [nn.Parameter(torch.empty(n, device=device, dtype=dtype)) for n in lengths]
    for param in result:
        param.grad = torch.randn_like(param)
    return result


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    elements = size // dtype.itemsize
    layer = [12, 4, 1, 3, 4, 1, 1, 1]  # qkv, out, two norms, up, down: matrices have most of the elements
    matrices = elements // (25 * (12 + 4 + 3 + 4)) - 200
    gpt = [part * matrices if part > 1 else 1024 for _ in range(25) for part in layer]
    result = []
    for name, lengths in ((f"{len(gpt)} tensors, {size >> 20} MiB", gpt), ("2000 tensors of 64", [64] * 2000)):
        for clips, max_norm in (("clipped", 0.5), ("not clipped", 1e9)):
            ours, torchs, each = (params(lengths, device, dtype) for _ in range(3))

            def check(lengths=lengths, max_norm=max_norm) -> None:
                """Norm and gradients, in fp64, since torch's norms of half types are rounded tensor by tensor."""
                mine = params(lengths, device, torch.float64)
                theirs = [nn.Parameter(param.detach()) for param in mine]
                for a, b in zip(mine, theirs, strict=True):
                    b.grad = None if a.grad is None else a.grad.clone()
                norms = tp_ext.clip_grad_norm_(mine, max_norm), nn.utils.clip_grad_norm_(theirs, max_norm)
                torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
                for a, b in zip(mine, theirs, strict=True):
                    torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=0)

            # Gradients shrink to the bound once and stay there: a factor next to 1, which costs as much as any other
            peers = {
                "torch": lambda p=torchs, m=max_norm: nn.utils.clip_grad_norm_(p, m),
                "torch, foreach": lambda p=each, m=max_norm: nn.utils.clip_grad_norm_(p, m, foreach=True),
            }
            moved = sum(lengths) * dtype.itemsize * 3
            call = lambda p=ours, m=max_norm: tp_ext.clip_grad_norm_(p, m * 0.999)  # noqa: E731
            result.append(Case(f"{name}, {clips}", call, peers, check, moved))
        grads = [param.grad for param in params(lengths, device, dtype) if param.grad is not None]
        peers = {"torch": lambda g=grads: nn.utils.get_total_norm(g)}
        result.append(
            Case(
                f"{name}, squared norm",
                lambda g=grads: _ops.multi_tensor_squared_norm(g),
                peers,
                lambda: None,
                sum(lengths) * dtype.itemsize,
            )
        )
        half = torch.tensor(1.0 + 1e-7, dtype=torch.float64, device=device)
        peers = {"torch, foreach": lambda g=grads, s=half: torch._foreach_mul_(g, s)}
        result.append(
            Case(
                f"{name}, scale",
                lambda g=grads, s=half: _ops.multi_tensor_scale_(g, s),
                peers,
                lambda: None,
                2 * sum(lengths) * dtype.itemsize,
            )
        )
    return result


if __name__ == "__main__":
    main(cases)
