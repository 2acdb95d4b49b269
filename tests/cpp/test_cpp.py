"""Programs of C++ against the installed package: built by CMake, run without Python, with the bits of Python."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tp_ext
from tests.cpp.cases import AdamWOfCpp, Cases
from tests.export.test_export import MAX_SEQ, SECONDS, export, prompt
from tests.helpers import small_gpt
from tests.helpers.paths import CCACHE, ROOT
from tests.helpers.ranks import run
from tp_ext.debug import simulate

# The environment's, whose programs need not be on the PATH, or the machine's
CMAKE = shutil.which("cmake", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CMAKE is None, reason="there is no CMake")]
PACKAGE = Path(tp_ext.__file__).parent
DATA = ROOT / "LICENSE"


def configure(source: Path, build: Path, *options: str) -> subprocess.CompletedProcess:
    command = [CMAKE, "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={tp_ext.cmake_prefix_path}", *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """The folder of the programs, built without a CUDA toolkit, by the compiler that CMake finds or CXX names."""
    build = tmp_path_factory.mktemp("cpp")
    launcher = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={name}" for name in CCACHE]
    configured = configure(ROOT / "tests" / "cpp", build, "-DCMAKE_CXX_FLAGS=-O0", *launcher)
    assert configured.returncode == 0, configured.stderr
    built = subprocess.run([CMAKE, "--build", build], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-4000:]
    return build


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def start_ranks(p: int, *command: str | Path, stderr: int = subprocess.STDOUT) -> list[subprocess.Popen]:
    """Starts p processes; the only folder of their PATH has no Python."""
    port, alone = str(free_port()), {"PATH": "/nowhere", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    of_job = {"WORLD_SIZE": str(p), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    options = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    environments = [alone | ({"RANK": str(rank)} | of_job if p > 1 else {}) for rank in range(p)]
    return [subprocess.Popen(command, env=environment, **options) for environment in environments]


def run_ranks(p: int, *command: str | Path, timeout: float = 120) -> list[str]:
    """Returns the output of each of p processes."""
    ranks = start_ranks(p, *command)
    try:
        texts = [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), texts
    return texts


def reference(rank, group, folder):
    group = group if group.size() > 1 else None
    cases = Cases(group)
    for dtype, name in ((torch.float64, "Double"), (torch.float32, "Float"), (torch.bfloat16, "BFloat16")):
        cases.functions(f"{name}/", dtype)
        for sp in (False, True):
            cases.modules(f"{name}/{'sp' if sp else 'plain'}/", dtype, sp)
    cases.files(folder)
    return cases.results


@pytest.mark.parametrize("p", [1, 2, 3])
def test_functions_and_modules_have_the_bits_of_python(programs, tmp_path, p):
    run_ranks(p, programs / "cases", tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = simulate(reference, p, tmp_path)
    finally:
        torch.set_num_threads(threads)
    for rank in range(p):
        results = load_file(tmp_path / f"rank_{rank}.safetensors")
        assert results.keys() == expected[rank].keys()
        wrong = [name for name, value in expected[rank].items() if not torch.equal(results[name], value)]
        assert not wrong, (len(wrong), wrong[:20])


class Block(torch.nn.Module):
    def __init__(self, group):
        super().__init__()
        self.attention_norm = tp_ext.RMSNorm(48, group=group)
        self.attention = tp_ext.ParallelAttention(48, 6, bias=False, rope=10000.0, group=group)
        self.mlp_norm = tp_ext.RMSNorm(48, group=group)
        self.mlp = tp_ext.ParallelMLP(48, 128, activation="swiglu", bias=False, group=group)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(torch.nn.Module):
    """The model of examples/cpp/gpt.h."""

    def __init__(self, group):
        super().__init__()
        init = tp_ext.random.Normal(0.0, 0.02)
        self.embedding = tp_ext.VocabParallelEmbedding(256, 48, init=init, group=group)
        self.blocks = torch.nn.Sequential(Block(group), Block(group))
        self.norm = tp_ext.RMSNorm(48, group=group)
        self.head = tp_ext.VocabParallelLMHead(48, 256, group=group)

    def loss(self, ids, target):
        return self.head.loss(self.norm(self.blocks(self.embedding(ids))), target)


def train(rank, group, steps):
    group = group if group.size() > 1 else None
    data = torch.frombuffer(bytearray(DATA.read_bytes()), dtype=torch.uint8).long()
    tp_ext.manual_seed(1)
    model = GPT(group)
    optimizer, lines = AdamWOfCpp(model.parameters(), 1e-3), []
    for step in range(steps):
        starts = [(step * 4 + i) * 32 % (len(data) - 33) for i in range(4)]
        window = torch.stack([data[start : start + 33] for start in starts])
        loss = model.loss(window[:, :-1].contiguous(), window[:, 1:].contiguous())
        optimizer.zero_grad()
        loss.backward()
        tp_ext.clip_grad_norm_(model, 1.0)
        optimizer.step()
        lines.append(f"step {step} loss {loss.item():.17g}")
    return lines


@pytest.mark.parametrize("p", [1, 2, 3])
def test_the_example_trains_with_the_losses_of_python(programs, p):
    printed = run_ranks(p, programs / "examples" / "train", "--data", DATA, "--steps", "5")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        lines = simulate(train, p, 5)[0]
    finally:
        torch.set_num_threads(threads)
    assert printed[0].splitlines() == lines
    assert not any(printed[1:])


def test_gloo(programs):
    of_shm, of_gloo = (
        run_ranks(2, programs / "examples" / "train", "--data", DATA, "--steps", "3", "--backend", backend)
        for backend in ("tp_shm", "gloo")
    )
    assert of_gloo == of_shm  # of two ranks each sum has one order


def test_a_killed_rank_is_a_sentence(programs):
    ranks = start_ranks(
        2, programs / "examples" / "train", "--data", DATA, "--steps", "1000000", stderr=subprocess.PIPE
    )
    try:
        ranks[0].stdout.read(1)  # the job runs
        ranks[1].kill()
        _, error = ranks[0].communicate(timeout=30)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 1 and error.startswith("train: tp_shm: rank 0 of 2"), error
    assert "rank 1 has died" in error


def test_the_programs_and_the_library_know_no_python(programs):
    for file in (programs / "cases", programs / "examples" / "train", PACKAGE / "libtp_ext.so"):
        linked = subprocess.run(["ldd", file], capture_output=True, text=True, check=True).stdout
        assert "libtp_ext" in linked or file.suffix == ".so"
        assert not re.search("python", re.sub(r"\S*site-packages\S*", "", linked)), linked
    names = subprocess.run(["nm", "-D", PACKAGE / "libtp_ext.so"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r" _?Py[A-Z_]| THP", names)


def test_the_library_shows_its_interface_alone():
    """Others would be found by other libraries of a program, in place of theirs."""
    headers = [*ROOT.glob("tp_ext/include/tp_ext/*.h"), *ROOT.glob("csrc/**/*.h")]
    text = " ".join(file.read_text() for file in headers)
    declared = set(re.findall(r"TP_EXT_API [^;({]*?(\w+) ?(?:\(| : | \{|\{)", text))
    command = ["nm", "-DC", "--defined-only", PACKAGE / "libtp_ext.so"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = {re.sub(r"^\S+ \w ", "", line).partition("(")[0] for line in lines}
    others = [name for name in names if not declared & set(re.findall(r"\w+", name))]
    assert len(declared) > 40 and not others, sorted(others)[:20]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("--data", "/nowhere"), "--data: '/nowhere' must be a file"),
        (("--data", DATA, "--backend", "mpi"), "backend: 'mpi' must be tp_shm"),
    ],
)
def test_errors_are_sentences(programs, command, message):
    of_job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = subprocess.run([programs / "examples" / "train", *command], env=of_job, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith(f"train: {message}"), ended.stderr


def test_a_variable_that_is_missing_is_named(programs):
    command = [programs / "examples" / "train", "--data", DATA]
    ended = subprocess.run(command, env={"WORLD_SIZE": "2"}, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith("train: RANK: must be set"), ended.stderr


def test_another_torch_is_refused_with_both_versions(tmp_path):
    (tmp_path / "torch/lib").mkdir(parents=True)
    (tmp_path / "torch/lib/libtorch.so").touch()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.3.1+cpu'\ncuda: Optional[str] = None\n")
    refused = configure(ROOT / "examples" / "cpp", tmp_path / "build", f"-DTP_EXT_TORCH={tmp_path / 'torch'}")
    text = " ".join(refused.stderr.split())
    assert refused.returncode != 0
    assert f"built for torch {torch.__version__}" in text and "is torch 2.3.1+cpu" in text


def test_the_module_prints_the_folder():
    printed = subprocess.run([sys.executable, "-m", "tp_ext.cmake"], capture_output=True, text=True, cwd=ROOT)
    assert printed.stdout.strip() == tp_ext.cmake_prefix_path == os.fspath(PACKAGE / "share" / "cmake")


def export_and_continue(group, folder, prompts, options):
    """Exports the model, and continues each prompt by its Python form."""
    model = small_gpt.make(group).eval()
    export(model, prompt(3), folder, generate=True, max_seq=MAX_SEQ)
    exported = tp_ext.load_exported(folder, group)
    with torch.inference_mode():
        return [exported.generate(ids, **options).tolist() for ids in prompts]


@pytest.fixture(scope="module", params=[2, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (1, 3))])
def exported(request, tmp_path_factory):
    """The number of ranks, the folder of an export, prompts, and their continuations by Python."""
    folder, prompts = tmp_path_factory.mktemp("exported") / "export", [prompt(1), prompt(5)]
    options = {"max_new_tokens": 6, "temperature": 0.8, "seed": 3}
    texts = run(export_and_continue, request.param, folder, prompts, options, timeout=SECONDS)[0]
    return request.param, folder, [ids[0].tolist() for ids in prompts], [text[0] for text in texts]


def test_the_program_prints_the_ids_of_python(programs, exported):
    p, folder, prompts, texts = exported
    command = [programs / "examples" / "generate", folder, "--backend", "gloo", "--max-new-tokens", "6", "--prompt"]
    for ids, text in zip(prompts, texts, strict=True):
        printed = run_ranks(p, *command, ",".join(map(str, ids)), "--temperature", "0.8", "--seed", "3")
        assert printed[0].strip() == ",".join(map(str, text))


def test_the_program_refuses_other_exports(programs, exported, tmp_path):
    p, folder, _, _ = exported
    manifest = json.loads((folder / "manifest.json").read_text())
    weights, library = "rank_00000.weights", next(name for name in manifest["files"] if name.endswith(".so"))
    for number, (changes, error) in enumerate(
        [
            ({"torch": "2.0.0"}, "must be the version of the export, 2.0.0"),
            ({"isa": ["avx9000"]}, "this processor has no avx9000"),
            ({"p": 9}, "must be the 9 of the export"),
            ({"files": manifest["files"] | {weights: "0"}}, "another file than the one that was exported"),
            ({"files": manifest["files"] | {library: "0"}}, "another file than the one that was exported"),
            ({"files": {weights: manifest["files"][weights]}}, "names no weights or no library of rank 0"),
        ]
    ):
        other = shutil.copytree(folder, tmp_path / f"changed{number}")
        (other / "manifest.json").write_text(json.dumps(manifest | changes))
        with pytest.raises(AssertionError, match=error):
            run_ranks(p, programs / "examples" / "generate", other, "--backend", "gloo", "--prompt", "1")
    with pytest.raises(AssertionError, match="has no manifest"):
        run_ranks(p, programs / "examples" / "generate", tmp_path, "--prompt", "1")


def files_to_leave(process, *folders):
    """The files that a process has mapped from folders of temporary files, other than those of these folders."""
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in maps if line.count("/")}
    kept = [file for file in files if file.startswith(("/tmp/", "/dev/shm/")) and not file.endswith(" (deleted)")]
    return [file for file in kept if not file.startswith(tuple(f"{folder}/" for folder in folders))]


def test_two_programs_at_once_of_which_one_loses_a_rank(programs, exported):
    """What a process has mapped and not deleted it would leave when it is killed."""
    p, folder, _, _ = exported
    jobs = [start_ranks(p, programs / "cases", folder, "generate", stderr=subprocess.PIPE) for _ in range(2)]
    try:
        for rank in (*jobs[0], *jobs[1]):
            assert rank.stdout.readline() == "5\n", rank.communicate()
            assert f"{folder}/rank_" in Path(f"/proc/{rank.pid}/maps").read_text()
            assert not files_to_leave(rank, folder, programs)
        jobs[0][-1].kill()
        for rank in jobs[0][:-1]:
            _, error = rank.communicate(timeout=60)
            assert rank.returncode == 1 and re.search(rf"tp_shm: rank \d of {p}.*: rank {p - 1} has died", error), error
        for rank in jobs[1]:
            assert rank.stdout.readline() == "5\n"
    finally:
        for rank in (*jobs[0], *jobs[1]):
            rank.kill()
            rank.communicate()
