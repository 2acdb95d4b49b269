"""Reinforcement learning with a model that trains on one layout and generates on two others, without files:

    torchrun --standalone --nproc-per-node 4 examples/rl.py
    torchrun --standalone --nproc-per-node 4 examples/rl.py --files

It trains on (dp 2, tp 2); of the completions of a round a generator on tp 4 makes one half, one on rank 0 alone the
other. ``--files`` moves the weights by a checkpoint instead: the tokens are the same, and so is their digest, which is
printed last. Prompts are real text (``--data``, default Python's own source); the reward is the share of lower-case
letters, the loss that of REINFORCE with the mean reward as baseline (Williams, Machine Learning 8, 1992).
"""

import argparse
import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import read_text
from gpt import GPT, GPTConfig
from torch import Tensor

import tp_ext

PROMPT, NEW = 24, 16  # bytes


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text file, or a folder; default: Python's own source")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="completions of a round, a multiple of 4")
    parser.add_argument("--files", action="store_true", help="move the weights by a checkpoint, to compare")
    return parser.parse_args()


class Generators:
    """The model on tp 4 and on rank 0 alone, and how they get the weights of the one that trains."""

    def __init__(self, config: GPTConfig, trained: Any, by_files: bool) -> None:
        self.whole = GPT(config, dist.group.WORLD)
        self.alone = GPT(config) if dist.get_rank() == 0 else None
        self.first = dist.new_group([0])
        self.trained, self.folder = trained, [tempfile.mkdtemp() if by_files and dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(self.folder)
        if not by_files:
            self.plans = [tp_ext.refit.plan(trained, target) for target in (self.whole, self.alone)]

    def update(self) -> int:
        """Moves the weights; returns the bytes that this rank has received from others."""
        if not self.folder[0]:
            return sum(plan.run().received for plan in self.plans)
        path = f"{self.folder[0]}/checkpoint"
        tp_ext.save_checkpoint(path, self.trained)
        tp_ext.load_checkpoint(path, self.whole)
        if self.alone is not None:
            tp_ext.load_checkpoint(path, self.alone, process_group=self.first)
        return 0

    def complete(self, prompts: Tensor, seed: int) -> Tensor:
        """Returns the completed prompts, the same on all ranks: the first half from tp 4, the other from rank 0."""
        torch.manual_seed(seed)
        one, other = prompts.chunk(2)
        one = self.whole.generate(one, NEW)
        torch.manual_seed(seed + 1)
        other = other.new_empty(len(other), PROMPT + NEW) if self.alone is None else self.alone.generate(other, NEW)
        dist.broadcast(other, 0)
        return torch.cat([one, other])


def train(options: argparse.Namespace) -> str:
    """Trains, and returns the digest of all tokens."""
    torch.set_default_dtype(torch.float64)  # sums of any layout choose the same tokens
    text = torch.frombuffer(bytearray(read_text(options.data, 2**20)), dtype=torch.uint8).long()
    config = GPTConfig(hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=4, ffn_hidden_size=128, dropout=0.0)
    mesh = tp_ext.init_mesh("cpu", dp=2, tp=2)
    with torch.device("meta"):
        model = GPT(config, mesh["tp"])

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        """``target``: the next byte, -100 in the prompt, and the advantage of its completion."""
        ids, advantage = target[..., 0].long().flatten(), target[..., 1].flatten()
        each = tp_ext.vocab_parallel_cross_entropy(
            logits, ids, mesh["tp"], vocab_size=config.vocab_size, reduction="none"
        )
        return (each * advantage).sum()

    def count(target: Tensor) -> Tensor:
        return (target[..., 0] != -100).sum()

    run = tp_ext.parallelize(model, mesh, loss=loss, reduction="sum", count=count)
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-3)
    generators, digest = Generators(config, run.state, options.files), hashlib.sha256()
    for number in range(options.rounds):
        begun = time.perf_counter()
        received = generators.update()
        moved = time.perf_counter() - begun
        starts = torch.randint(
            len(text) - PROMPT, (options.batch_size, 1), generator=torch.Generator().manual_seed(number)
        )
        ids = generators.complete(text[starts + torch.arange(PROMPT)], 2 * number)
        digest.update(ids.numpy().tobytes())
        new = ids[:, PROMPT:]
        reward = ((new >= ord("a")) & (new <= ord("z"))).double().mean(1)
        advantage = (reward - reward.mean())[:, None].expand(-1, ids.shape[1] - 1)
        target = ids[:, 1:].clone()
        target[:, : PROMPT - 1] = -100
        rows = slice(run.data_rank, None, run.data_size)
        run.step(ids[rows, :-1].contiguous(), torch.stack([target.double(), advantage], -1)[rows])
        run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"round {number:2}  reward {reward.mean():.3f}  moved {received} bytes in {moved * 1e3:.0f} ms")
    return digest.hexdigest()


if __name__ == "__main__":
    OPTIONS = parse_options()
    dist.init_process_group("tp_shm")
    DIGEST = train(OPTIONS)
    if dist.get_rank() == 0:
        print("digest of all tokens", DIGEST)
    dist.destroy_process_group()
