"""Cross entropy of the local share of a vocabulary (the kernels alone, one rank) against torch's on the same logits.

In the rows "in place" the gradient replaces the logits, which are restored before each call, outside the measured time.
On a GPU one of them has the 8192 x 131072 logits of a large model, at any size.
"""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.harness import Case, main, passes, torch_peers
from benchmarks.peers.kernels_on_gpu import liger
from tp_ext import _ops

LARGE = (8192, 131072)


def cases(device: str, dtype: torch.dtype, size: int) -> Iterator[Case]:
    for vocab in (1024, 50257):
        yield from _cases(max(1, size // dtype.itemsize // vocab), vocab, device, dtype)
    if device == "cuda":
        rows, vocab = LARGE
        if torch.cuda.mem_get_info()[0] < 14 * rows * vocab:  # logits, their copy, torch's own
            print("no 8192 x 131072: too little memory")
        else:
            yield _in_place(rows, vocab, device, dtype)


def _made(rows: int, vocab: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = torch.empty(rows, vocab, device=device, dtype=dtype).normal_()
    return logits, torch.randint(vocab, (rows,), device=device)


def _ours(x: Tensor, target: Tensor, inplace: bool) -> Tensor:
    cut = ("", 0, x.shape[-1], x.shape[-1], -100, 0.0, 0.0)
    return _ops.vocab_parallel_cross_entropy(x, target, *cut, "mean", inplace)


def _upstream(rows: int, logits: Tensor) -> Tensor:
    """The gradient of the mean loss; scaled in fp16, as in training, or most gradients of logits would be subnormal."""
    return logits.new_tensor(min(rows, 2**15) if logits.dtype == torch.float16 else 1)


def _cases(rows: int, vocab: int, device: str, dtype: torch.dtype) -> list[Case]:
    logits, target = _made(rows, vocab, device, dtype)
    leaf, size = logits.clone().requires_grad_(), logits.nbytes
    peers = torch_peers(lambda x: F.cross_entropy(x, target), device)
    grad = _upstream(rows, logits)
    made = passes(f"{rows} x {vocab}", lambda x: _ours(x, target, False), peers, [leaf], grad, (size, 2 * size))
    return [*made, _in_place(rows, vocab, device, dtype)]


def _in_place(rows: int, vocab: int, device: str, dtype: torch.dtype) -> Case:
    logits, target = _made(rows, vocab, device, dtype)
    leaf, upstream = logits.clone().requires_grad_(), _upstream(rows, logits)

    def before() -> None:
        with torch.no_grad():
            leaf.copy_(logits)

    def both(forward: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
        def call() -> tuple[Tensor, Tensor]:
            loss = forward(leaf)
            return loss.detach(), torch.autograd.grad(loss, leaf, upstream)[0]

        return call

    def check() -> None:
        """Compares the first rows with fp64: the mean over all rows only scales their gradient."""
        few = min(rows, 64)
        before()
        _, grad = both(lambda x: _ours(x, target, True))()
        assert grad.data_ptr() == leaf.data_ptr()
        exact = logits[:few].double().requires_grad_()
        (want,) = torch.autograd.grad(
            F.cross_entropy(exact, target[:few], reduction="sum") / rows, exact, upstream.double()
        )
        assert (grad[:few].double() - want).norm() <= 4 * torch.finfo(dtype).eps * want.norm()

    peers = torch_peers(lambda x: F.cross_entropy(x, target), device)
    peers |= {name: functools.partial(f, target=target) for name, f in liger("cross_entropy", device).items()}
    return Case(
        f"in place {rows} x {vocab} fwd+bwd",
        both(lambda x: _ours(x, target, True)),
        {name: both(forward) for name, forward in peers.items()},
        check,
        3 * logits.nbytes,
        before,
        (rows, vocab),
    )


if __name__ == "__main__":
    main(cases)
