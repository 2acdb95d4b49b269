"""Values: JSON both ways, presets with sources, sizes of published models, bad input."""

import dataclasses
import json

import pytest

from tp_ext import planner
from tp_ext.planner import Cluster, Device, EfficiencyCurve, Layout, Link

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
    assert name == "cpu" or planner.SOURCES[name].startswith("https://")
    inner = planner.cluster(name, 1024).links[0].group_size
    assert inner == (64 if name in ("gb200", "gb300") else 8)


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
BAD = [
    (lambda: planner.device("h100"), ValueError, "name: 'h100' must be one of"),
    (lambda: planner.cluster("a100-80", 0), ValueError, "count: 0 must be an integer of at least 1"),
    (lambda: dataclasses.replace(DEVICE, peak={"int8": 1.0}), ValueError, "peak: 'int8' must be one of fp32"),
    (lambda: dataclasses.replace(DEVICE, peak={"bf16": 0}), ValueError, r"peak\['bf16'\]: 0 must be"),
    (lambda: dataclasses.replace(DEVICE, memory=-1), ValueError, "memory: -1 must be a finite number above 0"),
    (lambda: DEVICE.flops("fp8"), ValueError, "dtype: 'fp8' needs the peak of 'fp8', and d has bf16"),
    (lambda: DEVICE.flops("int4"), ValueError, "dtype: 'int4'"),
    (lambda: Link(-1, 1e9), ValueError, "latency: -1 must be"),
    (lambda: Link(0, 0), ValueError, "bandwidth: 0 must be a finite number above 0"),
    (lambda: Cluster(DEVICE, 16, [Link(0, 1, 8)]), ValueError, "links: group_size of the last one, 8"),
    (lambda: Cluster(DEVICE, 16, []), TypeError, "links: .* must be a list of at least one Link"),
    (lambda: Cluster(DEVICE, 16, [Link(0, 1, 8), Link(0, 1, 12), Link(0, 1)]), ValueError, "multiples of those before"),
    (lambda: Cluster("h100", 16, [Link(0, 1)]), TypeError, "device: 'h100' must be a Device"),
    (lambda: Cluster(DEVICE, 1, [Link(0, 1)], constants={"speed": 1}), ValueError, "constants: 'speed' must be"),
    (lambda: Layout(tp=0), ValueError, "tp: 0 must be an integer of at least 1"),
    (lambda: Layout(zero=4), ValueError, "zero: 4 must be one of 0, 1, 2, 3"),
    (lambda: Layout(virtual=2), ValueError, "virtual: 2 must be 1 without a pipeline"),
    (lambda: Layout(pp=2, schedule="DualPipeV"), ValueError, "virtual: 1 must be 2 with DualPipeV"),
    (lambda: Layout(pp=2, schedule="GPipe", virtual=2), ValueError, "virtual: 2 must be 1 with GPipe"),
    (lambda: Layout(recompute="some"), ValueError, "recompute: 'some' must be one of None, selective"),
    (lambda: Layout(dtype="int8"), ValueError, "dtype: 'int8' must be one of fp32"),
    (lambda: Layout(offload=True), ValueError, "offload: True needs zero = 2 or 3"),
    (lambda: planner.transformer(**SIZES, kv_heads=3), ValueError, "kv_heads: 3 must divide heads, 4"),
    (lambda: planner.transformer(**{**SIZES, "layers": 0}), ValueError, "layers: 0 must be"),
    (lambda: planner.transformer(**SIZES, experts=4), ValueError, "top_k: 0 must be between 1 and experts, 4"),
    (lambda: planner.transformer(**SIZES, mla={"kv_lora_rank": 4}), ValueError, "mla: .* must have the keys"),
    (lambda: planner.from_config("/nowhere/config.json"), ValueError, "config: '/nowhere/config.json' must be a file"),
    (
        lambda: planner.from_config({"model_type": "x"}),
        ValueError,
        "of model_type 'x' must have one of the keys",
    ),
]


@pytest.mark.parametrize("call, error, says", BAD)
def test_bad_input(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_a_config_file_or_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    assert planner.from_config(tmp_path) == planner.from_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        planner.from_config(tmp_path)
