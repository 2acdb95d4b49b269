"""Multi-head latent attention on two ranks and in one process: ours, and DeepSeek's attention of ``transformers``.

Hidden 1024, 16 heads of 64 + 32 features (values 64), latents of widths 384 (queries) and 256, fp32. "training":
forward and backward of a sequence of 1024 tokens, with the gradient of the input. "decoding": a token of each of 4
sequences after 1024 tokens in the cache. "transformers" is ``DeepseekV3Attention`` with torch's
``scaled_dot_product_attention`` on the same weights, in one process; its cache holds latents, too, and it expands all
of them for each token. Output, input gradient and all weights' gradients are compared with it before any measurement.
``speedup`` is the time of "transformers, 1 thread" over that of a case, medians of turns.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.harness import TOLERANCE
from benchmarks.lib.report import Record

RANKS = 2
HIDDEN, HEADS, TOKENS, BATCH = 1024, 16, 1024, 4  # BATCH: sequences of decoding
WIDTHS = {"q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
Results = list[Tensor]


@functools.cache
def rope() -> tp_ext.RotaryEmbedding:
    return tp_ext.RotaryEmbedding(WIDTHS["qk_rope_head_dim"], interleaved=True)


@functools.cache
def weights() -> dict[str, Tensor]:
    tp_ext.manual_seed(0)
    return dict(tp_ext.ParallelLatentAttention(HIDDEN, HEADS, **WIDTHS, group=None).state_dict())


@functools.cache
def data(task: str) -> Tensor:
    """x: of training with the gradient of y after it; of decoding the text, and the token to decode last."""
    shape = (2, TOKENS, HIDDEN) if task == "training" else (BATCH, TOKENS + 1, HIDDEN)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def training_step(layer: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, params: list[Tensor]) -> Results:
    x = x.clone().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *params], grad)]


@functools.cache
def of_transformers(task: str) -> Callable[[], Results]:
    from transformers import DynamicCache
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    options = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, **WIDTHS}
    config = DeepseekV3Config(**options, num_hidden_layers=1, attn_implementation="sdpa")
    layer = DeepseekV3Attention(config, 0)
    layer.load_state_dict(weights())

    def tables(first: int, last: int) -> tuple[Tensor, Tensor]:
        cos, sin = rope().cos_sin(torch.arange(first, last), torch.float32)
        return torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]

    if task == "training":
        x, grad = data(task)
        whole = tables(0, TOKENS)
        named = dict(layer.named_parameters())
        params: list[Tensor] = [named[name] for name in weights()]
        return lambda: training_step(lambda x: layer(x[None], whole, None)[0][0], x, grad, params)
    text, cache, step = data(task), DynamicCache(config=config), tables(TOKENS, TOKENS + 1)

    @torch.inference_mode()
    def decode() -> Results:
        if cache.get_seq_length() == 0:
            layer(text[:, :-1], tables(0, TOKENS), None, past_key_values=cache)
        y = layer(text[:, -1:], step, None, past_key_values=cache)[0]
        cache.crop(-1)
        return [y]

    return decode


@functools.cache
def ours(task: str, backend: str, sequence_parallel: bool) -> Callable[[], Results]:
    """On a rank over ``backend``, or with "" in this process."""
    group = interleave.group_on(backend) if backend else None
    layer = tp_ext.ParallelLatentAttention(
        HIDDEN, HEADS, **WIDTHS, rope=rope(), group=group, sequence_parallel=sequence_parallel
    )
    tp_ext.load_full_state_dict(layer, weights())
    if task == "training":
        x, grad = (own_tokens(t) if sequence_parallel else t for t in data(task))
        named = dict(layer.named_parameters())
        params: list[Tensor] = [named[name] for name in weights()]
        step = functools.partial(training_step, lambda x: layer(x, batch_size=1), x, grad, params)
    else:
        text, cache = data(task), layer.eval().new_cache(BATCH, TOKENS + 1)

        @torch.inference_mode()
        def step() -> Results:
            if cache.length == 0:
                layer(text[:, :-1], cache=cache)
            return [layer(text[:, -1:], cache=cache.truncate(TOKENS))]

    check(layer, task, step())
    return step


def own_tokens(x: Tensor) -> Tensor:
    return x.tensor_split(dist.get_world_size())[dist.get_rank()]


def check(layer: tp_ext.ParallelLatentAttention, task: str, results: Results) -> None:
    """Raises if this rank's results are not those of transformers."""
    want = of_transformers(task)()
    if task == "training":
        table = dict(tp_ext.layouts(layer))
        y, dx, *grads = want
        if layer.sequence_parallel:
            y, dx = own_tokens(y), own_tokens(dx)
        want = [y, dx, *(table[name].shard(grad) for name, grad in zip(weights(), grads, strict=True))]
    for name, got, one in zip(["y", "dx", *weights()], results, want, strict=False):
        error = float((got - one).norm() / one.norm())
        assert error <= TOLERANCE[torch.float32], f"{task}, {name} is off by {error:.1e} of its norm"


def measure(task: str, seconds: float, block: float) -> list[Record]:
    cores = interleave.cores()
    interleave.pin_ranks(RANKS, cores, len(cores) >= RANKS)
    one, every = cores[:1] if len(cores) >= RANKS else cores, cores
    subjects = {
        "transformers, 1 thread": interleave.here(of_transformers(task), 1, one),
        "transformers, 2 threads": interleave.here(of_transformers(task), 2, every),
        "ours, 1 thread": interleave.here(ours(task, "", False), 1, one),
    }
    for backend in interleave.BACKENDS:
        for parallel in (False, True) if task == "training" else (False,):
            name = f"{RANKS} ranks, {backend}" + ", sequence parallel" * parallel
            subjects[name] = interleave.on_ranks(RANKS, ours, task, backend, parallel)
    times = interleave.take(subjects, seconds, block, turns=3 if seconds else 1)
    return interleave.rows(
        times,
        {"task": task},
        lambda of, name: {
            "speedup": of["transformers, 1 thread"] / of[name],
            "to_ours": of["ours, 1 thread"] / of[name],
        },
    )


draw = report.bars("latent attention, {task}", "speedup", "times as fast as transformers with 1 thread, medians")


def main() -> None:
    report.run(__file__, __doc__, lambda quick: ["training", "decoding"], measure, draw, "transformers")


if __name__ == "__main__":
    main()
