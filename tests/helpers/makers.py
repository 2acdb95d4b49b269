"""Every module of the registry, and models of them, with inputs and outputs: one test of a feature covers them all.

Weights depend on the seed only, not on the number of ranks: the same case at p = 1 is the oracle. 6 tokens, 10 features
of the linears, 13 words and, of the multi-query attention, the copied key and value heads are uneven or copied at most
p that are tested.
"""

from collections.abc import Callable
from typing import Any

import torch
from gpt import GPT, Block, GPTConfig
from torch import Tensor, nn

from tests.helpers import ranks, registry
from tests.helpers.models import RichBlock
from tests.helpers.oracle import full_gradients, gradients, own_tokens
from tests.helpers.registry.entries import BATCH, FFN, HIDDEN, SEQ, SEQUENCES, TOKENS, VOCAB, Case
from tp_ext import Sharding


def config(**options) -> GPTConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_layers": 2}
    return GPTConfig(**sizes | {"num_heads": 4, "num_kv_heads": 1, "dropout": 0.2} | options)


def gpt(group, sequence_parallel=False, **options) -> GPT:
    return GPT(config(sequence_parallel=sequence_parallel, **options), group)


class _Model(Case):
    """A model of layers: ``kind(group=, sequence_parallel=)``, the name of one of these functions."""

    def make(self, kit: Any = None, **parallel: Any) -> nn.Module:
        return _MODELS[self.kind](**parallel)


_MODELS = {"block": lambda group, **o: Block(config(**o), group), "rich_block": RichBlock, "gpt": gpt}
CASES = registry.CASES | {
    "block": _Model("block", call=SEQUENCES, dropout=True, keeps_dtype=True),  # by its residual
    "rich_block": _Model("rich_block", call={}, dropout=True, keeps_dtype=True),
    "gpt": _Model("gpt", takes="ids", gives="features", call={}, dropout=True),
}


def build(name: str, group: Any, sp: bool, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(11)
    module = CASES[name].make(group=group, sequence_parallel=sp).to(dtype)
    module.tested_dtype = dtype  # Dropout has no parameter to take it from
    return module


def _columns(module: nn.Module) -> Sharding:
    head = module.head if isinstance(module, GPT) else module
    return Sharding(-1, head.tp_shardings["weight"].parts)


def _place(group: Any) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


def own_input(name: str, module: nn.Module, group: Any, sp: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    """This rank's input of the module; a leaf, unless it is ids."""
    case, generator = CASES[name], torch.Generator().manual_seed(12)
    if case.takes == "ids":
        ids = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
        return ids if name == "gpt" else ids.flatten()
    width = FFN if case.takes == "features" else HIDDEN
    x = torch.randn(TOKENS, width, generator=generator, dtype=torch.float64).to(dtype)
    if case.takes == "features":
        x = Sharding(-1, (FFN,)).shard(x, *_place(group))
    elif sp and group is not None:
        x = own_tokens(x, group)
    return x.clone().requires_grad_()


def own_upstream(name: str, module: nn.Module, group: Any, sp: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    """The gradient at this rank's output."""
    generator = torch.Generator().manual_seed(13)
    features = _columns(module) if CASES[name].gives == "features" else None
    width = HIDDEN if features is None else features.size
    dy = torch.randn(TOKENS, width, generator=generator, dtype=torch.float64).to(dtype)
    if features is not None:
        return features.shard(dy, *_place(group))
    return own_tokens(dy, group) if sp and group is not None else dy


def caller(name: str, module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x, **CASES[name].call)


def outcome(name: str, module: nn.Module, group: Any, sp: bool, call=None, seed: int = 14) -> list[Tensor | None]:
    """This rank's y, dx (None for ids) and gradients of a step: fixed input, upstream gradient and masks."""
    dtype = module.tested_dtype
    x = own_input(name, module, group, sp, dtype)
    module.zero_grad()
    torch.manual_seed(seed)
    y = (call or caller(name, module))(x)
    y.backward(own_upstream(name, module, group, sp, dtype).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def same(got: list[Tensor | None], want: list[Tensor | None]) -> bool:
    """To the last bit."""
    return len(got) == len(want) and all(
        a is b is None or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(got, want, strict=True)
    )


# The unsharded model's results from those of the ranks


def step(group: Any, name: str, sp: bool, dtype: torch.dtype = torch.float64) -> tuple:
    """On one rank: y, dx and the gradients with their shardings."""
    module = build(name, group, sp, dtype)
    y, dx, *_ = outcome(name, module, group, sp)
    return y, dx, gradients(module)


def gathered(name: str, sp: bool, per_rank: list[tuple]) -> dict[str, Tensor | None]:
    """{"y", "dx", parameter names} of the unsharded model from what each rank's (y, dx, gradients) say."""
    module = build(name, None, sp)
    case = CASES[name]
    full = full_gradients([r[2] for r in per_rank])
    ys, dxs = [r[0] for r in per_rank], [r[1] for r in per_rank]

    def tokens(parts):
        if parts[0] is None:
            return None
        if sp:
            return torch.cat(parts)
        assert all(torch.equal(part, parts[0]) for part in parts), "replicated, and yet not the same"
        return parts[0]

    full["y"] = _columns(module).unshard(ys) if case.gives == "features" else tokens(ys)
    full["dx"] = torch.cat(dxs, -1) if case.takes == "features" else tokens(dxs)
    return full


def assert_parity(fn: Callable, name: str, p: int, sp: bool, want: dict, bound: float, *args: Any) -> None:
    """fn(group, name, sp, ..) on p ranks gives ``want``, {"y", "dx", parameter names}, within bound * its largest."""
    got = gathered(name, sp, ranks.run(fn, p, name, sp, *args))
    assert got.keys() == want.keys()
    for key, value in want.items():
        if value is None or got[key] is None:
            assert value is got[key] is None, (name, key)
            continue
        assert got[key].dtype == value.dtype, (name, key)
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(got[key], value, rtol=0, atol=bound * scale, msg=lambda m, k=key: f"{name} {k}: {m}")
