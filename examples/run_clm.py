"""Trains a causal language model as transformers' run_clm.py does, on a model that all processes share.

``torchrun --standalone --nproc-per-node 2 examples/run_clm.py --output_dir runs/clm --bf16 --do_train --do_eval``: all
options of TrainingArguments hold. Without ``--model`` a tiny random Llama over bytes. Two lines are not run_clm.py's:
the loading of the model, and the class of the trainer.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from data import read_text
from finetune_hf import make_tiny_model, rows_of
from transformers import AutoTokenizer, HfArgumentParser, TrainingArguments, default_data_collator

import tp_ext.huggingface


@dataclass
class Arguments:
    model: str | None = field(default=None, metadata={"help": "folder of a pretrained model; default: a tiny one"})
    data: Path | None = field(default=None, metadata={"help": "text file, or folder; default: Python's own source"})
    block_size: int = field(default=64, metadata={"help": "tokens of a row"})
    eval_rows: int = field(default=64, metadata={"help": "rows that are kept for evaluation"})
    resume: str | None = field(default=None, metadata={"help": "a checkpoint of this script or of transformers'"})


def main() -> None:
    args, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    text = read_text(args.data, limit=400_000)
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else None
    tokens = list(text) if tokenizer is None else tokenizer(text.decode(errors="ignore"))["input_ids"]
    with torch.device("cpu"):
        rows = rows_of(tokens, args.block_size)
    path = args.model or make_tiny_model(Path(training.output_dir) / "model")
    trainer = tp_ext.huggingface.Trainer(  # in place of transformers.Trainer
        tp_ext.huggingface.from_pretrained(path, group=dist.group.WORLD, use_cache=False),  # .. of AutoModelForCausalLM
        training,
        train_dataset=rows[args.eval_rows :],
        eval_dataset=rows[: args.eval_rows],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
