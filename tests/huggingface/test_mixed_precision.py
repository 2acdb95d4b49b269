"""Mixed precision of the Trainer and of loops of accelerate: two ranks next to transformers.Trainer in one process."""

import contextlib
from pathlib import Path
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers

from tests.auto.architectures import build
from tests.helpers.one_plan import run
from tests.huggingface.test_trainer import _data, torchrun
from tp_ext import huggingface

transformers.utils.logging.disable_progress_bar()
FIRST_SCALE = 2.0**126  # overflows in fp16 until it has been halved many times


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    model, _ = build("llama")
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _options(path: Path, **options: object) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=str(path), per_device_train_batch_size=4, max_steps=6, logging_steps=1, learning_rate=1e-1,
        optim="sgd", max_grad_norm=0.5, seed=5, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        **options,
    )  # fmt: skip


def _fp16_on_cpu():
    """Autocast to fp16 and a scaler on the CPU, where accelerate has neither."""
    create = transformers.Trainer.create_accelerator_and_postprocess

    def with_scaler(trainer):
        create(trainer)
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, backoff_factor=2.0**-29)

    return mock.patch.object(transformers.Trainer, "create_accelerator_and_postprocess", with_scaler)


def _overflow_once(model, *, here):
    """Makes one gradient infinite in the fifth step, when the scale has come down."""
    calls = []

    def hook(grad):
        calls.append(None)
        return grad * float("inf") if here and len(calls) == 5 else grad

    model.model.layers[0].mlp.up_proj.weight.register_hook(hook)


def _trained(trainer_class, model, path, fp16=False, here=True, **options):
    """(loss, norm, learning rate) of each step, and the dtypes of a layer's output and of the logits."""
    seen = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model.register_forward_hook(lambda module, args, out: seen.append(out.logits.dtype))
    if fp16:
        _overflow_once(model, here=here)
    with _fp16_on_cpu() if fp16 else contextlib.nullcontext():
        trainer = trainer_class(model, _options(path, fp16=fp16, **options), train_dataset=_data())
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [(x["loss"], float(x["grad_norm"]), x["learning_rate"]) for x in lines], seen[:2]


def _sharded(group, folder, path, **options):
    model = huggingface.from_pretrained(folder, group=group)
    with torchrun(group):
        return _trained(huggingface.Trainer, model, path, here=dist.get_rank(group) == 1, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        pytest.param(
            {"bf16": True, "torch_compile": True, "torch_compile_backend": "eager"}, marks=pytest.mark.exhaustive
        ),
        {"fp16": True},
    ],
    ids=["bf16", "compiled", "fp16"],
)
def test_losses_and_norms_are_those_of_one_process_in_the_same_precision(options, folder, tmp_path):
    dense = transformers.LlamaForCausalLM.from_pretrained
    exact = torch.tensor(_trained(transformers.Trainer, dense(folder), tmp_path / "fp32")[0])
    precision = {name: value for name, value in options.items() if name in ("bf16", "fp16")}
    lines, dtypes = _trained(transformers.Trainer, dense(folder), tmp_path / "dense", **precision)
    expected = torch.tensor(lines)
    for values, own_dtypes in run(_sharded, 2, folder, tmp_path / "sharded", timeout=180, **options):
        assert own_dtypes == dtypes == [torch.float16 if "fp16" in options else torch.bfloat16, torch.float32]
        found = torch.tensor(values)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0, equal_nan=True)
        if (
            "fp16" in options
        ):  # infinite gradients in 4 steps, then on rank 1 alone; no rank steps, nor does the schedule
            assert found[:, 1].isfinite().tolist() == [False, False, False, False, False, True]
            assert found[:, 2].tolist() == pytest.approx([0.1] * 6)
        else:
            assert (found - expected)[:, 1].abs().sum() < (found - exact)[:, 1].abs().sum()


def _accelerated(model, accelerator, **options):
    """Losses, norms and learning rates of a loop as accelerate's documentation has it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(_data(), 4, shuffle=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    lines = []
    for batch in loader:
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        lines.append((loss.item(), norm.item(), schedule.get_last_lr()[0]))
    rows = accelerator.gather_for_metrics(batch["input_ids"])
    return lines, len(loader), rows.shape[0], accelerator.gather_for_metrics(["text"], use_gather_object=True)


def _reset_accelerate():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def _accelerated_by_rank(group, folder):
    with torchrun(group):
        _reset_accelerate()
        model = huggingface.from_pretrained(folder, group=group).train()
        accelerator = huggingface.share_batches(accelerate.Accelerator(cpu=True, mixed_precision="bf16"), model)
        torch.manual_seed(dist.get_rank(group))  # the order of the rows does not depend on it
        found = _accelerated(model, accelerator)
        with pytest.raises(
            RuntimeError, match=r"accelerator\.save_state: knows of no shards; call tp_ext.save_checkpoin"
        ):
            accelerator.save_state("folder")
        with pytest.raises(ValueError, match="must not have prepared anything; call share_batches first"):
            huggingface.share_batches(accelerator, model)
    _reset_accelerate()
    return found


def test_a_loop_of_accelerate_is_that_of_one_process(folder):
    _reset_accelerate()
    torch.manual_seed(0)
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", dataloader_config=config)
    model = transformers.LlamaForCausalLM.from_pretrained(folder).train()
    expected, *others = _accelerated(model, accelerator)
    _reset_accelerate()
    for found, *own in run(_accelerated_by_rank, 2, folder):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=0)
        assert own == others == [8, 4, ["text"]]


def test_share_batches_refuses_other_arguments(folder):
    model = huggingface.from_pretrained(folder, group=None)
    with pytest.raises(TypeError, match=r"accelerator: int must be an accelerate\.Accelerator"):
        huggingface.share_batches(3, model)
    with pytest.raises(ValueError, match="model: is not sharded and must be"):
        huggingface.share_batches(accelerate.Accelerator(cpu=True), torch.nn.Linear(2, 2))


class _Stream(torch.utils.data.IterableDataset):
    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        yield from (torch.full((2, length), float(i)) for i, length in enumerate(self.lengths))


class _Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.randn(3) + index


def _without_generator():
    return torch.utils.data.WeightedRandomSampler(torch.arange(1.0, 9.0), 8)


LOADERS = {
    "iterable": lambda: torch.utils.data.DataLoader(_Stream([3] * 11), 2),
    "iterable of batches of changing lengths": lambda: torch.utils.data.DataLoader(_Stream(range(1, 8)), None),
    "sampler without a generator": lambda: torch.utils.data.DataLoader(range(8), 2, sampler=_without_generator()),
    "random data": lambda: torch.utils.data.DataLoader(_Noise(), 2, shuffle=True),
}


def _batches(accelerator, kind):
    """Two passes over a loader, with the number of rows that count of two of each batch."""
    loader, two = accelerator.prepare(LOADERS[kind]()), torch.zeros(2)
    return [(batch.tolist(), len(accelerator.gather_for_metrics(two))) for _ in range(2) for batch in loader]


def _batches_by_rank(group, folder, kind):
    with torchrun(group):
        _reset_accelerate()
        model = huggingface.from_pretrained(folder, group=group)
        accelerator = huggingface.share_batches(accelerate.Accelerator(cpu=True), model)
        torch.manual_seed(dist.get_rank(group))
        batches = _batches(accelerator, kind)
    _reset_accelerate()
    return batches


@pytest.mark.parametrize("kind", LOADERS)
def test_all_ranks_read_the_batches_of_one_process(kind, folder):
    _reset_accelerate()
    torch.manual_seed(0)
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    expected = _batches(accelerate.Accelerator(cpu=True, dataloader_config=config), kind)
    _reset_accelerate()
    assert run(_batches_by_rank, 2, folder, kind) == [expected] * 2
