"""Modules of torch that a plan shards: next to the unsharded model in training and in evaluation, for each option."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tp_ext
from tests.auto.torch_modules import Called, Model, Residual, same
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.group import parallel_group
from tp_ext.simulation.comparison import outputs_of, projection


def _image(channels: int = 8, size: int = 6) -> Tensor:
    return torch.randn(3, channels, size, size)


def _image_model(*layers: nn.Module, channels: int = 8, size: int = 6) -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Sequential(*layers), (_image(channels, size),)


def _res_net() -> tuple[nn.Module, tuple[Tensor]]:
    def block() -> nn.Module:
        return Residual(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                        nn.Conv2d(16, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))  # fmt: skip

    return _image_model(block(), nn.ReLU(), nn.MaxPool2d(2), block(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _u_net() -> tuple[nn.Module, tuple[Tensor]]:
    def block() -> nn.Module:
        return Residual(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 24, 3, padding=1), nn.GroupNorm(12, 24), nn.SiLU(),
                        nn.Conv2d(24, 8, 3, padding=1))  # fmt: skip

    return _image_model(block(), nn.AvgPool2d(2), block(), nn.Upsample(scale_factor=2, mode="nearest"), block())


CONVOLUTIONS: dict[str, Model] = {
    "residual blocks with batch norm": _res_net,
    "residual blocks with group norm": _u_net,
    "batch norm without statistics": lambda: _image_model(
        nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12, track_running_stats=False), nn.ReLU(), nn.Conv2d(12, 8, 1)
    ),
    "instance norm": lambda: _image_model(
        nn.Conv2d(8, 12, 1, bias=False), nn.InstanceNorm2d(12, affine=True, track_running_stats=True), nn.ReLU(),
        nn.Conv2d(12, 8, 1),
    ),
    "transposed and in groups": lambda: _image_model(
        nn.ConvTranspose2d(8, 24, 2, 2), nn.ReLU(), nn.Conv2d(24, 24, 3, groups=12, padding_mode="circular", padding=1),
        nn.PReLU(), nn.Conv2d(24, 8, 1),
    ),
    "upsampling by shuffled pixels": lambda: _image_model(
        nn.Conv2d(8, 48, 1), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(12, 8, 1)
    ),
    "gated": lambda: _image_model(nn.Conv2d(8, 24, 1), nn.GLU(1), nn.Conv2d(12, 8, 1)),
    "weight norm": lambda: _image_model(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 12, 3)), nn.ReLU(), nn.Conv2d(12, 8, 1)
    ),
    "bilinear": lambda: (
        Called(lambda m, x, y: m.last(m.first(x, y).relu()), first=nn.Bilinear(5, 6, 12), last=nn.Linear(12, 7)),
        (torch.randn(3, 5), torch.randn(3, 6)),
    ),
}  # fmt: skip


def _spectral() -> tuple[nn.Module, tuple[Tensor, ...]]:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 24))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(24, 8)), (torch.randn(3, 8),)


NETS = [n for n in CONVOLUTIONS if "residual" in n]
SPECTRAL: dict[str, Model] = {"spectral norm": _spectral}


def test_a_norm_of_a_whole_weight_keeps_it_whole() -> None:
    assert not any("parametrizations" in name for name in run(same, 2, "spectral norm", "SPECTRAL", __name__)[0])
    model, example = _spectral()
    assert "linalg_vector_norm" in auto.plan(model, example, 2).whole["0.parametrizations.weight.original"]


@pytest.mark.parametrize(("name", "p"), [*((n, 3) for n in CONVOLUTIONS), *((n, 4) for n in NETS)])
def test_channels(name: str, p: int) -> None:
    sharded = run(same, p, name, "CONVOLUTIONS", __name__)[0]
    model, _ = CONVOLUTIONS[name]()
    sizes = {own: t.numel() for own, t in model.named_parameters() if t.dim() > 1}
    assert sum(size for own, size in sizes.items() if own in sharded) > 0.9 * sum(sizes.values())


class Spectral(nn.Module):
    """A Fourier neural operator whose output is that of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.up, self.down = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1)
        self.weight = nn.Parameter(torch.randn(8, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.down(self.up(x).relu())
        spectrum = torch.fft.rfft2(x) * self.weight
        return self.last(x + torch.fft.irfft2(spectrum, s=x.shape[-2:]))


def _patches(model: Any, x: Tensor) -> Tensor:
    x = x + model.down(model.up(x).relu())
    y = model.last(x).reshape(3, 5, 2, 2, 3)
    return torch.einsum("nspqc->ncspq", y).reshape(3, 3, 10, 2)


OUTPUTS: dict[str, Model] = {
    "of a convolution after Fourier transforms": lambda: (Spectral(), (torch.randn(2, 3, 6, 6),)),
    "patches of an image": lambda: (
        Called(_patches, up=nn.Linear(16, 32), down=nn.Linear(32, 16), last=nn.Linear(16, 12)),
        (torch.randn(3, 5, 16),),
    ),
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [4, 2])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name: str, p: int) -> None:
    assert {"up.weight", "down.weight", "last.weight"} <= set(run(same, p, name, "OUTPUTS", __name__)[0])


def _attention(
    width: int = 24, cross: bool = False, **options: Any
) -> Callable[..., tuple[nn.Module, tuple[Tensor, ...]]]:
    """A model around ``nn.MultiheadAttention(24, 4)`` with these options, called with those of a case."""

    def made(*masks: Tensor, **called: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
        def forward(model: Any, x: Tensor, y: Tensor, *masks: Tensor) -> Any:
            query = model.norm(model.first(x))
            source = (model.keys(y), model.values(y)) if cross else (query, query)
            given = {**called, **dict(zip(called.get("named", ()), masks, strict=True))}
            given.pop("named", None)
            mixed, weights = model.attention(query, *source, **given)
            return (query + mixed) if weights is None else (query + mixed, weights)

        model = Called(
            forward, first=nn.Linear(10, 24), norm=nn.LayerNorm(24), keys=nn.Linear(10, options.get("kdim", 24)),
            values=nn.Linear(10, options.get("vdim", 24)), attention=nn.MultiheadAttention(24, 4, **options),
        )  # fmt: skip
        shape = (5,) if called.pop("unbatched", False) else (3, 5) if options.get("batch_first") else (5, 3)
        return model, (torch.randn(*shape, 10), torch.randn(*shape, 10), *masks)

    return made


def _masked(*names: str) -> dict[str, Any]:
    return {"named": names}


causal = nn.Transformer.generate_square_subsequent_mask(5)
padded = torch.arange(5) >= torch.tensor([[5], [3], [4]])
# A query without a key that is neither padded nor banned would have NaN for all, and in one of 16 draws there is one
banned = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)).gt(0.7).fill_diagonal_(False)
ATTENTION: dict[str, Model] = {
    "batch first": lambda: _attention(batch_first=True)(need_weights=False),
    "batch second": lambda: _attention()(need_weights=False),
    "unbatched": lambda: _attention()(unbatched=True),
    "averaged weights": lambda: _attention(batch_first=True)(),
    "weights of each head": lambda: _attention()(average_attn_weights=False),
    "weights of each head, unbatched": lambda: _attention(bias=False)(unbatched=True, average_attn_weights=False),
    "cross": lambda: _attention(cross=True)(),
    "cross of other widths": lambda: _attention(cross=True, kdim=6, vdim=7, batch_first=True)(need_weights=False),
    "no bias": lambda: _attention(cross=True, kdim=6, bias=False)(),
    "padding": lambda: _attention(batch_first=True)(padded, **_masked("key_padding_mask"), need_weights=False),
    "padding and banned": lambda: _attention()(padded, banned, **_masked("key_padding_mask", "attn_mask")),
    "causal by a hint": lambda: _attention()(causal, **_masked("attn_mask"), is_causal=True, need_weights=False),
    "causal with weights": lambda: _attention()(causal, **_masked("attn_mask"), is_causal=True),
    "a mask for each head": lambda: _attention()(torch.randn(12, 5, 5), **_masked("attn_mask"), need_weights=False),
}


FEW = ["batch first", "cross of other widths", "a mask for each head"]


@pytest.mark.parametrize(("name", "p"), [*((n, 3) for n in ATTENTION), *((n, 4) for n in FEW)])
def test_attention(name: str, p: int) -> None:
    sharded = run(same, p, name, "ATTENTION", __name__)[0]
    own = {n for n, _ in ATTENTION[name]()[0].named_parameters() if n.startswith("attention")}
    assert own - set(sharded) <= {"attention.out_proj.bias"}


def _transformer(**options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """An encoder and a decoder behind each other, as ``nn.Transformer`` has them, with a causal mask."""
    layers = {"d_model": 24, "nhead": 4, "dim_feedforward": 40, "dropout": 0.0, **options}
    core = nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **layers)
    model = Called(lambda m, x, y: m.core(m.first(x), m.second(y), tgt_mask=causal.to(x)), core=core,
                   first=nn.Linear(10, 24), second=nn.Linear(10, 24))  # fmt: skip
    shape = (3, 5, 10) if options.get("batch_first") else (5, 3, 10)
    return model, (torch.randn(*shape), torch.randn(*shape))


def _encoder(**options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = {"d_model": 24, "nhead": 4, "dim_feedforward": 40, "dropout": 0.0, "batch_first": True, **options}
    core = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layers), 2, enable_nested_tensor=False)
    model = Called(lambda m, x: m.core(m.first(x), mask=causal.to(x)), core=core, first=nn.Linear(10, 24))
    return model, (torch.randn(3, 5, 10),)


TRANSFORMERS: dict[str, Model] = {
    "transformer": lambda: _transformer(batch_first=True),
    "transformer, norm first, batch second": lambda: _transformer(norm_first=True, activation="gelu"),
    "encoder": _encoder,
    "encoder without biases": lambda: _encoder(bias=False, activation=nn.SiLU()),
}


@pytest.mark.parametrize(("name", "p"), [*((n, 3) for n in TRANSFORMERS), ("encoder", 2), ("transformer", 4)])
def test_layers_of_transformers(name: str, p: int) -> None:
    sharded = run(same, p, name, "TRANSFORMERS", __name__)[0]
    model, _ = TRANSFORMERS[name]()
    sizes = {own: t.numel() for own, t in model.named_parameters() if t.dim() > 1 and own.startswith("core")}
    assert set(sizes) <= set(sharded)


def _padded_encoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """An encoder of fewer heads than ranks, for which torch has a fused path over nested tensors in evaluation."""
    layer = nn.TransformerEncoderLayer(24, 2, 40, 0.0, batch_first=True)

    def forward(model: Any, x: Tensor, padding: Tensor) -> Tensor:
        y = model.core(model.first(x), src_key_padding_mask=padding)
        return y.masked_fill(padding[..., None], 0.0)

    model = Called(forward, core=nn.TransformerEncoder(layer, 2), first=nn.Linear(10, 24))
    return model, (torch.randn(3, 5, 10), padded)


PADDED: dict[str, Model] = {"encoder": _padded_encoder}


def test_a_sharded_feed_forward_keeps_its_layer_from_fused_inference() -> None:
    sharded = run(same, 3, "encoder", "PADDED", __name__)[0]
    assert "core.layers.0.linear1.weight" in sharded and "core.layers.0.self_attn.in_proj_weight" not in sharded


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_attention_that_adds_keys_is_whole(option: str) -> None:
    model, inputs = _attention(**{option: True})()
    plan = auto.plan(model, inputs, 2)
    assert f"{option} of multi_head_attention" in plan.whole["attention.in_proj_weight"]
    assert "attention.out_proj.weight" in plan.whole


def _dropped(group: Any) -> Any:
    torch.manual_seed(0)
    model, inputs = _encoder(dropout=0.3)
    model = nn.Sequential(Called(lambda m, x: F.dropout(m.inner(x), 0.2, m.training), inner=model))
    model, inputs = model.double(), (inputs[0].double(),)
    auto.apply(auto.plan(model, inputs, parallel_group(group).size), model, group)
    tp_ext.manual_seed(7)
    y = model(*inputs)
    y.square().mean().backward()
    return y.detach(), model[0].inner.first.weight.grad


def test_dropout_of_attention_has_the_masks_of_any_number_of_ranks() -> None:
    results = [run(_dropped, p)[-1] for p in (1, 2, 3)]
    for of_one, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(other, of_one, rtol=1e-10, atol=1e-11)


def _counted(group: Any) -> tuple[int, int, int, int]:
    model, inputs = _attention(batch_first=True)()
    plan = auto.plan(model, inputs, parallel_group(group).size)
    auto.apply(plan, model, group)
    with tp_ext.debug.count_collectives() as forward:
        loss = projection(outputs_of(model(*inputs)))
    with tp_ext.debug.count_collectives() as backward:
        loss.backward()
    planned = sum(one.direction == "forward" for one in plan.collectives)
    return planned, forward.number, len(plan.collectives) - planned, backward.number


def test_attention_sums_its_output_its_weights_and_the_gradient_of_its_input() -> None:
    assert run(_counted, 2)[0] == (2, 2, 1, 1)
