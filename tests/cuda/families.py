"""Every family of kernels as one training step, small: what capture, streams, synchronisation and memory are tested on.

    compute-sanitizer python -m tests.cuda.families --device cuda

runs all of them once, on shapes that take the wide path, the tail and the unaligned path.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tests.helpers import small_gpt
from tp_ext import _ops

ROWS, EPS, VOCAB = 33, 1e-5, 41
DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = (64, 67)  # whole vectors, and a tail
Make = Callable[[int, torch.dtype], list[Tensor]]


@dataclass(frozen=True)
class Family:
    """`make(width, dtype)` draws the inputs on the CPU, `call(*inputs)` is the forward pass.

    `exact`: every step gives the same bits. GEMMs and attention are not our kernels, and may be chosen otherwise.
    `parameters`: what else has a gradient.
    """

    make: Make
    call: Callable[..., Tensor]
    exact: bool = True
    parameters: tuple[Tensor, ...] = ()

    def inputs(self, device: torch.device | str, dtype: torch.dtype, width: int = 64, seed: int = 0) -> list[Tensor]:
        """Those of floating point are leaves."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = self.make(width, dtype)
        return [t.to(device).requires_grad_(t.is_floating_point()) for t in made]

    def step(self, *inputs: Tensor) -> list[Tensor]:
        """y, and the gradients of all inputs that have one, from one that depends on y."""
        y = self.call(*inputs)
        wanted = [t for t in (*inputs, *self.parameters) if t.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, wanted, y.detach().cos())]


def rows(*widths: Callable[[int], int | tuple[int, ...]]) -> Make:
    """Normal tensors: of [33, n], or of the shape given for the width n."""

    def make(n: int, dtype: torch.dtype) -> list[Tensor]:
        shapes = [w(n) for w in widths]
        return [torch.randn((ROWS, s) if isinstance(s, int) else s).to(dtype) for s in shapes]

    return make


def vector(n: int) -> tuple[int]:
    return (n,)


def same(n: int) -> int:
    return n


def added(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """Both have a gradient."""
    return outputs[0] + outputs[1]


def _rope(n: int, dtype: torch.dtype) -> list[Tensor]:
    angles = torch.randn(ROWS, n // 2)
    return [torch.randn(ROWS, 3, n // 2 * 2 + 6).to(dtype), angles.cos(), angles.sin()]  # the last 6 are not turned


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _ops.rope(x, cos.detach(), sin.detach(), interleaved, None) + 0 * (cos.sum() + sin.sum())  # have no gradient


def _positions(n: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(3, ROWS // 3, 2, n // 2 * 2).to(dtype), torch.randint(ROWS, (3, ROWS // 3))]


def rope_by_position(x: Tensor, positions: Tensor) -> Tensor:
    """Three sequences and rows of tables made here."""
    every = torch.arange(ROWS, device=x.device)
    cos, sin = _ops.rope_tables(every, x.shape[-1], 10000.0, torch.float32)
    return _ops.rope(x, cos, sin, False, positions)


def seed_like(x: Tensor) -> Tensor:
    """As the layers draw it."""
    return torch.randint(2**62, (), dtype=torch.int64, device=x.device)


def dropped(x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    return _ops.bias_dropout_residual(x, bias, residual, seed_like(x), 0.25, x.numel(), x.numel(), 0)


def filled(x: Tensor, fill: Callable[..., None]) -> Tensor:
    noise = torch.empty_like(x, requires_grad=False)
    fill(noise, seed_like(x), 0.0, 1.0, max(x.numel(), 1), max(x.numel(), 1), 0)
    return x * noise


def truncated(noise: Tensor, seed: Tensor, mean: float, std: float, *index: int) -> None:
    _ops.philox_truncated_normal_(noise, seed, mean, std, -1.0, 2.0, *index)


def _ids(n: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randint(VOCAB, (ROWS,)), torch.randn(VOCAB // 2, n).to(dtype)]  # half of the vocabulary


def embedded(ids: Tensor, weight: Tensor) -> Tensor:
    return _ops.vocab_parallel_embedding(ids, weight, "", 0, VOCAB // 2, VOCAB, False, None)


def _slots(n: int, dtype: torch.dtype) -> list[Tensor]:
    """x, scores, experts of three choices a token; some choices have none."""
    return [torch.randn(ROWS, n).to(dtype), torch.rand(ROWS, 3), torch.randint(-1, 5, (ROWS, 3))]


def experts(x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """To the rows of the experts, with two more than are used, and back, with the scores."""
    rows, counts = _ops.moe_sort(chosen, 5)
    y = _ops.moe_permute(x, rows, rows.numel() + 2) * (1 + counts.amax())
    return _ops.moe_unpermute(y, rows, scores) + 0.01 * _ops.moe_dot(x, y, rows).sum(1, keepdim=True).to(x.dtype)


def _logits(n: int, dtype: torch.dtype) -> list[Tensor]:
    target = torch.randint(n, (ROWS,))
    target[3] = -100
    return [torch.randn(ROWS, n).to(dtype), target]


def loss(logits: Tensor, target: Tensor, inplace: bool) -> Tensor:
    n = logits.shape[-1]
    own = logits * 1 if inplace else logits  # which the gradient replaces
    return _ops.vocab_parallel_cross_entropy(own, target, "", 0, n, n, -100, 0.1, 0.01, "mean", inplace)


def linear(op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return op(x, weight, bias, "", False, None, None, 1)


def packed(x: Tensor) -> Tensor:
    """Through blocks of two lengths along each dim, padded and not, and back."""
    y = x
    for dim, n in enumerate(x.shape):
        sizes = [n // 2, n - n // 2]
        for padded in (True, False):
            blocks = _ops.pack_shards(x.detach(), dim, sizes, padded)
            y = y * _ops.unpack_shards(blocks, dim, sizes, None if padded else x.shape)
    return y


def clipped(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Copies of three tensors over the norm of all, side by side: sums of torch's would depend on the threads."""
    inputs = [t.detach() for t in (x, y, z)]
    xs = [torch.empty_like(t) for t in inputs]
    _ops.multi_tensor_copy_(xs, inputs)
    _ops.multi_tensor_scale_(xs, _ops.multi_tensor_squared_norm(xs).rsqrt())
    return torch.cat([x * xs[0], y * xs[1], z * xs[2]], -1)


def _weight(n: int) -> tuple[int, int]:
    return 24, n


def accumulated(x: Tensor, dy: Tensor) -> Tensor:
    main_grad = torch.ones(dy.shape[1], x.shape[1], device=x.device)
    _ops.add_weight_grad_(main_grad, dy.detach(), x.detach())
    return x * main_grad.mean(0).to(x.dtype) + 0 * dy.sum()  # has no gradient


def summed_columns(x: Tensor) -> Tensor:
    """The sums of two slices of columns that do not depend on each other."""
    n = x.shape[1] // 3
    return x * _ops.column_sums(x.detach(), [n, x.shape[1] - n]).to(x.dtype)


def root_of_tree(x: Tensor) -> Tensor:
    """Slices of columns as the nodes of a tree in which the last of three moves up."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    nodes = torch.stack([wide.roll(i, 1) for i in range(3)])
    return x * _ops.tree_total(nodes, [0, 1, 1], x.dtype)


def through_codes(x: Tensor) -> Tensor:
    """Compressed for two ranks, summed and decoded, int8 and e4m3."""
    value = x.detach() if x.dtype != torch.float64 else x.detach().float()
    n, first = value.numel(), value.numel() // 2 // 64 * 64
    bytes_ = [length + -(-length // 64) * 4 for length in (first, n - first)]
    places = torch.tensor([[0, first, 0], [first, n - first, bytes_[0]]], device=x.device)
    y = x
    for float8 in (False, True):
        wire = torch.zeros(sum(bytes_), dtype=torch.uint8, device=x.device)
        error = torch.full((n,), 0.01, device=x.device)
        _ops.compress_blocks_(value.reshape(-1), error, wire, places, 64, float8)
        own = wire[: bytes_[0]]
        _ops.sum_compressed_blocks_(own.expand(2, -1).contiguous(), error[:first], own, 0, first, 64, float8)
        out = torch.empty_like(value)
        _ops.decompress_blocks_(wire, out.view(-1), places, 64, float8)
        y = y * out.to(x.dtype) + error.view(x.shape).to(x.dtype)
    return y


def chunk_of_tokens(x: Tensor, weight: Tensor) -> Tensor:
    """The logits of a chunk, and both gradients from them."""
    tokens, rows = x.detach(), weight.detach()
    logits = tokens.new_empty(len(tokens), len(rows))
    _ops.vocab_chunk_logits_(logits, tokens, rows, None)
    dx, dw = _ops.vocab_chunk_input_grad(logits, rows), torch.ones_like(rows)
    _ops.vocab_chunk_weight_grad_(dw, logits, tokens, True)
    return x * dx.sin() * dw.mean(0).to(x.dtype) + 0 * weight.sum()  # have no gradient


def in_low_bits(x: Tensor) -> Tensor:
    """With a weight of 8 bits and one of 4: rows of it, and products."""
    n = x.shape[1]
    q = torch.arange(2 * n, device=x.device).view(2, -1)
    q8, q4 = (q % 255 - 127).to(torch.int8), (q % 256).to(torch.uint8)
    scale = torch.linspace(0.1, 1, 2, device=x.device)
    eight, four = _ops.dequantize_low_bits(q8, scale), _ops.dequantize_low_bits(q4, scale[:, None].contiguous(), 2 * n)
    weight = (eight[0] * eight[1] + four[0, 1::2] * four[1, 0::2]).to(x.dtype)
    few, small = x.detach()[:6], scale / n
    products = _ops.low_bits_product(few, q8, small).sum(1)
    products = products + _ops.low_bits_product(torch.cat([few, few], 1), q4, small[:, None].contiguous(), 2 * n).sum(1)
    return x * weight.sin() * products.sum()


def in_float8(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A column, a row and an expert's linear, a scale per tensor and per row."""
    formats = torch.float8_e4m3fn, torch.float8_e5m2
    ys = []
    for by_row in (False, True):
        ys.append(_ops.float8_column_linear(x, weight, bias, "", False, None, by_row, *formats, True))
        ys.append(_ops.float8_row_linear(x, weight, bias, "", False, None, by_row, *formats, True))
        ys.append(_ops.float8_grouped_linear(x, weight[None], [len(x)], "", False, by_row, *formats))
    return torch.cat(ys, 1)


FAMILIES: dict[str, Family] = {
    **{
        name: Family(rows(same, vector), partial(lambda x, b, act: _ops.bias_act(x, b, act), act=name))
        for name in ("gelu", "gelu_tanh", "relu", "silu")
    },
    **{
        name: Family(
            rows(lambda n: 2 * n, lambda n: (2 * n,)), partial(lambda x, b, act: _ops.gated_act(x, b, act), act=name)
        )
        for name in ("swiglu", "geglu")
    },
    "rms_norm": Family(rows(same, vector), lambda x, w: _ops.rms_norm(x, w, EPS)),
    "layer_norm": Family(rows(same, vector, vector), lambda x, w, b: _ops.layer_norm(x, w, b, EPS)),
    "rms_norm_residual": Family(rows(same, same, vector), lambda x, r, w: added(_ops.rms_norm_residual(x, r, w, EPS))),
    "layer_norm_residual": Family(
        rows(same, same, vector, vector), lambda x, r, w, b: added(_ops.layer_norm_residual(x, r, w, b, EPS))
    ),
    "rope half": Family(_rope, partial(rope, interleaved=False)),
    "rope interleaved": Family(_rope, partial(rope, interleaved=True)),
    "rope by position": Family(_positions, rope_by_position),
    "dropout": Family(rows(same), dropped),
    "bias_dropout_residual": Family(rows(same, vector, same), dropped),
    "philox_uniform": Family(rows(same), partial(filled, fill=_ops.philox_uniform_)),
    "philox_normal": Family(rows(same), partial(filled, fill=_ops.philox_normal_)),
    "philox_truncated_normal": Family(rows(same), partial(filled, fill=truncated)),
    "vocab_embedding": Family(_ids, embedded),
    "experts": Family(_slots, experts),
    "vocab_chunk": Family(rows(same, _weight), chunk_of_tokens, False),
    "vocab_cross_entropy": Family(_logits, partial(loss, inplace=False)),
    "vocab_cross_entropy in place": Family(_logits, partial(loss, inplace=True)),
    "column_linear": Family(rows(same, _weight, lambda n: (24,)), partial(linear, _ops.column_parallel_linear), False),
    "weight_grad": Family(rows(same, lambda n: 24), accumulated, False),
    "multi_tensor": Family(rows(same, lambda n: n // 2 + 1, lambda n: 1), clipped),
    "shard_pack": Family(rows(same), packed),
    "column_sums": Family(rows(same), summed_columns),
    "compressed_blocks": Family(rows(same), through_codes),
    "low_bits": Family(rows(same), in_low_bits),
    "float8_linear": Family(rows(same, _weight, lambda n: (24,)), in_float8, False),
    "tree_total": Family(rows(same), root_of_tree),
    "row_linear": Family(rows(same, _weight, lambda n: (24,)), partial(linear, _ops.row_parallel_linear), False),
}


def block(device: torch.device | str) -> Family:
    """A whole block, RMSNorm, attention with RoPE, RMSNorm and SwiGLU, with dropout, as one more family. fp32."""
    module = small_gpt.make(None).blocks[0].to(device)

    def make(n: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(ROWS, small_gpt.CONFIG["hidden_size"])]

    return Family(make, lambda x: module(x, None, ROWS, 3), False, tuple(module.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs every family of kernels once.")
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    for name, family in FAMILIES.items():
        for dtype in DTYPES:
            for width in WIDTHS:
                inputs = family.inputs(device, dtype, width)
                shifted = [  # one element off every boundary
                    torch.cat([t.detach().flatten()[:1], t.detach().flatten()])[1:].view_as(t) for t in inputs
                ]
                for values in (inputs, [t.requires_grad_(t.is_floating_point()) for t in shifted]):
                    assert all(r.isfinite().all() for r in family.step(*values)), (name, dtype, width)
        print(name, flush=True)


if __name__ == "__main__":
    main()
