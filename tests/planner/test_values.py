"""Values: JSON both ways, presets with sources, sizes of published models, bad input."""

import dataclasses
import itertools
import json
import math

import pytest

from tp_ext import planner
from tp_ext.planner import Block, Cluster, Device, EfficiencyCurve, Layout, Link, Op, Workload

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
CURVE = EfficiencyCurve(share={"bf16": 0.7}, units=4, table=((1, 2, 3, "bf16", 0.5),))
DEVICE = Device("d", peak={"bf16": 1e12}, memory_bandwidth=1e11, memory=1e10, gemm=CURVE)
VALUES = [
    CURVE,
    DEVICE,
    Link(1e-6, 1e9, 8),
    Cluster(DEVICE, 16, [Link(1e-6, 1e9, 8), Link(1e-5, 1e8)], constants={"memory": 0.9}),
    Layout(pp=2, dp=None, virtual=2, recompute="full", dtype="fp8"),
    planner.from_config(DEEPSEEK_V3, seq=4096),
    planner.transformer(layers=2, hidden=8, heads=2, vocab=16, seq=4, gated=False, positions=True, bias=True),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_json_round_trip(value):
    again = type(value).from_json(value.to_json())
    assert again == value and hash(again) == hash(value) and type(again) is type(value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)
    with pytest.raises(ValueError, match="fields"):
        type(value).from_json(json.dumps({"other": 1}))


def test_dicts_of_values_do_not_change():
    with pytest.raises(TypeError, match="must not be changed"):
        DEVICE.peak["bf16"] = 1.0


@pytest.mark.parametrize("name", planner.SOURCES)
def test_presets(name):
    device = planner.device(name)
    assert device.name == name and device.memory > device.reserve
    assert device.reserve == (0 if name == "cpu" else 2 * 2**30)
    assert planner.SOURCES[name].startswith("assumed" if name == "cpu" else "https://")
    inner = planner.cluster(name, 1024).links[0].group_size
    assert inner == (64 if name in ("gb200", "gb300") else 8)


@pytest.mark.parametrize(
    "name, reported",
    [("h100-sxm", 81559), ("h200", 143771), ("b200", 183359), ("gb200", 189471), ("b300", 275040), ("gb300", 284208)],
)
def test_memory_is_that_of_data_sheets_in_the_gib_that_devices_report(name, reported):
    """MiB of nvidia-smi."""
    assert 0.99 <= reported * 2**20 / planner.device(name).memory <= 1


def test_parameters_of_published_models():
    assert planner.from_config(LLAMA_70B).parameters == 70_553_706_496
    assert planner.from_config(LLAMA_70B).seq == 8192 and planner.from_config(LLAMA_70B, seq=128).seq == 128
    # 671e9 without the layer of multi-token prediction; the model's own biases of routing are left out
    assert planner.from_config(DEEPSEEK_V3, seq=4096).parameters == pytest.approx(671.0e9, rel=1e-3)


def test_flops_are_those_of_megatron():
    """72 B s l h^2 (1 + s / (6 h) + V / (12 l h)) of a model without causal halves (arXiv:2104.04473, section 5.1)."""
    b, s, layers, h, vocab = 3, 2048, 24, 1024, 51200
    sizes = {"layers": layers, "hidden": h, "heads": 16, "vocab": vocab, "seq": s, "gated": False}
    whole = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert planner.transformer(**sizes, causal=False).flops(b * s) == pytest.approx(whole)
    half = whole - 72 * b * s * layers * h**2 * s / (12 * h)
    assert planner.transformer(**sizes).flops(b * s) == pytest.approx(half)


def test_efficiency_of_tiles_waves_and_tables():
    curve = EfficiencyCurve(share={"bf16": 1.0}, tile=(128, 128), units=10, half_k=0)
    assert curve(1280, 128, 64) == 1.0  # ten tiles, one wave
    assert curve(1280 + 128, 128, 64) < 0.6 + 0.4  # eleven: a second wave
    assert curve(640, 64, 64) == pytest.approx(1.0)  # tiles of a quarter
    assert EfficiencyCurve(share={"bf16": 0.8}, half_k=128)(10**5, 10**5, 128) == pytest.approx(0.4, rel=1e-2)
    table = dataclasses.replace(curve, table=((64, 64, 64, "bf16", 0.1), (4096, 4096, 4096, "bf16", 0.9)))
    assert table(64, 64, 64) == 0.1 and table(64, 64, 64, "fp8") != 0.1
    assert table(4000, 4000, 4000) == pytest.approx(0.9) and table(70, 60, 64) == pytest.approx(0.1)
    assert table(512, 512, 512) == pytest.approx(0.5)  # half-way


def test_a_device_that_is_not_asynchronous_adds_what_others_hide():
    """Launches and collectives during kernels: on a CPU the same cores do all."""
    model = planner.transformer(layers=2, hidden=512, heads=8, vocab=512, seq=256)
    gpu = planner.cluster("h100-sxm", 8)
    cpu = dataclasses.replace(gpu, device=dataclasses.replace(gpu.device, asynchronous=False))
    hidden, all_of_it = (planner.predict(model, on, Layout(dp=4, tp=2, zero=3), 8) for on in (gpu, cpu))
    assert all_of_it.breakdown["host"] > hidden.breakdown["host"] > 0
    for mine, other in zip(all_of_it.collectives[0], hidden.collectives[0], strict=True):
        assert mine.exposed == pytest.approx(mine.time) or mine.axis == "dp"
        assert mine.time == other.time and mine.exposed >= other.exposed
    assert all_of_it.breakdown["dp"] > hidden.breakdown["dp"]


def test_a_share_for_the_optimizer():
    model = planner.transformer(layers=2, hidden=512, heads=8, vocab=512, seq=256)
    machine = planner.cluster("h100-sxm", 1)
    curve = dataclasses.replace(machine.device.gemm, optimizer=0.07)
    slow = dataclasses.replace(machine.device, gemm=curve)
    times = [
        planner.predict(model, dataclasses.replace(machine, device=device), Layout(), 8).breakdown
        for device in (machine.device, slow)
    ]
    assert times[1]["optimizer"] == pytest.approx(10 * times[0]["optimizer"])
    assert times[1]["memory_bound"] == times[0]["memory_bound"]


def test_forms_of_blocks():
    """Norms and biases of families; tests/planner/test_config.py has their models."""
    sizes = {"layers": 4, "hidden": 8, "heads": 4, "kv_heads": 2, "vocab": 16, "seq": 4}
    base, width = planner.transformer(**sizes).parameters, 2 * 2 + 2 * 4
    for more, added in (
        ({"bias": True}, 4 * (16 + 8 + 2 * 32 + 8)),
        ({"bias": ("qkv", "head")}, 4 * 16 + 16),
        ({"norms": 4}, 4 * 2 * 8),
        ({"norms": 1}, -4 * 8),
        ({"norm": "plain"}, -9 * 8),
        ({"qk_norm": "head"}, 4 * 2 * 2),
        ({"qk_norm": "all"}, 4 * width),
        ({"embedding_norm": True, "positions": 7}, 8 + 7 * 8),
    ):
        assert planner.transformer(**sizes, **more).parameters == base + added
    experts = {"experts": 3, "top_k": 1, "expert_ffn": 5, "shared_ffn": 6, "shared_gate": True}
    mixed = planner.transformer(**sizes, **experts, dense_layers=(0, 2))
    assert [block.layers for block in mixed.blocks] == [1, 1, 1, 1] and mixed.blocks[0] == mixed.blocks[2]
    assert mixed.parameters == base + 2 * (8 * 3 + 3 * 3 * 8 * 5 + 3 * 8 * 6 + 8 - 3 * 8 * 32)


def test_a_parallel_block_keeps_the_input_of_both_once():
    sizes = {"layers": 1, "hidden": 64, "heads": 4, "vocab": 16, "seq": 8}
    sequential, parallel = (
        sum(op.saved for op in planner.transformer(**sizes, norms=norms).blocks[0].ops) for norms in (2, 1)
    )
    assert sequential - parallel == 2 * 64  # a norm's, and that of the MLP


def test_a_layout_resolves_and_counts():
    layout = Layout(pp=2, tp=4).resolve(64)
    assert (layout.dp, layout.ranks, layout.microbatches(30)) == (8, 64, 4)  # uneven: the longest
    with pytest.raises(ValueError, match="pp = 2, dp = None, ep = 1, cp = 1, tp = 3 must multiply to count, 64"):
        Layout(pp=2, tp=3).resolve(64)
    with pytest.raises(ValueError, match=r"dp = 3.* must multiply to count, 64"):
        Layout(pp=2, tp=4, dp=3).resolve(64)
    with pytest.raises(ValueError, match="dp: None must be resolved"):
        Layout().microbatches(4)


def test_arguments_of_parallelize():
    layout = Layout(pp=2, dp=2, tp=2, zero=2, recompute="full", micro_batch=2)
    assert layout.arguments(32)["microbatches"] == 8 and layout.arguments(32)["schedule"] == "1F1B"
    assert Layout(dp=1).arguments(4)["schedule"] is None
    assert Layout(dp=1, pp=2, virtual=2).arguments(4)["schedule"] == "Interleaved1F1B"
    for change, says in (
        ({"recompute": "half"}, "recompute: 'half' must be None, 'selective' or 'full'"),
        ({"recompute": "attention"}, "recompute: 'attention'"),
        ({"dtype": "fp8"}, "dtype: 'fp8' must be one of"),
        ({"overlap_tp": True}, "overlap_tp: True must be False"),
        ({"pp": 2, "virtual": 4}, "virtual: 4 must be 2"),
    ):
        with pytest.raises(ValueError, match=says):
            Layout(dp=1, **change).arguments(4)


SIZES = {"layers": 2, "hidden": 8, "heads": 4, "vocab": 16, "seq": 4}
ONE_LINK = [Link(0, 1)]
OP = Op("column", 8, 8)
WORK = {"name": "w", "hidden": 8, "seq": 4, "heads": 2, "kv_heads": 2, "vocab": 0, "first": (), "last": ()}
WORK["blocks"] = (Block(1, (OP,)),)


def transformer(**options):
    return planner.transformer(**{**SIZES, **options})


BAD = [
    (lambda: planner.device("h100"), ValueError, "name: 'h100' must be one of"),
    (lambda: planner.cluster("a100-80", 0), ValueError, "count: 0 must be an integer of at least 1"),
    (lambda: dataclasses.replace(DEVICE, peak={"int8": 1.0}), ValueError, "peak: 'int8' must be one of fp32"),
    (lambda: dataclasses.replace(DEVICE, peak={"bf16": 0}), ValueError, r"peak\['bf16'\]: 0 must be"),
    (lambda: dataclasses.replace(DEVICE, memory=-1), ValueError, "memory: -1 must be a finite number above 0"),
    (lambda: dataclasses.replace(DEVICE, peak=[1]), TypeError, r"peak: \[1\] must be a dict of numbers"),
    (lambda: dataclasses.replace(DEVICE, reserve=1e10), ValueError, "reserve: 1.* must be below memory, 1"),
    (lambda: EfficiencyCurve(tile=(0, 1)), ValueError, r"tile: \(0, 1\) must be two integers of at least 1"),
    (lambda: EfficiencyCurve(tile=(1, 2, 3)), ValueError, r"tile: \(1, 2, 3\) must be two integers"),
    (lambda: EfficiencyCurve(table=((1, 2),)), ValueError, r"table: \(1, 2\) must be \(m, n, k, dtype, share"),
    (lambda: EfficiencyCurve(table=((1, 2, 0, "bf16", 1.0),)), ValueError, r"table: \(1, 2, 0, .* must be \(m, n"),
    (lambda: EfficiencyCurve(table=((1, 2, 3, "int8", 1.0),)), ValueError, "dtype of table row .*: 'int8' must be one"),
    (lambda: EfficiencyCurve(table=((1, 2, 3, "bf16", 0),)), ValueError, "share of table row .*: 0 must be a finite"),
    (lambda: EfficiencyCurve(table=3), TypeError, "table: 3 must be a tuple of rows"),
    (lambda: EfficiencyCurve(share={"int8": 0.5}), ValueError, "share: 'int8' must be one of fp32, bf16, fp8, fp4"),
    (lambda: EfficiencyCurve(share={"bf16": 5}), ValueError, r"share\['bf16'\]: 5 must be at most 1"),
    (lambda: EfficiencyCurve(share=[1]), TypeError, r"share: \[1\] must be a dict of numbers"),
    (lambda: DEVICE.flops("fp8"), ValueError, "dtype: 'fp8' needs the peak of 'fp8', and d has bf16"),
    (lambda: DEVICE.flops("int4"), ValueError, "dtype: 'int4'"),
    (lambda: Link(-1, 1e9), ValueError, "latency: -1 must be"),
    (lambda: Link(0, 0), ValueError, "bandwidth: 0 must be a finite number above 0"),
    (lambda: Cluster(DEVICE, 16, [Link(0, 1, 8)]), ValueError, "links: group_size of the last one, 8"),
    (lambda: Cluster(DEVICE, 16, []), TypeError, "links: .* must be a list of at least one Link"),
    (lambda: Cluster(DEVICE, 16, [Link(0, 1, 8), Link(0, 1, 12), Link(0, 1)]), ValueError, "multiples of those before"),
    (lambda: Cluster("h100", 16, [Link(0, 1)]), TypeError, "device: 'h100' must be a Device"),
    (lambda: Cluster(DEVICE, 1, [Link(0, 1)], constants={"speed": 1}), ValueError, "constants: 'speed' must be"),
    (lambda: Cluster(DEVICE, 1, ONE_LINK, constants=[1]), TypeError, r"constants: \[1\] must be a dict of numbers"),
    (lambda: Cluster(DEVICE, 1, ONE_LINK, fit_error="1"), ValueError, "fit_error: '1' must be a finite number"),
    (lambda: planner.cluster("tpu", 8), ValueError, "device_name: 'tpu' must be one of a100-40"),
    (lambda: Layout(tp=0), ValueError, "tp: 0 must be an integer of at least 1"),
    (lambda: Layout(zero=4), ValueError, "zero: 4 must be one of 0, 1, 2, 3"),
    (lambda: Layout(virtual=2), ValueError, "virtual: 2 must be 1 without a pipeline"),
    (lambda: Layout(pp=2, schedule="DualPipeV"), ValueError, "virtual: 1 must be 2 with DualPipeV"),
    (lambda: Layout(pp=2, schedule="GPipe", virtual=2), ValueError, "virtual: 2 must be 1 with GPipe"),
    (lambda: Layout(recompute="some"), ValueError, "recompute: 'some' must be one of None, selective"),
    (lambda: Layout(dtype="int8"), ValueError, "dtype: 'int8' must be one of fp32"),
    (lambda: Layout(dp=1, offload=True).arguments(8), ValueError, "offload: True needs zero = 2 or 3"),
    (lambda: transformer(kv_heads=3), ValueError, "kv_heads: 3 must divide heads, 4"),
    (lambda: transformer(kv_heads=0), ValueError, "kv_heads: 0 must be an integer of at least 1"),
    (lambda: transformer(ffn=0), ValueError, "ffn: 0 must be an integer of at least 1"),
    (lambda: transformer(experts=2, top_k=1, expert_ffn=0), ValueError, "expert_ffn: 0 must be an integer of at least"),
    (lambda: transformer(head_dim=0), ValueError, "head_dim: 0 must be an integer of at least 1"),
    (lambda: transformer(hidden=10), ValueError, "hidden: 10 must be a multiple of heads, 4, unless head_dim is given"),
    (lambda: transformer(layers=0), ValueError, "layers: 0 must be"),
    (lambda: transformer(name=3), TypeError, "name: 3 must be a string"),
    (lambda: transformer(experts=4), ValueError, "top_k: 0 must be between 1 and experts, 4"),
    (lambda: transformer(mla={"kv_lora_rank": 4}), ValueError, "mla: .* must have the keys"),
    (lambda: transformer(mla=3), TypeError, "mla: 3 must be a dict or None"),
    (lambda: transformer(bias="qkv"), ValueError, "bias: 'qkv' must be True, False or a tuple of qkv, out, mlp, head"),
    (lambda: transformer(bias=("gate",)), ValueError, "bias: .*'gate'.* must be True, False or a tuple of qkv"),
    (lambda: transformer(positions=-1), ValueError, "positions: -1 must be an integer of at least 1"),
    (lambda: transformer(norm="batch"), ValueError, "norm: 'batch' must be one of None, rms, layer, plain"),
    (lambda: transformer(norms=3), ValueError, "norms: 3 must be one of 1, 2, 4"),
    (lambda: transformer(rope="yes"), ValueError, "rope: 'yes' must be one of None, True, False"),
    (lambda: transformer(qk_norm=True), ValueError, "qk_norm: True must be one of None, head, all"),
    (lambda: transformer(experts=2, top_k=1, dense_layers=3), ValueError, "dense_layers: 3 must be at most layers, 2"),
    (lambda: transformer(experts=2, top_k=1, dense_layers=[2]), ValueError, r"dense_layers: \[2\] must be numbers of"),
    (lambda: Op("nonsense"), ValueError, "kind: 'nonsense' must be one of column, row"),
    (lambda: Op("column", -1), ValueError, "inputs: -1 must be an integer of at least 0"),
    (lambda: Op("column", units=0), ValueError, "units: 0 must be an integer of at least 1"),
    (lambda: Op("pointwise", saved="x"), ValueError, "saved: 'x' must be a finite number of at least 0"),
    (lambda: Op("column", bias=1), TypeError, "bias: 1 must be True or False"),
    (lambda: Op("attention", heads=4), ValueError, "kv_heads: 0 must divide heads, 4"),
    (lambda: Block(0, (OP,)), ValueError, "layers: 0 must be an integer of at least 1"),
    (lambda: Block(1, OP), TypeError, "ops: Op.* must be a tuple of Op"),
    (lambda: Workload(**{**WORK, "name": 3}), TypeError, "name: 3 must be a string"),
    (lambda: Workload(**{**WORK, "hidden": 0}), ValueError, "hidden: 0 must be an integer of at least 1"),
    (lambda: Workload(**{**WORK, "blocks": ()}), ValueError, r"blocks: \(\) must have at least one Block"),
    (lambda: Workload(**{**WORK, "blocks": (OP,)}), TypeError, "blocks: .* must be a tuple of Block"),
    (lambda: Workload(**{**WORK, "first": None}), TypeError, "first: None must be a tuple of Op"),
    (lambda: Workload(**WORK, tied=1), TypeError, "tied: 1 must be True or False"),
    (lambda: Workload.from_json("{"), ValueError, "text: '{' must be JSON: Expecting"),
    (lambda: Workload.from_json(3), TypeError, "text: 3 must be a string"),
    (
        lambda: Workload.from_json("{}"),
        ValueError,
        "text: {} must be an object with the fields blocks, .*of Workload",
    ),
    (lambda: Block.from_json('{"layers": 1, "ops": [3]}'), ValueError, r"text.ops\[0\]: 3 must be an object .* of Op"),
    (lambda: Block.from_json('{"layers": 1, "ops": 3}'), ValueError, "text.ops: 3 must be a list"),
    (lambda: EfficiencyCurve.from_json('{"tile": [1]}'), ValueError, r"text.tile: \[1\] must be a list of 2"),
    (lambda: dataclasses.replace(DEVICE, peak={}), ValueError, "peak: {} must have the FLOP/s of at least one of"),
    (lambda: Device.from_json(DEVICE.to_json().replace("10000000000.0", "NaN")), ValueError, "NaN is no number"),
    (lambda: Device.from_json(DEVICE.to_json().replace('"d"', "3")), ValueError, "text.name: 3 must be a string"),
    (lambda: Device.from_json('{"name": "d", ' + DEVICE.to_json()[1:]), ValueError, "'name' is there twice"),
    (lambda: Device.from_json('{"name":' * 100_000), ValueError, "must be JSON"),
    (lambda: Device.from_json("[1]"), ValueError, "must be a JSON object, not list"),
    (lambda: Layout(zero=True), ValueError, "zero: True must be one of 0, 1, 2, 3"),
    (lambda: transformer(layers=10**9), ValueError, "layers: 1000000000 must be at most 100000"),
    (lambda: transformer(bias=([1],)), ValueError, "bias: .* must be True, False or a tuple of qkv"),
    (lambda: transformer(experts=2, top_k=1, dense_layers=[[2]]), ValueError, "dense_layers: .* must be numbers of"),
]
ODD = (True, -1, 1.5, float("nan"), float("inf"), 10**400, "x", [[1]], {"a": 1}, [None], object(), 1j, {1: 2})


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_field_is_checked(value):
    """Whatever stands in a field is refused by a sentence that names it, or is a value that JSON takes both ways."""
    for field, odd in itertools.product(dataclasses.fields(value), ODD):
        try:
            made = dataclasses.replace(value, **{field.name: odd})
        except (TypeError, ValueError) as error:
            assert field.name in str(error), error
        else:
            assert type(value).from_json(made.to_json()) == made
            assert isinstance(odd, str | bool | int | float) and math.isfinite(float(odd != "x" and odd))


FALCON = {
    "model_type": "falcon", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100,
    "max_position_embeddings": 64, "alibi": False, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 2,
    "parallel_attn": True, "bias": False, "num_kv_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2_moe", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100,
    "max_position_embeddings": 64, "intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1,
    "mlp_only_layers": [0], "qkv_bias": True,
}  # fmt: skip


@pytest.mark.parametrize("config", [LLAMA_70B, DEEPSEEK_V3, FALCON, QWEN], ids=lambda config: config["model_type"])
def test_every_value_of_a_configuration_is_checked(config):
    planner.from_config(config, seq=16)
    for key, odd in itertools.product(config.keys() - {"max_position_embeddings"}, ODD):
        if odd is not True or not isinstance(config[key], bool):
            with pytest.raises((TypeError, ValueError), match=r"^[\w: ]+ must|^[\w: ]+: "):
                planner.from_config({**config, key: odd}, seq=16)


@pytest.mark.parametrize("call, error, says", BAD)
def test_bad_input(call, error, says):
    with pytest.raises(error, match=says):
        call()
