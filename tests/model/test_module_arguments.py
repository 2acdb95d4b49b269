"""Arguments of another type, and numbers of tokens that do not fit, are errors that name the argument and the rule."""

import pytest
import torch

import tp_ext
from tests.helpers.ranks import run, run_raises

pytestmark = pytest.mark.core


def _moe(group, **options):
    router = tp_ext.RouterConfig(balance_loss=0.1, balance_over="sequence", correction_bias=True)
    return tp_ext.ParallelMoE(6, 8, 4, 2, group=group, router=router, **options)


def _latent(**options):
    return tp_ext.ParallelLatentAttention(
        8,
        2,
        q_lora_rank=None,
        kv_lora_rank=4,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
        group=None,
        **options,
    )


CASES = {
    "list": (lambda: _moe(None)([[1.0] * 6]), TypeError, "x: list must be a tensor"),
    "none": (lambda: _moe(None)(None), TypeError, "x: NoneType must be a tensor"),
    "latent list": (lambda: _latent()([1.0]), TypeError, "x: list must be a tensor"),
    "attention list": (
        lambda: tp_ext.ParallelAttention(8, 2, group=None)([1.0]),
        TypeError,
        "x: list must be a tensor",
    ),
    "divides": (
        lambda: _moe(None)(torch.ones(8, 6), batch_size=3),
        ValueError,
        "batch_size: 3 must divide the number of tokens, 8",
    ),
    "more sequences": (
        lambda: _moe(None)(torch.ones(4, 6), batch_size=100),
        ValueError,
        "batch_size: 100 must divide the number of tokens, 4",
    ),
    "rate": (lambda: _moe(None).router.update_correction_bias(float("nan")), ValueError, "rate: nan must be finite"),
    "rate text": (lambda: _moe(None).router.update_correction_bias("a"), TypeError, "rate: 'a' must be a number"),
    "eps": (lambda: _latent(norm_eps=-1.0), ValueError, "norm_eps: -1.0 must be at least 0"),
    "causal": (lambda: _latent(causal="yes"), TypeError, "causal: 'yes' must be True or False"),
    "cu_seqlens": (
        lambda: tp_ext.ParallelAttention(8, 2, group=None)(torch.ones(6, 8), cu_seqlens=6),
        TypeError,
        "cu_seqlens: 6 must be a 1-D tensor or a list",
    ),
    "chunk": (
        lambda: tp_ext.linear_cross_entropy(
            torch.ones(2, 3), torch.ones(4, 3), torch.tensor([1, 2]), None, chunk_tokens=True
        ),
        TypeError,
        "chunk_tokens: True must be an integer",
    ),
    "reorder floats": (lambda: _cache().reorder(torch.ones(2)), TypeError, "index: torch.float32 must be torch.int64"),
    "reorder": (
        lambda: _cache().reorder(torch.tensor([0, 2])),
        IndexError,
        r"index: \[0, 2\] must be sequences of the 2",
    ),
}


NAN, IDS = float("nan"), torch.tensor([1, 2])
NO_INTEGERS, NO_NUMBERS = [NAN, True, 2.5, "x"], [True, "x", None]
LOSSES = {
    "loss": lambda group, **options: tp_ext.vocab_parallel_cross_entropy(torch.ones(2, 2), IDS, group, **options),
    "linear": lambda group, **options: tp_ext.linear_cross_entropy(
        torch.ones(2, 3), torch.ones(2, 3), IDS, group, **options
    ),
    "head": lambda group, **options: tp_ext.VocabParallelLMHead(3, 4, group=group).loss(
        torch.ones(2, 3), IDS, **options
    ),
    "module": lambda group, **options: tp_ext.VocabParallelCrossEntropy(group=group, **options)(torch.ones(2, 2), IDS),
}
OPTIONS = [
    *((loss, "ignore_index", [*NO_INTEGERS, None]) for loss in LOSSES),
    *((loss, name, [*NO_NUMBERS, NAN]) for loss in LOSSES for name in ("label_smoothing", "z_loss")),
    *((loss, "vocab_size", NO_INTEGERS) for loss in ("loss", "linear", "module")),
    *((loss, name, NO_INTEGERS) for loss in ("linear", "head") for name in ("chunk_tokens", "total_tokens")),
]


@pytest.mark.parametrize(("loss", "name", "values"), OPTIONS, ids=[f"{loss}-{name}" for loss, name, _ in OPTIONS])
def test_numbers_of_losses_are_checked_before_ranks_communicate(loss, name, values):
    def on_rank(rank, group):
        texts = []
        with tp_ext.debug.count_collectives() as counts:
            for value in values:
                with pytest.raises((TypeError, ValueError), match=f"^{name}: {value!r} must be ") as error:
                    LOSSES[loss](group, **{name: value})
                texts.append(str(error.value))
        return texts, counts.number

    (first, number), second = tp_ext.debug.simulate(on_rank, 2)
    assert second == (first, 0) and number == 0


@pytest.mark.parametrize(
    ("call", "name", "values"),
    [
        (lambda x: tp_ext.VocabParallelEmbedding(4, 3, padding_idx=x, group=None), "padding_idx", NO_INTEGERS),
        (
            lambda x: tp_ext.VocabParallelEmbedding(4, 3, pad_to_multiple_of=x, group=None),
            "pad_to_multiple_of",
            NO_INTEGERS,
        ),
        (lambda x: tp_ext.LayerNorm(x, group=None), "normalized_shape", [*NO_INTEGERS, None, [True], [2.5]]),
        (lambda x: tp_ext.RMSNorm(x, group=None), "normalized_shape", [*NO_INTEGERS, None, [True], [2.5]]),
        (lambda x: tp_ext.ColumnParallelLinear(3, 4, parts=x, group=None), "parts", NO_INTEGERS),
        (lambda x: tp_ext.RowParallelLinear(4, 3, parts=x, group=None), "parts", NO_INTEGERS),
    ],
    ids=["padding_idx", "pad_to_multiple_of", "LayerNorm", "RMSNorm", "column", "row"],
)
def test_numbers_of_layers_are_checked(call, name, values):
    for value in values:
        with pytest.raises((TypeError, ValueError)) as error:
            call(value)
        assert str(error.value).startswith(f"{name}: {value!r} must be ")


def _cache():
    return tp_ext.ParallelAttention(8, 2, group=None).new_cache(2, 4)


@pytest.mark.parametrize("case", CASES)
def test_each_is_named(case):
    call, error, match = CASES[case]
    with pytest.raises(error, match=match):
        call()


def _sequences(group, batch_size):
    x = torch.ones(4, 6)
    return _moe(group, sequence_parallel=True)(x, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [3, 100])
def test_a_number_of_sequences_that_does_not_fit_is_the_error_of_all_ranks(batch_size):
    """Of 8 tokens on two ranks; before, only the rank with tokens beyond the last whole sequence raised."""
    run_raises(_sequences, 2, ValueError, f"batch_size: {batch_size} must divide the number of tokens, 8", batch_size)


def _wrong_total(group, layer):
    """Nine tokens of which each rank has four: the rank that should have five raises, before it communicates."""
    options = {"group": group, "sequence_parallel": True}
    made = {
        "column": lambda: tp_ext.ColumnParallelLinear(6, 8, **options),
        "row": lambda: tp_ext.RowParallelLinear(6, 8, **options),
        "mlp": lambda: tp_ext.ParallelMLP(6, 8, **options),
        "moe": lambda: _moe(group, sequence_parallel=True),
        "head": lambda: tp_ext.VocabParallelLMHead(6, 8, **options),
        "dropout": lambda: tp_ext.Dropout(0.5, **options),
    }[layer]()
    if group.rank() and layer != "row":
        return ""
    x = torch.ones(8, 3) if layer == "row" else torch.ones(4, 6)
    with pytest.raises(ValueError) as error:
        made(x, total_tokens=9)
    return str(error.value)


@pytest.mark.parametrize("layer", ["column", "row", "mlp", "moe", "head", "dropout"])
def test_a_wrong_total_is_named(layer):
    first, second = run(_wrong_total, 2, layer)
    if layer == "row":
        assert first == second == "total_tokens: 9 must be the length of dim 0 of the input, 8"
    else:
        assert first == "total_tokens: 9 gives the ranks [5, 4], this one 5, and dim 0 of its input has 4"


def test_the_correction_bias_stays_in_fp32():
    layer = _moe(None)
    layer.router.e_score_correction_bias += torch.tensor([0.5001, 0.0, 0.0, 0.0])
    before = layer.router.e_score_correction_bias.clone()
    layer.bfloat16().half()
    bias = layer.router.e_score_correction_bias
    assert layer.router.weight.dtype == torch.float16 and bias.dtype == torch.float32 and torch.equal(bias, before)
    assert dict(layer.named_buffers())["router.e_score_correction_bias"] is bias
    assert layer.double().router.e_score_correction_bias.dtype == torch.float64
