"""Trains a byte-level language model with data, pipeline, context, expert and tensor parallelism:

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --data PATH --steps 300
    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --pp 2 --dp 2 --tp 2 --zero 2 --timeline
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --experts 8 --top-k 2 --ep 2 --tp 2

``--data`` is a file or a folder of text; without it, the source of Python's standard library. The losses are the same
for every number of ranks along each axis. Runs on CPU (shared memory on one host, gloo on several) and on GPUs (NCCL;
gloo when ranks share one). Ctrl-C and SIGTERM save a checkpoint and end the run; ``--resume`` continues it, on any
mesh.
"""

import signal

from data import batch_of, read_text, split
from options import MESH, MODEL, difference, parse_options, saved_form

if __name__ == "__main__":  # before torch is imported: --help and mistakes are answered at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch is imported: no traceback
    OPTIONS = parse_options(__doc__)
    TEXTS = split(read_text(OPTIONS.data, OPTIONS.max_mib * 2**20), OPTIONS.seq_length)

import argparse
import contextlib
import hashlib
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from run_log import RunLog
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

import tp_ext
from tp_ext import planner
from tp_ext.parallel import ParallelRun


def autocast_dtype(options: argparse.Namespace) -> torch.dtype | None:
    return torch.bfloat16 if (options.dtype, options.param_dtype) == ("bfloat16", "float32") else None


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


def config_of(options: argparse.Namespace) -> GPTConfig:
    return GPTConfig(**{name: value for name, value in vars(options).items() if name in MODEL})


class Trainer:
    """The model on a mesh, its optimizer, and its steps on batches of all ranks."""

    def __init__(self, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh = mesh
        blocks = options.tp_invariant
        invariant = tp_ext.tp_invariant(blocks) if blocks else contextlib.nullcontext()
        # Each rank then gets the memory of its own stage and shards
        with torch.device("meta"), invariant, tp_ext.shares(options.shares):
            model = GPT(config_of(options), mesh["tp"], mesh["cp"], mesh["ep"], mesh["dp"])
        if options.float8:
            tp_ext.low_precision.float8(model, tp_ext.low_precision.Float8(options.float8))
        self.run: ParallelRun = tp_ext.parallelize(
            model,
            mesh,
            schedule=options.schedule,
            microbatches=options.micro_batches,
            loss=model.cross_entropy,
            zero=options.zero,
            offload=options.offload,
            recompute=options.recompute,
            compile=options.compile,
            autocast=autocast_dtype(options),
            seed=options.seed,
        )
        self.optimizer = self._make_optimizer(options, device)
        sequences = options.batch_size // (self.run.data_size * options.micro_batches)
        self.layout = tp_ext.ContextLayout(batch=sequences, seq=options.seq_length, group=mesh["cp"])
        self.keywords = {"layout": self.layout, "total_tokens": self.layout.sizes[mesh["cp"].get_local_rank()]}

    def _make_optimizer(self, options: argparse.Namespace, device: torch.device) -> torch.optim.Optimizer:
        """AdamW; or Muon for the matrices of the blocks, at a learning rate in AdamW's scale, and AdamW for others."""
        shared: dict[str, Any] = {"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
        if options.optimizer == "adamw":
            return self.run.optimizer(torch.optim.AdamW, **shared)
        matrices, others = tp_ext.optim.split_parameters(self.run.state)
        return tp_ext.optim.Muon(
            matrices,
            adamw_params=others,
            adjust_lr_fn="match_rms_adamw",
            ns_dtype=torch.bfloat16 if device.type == "cuda" else torch.get_default_dtype(),
            model=self.run.state,
            mesh=self.mesh,
            **shared,
        )

    def step(self, batch: tuple[Tensor, Tensor], lr: float) -> float:
        """One step of the optimizer; returns the loss."""
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr
        self.optimizer.zero_grad()
        loss = self.run.step(*self._local(batch), **self.keywords)
        self.run.clip_grad_norm_(1.0)
        self.optimizer.step()
        return loss.item()

    def evaluate(self, text: Tensor, options: argparse.Namespace, device: torch.device) -> float:
        """Mean loss of ``--eval-batches`` batches of the held-out text, the same batches every time."""
        batches = (batch_of(text, i, options, device) for i in range(options.eval_batches))
        losses = [self.run.evaluate(*self._local(batch), **self.keywords) for batch in batches]
        return torch.stack(losses).mean().item()

    def _local(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's sequences, and of these its tokens."""
        ids, target = (self.layout.shard(one.chunk(self.run.data_size)[self.run.data_rank], 1) for one in batch)
        return ids, target

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's parameters, their gradients and the optimizer's states."""
        params = list(self.run.parameters())
        own: Any = getattr(self.optimizer, "optim", self.optimizer)  # of this rank, within a ZeroRedundancyOptimizer
        states = [state for kept in own.state.values() for state in kept.values()]
        kinds = {"parameters": params, "gradients": [param.grad for param in params], "optimizer states": states}
        return {kind: sum(map(local_bytes, tensors)) for kind, tensors in kinds.items()}


def local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.nbytes if isinstance(local, Tensor) else 0


def peak_memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def train(options: argparse.Namespace, texts: tuple[bytes, bytes], device: torch.device) -> None:
    rank = dist.get_rank()
    if device.type == "cpu":
        tp_ext.keep_memory()  # the next step's activations are where those of this step were
    plain_options = saved_form(options, hashlib.sha256(b"".join(texts)).hexdigest())
    check_output(options, plain_options)
    train_text, held_out_text = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    tp_ext.debug.assert_replicated(train_text, group=dist.group.WORLD)  # hosts that read different files are found here

    mesh = tp_ext.init_mesh(device.type, **{name: getattr(options, name) for name in MESH})
    torch.set_default_dtype(getattr(torch, options.param_dtype))
    trainer = Trainer(options, mesh, device)
    run, optimizer = trainer.run, trainer.optimizer

    checkpoint, first_step = options.out / "checkpoint", 0
    if options.resume:
        run.next_step = first_step = tp_ext.load_checkpoint(checkpoint, run.state, optimizer, mesh=mesh)["step"]
        if first_step >= options.steps:
            sys.exit(f"--steps: {options.steps} must be more than the {first_step} steps of the checkpoint")

    stop, log = StopSignals(), RunLog(options, first_step, rank)
    plan, least = predicted(options, mesh, device) if options.plan else None, math.inf
    elements = sum(param.numel() for param in run.parameters())
    sizes = " x ".join(f"{name} {getattr(options, name)}" for name in MESH)
    log.print(f"{sizes} on {device.type}, {elements:,} parameters on rank 0")
    log.print(f"{len(train_text):,} bytes of text, {len(held_out_text):,} held out")
    for step in range(first_step, options.steps):
        begin, lr = time.perf_counter(), learning_rate(step, options)
        batch = batch_of(train_text, step, options, device)
        with drawn_timeline(options, run, step == first_step + 2):
            loss = trainer.step(batch, lr)
        seconds = time.perf_counter() - begin
        rate, least = batch[0].numel() / seconds, min(least, seconds)
        if step == first_step:
            log.print(memory_line(trainer.memory()))

        done, held_out_loss = step + 1, None
        if done == options.steps or (options.eval_every and done % options.eval_every == 0):
            held_out_loss = trainer.evaluate(held_out_text, options, device)
        log.step(step, loss, held_out_loss, lr, rate, peak_memory_mib(device))
        received = stop.on_any_rank(device)
        if done == options.steps or received or (options.save_every and done % options.save_every == 0):
            tp_ext.save_checkpoint(checkpoint, run.state, optimizer, mesh=mesh, step=done, options=plain_options)
        if received:
            log.close()
            log.print(f"stopped by {signal.Signals(received).name} after step {done}: continue with --resume")
            sys.exit(128 + received)
    log.close()
    if options.tp_invariant:
        log.print(f"weights and optimizer: sha256 {tp_ext.debug.sha256(run.state, optimizer)}")
    if plan is not None:
        log.print(f"a step: {plan.step_time:.4g} s predicted, {least:.4g} s measured, the least of all\n{plan}")
    report(log, options, mesh, device)


def memory_line(own: dict[str, int]) -> str:
    """The bytes on the rank that has most of them; all ranks call this."""
    ranks: list[dict[str, int]] = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    kinds = ", ".join(f"{max(one[kind] for one in ranks) / 2**20:,.1f} MiB of {kind}" for kind in own)
    return f"on a rank at most {kinds}"


def predicted(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> planner.Prediction:
    """The step of this run by the planner, on a profile of this machine that all ranks measure; all ranks call this."""
    axes = {name: mesh[name].size() for name in MESH}
    several = axes["pp"] > 1 and options.schedule not in (None, "GPipe", "1F1B")
    layout = planner.Layout(
        **axes,
        virtual=2 if several else 1,
        schedule=(options.schedule or "1F1B") if axes["pp"] > 1 else "1F1B",
        micro_batch=options.batch_size // (axes["dp"] * axes["ep"] * options.micro_batches),
        zero=options.zero,
        sequence_parallel=options.sequence_parallel,
        recompute=options.recompute,
        offload=options.offload,
        dtype="bf16" if options.dtype == "bfloat16" else "fp32",
    )
    model = planner.transformer(
        layers=options.num_layers,
        hidden=options.hidden_size,
        heads=options.num_heads,
        kv_heads=options.num_kv_heads,
        ffn=options.ffn_hidden_size,
        vocab=config_of(options).vocab_size,
        seq=options.seq_length,
        tied=True,
        experts=options.experts,
        top_k=options.top_k if options.experts else 0,
        shared=options.shared_experts if options.experts else 0,
    )
    machine = planner.measure(device, dist.group.WORLD, minutes=options.plan)
    return planner.predict(model, machine, layout, options.batch_size)


@contextlib.contextmanager
def drawn_timeline(options: argparse.Namespace, run: ParallelRun, wanted: bool) -> Iterator[None]:
    """Draws what the ranks do in a step, with ``--timeline``."""
    if not (options.timeline and wanted):
        yield
        return
    with tp_ext.debug.record_timeline() as timeline:
        yield
    if dist.get_rank() == 0:
        timeline.save(options.out / "timeline.png")
    if (bubble := run.bubble) is not None and dist.get_rank() == 0:
        ideal = "" if run.ideal_bubble is None else f"; {run.ideal_bubble:.1%} by the formula for equal stages"
        print(f"timeline.png: ranks wait for other stages for {bubble:.1%} of the step{ideal}", flush=True)


def report(log: RunLog, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
    """First and last loss, the plot, a sample of the trained model, which each tensor-parallel group loads whole."""
    sample = None
    if options.sample_bytes:
        model = GPT(config_of(options), mesh["tp"]).to(device)
        tp_ext.load_checkpoint(options.out / "checkpoint", model)
        tp_ext.manual_seed(options.seed)
        prompt = torch.tensor([list(options.prompt.encode())], device=device)
        precision = torch.autocast(device.type, torch.bfloat16, enabled=autocast_dtype(options) is not None)
        with precision:
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
