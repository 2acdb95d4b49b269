"""Trainers of TRL around a sharded model: every logged number and all weights are those of one process."""

import functools
import importlib
import os

import pytest
import torch
import transformers

import tp_ext
from tests.helpers.one_plan import run
from tests.huggingface import trl_cases as cases
from tp_ext import huggingface
from tp_ext.huggingface.fused_head import STATISTICS
from tp_ext.huggingface.trl_trainers import KNOWN, hash_of_ranks

trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")

transformers.utils.logging.disable_progress_bar()
GENERATION = {
    "dataset": "prompt", "arguments": {"reward_funcs": cases.even_words}, "max_completion_length": 6,
    "num_generations": 4, "optim": "sgd",
}  # fmt: skip
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
SGD = {"optim": "sgd"}  # AdamW would enlarge the rounding of the keys' biases, whose gradient is 0
FAMILIES = ("llama", "qwen2", "gpt2")
LLAMA = ("llama",)
TRAININGS = {  # trainer, models, options
    "sft": (
        "SFTTrainer",
        FAMILIES,
        {"dataset": "completion", "arguments": {"compute_metrics": cases.metrics}, **EVALUATED},
    ),
    "sft assistant": ("SFTTrainer", LLAMA, {"dataset": "chat", "assistant_only_loss": True}),
    "sft packed": ("SFTTrainer", LLAMA, {"packing": True, "max_length": 16}),
    "sft wrapped": ("SFTTrainer", LLAMA, {"packing": True, "packing_strategy": "wrapped", "max_length": 16}),
    "sft dft": ("SFTTrainer", LLAMA, {"loss_type": "dft", "gradient_checkpointing": True, **SGD}),
    "sft accumulated": ("SFTTrainer", ("qwen2",), {"gradient_accumulation_steps": 2}),
    "sft smoothed": ("SFTTrainer", ("gpt2",), {"label_smoothing_factor": 0.1}),
    "dpo": ("DPOTrainer", FAMILIES, {"dataset": "preference", "loss_type": ["sigmoid", "sft"]}),
    "dpo reference": ("DPOTrainer", ("gpt2",), {"dataset": "preference", "arguments": {"ref_model": cases.loaded}}),
    "dpo precomputed": ("DPOTrainer", FAMILIES, {"dataset": "preference", "precompute_ref_log_probs": True}),
    "dpo weighted": (
        "DPOTrainer",
        FAMILIES,
        {"dataset": "preference", "use_weighting": True, "learning_rate": 0.3, **SGD},
    ),
    "reward": ("RewardTrainer", FAMILIES, {"dataset": "preference", **EVALUATED}),
    "kto": ("KTOTrainer", FAMILIES, {"dataset": "label"}),
    "grpo": ("GRPOTrainer", FAMILIES, {**GENERATION, "beta": 0.1}),
    "grpo iterated": ("GRPOTrainer", LLAMA, {**GENERATION, "gradient_accumulation_steps": 2, "num_iterations": 2}),
    "rloo": ("RLOOTrainer", FAMILIES, GENERATION),
}
ROWS = {"SFTTrainer": "text", "DPOTrainer": "preference", "RewardTrainer": "preference", "KTOTrainer": "label"}
OF_TRAINER = {name: {"dataset": ROWS[name]} if name in ROWS else GENERATION for name in KNOWN}
BY_DEFAULT = {("sft", "llama", 2), ("sft", "gpt2", 3), ("dpo", "qwen2", 2), ("grpo", "llama", 2)}


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def _check(found, expected):
    off, name, weights = cases.difference(found, expected)
    assert off < 1e-5, name
    assert weights < 2e-5


def _setting(name, family, folder):
    trainer, _, options = TRAININGS[name]
    model = cases.write_model(f"{family} reward" if name == "reward" else family, folder / "model")
    return trainer, model, options | ({} if family == "llama" else SGD)


@pytest.mark.parametrize(
    ("name", "family", "p"),
    [
        pytest.param(name, family, p, marks=() if (name, family, p) in BY_DEFAULT else pytest.mark.exhaustive)
        for name, (_, families, _) in TRAININGS.items()
        for family in families
        for p in (1, 2, 3)
    ],
)
def test_logs_and_weights_are_those_of_one_process(name, family, p, tmp_path):
    trainer, folder, options = _setting(name, family, tmp_path)
    expected = cases.train(None, trainer, folder, tmp_path / "one", **options)
    for found in run(cases.train, p, trainer, folder, tmp_path / "ranks", timeout=300, **options):
        _check(found, expected)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=() if (name, family) == ("sft", "llama") else pytest.mark.exhaustive)
        for name, (_, families, _) in TRAININGS.items()
        for family in families
        if families == FAMILIES
    ],
)
def test_data_axis_has_the_logs_of_data_parallel_processes(name, family, tmp_path):
    trainer, folder, options = _setting(name, family, tmp_path)
    options = options | {"data": 2}
    if "num_generations" in options:
        options["num_generations"] = 2
    # Of a data set in memory, processes of TRL would read each a file of its own: the numbers are those without it
    plain = {key: value for key, value in options.items() if key != "precompute_ref_log_probs"}
    expected = run(cases.train, 2, trainer, folder, tmp_path / "plain", plain=True, timeout=300, **plain)[0]
    for found in run(cases.train, 4, trainer, folder, tmp_path / "ranks", tp=2, timeout=300, **options):
        _check(found, expected)


def _adapters_of_peft(model, path):
    return peft.PeftModel.from_pretrained(model, path, is_trainable=True)


def _adapters_of_ours(model, path):
    huggingface.load_adapter(model, path)
    return model


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "dpo" else pytest.mark.exhaustive)
        for name in ("sft", "dpo", "dpo precomputed", "kto", "grpo", "rloo")
    ],
)
def test_adapters_and_the_base_as_reference_are_those_of_peft(name, tmp_path):
    trainer, folder, options = _setting(name, "llama", tmp_path)
    adapter = tmp_path / "adapter"
    torch.manual_seed(1)
    # Trainers with a reference switch dropout off
    dropout = 0.3 if name.startswith(("dpo", "kto")) else 0.0
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["q_proj", "o_proj", "up_proj"])
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    peft.get_peft_model(base, config).save_pretrained(adapter)  # lora_B is 0: TRL's reference, a copy, is the base
    options = options | {"learning_rate": 1e-2, **SGD}
    options = options | ({"learning_rate": 1.0} if "num_generations" in options else {})
    prepare = functools.partial(_adapters_of_peft, path=adapter)
    expected = cases.train(None, trainer, folder, tmp_path / "one", prepare=prepare, **options)
    prepare = functools.partial(_adapters_of_ours, path=adapter)
    for found in run(cases.train, 2, trainer, folder, tmp_path / "ranks", prepare=prepare, timeout=300, **options):
        _check(found, expected)
        assert all("lora_" in key for key in found[1])


def test_a_reference_that_is_the_base_takes_no_memory(tmp_path):
    folder = cases.write_model("llama", tmp_path / "model")
    model = huggingface.from_pretrained(folder, group=None)
    tp_ext.add_lora(model, targets="q_proj", r=4, alpha=8.0)
    for name in ("DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer"):
        options = OF_TRAINER[name] | {"beta": 0.1, "cls": huggingface.trainer_for(getattr(trl, name))}
        made = cases.make(None, name, folder, tmp_path, model=model, **options)
        assert {id(p) for p in made.ref_model.parameters()} == {id(p) for p in model.parameters()}, name
        with pytest.raises(ValueError, match="args: sync_ref_model must be False for a model with adapters"):
            cases.make(None, name, folder, tmp_path, model=model, sync_ref_model=True, **options)
    precomputed = OF_TRAINER["DPOTrainer"] | {"cls": huggingface.trainer_for(trl.DPOTrainer)}
    made = cases.make(None, "DPOTrainer", folder, tmp_path, model=model, precompute_ref_log_probs=True, **precomputed)
    assert made.ref_model.model is model
    # PEFT would not know the layers of one rank either
    options["arguments"] = options["arguments"] | {"peft_config": _peft}
    with pytest.raises(ValueError, match=r"peft_config: must not be given .* call tp_ext.add_lora"):
        cases.make(None, name, folder, tmp_path, model=model, **options)


def _hashes(group):
    importlib.import_module("trl.trainer.utils")
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    before = hash_of_ranks(model, group)
    if group.rank() == 1:
        model.bias.data += 1
    return before, hash_of_ranks(model, group)


def test_models_that_differ_on_one_rank_have_other_hashes():
    (before, after), others = run(_hashes, 2)
    assert before != after and others == (before, after)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_resumed_runs_are_those_of_one_process(name, tmp_path):
    trainer, folder, options = _setting(name, "llama", tmp_path)
    options = options | {"save_strategy": "steps", "save_steps": 3}

    def resumed(train, out):
        train(trainer, folder, out, steps=6, **options)
        return train(trainer, folder, out, steps=6, resume=str(out / "checkpoint-3"), **options)

    expected = resumed(functools.partial(cases.train, None), tmp_path / "one")
    for found in resumed(functools.partial(run, cases.train, 2, timeout=300), tmp_path / "ranks"):
        _check(found, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["sft", "reward", "grpo"])
def test_a_path_is_read_sharded(name, tmp_path):
    trainer, folder, options = _setting(name, "llama", tmp_path)
    expected = cases.train(None, trainer, folder, tmp_path / "one", **options)
    for found in run(cases.train, 2, trainer, folder, tmp_path / "ranks", by_path=True, timeout=300, **options):
        _check(found, expected)


def test_rewards_are_computed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_CALLS", str(tmp_path / "calls"))
    folder = cases.write_model("llama", tmp_path / "model")
    run(_with_variable, 2, str(tmp_path / "calls"), folder, tmp_path / "ranks", timeout=300)
    assert (tmp_path / "calls").read_text().split() == ["4", "4"]


def _with_variable(group, calls, folder, out):
    os.environ["TRL_CALLS"] = calls
    try:
        cases.train(group, "GRPOTrainer", folder, out, steps=2, **GENERATION)
    finally:
        del os.environ["TRL_CALLS"]


def _bad_reward(folder, load):
    def bad(completions, **others):
        raise KeyError("no such rule")

    return [bad]


def _peft(folder, load):
    return peft.LoraConfig(task_type="CAUSAL_LM")


OTHER_WORDS = {"ref_model": cases.other_vocabulary}
REFUSALS = [  # trainer, options, message
    *(
        (
            name,
            {**options, "arguments": {**options.get("arguments", {}), "peft_config": _peft}},
            "peft_config: must not be given for a sharded model: .* call tp_ext.add_lora",
        )
        for name, options in OF_TRAINER.items()
    ),
    *(
        (
            name,
            {**options, "cls": name},
            rf"'.*' is sharded over ranks \[0, 1\], and {name} takes .*: use tp_ext.huggingface.trainer_for\({name}\)",
        )
        for name, options in OF_TRAINER.items()
    ),
    *(
        (
            "DPOTrainer",
            {"dataset": "preference", "arguments": OTHER_WORDS, **by_path},
            "ref_model: has a vocabulary of 50 and must have one of 97, that of model",
        )
        for by_path in ({}, {"model": "path"})
    ),
    ("SFTTrainer", {"use_liger_kernel": True}, "args: use_liger_kernel must be False for a sharded model"),
    ("SFTTrainer", {"train_sampling_strategy": "batch_rebalance"}, "args: train_sampling_strategy must not be"),
    ("SFTTrainer", {"model": "unsharded"}, "model: is not sharded and must be sharded over all 2 ranks"),
    ("SFTTrainer", {"model": "alone"}, r"model: is sharded over the groups of ranks \[\], which must be equally large"),
    ("GRPOTrainer", {**GENERATION, "use_vllm": True}, "args: use_vllm must be False for a sharded model: vLLM would"),
    ("RLOOTrainer", {**GENERATION, "use_vllm": True}, "args: use_vllm must be False for a sharded model: vLLM would"),
    ("GRPOTrainer", {**GENERATION, "cast_lm_head_to_fp32": True}, "args: cast_lm_head_to_fp32 must be False"),
    ("GRPOTrainer", {**GENERATION, "num_generations": 8}, "args: generation_batch_size = 4 over 1 data-parallel ranks"),
    ("GRPOTrainer", {**GENERATION, "arguments": {"reward_funcs": _bad_reward}}, "no such rule"),
]


def _refused(group, folder, out):
    model = huggingface.from_pretrained(folder, group=group)
    model.config.num_labels = 1  # for the trainer of rewards
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    models = {
        "path": str(folder),
        "alone": huggingface.from_pretrained(folder, group=None),
        "unsharded": transformers.AutoModelForCausalLM.from_pretrained(folder),
    }
    for trainer, options, match in REFUSALS:
        given = options | {"model": models.get(options.get("model"), model)}
        given["cls"] = getattr(trl, trainer) if "cls" in options else None  # not ours
        kind = KeyError if match == "no such rule" else ValueError
        # Also without the variables of torchrun, where accelerate sees one process
        for variables in (True, False) if "cls" in options else (True,):
            with cases.processes(group if variables else None), pytest.raises(kind, match=match):
                cases.make(group, trainer, folder, out, **given).train()
        after = dict(model.named_parameters())
        assert after.keys() == before.keys(), trainer
        assert all(
            after[name] is parameter and torch.equal(parameter, kept) for name, (parameter, kept) in before.items()
        )


def test_what_is_not_right_is_refused_before_anything_changes(tmp_path):
    run(_refused, 2, cases.write_model("llama", tmp_path / "model"), tmp_path / "out", timeout=300)


def test_classes_that_are_not_known_are_refused():
    with pytest.raises(TypeError, match=r"cls: <class 'int'> must be transformers.Trainer or a subclass"):
        huggingface.trainer_for(int)
    with pytest.raises(TypeError, match="cls: DistillationTrainer of TRL is not known over shards"):
        huggingface.trainer_for(trl.DistillationTrainer)


def test_a_path_without_the_ranks_of_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="args: know of 1 processes and must know of all 2 of torchrun, which share"):
        huggingface.trainer_for(trl.SFTTrainer)("model")


def test_one_class_for_each():
    assert huggingface.trainer_for(transformers.Trainer) is huggingface.Trainer
    made = huggingface.trainer_for(trl.SFTTrainer)
    assert made is huggingface.trainer_for(trl.SFTTrainer) is huggingface.trainer_for(made)
    assert issubclass(made, trl.SFTTrainer)


class _Other(transformers.Trainer):
    def save_model(self, output_dir=None, format=None):
        pass


def test_another_signature_is_named():
    with pytest.raises(
        TypeError, match=r"cls: _Other.save_model of tests \? has parameters \['self', 'output_dir', 'f"
    ):
        huggingface.trainer_for(_Other)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_fused_head_over_columns(softcap):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 7).double()
    hidden, targets = torch.randn(5, 8, dtype=torch.double), torch.tensor([0, 6, 3, 3, 5])
    for p in (1, 2, 3):
        found = run(_fused, p, head.weight.detach(), head.bias.detach(), hidden, targets, softcap)
        expected = _dense(head.weight.detach(), head.bias.detach(), hidden, targets, softcap)
        for values, of_hidden, _ in found:
            torch.testing.assert_close(values, expected[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(of_hidden, expected[1], rtol=1e-5, atol=1e-6)
        weights = torch.cat([of_weight for *_, of_weight in found])
        torch.testing.assert_close(weights, expected[2], rtol=1e-5, atol=1e-6)


def _gradients(outputs, hidden, weight):
    loss = (outputs[0] * torch.arange(1.0, 6.0)).sum() + (outputs[1] ** 2).sum()
    return torch.autograd.grad(loss, (hidden, weight))


def _fused(group, weight, bias, hidden, targets, softcap):
    from trl.trainer.utils import _ChunkedLogProbFunction

    head = torch.nn.Linear(8, 7).double()
    head.weight.data, head.bias.data = weight, bias
    layer = tp_ext.ColumnParallelLinear.from_linear(head, group=group)
    hidden = hidden.requires_grad_()
    outputs = _ChunkedLogProbFunction.apply(hidden, layer.weight, layer.bias, targets, 0.7, 4, softcap, 1.3, STATISTICS)
    return torch.stack([x.detach().float() for x in outputs]), *_gradients(outputs, hidden, layer.weight)


def _dense(weight, bias, hidden, targets, softcap):
    weight, hidden = weight.requires_grad_(), hidden.detach().requires_grad_()
    outputs = cases.dense_statistics(hidden, weight, bias, targets, 0.7, 4, softcap, 1.3, STATISTICS)
    return torch.stack([x.detach().float() for x in outputs]), *_gradients(outputs, hidden, weight)
