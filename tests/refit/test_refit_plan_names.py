"""Names, parts of fused parameters, dtypes, tied weights, states of optimizers by other names, models of others."""

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import simulated
from tests.helpers.on_ranks import on_ranks
from tp_ext import auto


class _Llama(nn.Module):
    """Our layers with q|k|v and gate|up fused."""

    def __init__(self, group, tied):
        super().__init__()
        self.embedding = tp_ext.VocabParallelEmbedding(11, 8, group=group)
        self.attention = tp_ext.ParallelAttention(8, 4, num_kv_heads=2, bias=False, group=group)
        self.mlp = tp_ext.ParallelMLP(8, 10, activation="swiglu", bias=False, group=group)
        self.head = tp_ext.VocabParallelLMHead(8, 11, group=group)
        if tied:
            self.head.weight = self.embedding.weight


SIZES = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8)}
SIZES |= {"gate_proj": (10, 8), "up_proj": (10, 8), "down_proj": (8, 10), "embed": (11, 8), "lm_head": (11, 8)}


class _Plain(nn.Module):
    """The same with the names and the separate matrices of a published model."""

    def __init__(self, tied):
        super().__init__()
        for name, (rows, columns) in SIZES.items():
            self.add_module(name, nn.Linear(columns, rows, bias=False))
        if tied:
            self.lm_head.weight = self.embed.weight


TO_PLAIN = {
    "embed.weight": "embedding.weight",
    "lm_head.weight": "head.weight",
    "o_proj.weight": "attention.out.weight",
    "down_proj.weight": "mlp.down.weight",
    **{f"{name}_proj.weight": ("attention.qkv.weight", i) for i, name in enumerate("qkv")},
    **{f"{name}_proj.weight": ("mlp.up.weight", i) for i, name in enumerate(("gate", "up"))},
}
FROM_PLAIN = {
    "embedding.weight": "embed.weight",
    "head.weight": "lm_head.weight",
    "attention.qkv.weight": [f"{name}_proj.weight" for name in "qkv"],
    "attention.out.weight": "o_proj.weight",
    "mlp.up.weight": ["gate_proj.weight", "up_proj.weight"],
    "mlp.down.weight": "down_proj.weight",
}


def _with_state(module, steps):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for step in range(steps):
        for param in module.parameters():
            param.grad = param.detach() ** 2 + step  # copies of KV heads get equal ones
        optimizer.step()
    return optimizer


def _there_and_back(group, tied):
    """To separate matrices on one rank and back: the full states are equal, those of the optimizers, too."""
    source, last = (_Llama(group, tied) for _ in range(2))
    plain = _Plain(tied) if group.rank() == 1 else None
    optimizers = _with_state(source, 2), None if plain is None else _with_state(plain, 0), _with_state(last, 1)
    tp_ext.refit.plan(source, plain, names=TO_PLAIN, optimizers=optimizers[:2]).run()
    full = tp_ext.full_state_dict(source)
    if plain is not None:
        ours = plain.state_dict()
        assert torch.equal(torch.cat([ours[f"{name}_proj.weight"] for name in "qkv"]), full["attention.qkv.weight"])
        assert torch.equal(ours["lm_head.weight"], full["head.weight"])
    moved = tp_ext.refit.plan(plain, last, names=FROM_PLAIN, optimizers=optimizers[1:]).run()
    for key, value in tp_ext.full_state_dict(last).items():
        assert torch.equal(value, full[key]), key
    before, after = (
        tp_ext.full_optimizer_state_dict(module, optimizer)["state"]
        for module, optimizer in ((source, optimizers[0]), (last, optimizers[2]))
    )
    assert before.keys() == after.keys() and before
    for name, state in before.items():
        for key, value in state.items():
            assert torch.equal(after[name][key], value), (name, key)
    return moved


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_fused_parts_there_and_back(p, tied):
    simulated.run(_there_and_back, p, tied)


@on_ranks(3)
def test_a_tied_weight_moves_once(group):
    """The source, whose weight is tied, on two ranks; on the third a target that has it twice."""
    tp = torch.distributed.new_group([0, 1])
    torch.manual_seed(group.rank())
    source = _Llama(tp, True) if group.rank() < 2 else None
    target = _Plain(False) if group.rank() == 2 else None
    moved = tp_ext.refit.plan(source, target, names=TO_PLAIN).run()
    if target is not None:
        assert torch.equal(target.embed.weight, target.lm_head.weight)
        assert moved.copied == target.embed.weight.nbytes
        assert moved.received == sum(p.nbytes for p in target.parameters()) - target.embed.weight.nbytes


@pytest.mark.parametrize(
    ("source", "dtype", "target", "wire"),
    [
        (torch.float32, None, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, None, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float64, torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float64, torch.bfloat16),
        (torch.float32, None, torch.float32, torch.float32),
    ],
)
@on_ranks(2)
def test_dtypes(group, source, dtype, target, wire):
    """Values are those of both casts; the narrowest dtype of the chain is sent."""
    a = tp_ext.ColumnParallelLinear(4, 6, group=group, dtype=source)
    b = nn.Linear(4, 6, dtype=target) if group.rank() == 0 else None
    a.register_buffer("count", torch.tensor([7]))
    if b is not None:
        b.register_buffer("count", torch.tensor([0]))
    moved = tp_ext.refit.plan(a, b, dtype=dtype).run()
    full = tp_ext.full_state_dict(a)
    if b is not None:
        for name, param in b.named_parameters():
            assert torch.equal(param, full[name].to(dtype or source).to(target)), name
        assert b.count == 7  # integers are not cast
        assert moved.received == (3 * 4 + 3) * wire.itemsize
        assert moved.copied == (3 * 4 + 3) * wire.itemsize + 8


def _auto(group):
    """An unchanged model that auto has sharded, and the same on one rank, both ways."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    x = torch.randn(2, 8)
    whole = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    before = whole(x)
    auto.apply(auto.plan(model, (x,), 2), model, group)
    moved = tp_ext.refit.plan(whole if group.rank() == 0 else None, model).run()
    torch.testing.assert_close(model(x), before)
    assert model[0].weight.shape == (6, 8)
    return moved.received


def test_auto_models():
    received = simulated.run(_auto, 2)
    assert received[0] == 0 and received[1] > 0


@on_ranks(2)
def test_hugging_face_on_one_process(group, tmp_path):
    """A Llama of transformers over two ranks, and its names on one."""
    pytest.importorskip("transformers")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    if group.rank() == 0:
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    torch.distributed.barrier()
    source = tp_ext.huggingface.from_pretrained(tmp_path, group=group)
    torch.manual_seed(1)
    target = transformers.LlamaForCausalLM(config) if group.rank() == 1 else None
    tp_ext.refit.plan(source, target).run()
    full = tp_ext.full_state_dict(source)
    if target is not None:
        state = target.state_dict()
        assert state.keys() == full.keys()
        assert all(torch.equal(state[key], value) for key, value in full.items())
