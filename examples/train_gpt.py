"""Trains a byte-level language model with tensor parallelism:

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --data PATH --steps 300

``--data`` is a file or a folder of text; without it, the source of Python's standard library. The losses are the same
for every number of ranks. Runs on CPU (shared memory on one host, gloo on several) and on GPUs (NCCL; gloo when ranks
share one). Ctrl-C and SIGTERM save a checkpoint and end the run; ``--resume`` continues it, on any number of ranks.
"""

import signal

from data import batch_of, read_text, split
from options import MODEL, difference, parse_options, saved_form

if __name__ == "__main__":  # before torch is imported: --help and mistakes are answered at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch is imported: no traceback
    OPTIONS = parse_options(__doc__)
    TEXTS = split(read_text(OPTIONS.data, OPTIONS.max_mib * 2**20), OPTIONS.seq_length)

import argparse
import hashlib
import math
import os
import resource
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from run_log import RunLog
from torch import Tensor

import tp_ext


class StopSignals:
    """Notes SIGINT (Ctrl-C) and SIGTERM; the ranks agree between two steps whether one of them has received one."""

    def __init__(self) -> None:
        self.received = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.received = number

    def on_any_rank(self, device: torch.device) -> int:
        received = torch.tensor(self.received, device=device)
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        return int(received)


def check_output(options: argparse.Namespace, plain_options: dict[str, Any]) -> None:
    """Ends the job, on all ranks, if ``--out`` cannot be written or holds a run that this one does not continue."""
    problem, extra = None, options.out / "checkpoint" / "extra.pt"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
        if extra.exists() and options.resume:
            problem = difference(plain_options, torch.load(extra, weights_only=True).get("options", {}))
        elif extra.exists() and not options.overwrite:
            problem = f"--out: {options.out} holds a checkpoint: pass --resume, --overwrite, or another --out"
    except OSError as error:
        problem = f"--out: {options.out} must be a folder that can be written: {error}"
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if found := next(filter(None, problems), None):
        sys.exit(found if dist.get_rank() == 0 else 1)


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Linear warmup, then a cosine from ``--lr`` down to ``--min-lr-ratio`` of it."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = min(1.0, (step - options.warmup_steps) / max(1, options.lr_decay_steps - options.warmup_steps))
    return options.lr * (options.min_lr_ratio + (1 - options.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], lr: float, precision: Any
) -> float:
    """One step of AdamW; returns the loss. ``precision``: the context of the forward."""
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    with precision:
        loss = model.loss(*batch)
    optimizer.zero_grad()
    loss.backward()
    tp_ext.clip_grad_norm_(model, 1.0)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model: GPT, text: Tensor, options: argparse.Namespace, device: torch.device, precision: Any) -> float:
    """Mean loss of ``--eval-batches`` batches of the held-out text, the same batches every time. The random numbers of
    the training are left as they were."""
    model.eval()
    with precision, torch.random.fork_rng([device] if device.type == "cuda" else []):
        losses = [model.loss(*batch_of(text, i, options, device)) for i in range(options.eval_batches)]
    model.train()
    return torch.stack(losses).mean().item()


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


def train(options: argparse.Namespace, texts: tuple[bytes, bytes], device: torch.device) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    plain_options = saved_form(options, hashlib.sha256(b"".join(texts)).hexdigest())
    check_output(options, plain_options)
    train_text, held_out_text = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    tp_ext.debug.assert_replicated(train_text, group=group)  # hosts that read different files are found here

    tp_ext.manual_seed(options.seed)
    torch.set_default_dtype(torch.float64 if options.dtype == "float64" else torch.float32)
    config = GPTConfig(**{name: value for name, value in vars(options).items() if name in MODEL})
    model = GPT(config, group).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    if options.compile:
        for block in model.blocks:
            block.compile(fullgraph=True)

    checkpoint, first_step = options.out / "checkpoint", 0
    if options.resume:
        extra = tp_ext.load_checkpoint(checkpoint, model, optimizer, group=group)
        first_step = extra["step"]
        set_random_state(extra["random_state"], device)
        if first_step >= options.steps:
            sys.exit(f"--steps: {options.steps} must be more than the {first_step} steps of the checkpoint")

    def save(step: int) -> None:
        extra = {"step": step, "options": plain_options, "random_state": random_state(device)}
        tp_ext.save_checkpoint(checkpoint, model, optimizer, group=group, **extra)

    stop, log = StopSignals(), RunLog(options, first_step, rank)
    elements = sum(param.numel() for param in model.parameters())
    log.print(f"{elements:,} parameters on each of {dist.get_world_size()} ranks, {device}")
    log.print(f"{len(train_text):,} bytes of text, {len(held_out_text):,} held out")
    precision = torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bfloat16")
    for step in range(first_step, options.steps):
        begin, lr = time.perf_counter(), learning_rate(step, options)
        batch = batch_of(train_text, step, options, device)
        loss = train_step(model, optimizer, batch, lr, precision)
        rate = batch[0].numel() / (time.perf_counter() - begin)

        done, held_out_loss = step + 1, None
        if done == options.steps or (options.eval_every and done % options.eval_every == 0):
            held_out_loss = evaluate(model, held_out_text, options, device, precision)
        log.step(step, loss, held_out_loss, lr, rate, peak_memory_mib(device))
        received = stop.on_any_rank(device)
        if done == options.steps or received or (options.save_every and done % options.save_every == 0):
            save(done)
        if received:
            log.close()
            log.print(f"stopped by {signal.Signals(received).name} after step {done}: continue with --resume")
            sys.exit(128 + received)
    log.close()
    report(model, log, options, device)


def report(model: GPT, log: RunLog, options: argparse.Namespace, device: torch.device) -> None:
    """First and last loss, the plot, a sample; every rank takes part in sampling."""
    sample = None
    if options.sample_bytes:
        prompt = torch.tensor([list(options.prompt.encode())], device=device)
        sample = bytes(model.generate(prompt, options.sample_bytes)[0].tolist()).decode("utf-8", "replace")
    log.print(f"{log.summary()}; checkpoint and plot in {options.out}/" if log.rank == 0 else "")
    if log.rank == 0:
        log.plot(options.out / "loss.png")
        if sample is not None:
            (options.out / "sample.txt").write_text(sample)
            print(f"--- sample\n{sample}\n---")


def main(options: argparse.Namespace, texts: tuple[bytes, bytes]) -> None:
    gpus = torch.cuda.device_count() if tp_ext.build_info()["cuda_available"] else 0
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    local_ranks, ranks = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if gpus >= local_ranks else "gloo" if gpus or local_ranks < ranks else "tp_shm"
    dist.init_process_group(options.backend or backend, timeout=timedelta(seconds=options.timeout))
    train(options, texts, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(OPTIONS, TEXTS)
