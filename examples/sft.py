"""Supervised fine-tuning by TRL, tensor-parallel: a model learns to spell numbers, ``34 => thirty-four``.

``torchrun --standalone --nproc-per-node 2 examples/sft.py``: trains a tiny random Llama over characters on 800 of the
numbers up to 999, and evaluates on the others, before and after; half a minute on two cores. ``--lora 8`` trains
adapters alone, on ``--model``, any folder of transformers with a tokenizer, such as the one this program has written.
Needs ``pip install 'tp_ext[trl]'``.
"""

import argparse
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import trl
from transformers import AutoTokenizer
from trl_model import write_tiny_model

import tp_ext.huggingface

ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a pretrained model; default: a tiny one is made")
    parser.add_argument("--out", type=Path, default=Path("runs/sft"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--lora", type=int, metavar="R", help="trains adapters of this rank on frozen weights")
    return parser.parse_args()


def spelled(number: int) -> str:
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{ONES[hundreds]} hundred" + (f" {spelled(rest)}" if rest else "")


def rows() -> tuple[datasets.Dataset, datasets.Dataset]:
    """Returns the numbers to learn and the others, as prompts and completions."""
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).tolist()
    made = datasets.Dataset.from_list([{"prompt": f"{n} =>", "completion": f" {spelled(n)}"} for n in order])
    return made.select(range(800)), made.select(range(800, 1000))


def evaluate(trainer: Any, tokenizer: Any, held_out: datasets.Dataset, when: str) -> None:
    """Prints the loss on the held-out numbers and the share that is spelled without a mistake."""
    loss = trainer.evaluate()["eval_loss"]
    batch = tokenizer(list(held_out["prompt"]), return_tensors="pt", padding=True, padding_side="left")
    ids, mask = batch["input_ids"].to(trainer.model.device), batch["attention_mask"].to(trainer.model.device)
    written = trainer.model.eval().generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    texts = tokenizer.batch_decode(written[:, ids.shape[1] :], skip_special_tokens=True)
    right = sum(text == completion for text, completion in zip(texts, held_out["completion"], strict=True))
    if dist.get_rank() == 0:
        print(f"{when}: loss {loss:.4f}, {right} of {len(texts)} right; {held_out['prompt'][0]}{texts[0]}", flush=True)


def main() -> None:
    args = options()
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    path = args.model or args.out / "model"
    if args.model is None:
        write_tiny_model(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = tp_ext.huggingface.from_pretrained(path, group=dist.group.WORLD)
    if args.lora:
        tp_ext.manual_seed(0)
        linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        tp_ext.add_lora(model, targets=linears, r=args.lora, alpha=2.0 * args.lora)
    train, held_out = rows()
    config = trl.SFTConfig(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = tp_ext.huggingface.trainer_for(trl.SFTTrainer)(
        model, config, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer
    )
    evaluate(trainer, tokenizer, held_out, "before")
    trainer.train()
    evaluate(trainer, tokenizer, held_out, "after")
    trainer.save_model(str(args.out / ("adapters" if args.lora else "final")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
