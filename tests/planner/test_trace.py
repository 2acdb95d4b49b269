"""Workloads of models as they run: against those by sizes, counted FLOPs, what autograd saves; bad input."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tp_ext
from tests.planner import test_prediction_counted as counted
from tp_ext import planner
from tp_ext.planner import Layout, predict

SEQ, VOCAB, HIDDEN, LAYERS, HEADS = 64, 960, 256, 4, 8
SIZES = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "ffn": 512, "vocab": VOCAB, "seq": SEQ}


class PlainBlock(nn.Module):
    """A block as in tutorials: one linear of q, k and v, and copies where views would not do."""

    runs = 0

    def __init__(self, hidden=HIDDEN, heads=HEADS, fused=True, causal=True):
        super().__init__()
        self.heads, self.fused, self.causal = heads, fused, causal
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 512), nn.Linear(512, hidden)

    def attention(self, q, k, v):
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return scores.softmax(-1) @ v

    def forward(self, x):
        PlainBlock.runs += 1
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(h, -1))
        y = self.attention(q, k, v).transpose(1, 2).reshape(b, s, h)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Plain(nn.Module):
    def __init__(self, blocks=None, layers=LAYERS):
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN)
        self.blocks = nn.ModuleList(blocks or [PlainBlock() for _ in range(layers)])
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """torch's own layers."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.table, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN)
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.body(self.table(ids))))


def hf(kind, sizes=None, **options):
    """A model of transformers; GPT-2 has other names for its sizes."""
    transformers = pytest.importorskip("transformers")
    sizes = sizes or SIZES
    if kind == "GPT2":
        names = {"n_layer": "layers", "n_embd": "hidden", "n_head": "heads", "n_positions": "seq", "n_inner": "ffn"}
        options |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    else:
        names = {"num_hidden_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads"}
        names |= {"max_position_embeddings": "seq", "intermediate_size": "ffn"}
        options = {"num_key_value_heads": 2, "pad_token_id": None, **options}
    options |= {name: sizes[size] for name, size in names.items()}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=sizes["vocab"], bos_token_id=0, eos_token_id=0, **options
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def with_biases(workload):
    """Adds the biases of q, k and v to a workload."""
    (block,) = workload.blocks
    ops = tuple(dataclasses.replace(op, bias=op.kind == "column" and op.heads > 0) for op in block.ops)
    return dataclasses.replace(workload, blocks=(dataclasses.replace(block, ops=ops),))


def with_shared_tables(workload):
    """Returns the workload without the tables of rotary embeddings: an unchanged model computes them once for all of
    its layers."""
    (block,) = workload.blocks
    ops = tuple(
        dataclasses.replace(op, heads=0, kv_heads=0, key_features=0) if op.kind == "pointwise" else op
        for op in block.ops
    )
    return dataclasses.replace(workload, blocks=(dataclasses.replace(block, ops=ops),))


GQA = with_shared_tables(planner.transformer(**SIZES, kv_heads=2))
OLD = {"gated": False, "bias": True}
MODELS = {
    "gpt2": (lambda: hf("GPT2"), planner.transformer(**SIZES, **OLD, positions=True, tied=True)),
    "llama": (lambda: hf("Llama"), GQA),
    "qwen2": (lambda: hf("Qwen2", tie_word_embeddings=True), with_biases(dataclasses.replace(GQA, tied=True))),
    "phi3": (lambda: hf("Phi3"), GQA),
    "encoder": (Encoder, planner.transformer(**SIZES, **OLD, causal=False)),
    "plain": (Plain, planner.transformer(**SIZES, **OLD)),
}
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=8, sequence_parallel=False),
    Layout(zero=3, recompute="full"),
    Layout(pp=2, tp=2, recompute="selective"),
    Layout(cp=2, tp=4, zero=1),
    Layout(pp=2, virtual=2, schedule="ZBVZeroBubble", zero=2),
]


def on_meta(make):
    with torch.device("meta"):
        return make()


def ids(batch=1, seq=SEQ, device="meta"):
    return torch.zeros(batch, seq, dtype=torch.long, device=device)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_operators_of_its_sizes(name):
    """So that parameters, FLOPs, saved bytes and the steps of all layouts are those of ``planner.transformer``."""
    make, want = MODELS[name]
    model = on_meta(make)
    got = planner.trace(model, (ids(),), name="transformer")
    assert got == want
    assert got.parameters == sum(parameter.numel() for parameter in {*model.parameters()})
    machine = planner.cluster("h100-sxm", 8)
    for layout in LAYOUTS:
        one, other = (predict(workload, machine, layout, 16) for workload in (got, want))
        assert one.step_time == other.step_time and one.memory == other.memory
        assert one.collectives == other.collectives
    # Numbers of a token do not depend on the batch; but positions are looked up once for all of its sequences
    if name != "gpt2":
        assert planner.trace(model, (ids(3),), name="transformer") == want
    assert planner.search(got, machine, 16, top=1)[0].step_time > 0


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_torch_counts(name):
    """Forward and backward on meta: equal of the linears; attention twice that of causal halves, forward alone, since
    the backward of fused attention counts a product again."""
    make, _ = MODELS[name]
    model = on_meta(make).train()
    workload = planner.trace(model, (ids(),))
    with FlopCounterMode(display=False) as counter:
        output = model(ids(2))
        getattr(output, "logits", output).sum().backward()
    counts = {str(op): number for op, number in counter.get_flop_counts()["Global"].items()}
    linears = sum(number for op, number in counts.items() if op in ("aten.mm", "aten.addmm"))
    with FlopCounterMode(display=False) as counter:
        model(ids(2))
    forward = {str(op): number for op, number in counter.get_flop_counts()["Global"].items()}
    attention = sum(number for op, number in forward.items() if op not in ("aten.mm", "aten.addmm"))
    cores = [op for block in workload.blocks for op in block.ops * block.layers if op.kind == "attention"]
    ours = sum(op.flops(2 * SEQ, SEQ) for op in cores)
    assert workload.flops(2 * SEQ) - ours == linears
    whole = ours / 3 * (2 if cores[0].causal else 1)
    tables = 2 * SEQ * HIDDEN // HEADS  # at most: the angles of RoPE are a product, too
    assert whole <= attention <= whole + tables


def test_saved_bytes_are_those_that_autograd_saves():
    """A block of torch's kernels in fp32 saves as many bytes, each storage counted once, parameters left out."""
    model, batch = Plain(), 2
    saved = []
    for layers in (2, 3):
        kept = {}
        plain = Plain(layers=layers)
        mine = {parameter.untyped_storage().data_ptr() for parameter in plain.parameters()}

        def pack(tensor, mine=mine, kept=kept):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in mine:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = plain(ids(batch, device="cpu"))
        assert result.requires_grad
        saved.append(sum(kept.values()))
    machine, layout = planner.cluster("cpu", 1), Layout(dtype="fp32", micro_batch=batch)
    predicted = [
        predict(planner.trace(on_meta(lambda n=n: Plain(layers=n)), (ids(),)), machine, layout, batch) for n in (2, 3)
    ]
    assert model.blocks[0].qkv.weight.dtype == torch.float32
    got = predicted[1].memory[0].activations - predicted[0].memory[0].activations
    assert got == pytest.approx(saved[1] - saved[0], rel=0.01)


@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_the_model_whose_collectives_are_counted(kv_heads):
    """The plain model of the same sizes has the workload of tests/planner/test_prediction_counted.py."""
    sizes = counted.SIZES
    traced = planner.trace(on_meta(lambda: hf("Llama", sizes, num_key_value_heads=kv_heads)), (ids(seq=sizes["seq"]),))
    want = with_shared_tables(planner.transformer(**sizes, kv_heads=kv_heads))
    assert dataclasses.replace(traced, name="transformer") == want


def test_experts():
    """Grouped GEMMs; what code does to weigh and add their results is more than a copy: steps differ by 1 %."""
    sizes = {**SIZES, "layers": 8, "hidden": 1024, "ffn": 2048, "seq": 1024}
    model = on_meta(lambda: hf("Mixtral", sizes, num_local_experts=8, num_experts_per_tok=2))
    got = planner.trace(model, (ids(seq=1024),))
    want = planner.from_config(model.config.to_dict(), seq=1024)
    assert got.parameters == want.parameters and got.flops(1024) == want.flops(1024) and got.experts == 8
    machine = planner.cluster("h100-sxm", 8)
    for layout in (Layout(ep=4, tp=2), Layout(tp=4), Layout(zero=3), Layout(ep=8, zero=2, recompute="full")):
        one, other = (predict(workload, machine, layout, 16) for workload in (got, want))
        assert one.step_time == pytest.approx(other.step_time, rel=0.01), layout
        assert one.memory[0].parameters == other.memory[0].parameters
        numbers = [[row[:5] for row in prediction.collectives[0]] for prediction in (one, other)]
        assert numbers[0] == numbers[1]


def test_attention_that_is_not_fused():
    got = planner.trace(on_meta(lambda: Plain([PlainBlock(fused=False) for _ in range(2)])), (ids(),), causal=True)
    want = planner.transformer(**{**SIZES, "layers": 2}, **OLD, fused_attention=False)
    cores = [[op for op in workload.blocks[0].ops if op.kind == "attention"] for workload in (got, want)]
    assert cores[0] == cores[1] and got.flops(SEQ) == want.flops(SEQ) and got.parameters == want.parameters


def test_dropout_keeps_a_byte_an_element():
    model = on_meta(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout()) for _ in "ab"]))
    dropped = planner.trace(model, (torch.zeros(4, 8, device="meta"),))
    assert [op.saved_bytes for op in dropped.blocks[0].ops if op.kind == "pointwise"] == [8]


def test_of_equal_blocks_two_run_and_the_model_is_as_before():
    model = on_meta(lambda: Plain(layers=30))
    before = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    PlainBlock.runs = 0
    got = planner.trace(model, (ids(),))
    assert PlainBlock.runs <= 4 and got.layers == 30 and len(got.blocks) == 1
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before


def test_blocks_that_differ_are_kinds_in_their_order():
    blocks = [PlainBlock(causal=causal) for causal in (True, True, False, True)]
    got = planner.trace(on_meta(lambda: Plain(blocks)), (ids(),))
    cores = [next(op for op in block.ops if op.kind == "attention") for block in got.blocks]
    assert [block.layers for block in got.blocks] == [2, 1, 1] and [op.causal for op in cores] == [True, False, True]


class Called(Plain):
    """Its code, not its blocks, says what they do."""

    def forward(self, ids):
        x = self.table(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, i == 2)
        return self.head(self.norm(x))


class Extra(PlainBlock):
    def forward(self, x, twice):
        return super().forward(x) + x if twice else super().forward(x)


def test_blocks_that_are_called_in_other_ways_run():
    got = planner.trace(on_meta(lambda: Called([Extra() for _ in range(4)])), (ids(),))
    assert [block.layers for block in got.blocks] == [2, 1, 1] and got.blocks[1].ops != got.blocks[0].ops == got.blocks[
        2
    ].ops


class Twice(Plain):
    def forward(self, ids):
        x = self.table(ids)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.head(self.norm(x))


class Branches(Plain):
    def forward(self, ids):
        return super().forward(ids) if ids.sum() > 0 else ids


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.up(x) @ x.transpose(-2, -1) @ x


class Unused(Plain):
    def __init__(self):
        super().__init__()
        self.rest = nn.Linear(3, 3)


class Shared(Plain):
    def __init__(self):
        super().__init__([PlainBlock(), PlainBlock()])
        self.blocks[1].up.weight = self.blocks[0].up.weight


@pytest.mark.parametrize(
    "make, example, error, says",
    [
        (lambda: "gpt2", (ids(),), TypeError, "model: str must be an nn.Module"),
        (Plain, [ids()], TypeError, "example: list must be a dict of keyword arguments or a tuple"),
        (Plain, (ids().float(),), ValueError, "example: forward fails on fake tensors like it, in table"),
        (Branches, (ids(),), ValueError, "model: forward branches on values of tensors"),
        (lambda: nn.Linear(3, 3), (ids(),), ValueError, "model: Linear has no repeated block"),
        (lambda: Plain([PlainBlock()]), (ids(),), ValueError, "model: Plain has no repeated block"),
        (Twice, (ids(),), ValueError, "the block blocks.0 runs 2 times with the example"),
        (lambda: Plain([Product(), Product()]), (ids(),), ValueError, "model: blocks.0 multiplies activations by bmm"),
        (Unused, (ids(),), ValueError, "the parameter rest.weight is of no operator"),
        (Shared, (ids(),), ValueError, "blocks.0.up.weight is shared by blocks.0 and blocks.1"),
        (
            lambda: nn.Sequential(*[tp_ext.ParallelMLP(8, 16, group=None) for _ in "ab"]),
            (torch.zeros(4, 8, device="meta"),),
            ValueError,
            "model: 0 is a ParallelMLP, whose operators are of this library",
        ),
    ],
)
def test_bad_input(make, example, error, says):
    with pytest.raises(error, match=says):
        planner.trace(on_meta(make), example)


def test_tokens_are_those_of_the_example():
    model, example = on_meta(Plain), (ids(batch=3, seq=8),)
    assert planner.trace(model, example, 3 * 8) == planner.trace(model, example)
    with pytest.raises(ValueError, match="tokens: 25 must be those of the example, 24"):
        planner.trace(model, example, 25)
    with pytest.raises(ValueError, match="tokens: 0 must be an integer of at least 1, or None"):
        planner.trace(model, example, tokens=0)


@pytest.mark.parametrize("options, says", [({"causal": 1}, "causal: 1 must be"), ({"name": 3}, "name: 3 must be text")])
def test_bad_options(options, says):
    with pytest.raises(TypeError, match=says):
        planner.trace(on_meta(Plain), (ids(),), **options)
