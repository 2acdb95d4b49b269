"""Traps of our own: functions of partial sums, lengths as numbers, and operators that mix sharded features."""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.traps.trap import HEADS, INNER, VOCAB, WIDTH, Attention, Mlp, Raw, lm, mlp, raw, trap

# Functions of partial sums that are affine, or not linear at all


def setitem(s: Raw, x: Tensor, h: Tensor) -> Tensor:
    y = s.down(h)
    y[..., 0] = 2.0
    return y


def set_row(s: Raw, x: Tensor, h: Tensor) -> Tensor:
    y = s.down(h).clone()
    y[:, 0] = x[:, 0]
    return y


def out_argument(s: Raw, x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        result = torch.empty_like(x)
        torch.add(s.down(h), 1.0, out=result)
    return result + s.down(h)


def as_strided_sum(s: Raw, x: Tensor, h: Tensor) -> Tensor:
    y = s.down(h).contiguous()
    return y.as_strided(y.shape, y.stride()) + 0.5


def copied_into(s: Raw, x: Tensor, h: Tensor) -> Tensor:
    whole = torch.ones(*x.shape[:-1], 2 * WIDTH)
    whole[..., WIDTH:] = s.down(h)
    return whole.unflatten(-1, (2, WIDTH)).prod(-2) + whole[..., :WIDTH]


def masked(x: Tensor) -> Tensor:
    """A mask that no value of x changes."""
    return torch.arange(x.shape[1])[None, :, None].expand_as(x) % 2 == 0


IN_SUMS = {
    "lerp": lambda s, x, h: torch.lerp(s.down(h), torch.ones(WIDTH), 0.3),
    "addcmul": lambda s, x, h: torch.addcmul(s.down(h), x, x, value=0.5),
    "addcdiv_of_square": lambda s, x, h: torch.addcdiv(x, s.down(h), s.down(h).square() + 1),
    "where_number": lambda s, x, h: torch.where(masked(x), s.down(h), 1.0),
    "where_whole": lambda s, x, h: torch.where(masked(x), s.down(h), x),
    "masked_fill": lambda s, x, h: s.down(h).masked_fill(masked(x), 1.0),
    "masked_scatter": lambda s, x, h: x.masked_scatter(masked(x), s.down(h)),
    "maximum": lambda s, x, h: torch.maximum(s.down(h), torch.zeros(())),
    "clamp": lambda s, x, h: s.down(h).clamp(-0.2, 0.2),
    "clamp_min_in_place": lambda s, x, h: s.down(h).clamp_min_(-0.1),
    "abs": lambda s, x, h: s.down(h).abs(),
    "square_by_mul": lambda s, x, h: s.down(h) * s.down(h),
    "power_of_one": lambda s, x, h: s.down(h) ** 3,
    "fmod": lambda s, x, h: s.down(h) % 0.3,
    "floor_divide": lambda s, x, h: x + s.down(h).detach() // 0.3,
    "divided_by_itself": lambda s, x, h: s.down(h) / (1 + s.down(h).detach().abs()),
    "pad_reflect": lambda s, x, h: F.pad(s.down(h), (2, 2), mode="reflect")[..., 1:-3],
    "pad_constant_zero": lambda s, x, h: F.pad(s.down(h), (1, 0))[..., :-1],
    "setitem_number": setitem,
    "setitem_whole": set_row,
    "index_fill": lambda s, x, h: s.down(h).index_fill(-1, torch.tensor([1, 3]), 0.7),
    "index_copy": lambda s, x, h: x.index_copy(-1, torch.tensor([1, 3]), s.down(h)[..., :2]),
    "scatter_reduce": lambda s, x, h: x.scatter_reduce(1, torch.zeros_like(x).long(), s.down(h), "amax"),
    "select_scatter": lambda s, x, h: torch.select_scatter(x, s.down(h)[..., 0], -1, 2),
    "diagonal_scatter": lambda s, x, h: torch.diagonal_scatter(x, s.down(h).diagonal(0, 1, 2).clone(), 0, 1, 2),
    "put_accumulate": lambda s, x, h: x.clone().put_(torch.arange(4), s.down(h).flatten()[:4], accumulate=True),
    "cat_with_whole": lambda s, x, h: torch.cat([x, s.down(h)], -1).unflatten(-1, (2, WIDTH)).sum(-2),
    "stack_with_whole": lambda s, x, h: torch.stack([x, s.down(h), x * 2]).sum(0),
    "baddbmm_bias": lambda s, x, h: torch.baddbmm(x, h, s.w2.mT.expand(len(x), -1, -1), beta=0.5),
    "addmm_bias": lambda s, x, h: torch.addmm(torch.ones(WIDTH), h.flatten(0, 1), s.w2.mT).view_as(x),
    "linear_with_bias": lambda s, x, h: F.linear(h, s.w2, torch.arange(1.0, WIDTH + 1)),
    "einsum_plus_bias": lambda s, x, h: torch.einsum("bti,oi->bto", h, s.w2) + torch.linspace(0, 1, WIDTH),
    "sum_of_constants": lambda s, x, h: sum([s.down(h), torch.full((WIDTH,), 0.5)]),
    "polar": lambda s, x, h: torch.polar(torch.ones_like(x), s.down(h)).real,
    "complex_parts": lambda s, x, h: torch.complex(s.down(h), x).abs(),
    "view_as_complex": lambda s, x, h: torch.view_as_real(
        torch.view_as_complex(s.down(h).unflatten(-1, (-1, 2))) + 1j
    ).flatten(-2),
    "fft": lambda s, x, h: torch.fft.rfft(s.down(h)).abs().repeat(1, 1, 2)[..., :WIDTH],
    "logit_of_softmax": lambda s, x, h: s.down(h).softmax(-1),
    "softmax_over_batch": lambda s, x, h: s.down(h).softmax(0),
    "cumprod": lambda s, x, h: s.down(h).cumprod(1),
    "sort_values": lambda s, x, h: s.down(h).sort(-1).values,
    "median": lambda s, x, h: s.down(h) - s.down(h).median(-1, keepdim=True).values,
    "amax_subtracted": lambda s, x, h: s.down(h) - s.down(h).amax(-1, keepdim=True).detach(),
    "standardized": lambda s, x, h: (s.down(h) - s.down(h).mean(-1, keepdim=True)) / s.down(h).std(-1, keepdim=True),
    "cast_to_integers": lambda s, x, h: x + (s.down(h) * 4).long(),
    "cast_to_bool": lambda s, x, h: x * (s.down(h) > 0).to(x.dtype),
    "rounded": lambda s, x, h: s.down(h) + (s.down(h).round() - s.down(h)).detach(),
    "heaviside_gate": lambda s, x, h: x * torch.heaviside(s.down(h).detach(), torch.tensor(0.5)),
    "nan_to_num": lambda s, x, h: torch.nan_to_num(s.down(h) / 0.0, 1.0, 2.0, -2.0),
    "bucketized": lambda s, x, h: x + torch.bucketize(s.down(h).detach(), torch.linspace(-0.5, 0.5, 5)),
    "norm_clipped": lambda s, x, h: s.down(h) * (1 / s.down(h).norm(dim=-1, keepdim=True)).clamp(max=1.0),
    "outer_product": lambda s, x, h: torch.einsum("bti,btj->btij", s.down(h), s.down(h)).sum(-1),
    "cdist": lambda s, x, h: torch.cdist(s.down(h), x).sum(-1, keepdim=True) + x,
    "out_argument": out_argument,
    "as_strided": as_strided_sum,
    "copied_into": copied_into,
    "mean_squared_error": lambda s, x, h: x + F.mse_loss(s.down(h), x, reduction="none"),
    "huber_sum": lambda s, x, h: x + F.smooth_l1_loss(s.down(h), x, reduction="sum"),
    "ones_minus_in_place": lambda s, x, h: s.down(h).neg_().add_(x, alpha=2).sub_(0.25),
    "copysign": lambda s, x, h: torch.copysign(x, s.down(h)),
    "interpolated": lambda s, x, h: (
        F.interpolate(s.down(h), size=WIDTH, mode="linear") + F.avg_pool1d(s.down(h), 3, 1, 1)
    ),
    "max_pooled": lambda s, x, h: F.max_pool1d(s.down(h), 3, 1, 1),
    "unfolded": lambda s, x, h: s.down(h).unfold(-1, 4, 4).amax(-1).repeat_interleave(4, -1),
}
for name, f in IN_SUMS.items():
    raw(f"sums_{name}", "partial sums are no values yet", f)

raw("sums_in_fp32", "rounded, summed", lambda s, x, h: s.down(h).to(torch.float32).to(x.dtype), bound=1e-5)

# Lengths, counts and positions of sharded features that are used as numbers

LENGTHS = {
    "numel": lambda s, x, h: s.down(h) * (h.numel() / x.numel()),
    "nbytes": lambda s, x, h: s.down(h) * (h.nbytes / x.nbytes),
    "size_in_tensor": lambda s, x, h: s.down(h / torch.tensor(h.shape)[-1]),
    "sqrt": lambda s, x, h: s.down(h / math.sqrt(h.size(-1))),
    "len_of_transposed": lambda s, x, h: s.down(h) / len(h.movedim(-1, 0)),
    "numel_of_weight": lambda s, x, h: s.down(h) / s.up.weight.numel() ** 0.5,
    "sum_of_ones": lambda s, x, h: s.down(h) / torch.ones_like(h).sum(-1, keepdim=True),
    "count_positive": lambda s, x, h: s.down(h) / (h >= h).sum(-1, keepdim=True),
    "max_position": lambda s, x, h: s.down(h * (h.argmax(-1, keepdim=True) / 8)),
    "cumsum_of_ones": lambda s, x, h: s.down(h * torch.ones_like(h).cumsum(-1)),
    "eye": lambda s, x, h: s.down(h @ (torch.eye(h.shape[-1]) + torch.ones(h.shape[-1], h.shape[-1]).triu(1))),
    "tril_of_features": lambda s, x, h: s.down(torch.tril(h[..., None].expand(*h.shape, h.shape[-1])).sum(-1)),
    "frequencies": lambda s, x, h: s.down(h * torch.exp(-torch.arange(0, h.shape[-1]) / h.shape[-1])),
    "meshgrid": lambda s, x, h: s.down(
        h * torch.meshgrid(torch.arange(3), torch.arange(h.size(-1)), indexing="ij")[1][0]
    ),
    "hann_window": lambda s, x, h: s.down(h * torch.hann_window(h.shape[-1])),
    "logspace": lambda s, x, h: s.down(h * torch.logspace(-1, 0, h.shape[-1])),
    "new_full": lambda s, x, h: s.down(h + h.new_full((h.shape[-1],), 1 / h.shape[-1])),
    "range_loop": lambda s, x, h: s.down(torch.stack([h[..., i] * i for i in range(h.shape[-1])], -1)),
    "enumerate_unbind": lambda s, x, h: s.down(torch.stack([v * i for i, v in enumerate(h.unbind(-1))], -1)),
    "format_of_shape": lambda s, x, h: s.down(h * float(f"0.{h.shape[-1]}")),
    "power_of_length": lambda s, x, h: s.down(h * h.shape[-1] ** (-0.5 if h.ndim == 3 else 1)),
    "stride": lambda s, x, h: s.down(h / h.contiguous().stride(1)),
    "in_features": lambda s, x, h: s.down(h) * s.down.in_features**-0.5,
    "out_features": lambda s, x, h: s.down(h / s.up.out_features),
    "fan_of_weight": lambda s, x, h: s.down(h) * math.sqrt(2 / nn.init._calculate_correct_fan(s.down.weight, "fan_in")),
    "temperature": lambda s, x, h: s.down(h * (h.sum(-1, keepdim=True) / h.shape[-1] ** 0.5).sigmoid()),
    "std": lambda s, x, h: s.down(h / (1 + h.std(-1, keepdim=True))),
    "norm_by_size": lambda s, x, h: s.down(h / (1e-3 + h.norm(dim=-1, keepdim=True) / h.shape[-1] ** 0.5)),
    "rms_of_weight": lambda s, x, h: s.down(h) * s.up.weight.norm() / s.up.weight.numel() ** 0.5,
    "positions_of_heads": lambda s, x, h: s.down(
        (h.unflatten(-1, (s.heads, -1)) * torch.arange(s.heads)[:, None]).flatten(-2)
    ),
    "first_of_rank": lambda s, x, h: s.down(h * h[..., :1]),
    "last_of_rank": lambda s, x, h: s.down(h + h[..., -1:]),
    "roll": lambda s, x, h: s.down(h * h.roll(1, -1)),
    "flip": lambda s, x, h: s.down(h * h.flip(-1)),
    "diff": lambda s, x, h: s.down(h - F.pad(h.diff(dim=-1), (1, 0))),
    "take_permuted": lambda s, x, h: s.down(h[..., torch.arange(INNER).flip(0)]),
    "strided_slices": lambda s, x, h: s.down(torch.cat([h[..., ::2], h[..., 1::2]], -1)),
    "index_select_half": lambda s, x, h: s.down(h.index_select(-1, torch.arange(INNER) % 20)),
    "repeat_of_part": lambda s, x, h: s.down(h[..., :16].repeat(1, 1, 2)),
    "tile_of_view": lambda s, x, h: s.down(h.unflatten(-1, (2, 16)).mean(-2).tile(2)),
    "kthvalue": lambda s, x, h: s.down(h - h.kthvalue(5, dim=-1, keepdim=True).values),
    "quantile": lambda s, x, h: s.down(h - h.quantile(0.3, dim=-1, keepdim=True)),
    "histogram_of_signs": lambda s, x, h: s.down(h) * (h > 0).double().mean(-1, keepdim=True),
    "any_all": lambda s, x, h: s.down(h) * ((h > 0.3).any(-1, keepdim=True) + 2.0 * (h > -0.2).all(-1, keepdim=True)),
    "logsumexp": lambda s, x, h: s.down(h - h.logsumexp(-1, keepdim=True)),
    "cross_features": lambda s, x, h: s.down(h) + (h @ h.mT).softmax(-1) @ x,
    "fft_of_hidden": lambda s, x, h: s.down(torch.fft.fft(h).real),
    "conv_over_features": lambda s, x, h: s.down(
        F.conv1d(h.flatten(0, 1)[:, None], torch.ones(1, 1, 3), padding=1).view_as(h)
    ),
    "pool_over_features": lambda s, x, h: s.down(F.avg_pool1d(h, 3, 1, 1)),
    "softmax_groups_of_three": lambda s, x, h: s.down(
        F.pad(h, (0, 1)).unflatten(-1, (3, 11)).softmax(-1).flatten(-2)[..., :-1]
    ),
    "maxout_across": lambda s, x, h: s.down(h.unflatten(-1, (2, -1)).amax(-2).repeat(1, 1, 2)),
    "maxout_within": lambda s, x, h: s.down(h.unflatten(-1, (-1, 2)).amax(-1).repeat_interleave(2, -1)),
}
for name, f in LENGTHS.items():
    mlp(f"hidden_{name}", "a rank has a part of the features", f)

# Heads over the vocabulary

LOGITS = {
    "temperature_by_width": lambda s, y, t: F.cross_entropy((y / math.log(y.shape[-1])).flatten(0, 1), t.flatten()),
    "uniform_mixed": lambda s, y, t: (0.9 * y.softmax(-1) + 0.1 / y.size(-1)).log(),
    "positions": lambda s, y, t: (y.softmax(-1) * torch.arange(y.shape[-1])).sum(-1),
    "one_hot": lambda s, y, t: (y.log_softmax(-1) * F.one_hot(t, y.shape[-1])).sum(-1).neg().mean(),
    "topk": lambda s, y, t: y.topk(3, -1),
    "argmax_and_max": lambda s, y, t: (y.argmax(-1), y.max(-1).values),
    "banned": lambda s, y, t: y.index_fill(-1, torch.tensor([0, 30]), -1e4).softmax(-1),
    "banned_in_place": lambda s, y, t: torch.cat([y[..., :1] * 0 - 5, y[..., 1:]], -1),
    "mean_of_last_dim": lambda s, y, t: y - y.mean(-1, keepdim=True),
    "padded": lambda s, y, t: F.pad(y, (0, 2), value=-9.0),
    "extra_class": lambda s, y, t: torch.cat([y, y.new_zeros(*y.shape[:-1], 1)], -1).log_softmax(-1),
    "reversed_classes": lambda s, y, t: y.flip(-1),
    "grouped_classes": lambda s, y, t: y.unflatten(-1, (8, 6)).softmax(-1),
    "shifted_and_ignored": lambda s, y, t: F.cross_entropy(
        y[:, :-1].flatten(0, 1), t[:, 1:].flatten().where(t[:, 1:].flatten() > 5, -100)
    ),
    "z_loss": lambda s, y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()) + 1e-2 * y.logsumexp(-1).square().mean(),
    "sum_by_numel": lambda s, y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum") / y.numel(),
    "multi_label": lambda s, y, t: F.binary_cross_entropy_with_logits(y, F.one_hot(t, VOCAB).double()),
    "hinge": lambda s, y, t: F.multi_margin_loss(y.flatten(0, 1), t.flatten()),
    "nll_sum_of_top": lambda s, y, t: -y.log_softmax(-1).sort(-1, descending=True).values[..., :4].sum(),
    "gumbel_without_noise": lambda s, y, t: F.one_hot(y.argmax(-1), VOCAB) + y.softmax(-1) - y.softmax(-1).detach(),
    "labels_of_smoothing": lambda s, y, t: F.kl_div(
        y.log_softmax(-1), torch.full_like(y, 1 / y.shape[-1]), reduction="batchmean"
    ),
    "embedding_of_argmax": lambda s, y, t: s.e(y.argmax(-1)) + s.e(t),
    "soft_embedding": lambda s, y, t: y.softmax(-1) @ s.e.weight,
}
for name, f in LOGITS.items():
    lm(f"logits_{name}", "a rank has a part of the vocabulary", f)


@trap("a learned vector per head, scaled by the number of heads")
class HeadScale(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        a = self.scores(q, k).softmax(-1) @ v
        return self.join(a * (self.scale / self.scale.sum() * len(self.scale))[:, None, None])


@trap("a mask built from the shape of scores", p=(2, 4))
class MaskFromScores(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().scores(q, k)
        mask = torch.ones(scores.shape, dtype=torch.bool).tril()
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


@trap("some heads see a window: a mask per head")
class WindowOfSomeHeads(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        far = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).abs() > 1
        half = torch.arange(q.shape[1]) < q.shape[1] // 2
        return super().scores(q, k).masked_fill(far & half[:, None, None], -1e9)


@trap("one head of another kind: a loop over heads by index")
class HeadLoop(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        parts: list[Any] = []
        for i in range(q.shape[1]):
            scores = q[:, i] @ k[:, i].mT
            parts.append((scores.softmax(-1) if i % 2 else scores.relu()) @ v[:, i])
        return self.join(torch.stack(parts, 1))


@trap("constants of the width, made at construction")
class ConstantTable(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, INNER), persistent=False)
        self.plain = copy.copy(self.table).flip(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x) * self.table * self.plain)
