"""Fine-tunes a model of transformers on text, tensor-parallel, by the Trainer of transformers or a loop of accelerate.

``torchrun --standalone --nproc-per-node 2 examples/finetune_hf.py``: without ``--model`` a tiny random Llama over
bytes, which is saved first and then loaded as any other. With ``--model`` a folder with config.json, safetensors files
and a tokenizer.
"""

import argparse
import itertools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from data import read_text
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments

import tp_ext.huggingface

BYTES = 256


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a pretrained model; default: a tiny one is made")
    parser.add_argument("--data", type=Path, help="a text file, or a folder; default: Python's own source")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_hf"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a row")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true", help="mixed precision: products in bf16, parameters in fp32")
    parser.add_argument("--accelerate", action="store_true", help="a loop of one's own with accelerate, no Trainer")
    parser.add_argument("--lora", type=int, metavar="R", help="trains adapters of this rank on frozen weights")
    parser.add_argument("--quantize", choices=("int8", "int4"), help="reads the frozen weights in few bits")
    parser.add_argument("--resume", type=Path, help="a checkpoint folder of an earlier run, of any number of ranks")
    args = parser.parse_args()
    if args.accelerate and args.resume:
        parser.error("--resume: needs the Trainer, and must not be given with --accelerate")
    if (args.lora and args.resume) or (args.quantize and not args.lora):
        parser.error("--lora: must be given with --quantize, whose weights are frozen, and not with --resume")
    return args


def make_tiny_model(path: Path) -> Path:
    """Saves a random Llama over bytes, as rank 0."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=BYTES,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            pad_token_id=0,
            eos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(path)
    dist.barrier()
    return path


def rows_of(tokens: list[int], length: int) -> list[dict[str, torch.Tensor]]:
    blocks = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)
    return [{"input_ids": block, "labels": block} for block in blocks]


def with_trainer(model: Any, rows: list[dict[str, torch.Tensor]], tokenizer: Any, args: argparse.Namespace) -> None:
    trainer = tp_ext.huggingface.Trainer(
        model,
        TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr,
            logging_steps=10,
            save_strategy="no" if args.lora else "steps",
            save_steps=args.steps // 2 or 1,
            bf16=args.bf16,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=str(args.resume) if args.resume else None)
    save(model, args)


def with_accelerate(model: Any, rows: list[dict[str, torch.Tensor]], tokenizer: Any, args: argparse.Namespace) -> None:
    """The same in a loop of accelerate, whose processes compute each batch together."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="bf16" if args.bf16 else "no")
    tp_ext.huggingface.share_batches(accelerator, model)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=args.lr)
    trained, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(rows, args.batch_size, shuffle=True))
    for step, batch in zip(range(args.steps), itertools.cycle(batches), strict=False):
        loss = trained(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.4f}, norm {norm.item():.3f}")
    save(model, args)


def save(model: Any, args: argparse.Namespace) -> None:
    """Writes files for LlamaForCausalLM.from_pretrained; of adapters these alone, with the names of peft."""
    if not args.lora:
        return tp_ext.huggingface.save_pretrained(model, args.out / "final")
    adapters = {name: value for name, value in tp_ext.full_state_dict(model).items() if "lora_" in name}
    if dist.get_rank() == 0:
        save_file(adapters, args.out / "adapters.safetensors")


def add_adapters(model: Any, args: argparse.Namespace) -> None:
    kept = sum(tensor.nbytes for tensor in model.state_dict().values())
    tp_ext.add_lora(model, targets=["*_proj"], r=args.lora, alpha=2 * args.lora)
    trained = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    if dist.get_rank() == 0:
        print(f"rank 0 holds {kept / 2**20:.2f} MiB of frozen weights, {trained / 2**20:.2f} MiB of adapters")


def main() -> None:
    args = options()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    text = read_text(args.data, limit=400_000)
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else None
    tokens = list(text) if tokenizer is None else tokenizer(text.decode(errors="ignore"))["input_ids"]
    model = tp_ext.huggingface.from_pretrained(
        args.model or make_tiny_model(args.out / "model"),
        group=dist.group.WORLD,
        use_cache=False,
        quantize=args.quantize,
        block=16,
    )
    if args.lora:
        add_adapters(model, args)
    train = with_accelerate if args.accelerate else with_trainer
    train(model, rows_of(tokens, args.tokens), tokenizer, args)

    prompt = torch.tensor([tokens[:16]], device=model.device)
    written = model.eval().generate(prompt, max_new_tokens=32, do_sample=False, use_cache=True)[0].tolist()
    if dist.get_rank() == 0:
        print(
            "written:",
            repr(bytes(written).decode(errors="replace")) if tokenizer is None else tokenizer.decode(written),
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
