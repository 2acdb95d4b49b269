"""Training by loops of others: the Trainer of transformers, accelerate, gradient checkpointing, compiled blocks."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers

import tp_ext
from tests.auto.architectures import build
from tests.auto.compare import only_doubles
from tests.helpers import ranks
from tests.helpers.one_plan import run, run_raises
from tp_ext import huggingface

transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    build("llama")[0].double().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(4, 100, (32, 7), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def _options(path: Path) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=str(path), per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=4, save_steps=2,
        logging_steps=1, learning_rate=1e-2, max_grad_norm=0.5, seed=5, use_cpu=True, report_to=[], disable_tqdm=True,
        gradient_accumulation_steps=2, save_strategy="steps", eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True,
    )  # fmt: skip


def _history(trainer) -> list[tuple[float, float]]:
    lines = trainer.state.log_history
    training = [(line["loss"], float(line["grad_norm"])) for line in lines if "loss" in line]
    return [*training, *((line["eval_loss"], 0.0) for line in lines if "eval_loss" in line)]


def torchrun(group):
    """The environment of a rank of torchrun."""
    rank, p = str(dist.get_rank(group)), str(dist.get_world_size(group))
    master = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # the process group exists
    return mock.patch.dict(os.environ, {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": p, **master})


def _trained(group, folder, out):
    """Losses and norms of training, and of training that goes on from its checkpoint."""
    with torchrun(group):
        return _trained_under_torchrun(group, folder, out)


def _trained_under_torchrun(group, folder, out):
    found = []
    for resume in (None, str(out / "checkpoint-2")):
        model = huggingface.from_pretrained(folder, group=group)
        rows = _data()
        trainer = huggingface.Trainer(model, _options(out), train_dataset=rows, eval_dataset=rows[:6])
        trainer.train(resume_from_checkpoint=resume)
        found.append(_history(trainer))
    predicted = trainer.predict(rows[:6]).predictions
    trainer.save_model(str(out / "final"))
    return *found, predicted.shape


def test_trainer_trains_as_one_process(folder, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    dense, rows = transformers.LlamaForCausalLM.from_pretrained(folder), _data()
    trainer = transformers.Trainer(dense, _options(tmp_path / "dense"), train_dataset=rows, eval_dataset=rows[:6])
    trainer.train()
    expected = torch.tensor(_history(trainer))
    for trained, resumed, shape in run(_trained, 2, folder, tmp_path / "sharded", timeout=120):
        torch.testing.assert_close(torch.tensor(trained), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(resumed), expected, rtol=1e-5, atol=1e-6)
        assert shape == (6, 7, 144)
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "sharded" / "final")
    for one, other in zip(saved.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # the loss is in fp32
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "sharded" / "checkpoint-4")
    assert again.dtype == torch.float64


def _trainer_over_a_part(group, folder):
    part = [dist.new_group([0, 1]), dist.new_group([2])][dist.get_rank() // 2]
    with torchrun(group):
        huggingface.Trainer(huggingface.from_pretrained(folder, group=part), _options(folder))


def _trainer_without_torchrun(group, folder):
    huggingface.Trainer(huggingface.from_pretrained(folder, group=group), _options(folder), eval_dataset=_data())


def test_trainer_refuses_what_is_not_sharded_over_all_ranks(folder):
    match = r"model: is sharded over the groups of ranks \[\[0, 1\], \[2\]\], which must be equally large"
    ranks.run_raises(_trainer_over_a_part, 3, ValueError, match, folder, in_turns=False)  # each with a plan of its own
    run_raises(_trainer_without_torchrun, 2, ValueError, "args: know of 1 processes", folder)
    with pytest.raises(ValueError, match="model: is not sharded and must be"):
        huggingface.Trainer(transformers.LlamaForCausalLM.from_pretrained(folder))


def _steps(model, step) -> list[float]:
    """Three steps of AdamW by a user's loop; the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for rows in torch.stack([row["input_ids"] for row in _data()[:12]]).split(4):
        losses.append(step(model, optimizer, rows))
    return losses


def _plain(model, optimizer, rows):
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    tp_ext.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _with_accelerate(group, folder):
    from accelerate import Accelerator

    model, accelerator = huggingface.from_pretrained(folder, group=group).train(), Accelerator(cpu=True)

    def step(model, optimizer, rows):
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        accelerator.backward(loss)
        tp_ext.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return _steps(model, lambda model, optimizer, rows: step(model, accelerator.prepare(optimizer), rows))


def _checkpointed(group, folder, reentrant):
    model = huggingface.from_pretrained(folder, group=group).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return _steps(model, _plain)


def _compiled(group, folder):
    model = huggingface.from_pretrained(folder, group=group).train()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return _steps(model, _plain)


def _compiled_as_a_whole(group, folder):
    model = huggingface.from_pretrained(folder, group=group).train()
    model.compile(backend="aot_eager")
    return _steps(model, _plain)


@pytest.mark.parametrize(
    "trained",
    [
        (_with_accelerate, ()), (_checkpointed, (True,)), (_checkpointed, (False,)), (_compiled, ()),
        pytest.param((_compiled_as_a_whole, ()), marks=pytest.mark.exhaustive),
    ],
    ids=["accelerate", "reentrant", "checkpointing", "compile", "compile the model"],
)  # fmt: skip
def test_loops_of_users_train_as_one_process(trained, folder):
    fn, args = trained
    expected = _steps(transformers.LlamaForCausalLM.from_pretrained(folder).train(), _plain)
    for found in run(fn, 2, folder, *args, timeout=120):
        assert found == pytest.approx(expected, rel=1e-6)


def _with_lora(model):
    tp_ext.manual_seed(0)
    tp_ext.add_lora(model, targets=["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"], r=4, alpha=8.0)
    with only_doubles():
        return _steps(model, _plain)


def _lora(group, folder):
    return _with_lora(huggingface.from_pretrained(folder, group=group).train())


def test_lora_of_ours_trains_as_in_one_process(folder):
    dense = transformers.LlamaForCausalLM.from_pretrained(folder).train()
    for name, module in list(dense.named_modules()):
        if isinstance(module, torch.nn.Linear):
            dense.set_submodule(name, tp_ext.ColumnParallelLinear.from_linear(module, group=None))
    expected = _with_lora(dense)
    assert len(set(expected)) == 3
    for p in (2, 4):
        for found in run(_lora, p, folder):
            assert found == pytest.approx(expected, rel=1e-9)
