"""Greedy generation of an exported model in a C++ program on two ranks over tp_shm, and of the same model in Python.

The Llama of ``bench_generate`` and one of a quarter of its width, in fp32: 64 tokens after 8, batch 1 (``--quick``: the
narrow one, 8 tokens). "products": those of a token's hidden states and all weights, nothing else; what a token takes
beyond them is the host's time. "start": from the start of the programs to the end of the first token.
"""

import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.functional import linear

import tp_ext
from benchmarks.layers.bench_generate import RANKS, VOCAB, Llama
from benchmarks.lib import interleave, report
from benchmarks.lib.report import Record
from tests.helpers import ranks
from tests.helpers.paths import ROOT

PROMPT = 8
Case = tuple[int, int]  # hidden size, new tokens
Programs = list[subprocess.Popen[str]]


class Exported(Llama):
    """The model as an export calls it: logits, and new caches where there are none."""

    def forward(self, ids: Tensor, caches: list[tp_ext.KVCache] | None = None) -> Tensor:
        if caches is None:
            caches = [block.attention.new_cache(len(ids), ids.shape[1]) for block in self.blocks]
        return self.head(super().forward(ids, caches))


def config(width: int) -> transformers.LlamaConfig:
    heads = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    return transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=width, intermediate_size=width * 11 // 4, **heads)


@functools.cache
def model(width: int, kind: type[Llama]) -> Llama:
    tp_ext.manual_seed(0)
    return kind(config(width), interleave.group_on("tp_shm"), True).eval()


def prompt() -> Tensor:
    return torch.arange(1, 1 + PROMPT)[None]


@functools.cache
def by_python(width: int, count: int) -> Callable[[], Tensor]:
    return lambda: model(width, Llama).generate(prompt(), count)


@functools.cache
def products(width: int, count: int) -> Callable[[], None]:
    matrices = [p for name, p in model(width, Llama).named_parameters() if p.dim() == 2 and "embedding" not in name]
    inputs = [torch.randn(1, matrix.shape[1]) for matrix in matrices]

    @torch.inference_mode()
    def multiply() -> None:
        for _ in range(count):
            for x, matrix in zip(inputs, matrices, strict=True):
                linear(x, matrix)

    return multiply


def write_export(_: Any, width: int, count: int, folder: Path) -> list[int]:
    """In a rank: writes the export. Returns the ids of Python's model."""
    options = {"generate": True, "max_seq": PROMPT + count}
    tp_ext.export_model(model(width, Exported), prompt(), folder, **options)
    exported = tp_ext.load_exported(folder, interleave.group_on("tp_shm")).generate(prompt(), max_new_tokens=count)
    assert torch.equal(exported, by_python(width, count)())
    return exported[0].tolist()


def build(folder: Path) -> Path:
    cmake = shutil.which("cmake", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    source = ROOT / "benchmarks" / "layers"
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_PREFIX_PATH={tp_ext.cmake_prefix_path}"]
    subprocess.run([cmake, "-S", source, "-B", folder, *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", folder], check=True, stdout=subprocess.DEVNULL)
    return folder / "exported"


def start(program: Path, export: Path) -> Programs:
    of_job = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [program, export, str(PROMPT)]
    environments = [os.environ | of_job | {"RANK": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(RANKS)]
    return [subprocess.Popen(command, env=environment, **pipes) for environment in environments]


def generate(programs: Programs, count: int) -> float:
    """Returns the seconds of a text on the slowest rank."""
    for rank in programs:
        print(count, file=rank.stdin, flush=True)
    return max(float(rank.stdout.readline()) for rank in programs)


def end(programs: Programs) -> None:
    for rank in programs:
        rank.communicate()


def seconds_to_first_token(program: Path, export: Path) -> float:
    begin = time.perf_counter()
    programs = start(program, export)
    generate(programs, 1)
    seconds = time.perf_counter() - begin
    end(programs)
    return seconds


def measure(case: Case, seconds: float, block: float) -> list[Record]:
    width, count = case
    with tempfile.TemporaryDirectory() as scratch:
        program, export = build(Path(scratch) / "build"), Path(scratch) / "export"
        ranks.run(write_export, RANKS, width, count, export, timeout=600)
        programs = start(program, export)
        subjects: dict[str, interleave.Block] = {
            "C++": lambda calls: [generate(programs, count) for _ in range(calls)],
            "Python": interleave.on_ranks(RANKS, by_python, width, count),
            "products": interleave.on_ranks(RANKS, products, width, count),
        }
        times = interleave.take(subjects, seconds, block, turns=3 if seconds else 1)
        end(programs)
        starts = [seconds_to_first_token(program, export) for _ in range(5 if seconds else 1)]
    token = {name: statistics.median(values) / count for name, values in times.items()}
    return [
        {
            "case": name,
            "width": width,
            "tokens": count,
            "us_of_token": token[name] * 1e6,
            "host_us_of_token": None if name == "products" else (token[name] - token["products"]) * 1e6,
            "tokens_per_s": None if name == "products" else 1 / token[name],
            "times_python": None if name == "products" else token["Python"] / token[name],
            "start_s": statistics.median(starts) if name == "C++" else None,
        }
        for name in times
    ]


draw = report.bars("hidden {width}", "us_of_token", "microseconds of a token, medians", None)


def main() -> None:
    def cases(quick: bool) -> list[Case]:
        return [(128, 8)] if quick else [(512, 64), (128, 64)]

    report.run(__file__, __doc__, cases, measure, draw, "transformers")


if __name__ == "__main__":
    main()
