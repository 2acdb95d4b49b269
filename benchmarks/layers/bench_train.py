"""Training the GPT of examples/gpt.py on two ranks: ours, the peers, and one process; tokens a second, equal losses.

4 layers, hidden 256, 4 heads, ffn 1024, sequences of 256 bytes of Python's standard library, 8 a step, AdamW, fp32, no
dropout. The peers' model is the same in plain torch (plain_gpt.py), from the same weights on the same batches; "dense"
is that model in one process while the ranks wait, "ours, 1 thread" our model there. Every loss of every case must equal
dense's within 1e-4, otherwise nothing is reported. "pinned" and "memory" as in bench_mlp.py.

``--bf16`` compares fp32, autocast to bf16 over fp32 parameters, and parameters in bf16, of our model and of plain
torch, at three widths; losses within 0.1 of those of plain torch in fp32.
"""

import argparse
import contextlib
import functools
import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import batch_of, read_text
from gpt import GPT, GPTConfig

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.interleave import ranks
from benchmarks.lib.report import Record
from benchmarks.peers import layers as peers
from benchmarks.peers.plain_gpt import PlainGPT

RANKS = 2
PEERS = {"megatron-core": peers.WithMegatron, "DTensor": peers.WithDTensor}
TOLERANCE = 1e-4  # of the loss, in fp32 from equal weights: measured 1e-5 over some tens of steps
BF16_TOLERANCE = 0.1  # measured 0.06: a loss of 4 in bf16 is rounded to 0.016
PRECISIONS = ("fp32", "autocast", "bf16")


@dataclass(frozen=True)
class Sizes:
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    ffn: int = 1024
    seq: int = 256
    batch: int = 8


class Training:
    """``training()`` does one step and keeps its loss."""

    def __init__(self, model: torch.nn.Module, sizes: Sizes, around: Callable[[], Any], precision: str) -> None:
        self.model, self.around, self.losses = model, around, list[float]()
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")
        if precision == "bf16":
            model.bfloat16()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
        self.data = Namespace(seed=0, seq_length=sizes.seq, batch_size=sizes.batch)

    def __call__(self) -> None:
        batch = batch_of(text(), len(self.losses), self.data, torch.device("cpu"))
        with self.around():
            with self.autocast:
                loss = self.model.loss(*batch)
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        self.losses.append(peers.local(loss.detach()).item())


@functools.cache
def text() -> torch.Tensor:
    return torch.frombuffer(bytearray(read_text(None, 1 << 20)), dtype=torch.uint8)


def our_model(sizes: Sizes, group: Any) -> GPT:
    tp_ext.manual_seed(0)
    config = GPTConfig(
        hidden_size=sizes.hidden,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.heads,
        ffn_hidden_size=sizes.ffn,
        dropout=0.0,
    )
    return GPT(config, group)


def plain_model(sizes: Sizes, peer: peers.Plain) -> PlainGPT:
    state = {name: value.detach() for name, value in our_model(sizes, None).state_dict().items()}
    return PlainGPT(peer, state, sizes.layers, sizes.heads, sizes.seq)


@functools.cache
def training(name: str, backend: str, sizes: Sizes, threads: int = 1, precision: str = "fp32") -> Training:
    """The training of a case, on a rank, or with backend "" in this process."""
    group = interleave.group_on(backend) if backend else None
    if name == "ours":
        return Training(our_model(sizes, group), sizes, contextlib.nullcontext, precision)
    peer = PEERS[name](group) if name in PEERS else peers.Plain()
    return Training(plain_model(sizes, peer), sizes, peer.training, precision)


def losses_on_rank(_: Any, *case: Any) -> list[float]:
    return training(*case).losses


def check(cases: dict[str, tuple], want: list[float], tolerance: float = TOLERANCE) -> dict[str, float]:
    """The largest difference of each case's losses, on any rank, from ``want``; raises if one is too large."""
    found = {}
    for name, case in cases.items():
        each = ranks.run(losses_on_rank, RANKS, *case) if case[1] else [training(*case).losses]
        assert all(len(losses) == len(want) for losses in each), f"{name}: another number of steps"
        found[name] = max(abs(a - b) for losses in each for a, b in zip(losses, want, strict=True))
        assert found[name] <= tolerance, f"{name}: losses {each} differ by {found[name]:.1e} from dense's {want}"
    return found


def blocks_of(cases: dict[str, tuple], one: list[int], cores: list[int]) -> dict[str, interleave.Block]:
    """A block of each case, after a step of each; ``one``: the cores of a case with one thread in this process."""
    blocks = {
        name: interleave.on_ranks(RANKS, training, *case)
        if case[1]
        else interleave.here(training(*case), case[3], one if case[3] == 1 else cores)
        for name, case in cases.items()
    }
    for block in blocks.values():
        block(1)
    return blocks


def measure(sizes: Sizes, way: tuple[bool, bool], rounds: int, steps: int) -> list[Record]:
    cores = interleave.cores()
    pinned, kept = way
    interleave.pin_ranks(RANKS, cores, pinned)
    interleave.keep_memory(RANKS, kept)
    one = cores[:1] if pinned else cores
    cases: dict[str, tuple] = {
        "dense, 1 thread": ("dense", "", sizes, 1),
        "dense, 2 threads": ("dense", "", sizes, 2),
        "ours, 1 thread": ("ours", "", sizes, 1),
        "megatron-core, gloo": ("megatron-core", "gloo", sizes),
        **{f"{name}, {over}": (name, over, sizes) for name in ("DTensor", "ours") for over in interleave.BACKENDS},
    }
    blocks = blocks_of(cases, one, cores)
    dense = training(*cases["dense, 1 thread"]).losses
    check(cases, dense)
    times = interleave.take(blocks, 0, turns=rounds, count=steps)
    apart = check(cases, dense)
    tokens = sizes.seq * sizes.batch
    rates = {name: tokens / statistics.median(values) for name, values in times.items()}
    return [
        {
            "case": name,
            **interleave.described(pinned, kept),
            "tokens_per_s": rates[name],
            "best_tokens_per_s": tokens / min(times[name]),
            "speedup": rates[name] / rates["dense, 1 thread"],
            "to_2_threads": rates[name] / rates["dense, 2 threads"],
            "to_megatron": rates[name] / rates["megatron-core, gloo"],
            "to_dtensor": rates[name] / rates["DTensor, gloo"],
            "loss": training(*cases["dense, 1 thread"]).losses[-1],
            "loss_difference": f"{apart[name]:.1e}",
            "steps": len(times[name]),
        }
        for name in cases
    ]


def measure_precisions(sizes: Sizes, rounds: int, steps: int) -> list[Record]:
    cores = interleave.cores()
    interleave.pin_ranks(RANKS, cores, False)
    interleave.keep_memory(RANKS, True)
    models = {"dense, 1 thread": ("dense", ""), "ours, 1 thread": ("ours", ""), "ours, tp_shm": ("ours", "tp_shm")}
    cases = {
        f"{name}, {precision}": (*model, sizes, 1, precision)
        for name, model in models.items()
        for precision in PRECISIONS
    }
    blocks = blocks_of(cases, cores[:1], cores)
    times = interleave.take(blocks, 0, turns=rounds, count=steps)
    apart = check(cases, training(*cases["dense, 1 thread, fp32"]).losses, BF16_TOLERANCE)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        {
            "hidden": sizes.hidden,
            "case": name,
            "tokens_per_s": sizes.seq * sizes.batch / medians[f"{name}, {precision}"],
            "precision": precision,
            "to_fp32": medians[f"{name}, fp32"] / medians[f"{name}, {precision}"],
            "to_dense": medians[f"dense, 1 thread, {precision}"] / medians[f"{name}, {precision}"],
            "loss_difference": f"{apart[f'{name}, {precision}']:.1e}",
        }
        for name in models
        for precision in PRECISIONS
    ]


draw = report.bars(
    f"GPT on {RANKS} ranks, {{pinned}}, memory {{memory}}", "tokens_per_s", "tokens a second, median", None
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_options(parser)
    parser.add_argument("--bf16", action="store_true", help="compare precisions, prints a table alone")
    args = parser.parse_args()
    tiny = Sizes(layers=1, hidden=32, heads=2, ffn=64, seq=32, batch=2)
    if args.bf16:
        print(", ".join(f"{key} {value}" for key, value in report.stamp("cpu").items()))
        widths = (Sizes(hidden=192, ffn=512, heads=3), Sizes(), Sizes(hidden=512, ffn=2048, heads=8))
        for sizes in (tiny,) if args.quick else widths:
            report.print_table(measure_precisions(sizes, 5, 1))
        return
    sizes = tiny if args.quick else Sizes()
    rounds, steps = (1, 1) if args.quick else (12, 3) if args.full else (4, 2)
    run_stamp = report.stamp("cpu", "megatron-core")
    print(", ".join(f"{key} {value}" for key, value in run_stamp.items()))
    records: list[Record] = []
    for way in interleave.ways_of_processes(RANKS, args.quick):
        rows = measure(sizes, way, rounds, steps)
        report.print_table(rows)
        records += rows
    if args.csv:
        report.write(args.csv, Path(__file__).stem, run_stamp, records, lambda figure: draw(figure, records))


if __name__ == "__main__":
    main()
