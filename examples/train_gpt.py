"""Trains a byte-level language model with tensor parallelism:

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --data PATH --steps 300

``--data`` is a file or a folder of text; without it, the source of Python's standard library. The losses are the same
for every number of ranks. Runs on CPU (shared memory on one host, gloo on several) and on GPUs (NCCL; gloo when ranks
share one).
"""

import argparse
import csv
import os
import resource
import sys
import sysconfig
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch import Tensor
from tqdm import tqdm

import tp_ext


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file or folder of text; default: Python's standard library")
    parser.add_argument("--max-mib", type=int, default=16, help="read at most so many MiB of it")
    model = GPTConfig()
    for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(model, name))
    parser.add_argument("--dropout", type=float, default=model.dropout)
    parser.add_argument("--sequence-parallel", action="store_true", help="shard activations between blocks, too")
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute blocks in backward")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        default="float32",
        help="bfloat16: autocast over fp32 parameters",
    )
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="checkpoint, losses and plot go here")
    parser.add_argument("--save-every", type=int, default=0, help="a checkpoint every so many steps, and at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, at any rank count")
    parser.add_argument("--sample-bytes", type=int, default=200)
    parser.add_argument("--backend", help="of torch.distributed; default: what fits device and hosts")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for another rank")
    arguments = parser.parse_args()
    for name in ("seq_length", "batch_size", "steps", "max_mib", "timeout"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: {getattr(arguments, name)} must be at least 1")
    if arguments.data is not None and not arguments.data.exists():
        parser.error(f"--data: {arguments.data} must be an existing file or folder")
    return arguments


def read_bytes(path: Path | None, limit: int) -> Tensor:
    """The text as one uint8 tensor, files in the order of their names; files with a NUL byte are not text."""
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    files = [root] if root.is_file() else sorted(root.glob("*.py" if path is None else "**/*"))
    chunks, total = [], 0
    for file in files:
        content = file.read_bytes() if file.is_file() else b""
        if content and b"\0" not in content[:4096]:
            chunks.append(content[: limit - total])
            total += len(chunks[-1])
        if total >= limit:
            break
    return torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.uint8)


def batch_of(text: Tensor, step: int, arguments: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and next bytes ``[batch, seq]``: a function of seed and step only, so that a resumed run sees the same."""
    generator = torch.Generator().manual_seed(arguments.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - arguments.seq_length, (arguments.batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(arguments.seq_length + 1)].long().to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def peak_memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def random_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def write_losses(losses: list[float], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with (out / "loss.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("step", "loss"), *enumerate(losses)])
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
    axes.grid(alpha=0.3)
    figure.savefig(out / "loss.png", dpi=120, bbox_inches="tight")


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, step: int, batch: tuple[Tensor, Tensor], lr: float, precision: Any
) -> float:
    """One step of AdamW, the learning rate warmed up over 20 steps; returns the loss. ``precision`` is for forward."""
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr * min(1.0, (step + 1) / 20)
    with precision:
        loss = model.loss(*batch)
    optimizer.zero_grad()
    loss.backward()
    tp_ext.clip_grad_norm_(model, 1.0, group=model.group)
    optimizer.step()
    return loss.item()


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    group, rank, p = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    text = read_bytes(arguments.data, arguments.max_mib * 2**20)
    if len(text) <= arguments.seq_length:
        sys.exit(f"--data: {len(text)} bytes of text must be more than --seq-length = {arguments.seq_length}")

    tp_ext.manual_seed(arguments.seed)
    names = GPTConfig.__dataclass_fields__.keys() & vars(arguments).keys()
    torch.set_default_dtype(torch.float64 if arguments.dtype == "float64" else torch.float32)
    model = GPT(GPTConfig(**{name: getattr(arguments, name) for name in names}), group).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    if arguments.compile:
        for block in model.blocks:
            block.compile(fullgraph=True)
    checkpoint, losses = arguments.out / "checkpoint", []
    if arguments.resume:
        extra = tp_ext.load_checkpoint(checkpoint, model, optimizer, group=group)
        losses = extra["losses"]
        set_random_state(extra["random_state"], device)
    if rank == 0:
        elements = sum(param.numel() for param in model.parameters())
        print(f"{elements:,} parameters on each of {p} ranks, {device}; {len(text):,} bytes of text", flush=True)

    def save() -> None:
        extra = {"losses": losses, "random_state": random_state(device)}
        tp_ext.save_checkpoint(checkpoint, model, optimizer, group=group, **extra)

    precision = torch.autocast(device.type, torch.bfloat16, enabled=arguments.dtype == "bfloat16")
    with tqdm(total=arguments.steps, initial=len(losses), disable=rank != 0, mininterval=1.0) as bar:
        for step in range(len(losses), arguments.steps):
            begin = time.perf_counter()
            batch = batch_of(text, step, arguments, device)
            losses.append(train_step(model, optimizer, step, batch, arguments.lr, precision))
            rate = batch[0].numel() / (time.perf_counter() - begin)
            bar.set_postfix_str(f"loss {losses[-1]:.4f}, {rate:,.0f} tokens/s, {peak_memory_mib(device):,.0f} MiB")
            bar.update()
            if arguments.save_every and (step + 1) % arguments.save_every == 0:
                save()
    save()
    report(model, losses, arguments, device)


def report(model: GPT, losses: list[float], arguments: argparse.Namespace, device: torch.device) -> None:
    """Loss table and curve, first and last loss, a sample; every rank takes part in drawing it."""
    drawn = None
    if arguments.sample_bytes:
        prompt = torch.tensor([list(b"def ")], device=device)
        drawn = bytes(model.generate(prompt, arguments.sample_bytes)[0].tolist()).decode("utf-8", "replace")
    if dist.get_rank() == 0:
        write_losses(losses, arguments.out)
        print(f"first loss {losses[0]:.4f}, last loss {losses[-1]:.4f}; checkpoint and plot in {arguments.out}/")
        if drawn is not None:
            (arguments.out / "sample.txt").write_text(drawn)
            print(f"--- sample\n{drawn}\n---")


def main() -> None:
    arguments = parse_arguments()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("launch with torchrun: torchrun --standalone --nproc-per-node 2 examples/train_gpt.py")
    gpus = torch.cuda.device_count() if tp_ext.build_info()["cuda_available"] else 0
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    local_ranks, ranks = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if gpus >= local_ranks else "gloo" if gpus or local_ranks < ranks else "tp_shm"
    dist.init_process_group(arguments.backend or backend, timeout=timedelta(seconds=arguments.timeout))
    train(arguments, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
