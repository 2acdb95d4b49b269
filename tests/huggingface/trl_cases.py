"""Trainings by TRL's trainers of tiny models, for the comparison of a sharded model with one process: see
test_trainer_for.py."""

import contextlib
import functools
import importlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.helpers import torchrun
from tp_ext import huggingface

VOCAB = 97  # neither 2 nor 3 divides it
TIMES = ("runtime", "per_second", "step_time", "total_flos", "/time/", "time/")
SMALL = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
LLAMA = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 6, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {
    "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "Llama": lambda: transformers.LlamaConfig(**SMALL, **LLAMA),
    "Qwen2": lambda: transformers.Qwen2Config(**SMALL, **LLAMA, tie_word_embeddings=True),
    "GPT2": lambda: transformers.GPT2Config(**SMALL, **GPT2),
}
MODELS = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "gpt2": "GPT2LMHeadModel",
    **{f"{name.lower()} reward": f"{name}ForSequenceClassification" for name in CONFIGS},
}  # fmt: skip


CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + ' ' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
)


def write_model(kind: str, folder: Path) -> Path:
    """Writes a model of random weights and a tokenizer of whole words."""
    torch.manual_seed(0)
    cls = getattr(transformers, MODELS[kind])
    config = CONFIGS[MODELS[kind].partition("For")[0].partition("LM")[0]]()
    config.num_labels = 1 if "reward" in kind else 2
    cls(config).save_pretrained(folder)
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCAB - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    made.chat_template = CHAT
    made.save_pretrained(folder)
    return folder


def _text(generator: torch.Generator, least: int, most: int) -> str:
    length = int(torch.randint(least, most + 1, (), generator=generator))
    return " ".join(f"w{i}" for i in torch.randint(VOCAB - 4, (length,), generator=generator).tolist())


def rows(kind: str, count: int = 40) -> Any:
    """A data set of a kind: text, chat, completion, preference, label, prompt."""
    import datasets

    generator = torch.Generator().manual_seed(3)
    text = functools.partial(_text, generator)
    made: list[dict[str, Any]] = []
    for i in range(count):
        if kind == "text":
            made.append({"text": text(4, 11)})
        elif kind == "completion":
            made.append({"prompt": text(2, 4), "completion": " " + text(2, 6)})
        elif kind == "chat":
            made.append({"messages": [{"role": r, "content": text(2, 5)} for r in ("user", "assistant")]})
        elif kind == "preference":
            made.append({"prompt": text(2, 4), "chosen": " " + text(2, 6), "rejected": " " + text(2, 6)})
        elif kind == "label":
            made.append({"prompt": text(2, 4), "completion": " " + text(2, 6), "label": i % 3 != 0})
        else:
            made.append({"prompt": text(2, 4), "answer": i})
    return datasets.Dataset.from_list(made)


def even(completions: list[str], log_metric: Any, **others: Any) -> list[float]:
    """A reward by a rule: the share of words with even numbers; counts its calls in a file."""
    if "TRL_CALLS" in os.environ:
        with open(os.environ["TRL_CALLS"], "a") as file:
            file.write(f"{len(completions)}\n")
    numbers = [[int(word[1:]) for word in text.split() if word[0] == "w"] for text in completions]
    rewards = [sum(n % 2 == 0 for n in row) / max(len(row), 1) for row in numbers]
    log_metric("words", sum(map(len, numbers)) / len(numbers))
    return rewards


def even_words(folder: Path, load: Any) -> list[Any]:
    return [even]


def metrics(folder: Path, load: Any) -> Any:
    def of_logits(prediction: Any) -> dict[str, float]:
        logits, labels = prediction.predictions, prediction.label_ids
        return {"largest": float(logits.max()), "width": float(logits.shape[-1]), "labels": float(labels.sum())}

    return of_logits


def other_vocabulary(folder: Path, load: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **LLAMA, "vocab_size": 50}))


def loaded(folder: Path, load: Any) -> Any:
    return load(folder)


def dense_statistics(hidden, weight, bias, targets, temperature, chunk, softcap, scale, outputs):
    """TRL's statistics of each row's distribution, by whole logits: log_probs, entropy and those of its ``outputs``."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    logs = logits.log_softmax(-1)
    entropy, top = -(logs.exp() * logs).sum(-1), logits.argmax(-1) == targets
    chosen = logs.gather(1, targets[:, None])[:, 0]
    values = {"log_probs": chosen, "entropy": entropy, "log_sum_sq_probs": (2 * logs).logsumexp(-1).detach()}
    values |= {"mean_logits": logits.mean(-1).detach(), "is_top1": top}
    return tuple(value if name == "log_probs" or name in outputs else None for name, value in values.items())


def without_triton() -> None:
    """Has TRL 1.15, whose log-probabilities need a GPU, compute them on the CPU, too."""
    chunked, utils = (importlib.import_module(f"trl.kernels{name}") for name in (".chunked_logprob", ""))
    if not hasattr(chunked, "_use_triton"):
        utils.ChunkedLogProbFunction.apply = staticmethod(dense_statistics)


@contextlib.contextmanager
def processes(group: Any):
    """The environment of a rank of torchrun, and no state of accelerate from before."""
    with contextlib.nullcontext() if group is None else torchrun.variables(group.rank(), group.size()):
        for state in (PartialState, AcceleratorState, GradientState):
            state._reset_state()
        yield
    for state in (PartialState, AcceleratorState, GradientState):
        state._reset_state()


def make(
    group: Any,
    trainer: str,
    folder: Path,
    out: Path,
    *,
    tp: int | None = None,
    data: int = 1,
    steps: int = 6,
    dataset: str = "text",
    arguments: dict[str, Any] | None = None,
    plain: bool = False,
    model: Any = None,
    prepare: Any = None,
    cls: type | None = None,
    **options: Any,
) -> Any:
    """Makes a trainer.

    Args:
        tp: the ranks that share a model; default all. data: the number of data ranks.
        plain: the trainer of TRL, of unsharded models, over all ranks. cls: the class, instead of the one made for
            sharded models. model: instead of one that is loaded. prepare: is called with the model, and returns it.
        arguments: of the constructor, each a function of the folder and the function that loads a model.
        options: of the trainer's arguments.
    """
    import trl

    without_triton()
    base = getattr(trl, trainer)
    config = getattr(trl, trainer.replace("Trainer", "Config"))
    size = 1 if group is None else group.size()
    if group is None or plain:
        kind = transformers.AutoModelForSequenceClassification if "Reward" in trainer else None
        load = functools.partial((kind or transformers.AutoModelForCausalLM).from_pretrained)
    else:
        ranks = torch.arange(size).view(-1, tp or size)
        mesh = dist.DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        load = functools.partial(huggingface.from_pretrained, mesh=mesh["tp"])
        base = huggingface.trainer_for(base)
    batch = {"per_device_train_batch_size": 4 // data, "per_device_eval_batch_size": 4 // data}
    args = config(**{
        "output_dir": str(out), "max_steps": steps, "logging_steps": 1, "learning_rate": 3e-3, "use_cpu": True,
        "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "seed": 5,
        "max_grad_norm": 0.5, "gradient_checkpointing": False, "include_num_input_tokens_seen": True, **batch,
        **options,
    })  # fmt: skip
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = load(folder) if model is None else model
    model = model if prepare is None else prepare(model)
    given = {name: value(folder, load) for name, value in (arguments or {}).items()}
    examples = rows(dataset)
    if args.eval_strategy != "no":
        given["eval_dataset"] = examples.select(range(6))
    return (cls or base)(model=model, args=args, train_dataset=examples, processing_class=tokenizer, **given)


def train(
    group: Any, trainer: str, folder: Path, out: Path, *, resume: str | None = None, by_path: bool = False, **given: Any
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Trains by a trainer of :func:`make`; returns the logs, without times, and the weights.

    Args:
        resume: a checkpoint. by_path: the trainer loads the model.
    """
    with processes(group):
        made = make(group, trainer, folder, out, **given, **({"model": str(folder)} if by_path else {}))
        made.train(resume_from_checkpoint=resume)
        logs = [{k: v for k, v in line.items() if not any(t in k for t in TIMES)} for line in made.state.log_history]
        logs = [{k: float(v) for k, v in line.items()} for line in logs]
        made.save_model(str(out / "final"))
        if group is not None:
            dist.barrier()
        (file,) = (out / "final").glob("*.safetensors")  # of the model, or of its adapters
        return logs, load_file(file)


def difference(found: Any, expected: Any) -> tuple[float, str, float]:
    """The largest difference of the logs, relative to max(1, |value|), its name, and that of the weights."""
    logs, weights = found
    assert len(logs) == len(expected[0]), (len(logs), len(expected[0]))
    worst, name = 0.0, ""
    for line, other in zip(logs, expected[0], strict=True):
        assert line.keys() == other.keys(), set(line) ^ set(other)
        for key, value in line.items():
            # Where a margin is rounding, so is its sign, which this counts
            if abs(other.get(key.replace("accuracies", "margins"), 1.0)) < 1e-4 and "accuracies" in key:
                continue
            off = abs(value - other[key]) / max(1.0, abs(other[key]))
            if not off <= worst and not (value != value and other[key] != other[key]):
                worst, name = off, f"{key} {value} {other[key]} at {other.get('step')}"
    far = max(float((weights[n] - w).norm() / max(float(w.norm()), 1e-3)) for n, w in expected[1].items())
    return worst, name, far
