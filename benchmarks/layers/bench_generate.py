"""Greedy generation with a KV cache: a Llama of 4 layers on one process and on two ranks, and ``generate`` of
transformers with the same weights.

Hidden 512, 8 heads, 2 KV heads, SwiGLU of 1408, a vocabulary of 2048, in fp32; 32 tokens after a prompt of 256, batch 1
and 8 (``--quick``: 8 tokens after 16). "one operator": the sum over the ranks, the residual and the next norm in
``all_reduce_rms_norm``; "by themselves": ``norm(layer(x), residual)``. All generate the same tokens, which is checked.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.llama import LlamaBlock, block_weights
from benchmarks.lib.report import Record

RANKS, VOCAB = 2, 2048
Case = tuple[bool, int, int, int]  # pinned, batch, length of the prompt, new tokens


@functools.cache
def dense() -> transformers.LlamaForCausalLM:
    """The model of transformers, the same in every process."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


class Llama(nn.Module):
    """The model with layers of tp_ext; the norm after a sublayer is the next sublayer's."""

    def __init__(self, config: transformers.LlamaConfig, group: Any, one_operator: bool) -> None:
        super().__init__()
        self.one_operator = one_operator
        self.embedding = tp_ext.VocabParallelEmbedding(VOCAB, config.hidden_size, group=group)
        self.blocks = nn.ModuleList(LlamaBlock(config, group) for _ in range(config.num_hidden_layers))
        self.norm = tp_ext.RMSNorm(config.hidden_size, config.rms_norm_eps, group=group)
        self.head = tp_ext.VocabParallelLMHead(config.hidden_size, VOCAB, group=group)

    def into(self, norm: nn.Module, layer: nn.Module, h: Tensor, residual: Tensor, **options: Any) -> Any:
        if self.one_operator:
            return layer(h, residual=residual, norm=norm, **options)
        return norm(layer(h, **options), residual)

    def forward(self, ids: Tensor, caches: list[tp_ext.KVCache]) -> Tensor:
        """ids ``[batch, seq]`` -> hidden states of the last token ``[batch, hidden]``."""
        x = self.embedding(ids)
        rope = self.blocks[0].attention.rope
        tables = rope.cos_sin(caches[0].positions(ids.shape[1]).flatten(), x.dtype)
        h = self.blocks[0].norm1(x)
        for i, block in enumerate(self.blocks):
            after = self.blocks[i + 1].norm1 if i + 1 < len(self.blocks) else self.norm
            h, x = self.into(block.norm2, block.attention, h, x, cache=caches[i], cos_sin=tables)
            h, x = self.into(after, block.mlp, h, x)
        return h[:, -1]

    @torch.inference_mode()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        caches = [block.attention.new_cache(len(ids), ids.shape[1] + count) for block in self.blocks]
        new = ids
        for _ in range(count):
            new = self.head.sample(self(new, caches), temperature=0.0)[:, None]
            ids = torch.cat([ids, new], 1)
        return ids


def weights(of: transformers.LlamaForCausalLM) -> dict[str, Tensor]:
    """The weights of transformers under the names of :class:`Llama`."""
    state, full = of.state_dict(), {}
    for i, layer in enumerate(of.model.layers):
        full |= {f"blocks.{i}.{name}": weight for name, weight in block_weights(layer.state_dict()).items()}
    names = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    return full | {f"{ours}.weight": state[f"{theirs}.weight"] for ours, theirs in names.items()}


@functools.cache
def prompt(batch: int, length: int) -> Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


@functools.cache
def expected(batch: int, length: int, count: int) -> Tensor:
    return by_transformers(batch, length, count)()


def by_transformers(batch: int, length: int, count: int) -> Callable[[], Tensor]:
    ids = prompt(batch, length)
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    return lambda: dense().generate(ids, attention_mask=torch.ones_like(ids), **options)


@functools.cache
def ours(backend: str | None, one_operator: bool, batch: int, length: int, count: int) -> Callable[[], Tensor]:
    """A call that generates, whose tokens have been checked; on one process without a backend."""
    group = None if backend is None else interleave.group_on(backend)
    model = Llama(dense().config, group, one_operator).eval()
    tp_ext.load_full_state_dict(model, weights(dense()))
    ids = prompt(batch, length)
    assert torch.equal(model.generate(ids, count), expected(batch, length, count))
    return lambda: model.generate(ids, count)


def measure(case: Case, seconds: float, block: float) -> list[Record]:
    pinned, *shape = case
    cores = interleave.cores()
    interleave.pin_ranks(RANKS, cores, pinned)
    interleave.keep_memory(RANKS, True)
    alone = cores[:1] if pinned else cores
    subjects = {
        "transformers, 1 thread": interleave.here(by_transformers(*shape), 1, alone),
        "transformers, 2 threads": interleave.here(by_transformers(*shape), 2, cores),
        "ours, 1 thread": interleave.here(ours(None, True, *shape), 1, alone),
        "ours, 2 threads": interleave.here(ours(None, True, *shape), 2, cores),
    }
    for backend in interleave.BACKENDS:
        for name, one_operator in (("one operator", True), ("by themselves", False)):
            call = interleave.on_ranks(RANKS, ours, backend, one_operator, *shape)
            subjects[f"{RANKS} ranks, {backend}, {name}"] = call
    times = interleave.take(subjects, seconds, block, turns=3 if seconds else 1)
    batch, length, count = shape
    return interleave.rows(
        times,
        {"batch": batch, "prompt": length, "tokens": count, "pinned": "pinned" if pinned else "not pinned"},
        lambda of, name: {
            "tokens_per_s": batch * count / of[name],
            "times_transformers": of["transformers, 1 thread"] / of[name],
        },
    )


draw = report.bars(
    "batch {batch}, {pinned}", "times_transformers", "times as fast as transformers with one thread, medians"
)


def main() -> None:
    def cases(quick: bool) -> list[Case]:
        if quick:
            return [(False, 1, 16, 8)]
        pinned = len(interleave.cores()) >= RANKS
        return [(pinned, batch, 256, 32) for batch in (1, 8)]

    report.run(__file__, __doc__, cases, measure, draw, "transformers")


if __name__ == "__main__":
    main()
