"""Times every choice of the launch table on this GPU and writes the fastest ones: csrc/kernels/launch_table.inc.

    make gpu-tune                                          # in at most 6 minutes, with the library that is built
    python -m benchmarks.gpu.tune --device cpu --quick     # a dry run without a GPU: the table comes into the folder

A choice is timed as the benchmarks are (CUDA events, cold L2 cache, medians, in turns with the rule, a copy and, for
some widths, torch.compile), after its results were compared with the rule's. An entry is written where a choice is
faster than the rule by more than noise. FOLDER/tune.json and the table are written after each width, what gains most
first; entries of other architectures stay. The next build reads the table.
"""

import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.check import ROOT, begin, options
from benchmarks.lib.harness import Case, Forward, compare, passes, run, torch_peers
from benchmarks.lib.timing import Call
from tp_ext import _C, _ops

TABLE = ROOT / "csrc" / "kernels" / "launch_table.inc"
NAMES = {  # family -> its name in C++
    "layer_norm_bwd": "kLayerNormBackward",
    "rms_norm_bwd": "kRmsNormBackward",
    "ce_stats": "kCeStats",
    "ce_bwd": "kCeBackward",
    "columns_fwd": "kColumnsForward",
    "columns_bwd": "kColumnsBackward",
    "dropout_fwd": "kDropoutForward",
    "dropout_bwd": "kDropoutBackward",
    "embedding_bwd": "kEmbeddingBackward",
    "rms_norm_fwd": "kRmsNormForward",
    "layer_norm_fwd": "kLayerNormForward",
    "rope": "kRope",
    "random_fill": "kRandomFill",
}
Choice = tuple[int, int, int, int, int]  # vectors, threads, rows, blocks, stages: csrc/kernels/launch_table.h
NORM_CHOICES = [(vectors, 0, 0, blocks, stages) for stages in (1, 2) for vectors in (1, 2, 4) for blocks in (0, 2, 8)]
NORM_FORWARD_CHOICES = [(vectors, 0, 0, 0, 0) for vectors in (1, 2, 4)]
CE_CHOICES = [(0, 32, rows, 0, 1) for rows in (1, 2, 4, 8, 16)] + [(0, t, 1, 0, 1) for t in (64, 128, 256, 512)]
CE_AHEAD_CHOICES = [(0, 32, rows, blocks, 2) for rows in (2, 8) for blocks in (0, 2, 16)]
CE_AHEAD_BYTES = 2048  # of a row: kCeKept in csrc/kernels/vocab_cross_entropy.cuh
COLUMN_CHOICES = [(0, 0, 0, 1 << power, 0) for power in (11, 12, 13, 15)]
DROPOUT_CHOICES = [(vectors, 0, 0, blocks, 0) for vectors in (1, 2) for blocks in (0, 1 << 11, 1 << 13)]
EMBEDDING_CHOICES = [(4, 0, 0, 0, 0), (8, 0, 0, 0, 0)]
ROPE_CHOICES = [(0, threads, 0, blocks, 0) for threads in (32, 64, 128, 256) for blocks in (0, 1 << 10, 1 << 12)]
FILL_CHOICES = [(0, 0, 0, 1 << power, 0) for power in (10, 11, 12, 14)]
FLAT = 256  # columns of half types without a bias, 32 vectors: flat_columns in csrc/kernels/column_sum.cuh
DROPPED = 0.1  # of the elements
GAIN = 1.02  # times as fast as the rule: less is noise
COMPILED = (FLAT, 1024, 4096)  # widths at which the peer is timed, too: each costs torch.compile seconds
PEER = "torch.compile"  # torch's operators as they are, in a dry run
EPS = 1e-5


Made = Callable[[str, torch.dtype, int, int], Case]  # of device, dtype, rows, width: a call, and torch's


class Subject(NamedTuple):
    family: str
    width: int
    dtype: torch.dtype
    choices: Sequence[Choice]
    make: Made


def made(
    backward: bool, device: str, ours: Forward, eager: Forward, inputs: list[Tensor], grad: Tensor, moved: int
) -> Case:
    """Returns the pass of both; `moved`: bytes."""
    compiled = torch_peers(eager, device).get(PEER, eager)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    return passes("", ours, {PEER: compiled}, leaves, grad, (moved, moved))[backward]


def norm(centred: bool, backward: bool, device: str, dtype: torch.dtype, rows: int, width: int) -> Case:
    x, grad = (torch.randn(rows, width, dtype=dtype, device=device) for _ in range(2))
    params = [torch.randn(width, dtype=dtype, device=device) for _ in range(2 if centred else 1)]

    def eager(x: Tensor, *params: Tensor) -> Tensor:
        if centred:
            return F.layer_norm(x, (width,), *params, eps=EPS)
        return F.rms_norm(x, (width,), *params, eps=EPS)

    ours = partial(_ops.layer_norm if centred else _ops.rms_norm, eps=EPS)
    return made(backward, device, ours, eager, [x, *params], grad, (2 + backward) * x.nbytes)


def cross_entropy(backward: bool, device: str, dtype: torch.dtype, rows: int, width: int) -> Case:
    logits = torch.randn(rows, width, dtype=dtype, device=device)
    target = torch.randint(width, (rows,), device=device)

    def ours(x: Tensor) -> Tensor:
        cut = ("", 0, width, width, -100, 0.0, 0.0)
        return _ops.vocab_parallel_cross_entropy(x, target, *cut, "mean", False)

    def eager(x: Tensor) -> Tensor:
        return F.cross_entropy(x, target)

    return made(backward, device, ours, eager, [logits], logits.new_ones(()), (1 + backward) * logits.nbytes)


def columns(device: str, dtype: torch.dtype, rows: int, width: int) -> Case:
    x, bias = torch.randn(rows, width, dtype=dtype, device=device), torch.randn(width, dtype=dtype, device=device)

    def eager(x: Tensor, bias: Tensor) -> Tensor:
        return F.silu(x + bias)

    return made(False, device, partial(_ops.bias_act, activation="silu"), eager, [x, bias], x, 2 * x.nbytes)


def flat(backward: bool, device: str, dtype: torch.dtype, rows: int, width: int) -> Case:
    x, grad = (torch.randn(rows, width, dtype=dtype, device=device) for _ in range(2))
    ours = partial(_ops.bias_act, bias=None, activation="silu")
    return made(backward, device, ours, F.silu, [x], grad, (2 + backward) * x.nbytes)


def dropout(backward: bool, device: str, dtype: torch.dtype, rows: int, width: int) -> Case:
    x, residual = (torch.randn(rows, width, dtype=dtype, device=device) for _ in range(2))
    bias, seed = torch.randn(width, dtype=dtype, device=device), torch.tensor(5, device=device)

    def ours(x: Tensor, bias: Tensor) -> Tensor:
        return _ops.bias_dropout_residual(x, bias, residual, seed, DROPPED, width, width, 0)

    def eager(x: Tensor, bias: Tensor) -> Tensor:
        return residual + F.dropout(x + bias, DROPPED)

    return made(backward, device, ours, eager, [x, bias], residual, (3 - backward) * x.nbytes)


def embedding_backward(device: str, dtype: torch.dtype, rows: int, width: int) -> Case:
    """Eight tokens an id."""
    vocab = max(1, rows // 8)
    weight = torch.randn(vocab, width, dtype=dtype, device=device)
    ids, grad = torch.randint(vocab, (rows,), device=device), torch.randn(rows, width, dtype=dtype, device=device)

    def ours(weight: Tensor) -> Tensor:
        return _ops.vocab_parallel_embedding(ids, weight, "", 0, vocab, vocab, False, None)

    return made(True, device, ours, partial(F.embedding, ids), [weight], grad, grad.nbytes + weight.nbytes)


def rope(device: str, dtype: torch.dtype, rows: int, width: int) -> Case:
    """Heads of 128 features, all of them rotated."""
    head_dim = min(width, 128)
    x = torch.randn(1, rows, width // head_dim, head_dim, dtype=dtype, device=device)
    cos, sin = _ops.rope_tables(torch.arange(rows, device=device), head_dim, 10000.0, torch.float32)

    def eager(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, -1)
        turned = first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None]
        return torch.cat(turned, -1).to(x.dtype)

    return made(False, device, lambda x: _ops.rope(x, cos, sin), eager, [x], x, 2 * x.nbytes)


def random_fill(device: str, dtype: torch.dtype, rows: int, width: int) -> Case:
    seed = torch.tensor(5, device=device)
    x, y = (torch.empty(rows, width, dtype=dtype, device=device) for _ in range(2))
    turns = itertools.cycle((x, y))  # the results of a choice and of the rule must not be one tensor

    def ours() -> Tensor:
        to = next(turns)
        _ops.philox_normal_(to, seed, 0.0, 1.0, width, width, 0)
        return to

    return Case("", ours, {PEER: x.normal_}, bytes_moved=x.nbytes)


def subjects() -> Iterator[Subject]:
    """Yields the cases, those furthest behind torch.compile first (docs/reference/kernels.md)."""
    half, single = torch.bfloat16, torch.float32
    for width in (1024, 4096, 128, 2048, 8192, 256, 512):
        for centred, family in ((True, "layer_norm"), (False, "rms_norm")):
            yield Subject(f"{family}_bwd", width, half, NORM_CHOICES, partial(norm, centred, True))
            yield Subject(f"{family}_fwd", width, half, NORM_FORWARD_CHOICES, partial(norm, centred, False))
    for width in (1024, 4096, 8192):
        for backward, family in ((True, "dropout_bwd"), (False, "dropout_fwd")):
            yield Subject(family, width, half, DROPOUT_CHOICES, partial(dropout, backward))
        yield Subject("embedding_bwd", width, half, EMBEDDING_CHOICES, embedding_backward)
    for width in (1024, 4096):
        yield Subject("random_fill", width, half, FILL_CHOICES, random_fill)
        yield Subject("rope", width, half, ROPE_CHOICES, rope)
    for backward, family in ((True, "columns_bwd"), (False, "columns_fwd")):
        yield Subject(family, FLAT, half, COLUMN_CHOICES, partial(flat, backward))
    for width in (1024, 4096, 32768, 131072, 2048, 8192, 16384, 50257):
        for backward, family in ((False, "ce_stats"), (True, "ce_bwd")):
            for dtype in (half, single) if width <= 8192 else (half,):
                ahead = CE_AHEAD_CHOICES if width * dtype.itemsize <= CE_AHEAD_BYTES else []
                yield Subject(family, width, dtype, CE_CHOICES + ahead, partial(cross_entropy, backward))
    for width in (1024, 4096, 16384):
        for dtype in (half, single):
            yield Subject("columns_fwd", width, dtype, COLUMN_CHOICES, columns)


def trying(family: str, choice: Choice | None, call: Call) -> Call:
    """The call, launched by this choice; None: by the rule alone."""

    def tried() -> object:
        _C.try_launch(family, choice or (0, 0, 0, 0, 0))
        try:
            return call()
        finally:
            _C.try_launch(family, None)

    return tried


def measure(subject: Subject, device: str, size: int, seconds: float, turns: int) -> dict[str, Any]:
    """The median of each choice, of the rule, of the peer and of a copy, in ms."""
    torch.manual_seed(0)
    rows = max(1, size // subject.dtype.itemsize // subject.width)
    own = subject.make(device, subject.dtype, rows, subject.width)
    rule = trying(subject.family, None, own.ours)
    calls = {str(choice): trying(subject.family, choice, own.ours) for choice in subject.choices}
    alike = Case(f"{subject.family} {subject.width}", rule, calls)

    def check() -> None:
        for choice in calls:
            compare(alike, choice)

    timed = calls | (dict(own.peers) if subject.width in COMPILED else {})
    case = Case(alike.name, rule, timed, check, own.bytes_moved, None, (rows, subject.width))
    records = run([case], device, seconds, turns)
    times: dict[str, float] = {str(record["peer"]): record["peer_ms"] for record in records}  # type: ignore[misc]
    first: dict[str, Any] = records[0]
    row = {"family": subject.family, "width": subject.width, "bytes": subject.dtype.itemsize, "shape": first["shape"]}
    row |= {"rule_ms": first["ours_ms"], "copy_ms": first["copy_ms"], "peer_ms": times.pop(PEER, None)}
    best = min(times, key=lambda choice: times[choice])
    gains = first["ours_ms"] >= GAIN * times[best]
    return row | {"choices_ms": times, "best": list(map(int, re.findall(r"\d+", best))) if gains else None}


def entry(row: dict[str, Any], arch: int) -> str:
    """A line of the table. The width is that of csrc/kernels/launch_table.h: its power of two, rounded up."""
    width = (row["width"] - 1).bit_length()
    choice = ", ".join(map(str, row["best"]))
    return f"{{Family::{NAMES[row['family']]}, {row['bytes']}, {width}, {arch}, {{{choice}}}}},"


def write_table(path: Path, rows: Sequence[dict[str, Any]], arch: int) -> None:
    """Replaces the entries of what was measured on this architecture; the others stay."""
    text = TABLE.read_text().splitlines()
    comments = [line for line in text if line.startswith("//")]
    measured = {entry(row | {"best": []}, arch).partition(" {}")[0] for row in rows}
    entries = [line for line in text if line.startswith("{") and line.rpartition(" {")[0] not in measured]
    entries += [entry(row, arch) for row in rows if row["best"]]
    new = path.with_suffix(".new")
    new.write_text("\n".join([*comments, *sorted(entries), ""]))
    new.replace(path)


def main(arguments: list[str] | None = None) -> int:
    parser = options("Finds the fastest launch of each family of kernels on this GPU.")
    parser.add_argument("--families", default="", metavar="PATTERN", help="those whose name matches")
    parser.add_argument("--seconds", type=float, default=330.0, help="no width is begun after as many")
    args = parser.parse_args(arguments)
    results = begin("gpu-tune", args, torch.get_num_threads())
    if not results:
        return 2
    start, arch = time.monotonic(), int((results["arch"] or "0.0").replace(".", ""))
    folder = args.out or ROOT / "runs" / "gpu_tune"
    folder.mkdir(parents=True, exist_ok=True)
    table = TABLE if results["gpu"] else folder / TABLE.name
    results |= {"rows": [], "failed": {}, "left_out": []}
    for subject in subjects():
        name = f"{subject.family} {subject.width} {subject.dtype}"
        if not re.search(args.families, subject.family):
            continue
        if time.monotonic() - start > args.seconds:
            results["left_out"].append(name)
        else:
            try:
                seconds, turns = (0.0, 1) if args.quick else (0.4, 10)
                results["rows"].append(measure(subject, args.device, args.size << 20, seconds, turns))
                write_table(table, results["rows"], arch)
                row = results["rows"][-1]
                print(name, *(f"{key} {row[key]}" for key in ("rule_ms", "copy_ms", "peer_ms", "best")), flush=True)
            except Exception as error:  # the others are measured, too
                results["failed"][name] = repr(error)
                print(f"{name}: FAILED {error!r}", flush=True)
        results["seconds"] = round(time.monotonic() - start, 1)
        (folder / "tune.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(results['rows'])} widths, {len(results['left_out'])} left out: {args.out / 'tune.json'}, {table}")
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
