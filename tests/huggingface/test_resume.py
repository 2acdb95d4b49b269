"""Checkpoints of transformers.Trainer in one process, from which the Trainer of a sharded model goes on."""

import shutil
import warnings

import pytest
import torch
import transformers

from tests.helpers.one_plan import run, run_raises
from tests.huggingface.test_trainer import _data, folder, torchrun  # noqa: F401
from tp_ext import huggingface

transformers.utils.logging.disable_progress_bar()


def _some_labels(rows):
    """A collator that draws, as the one of masked language models does."""
    batch = transformers.default_data_collator(rows)
    batch["labels"] = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.4, -100)
    return batch


def _trainer(trainer_class, model, out, collator=None, max_steps=4, **options):
    args = transformers.TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=4, max_steps=max_steps, save_steps=2, logging_steps=1,
        warmup_steps=2, learning_rate=1e-2, weight_decay=0.1, seed=5, use_cpu=True, report_to=[], disable_tqdm=True,
        **options,
    )  # fmt: skip
    return trainer_class(model, args, collator, _data())


def _lines(trainer):
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return torch.tensor([(line["loss"], float(line["grad_norm"]), line["learning_rate"]) for line in lines])


@pytest.fixture
def one_process(folder, tmp_path, monkeypatch):  # noqa: F811
    """A function that trains in one process, with the checkpoint of its second step; its lines."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def train(checkpoint=None, **options):
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        trainer = _trainer(transformers.Trainer, model, tmp_path / "dense", **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        return _lines(trainer), str(tmp_path / "dense" / "checkpoint-2")

    return train


def _resumed(group, folder, checkpoint, out, **options):  # noqa: F811
    with torchrun(group), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = _trainer(huggingface.Trainer, huggingface.from_pretrained(folder, group=group), out, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
    return _lines(trainer), [str(one.message) for one in caught if "resume_from_checkpoint" in str(one.message)]


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"optim": "sgd", "optim_args": "momentum=0.9"}, marks=pytest.mark.exhaustive)],
    ids=["AdamW", "momentum"],
)
def test_moments_and_schedule_of_one_process_go_on(options, one_process, folder, tmp_path):  # noqa: F811
    expected, checkpoint = one_process(**options)
    for lines, warned in run(_resumed, 2, folder, checkpoint, tmp_path / "sharded", timeout=120, **options):
        torch.testing.assert_close(lines, expected, rtol=1e-5, atol=1e-6)
        assert not warned


def test_generators_go_on_on_other_numbers_of_ranks(one_process, folder, tmp_path):  # noqa: F811
    """As in one process, where the Trainer saves after it has drawn batches ahead, and goes on with other draws."""
    options = {"collator": _some_labels, "max_steps": 7}
    _, checkpoint = one_process(**options)
    expected, _ = one_process(checkpoint, **options)
    of_two = str(tmp_path / "2" / "checkpoint-2")
    run(_resumed, 2, folder, None, tmp_path / "2", timeout=120, **options)
    for p, source in ((2, checkpoint), (2, of_two), (3, of_two), (1, of_two)):
        for lines, _ in run(_resumed, p, folder, source, tmp_path / "on", timeout=120, **options):
            torch.testing.assert_close(lines, expected, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_the_model_alone_starts_anew_with_one_warning(one_process, folder, tmp_path):  # noqa: F811
    expected, checkpoint = one_process(save_only_model=True)
    results = run(_resumed, 2, folder, checkpoint, tmp_path / "sharded", timeout=120)
    for lines, _ in results:
        assert lines[2, 0] == pytest.approx(expected[2, 0].item(), rel=1e-5)  # the weights of step 2
        assert lines[2:, 2].tolist() == pytest.approx([0, 5e-3])  # the warm-up of a new schedule
    assert [len(warned) for _, warned in results] == [1, 0]


def _other_optimizer(path):
    state = torch.load(path / "optimizer.pt", weights_only=True)
    state["param_groups"][0]["momentum"] = 0.9
    torch.save(state, path / "optimizer.pt")


def _other_groups(path):
    state = torch.load(path / "optimizer.pt", weights_only=True)
    state["param_groups"][0]["params"].append(100)
    torch.save(state, path / "optimizer.pt")


def _other_shape(path):
    state = torch.load(path / "optimizer.pt", weights_only=True)
    state["state"][0]["exp_avg"] = torch.zeros(3, 5)
    torch.save(state, path / "optimizer.pt")


def _cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


REFUSED = {
    "a damaged schedule": (
        lambda path: _cut(path / "scheduler.pt"), "scheduler.pt' cannot be read: RuntimeError: "),
    "a schedule of something else": (
        lambda path: torch.save([1], path / "scheduler.pt"), r"scheduler.pt' must hold a dict with \['last_epoch'\]"),
    "a damaged optimizer": (lambda path: _cut(path / "optimizer.pt"), "optimizer.pt' cannot be read: RuntimeError: "),
    "an optimizer of something else": (
        lambda path: torch.save({"state": {}}, path / "optimizer.pt"), r"optimizer.pt' must hold a dict with \['param"),
    "no schedule": (lambda path: (path / "scheduler.pt").unlink(), r"has \['optimizer.pt', 'rng_state.pth'\]; the"),
    "no optimizer": (lambda path: (path / "optimizer.pt").unlink(), r"has \['rng_state.pth', 'scheduler.pt'\]; the"),
    "of FSDP": (lambda path: (path / "optimizer.pt").rename(path / "optimizer_0"), r"has \['optimizer_0', "),
    "of DeepSpeed": (
        lambda path: [(path / name).unlink() for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")]
        and (path / "global_step2").mkdir(), r"has \['global_step2'\]; the state of training can only be read from",
    ),
    "another optimizer": (_other_optimizer, "optimizer.pt' is of another optimizer: options .*'momentum'"),
    "other groups": (_other_groups, r"is of another optimizer: sizes of parameter groups \[17, 5\], here \[16, 5\]"),
    "another shape": (_other_shape, r"exp_avg.* shape \(3, 5\)"),
}  # fmt: skip


def test_what_would_be_silently_new_is_refused_on_all_ranks(one_process, folder, tmp_path):  # noqa: F811
    _, checkpoint = one_process()
    for damage, match in REFUSED.values():
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        damage(shutil.copytree(checkpoint, tmp_path / "damaged"))
        arguments = (folder, str(tmp_path / "damaged"), tmp_path / "out")
        run_raises(_resumed, 2, ValueError, match, *arguments)
