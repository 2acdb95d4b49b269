"""The build says in one sentence what is missing, the package what it was built for; the sdist is whole."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

import tp_ext._build as tp_build
from tests.helpers.paths import ROOT

PACKAGE = Path(tp_build.__file__).parent

pytestmark = pytest.mark.core


def run(*command: str | Path, cwd: Path = ROOT, **env: str | Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, **{name: str(value) for name, value in env.items()}}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def setup_py(tmp_path: Path, line: int = -1, **env: str | Path) -> str:
    """The last line, or another one, that `setup.py build_ext`, which has to fail, writes."""
    temp = ("--build-temp", tmp_path / "temp", "--build-lib", tmp_path / "lib")
    result = run(sys.executable, "setup.py", "--quiet", "build_ext", *temp, **env)
    assert result.returncode != 0, result.stdout
    assert not (tmp_path / "temp").exists(), "failed too late"
    return result.stderr.strip().splitlines()[line]


def fake_torch(path: Path, version: str, cuda: str | None, cuda_home: Path | None = None, gpus: int = 0) -> Path:
    """A folder for PYTHONPATH with as much of a torch as the checks look at."""
    (path / "torch/utils").mkdir(parents=True)
    (path / "torch/__init__.py").write_text(f"from . import cuda, version\n__version__ = {version!r}\n")
    (path / "torch/version.py").write_text(f"cuda = {cuda!r}\n")
    (path / "torch/cuda.py").write_text(f"def is_available(): return {gpus > 0}\ndef device_count(): return {gpus}\n")
    (path / "torch/utils/__init__.py").touch()
    (path / "torch/utils/cpp_extension.py").write_text(
        "from setuptools import Extension as CppExtension\n"
        "from setuptools.command.build_ext import build_ext as BuildExtension\n"
        f"CUDA_HOME = {cuda_home and str(cuda_home)!r}\n"
    )
    return path


def copy_of_package(path: Path, torch: str, torch_cuda: str | None) -> Path:
    """The package as if built for another torch; a library that is loaded nevertheless reports it."""
    shutil.copytree(PACKAGE, path / "tp_ext", ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    put_library(path / "tp_ext", torch, torch_cuda)
    return path


def put_library(folder: Path, torch: str, torch_cuda: str | None = None) -> Path:
    """Writes what setup.py writes: the library, which does not load, and what it was built for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "_built_for.py").write_text(f"TORCH = {torch!r}\nTORCH_CUDA = {torch_cuda!r}\n")
    library = folder / ("_C" + sysconfig.get_config_var("EXT_SUFFIX"))
    library.write_text(f"not a library, tp_ext built for torch {torch.partition('+')[0]}")
    return library


def wheel(path: Path, *torchs: str) -> Path:
    """The package as a wheel installs it, with libraries for several torchs."""
    shutil.copytree(PACKAGE, path / "tp_ext", ignore=shutil.ignore_patterns("*.so", "*.pyc", "_built_for.py"))
    for torch in torchs:
        put_library(path / "tp_ext" / "_libs" / f"torch{torch.rpartition('.')[0]}", torch)
    return path


def import_error(package: Path, torch: Path | None = None) -> str:
    """The last line that loading the copied package writes, under a fake torch or the real one."""
    path = str(package)
    if torch is not None:  # the rest of the package needs more of a torch
        (package / "tp_ext/__init__.py").write_text("")
        path = f"{torch}:{path}"
    command = "import tp_ext._build; tp_ext._build.load()"
    # A cached module counts as fresh if second and size are the same, and tests rewrite files within a second
    result = run(sys.executable, "-B", "-c", command, cwd=package, PYTHONPATH=path)
    assert result.returncode != 0
    return result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("value", ["yes", "2", ""])
def test_unknown_cuda_choice_is_named(tmp_path: Path, value: str) -> None:
    fake = fake_torch(tmp_path / "fake", "2.11.0", None)
    error = setup_py(tmp_path, TP_EXT_CUDA=value, PYTHONPATH=fake)
    assert error == f"ValueError: TP_EXT_CUDA={value!r} must be one of auto, 0 and 1"


def test_missing_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    error = setup_py(tmp_path, PYTHONPATH=tmp_path)
    assert "'pip install torch" in error and "--no-build-isolation" in error


def isolated(tmp_path: Path) -> Path:
    """The sources in a folder of their own, next to a torch that cannot be imported, as under pip's build isolation."""
    ignored = shutil.ignore_patterns("build", "*.so", "_built_for.py", "__pycache__", "runs", "*.egg-info", ".*")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    return tmp_path / "source"


def hook(source: Path, name: str) -> subprocess.CompletedProcess:
    """A hook of PEP 517, as pip calls it; what it makes lies in the folder out."""
    (source / "out").mkdir(exist_ok=True)
    command = f"from setuptools import build_meta; print(build_meta.{name}('out'))"
    return run(sys.executable, "-c", command, cwd=source, PYTHONPATH=source.parent)


def test_sdist_and_metadata_need_no_torch_and_are_whole(tmp_path: Path) -> None:
    source = isolated(tmp_path)
    result = hook(source, "build_sdist")
    assert result.returncode == 0, result.stderr
    (sdist,) = (source / "out").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive}
    for file in (
        "README.md",
        "docs/guide/migrating.md",
        "docs/reference/column_row.svg",
        "examples/train_gpt.py",
        "csrc/python/module.cpp",
        "tp_ext/include/tp_ext/tp_ext.h",
        "tp_ext/share/cmake/tp_ext/tp_extConfig.cmake",
    ):
        assert file in names
    assert not [name for name in names if name.startswith("benchmarks") and name.endswith(".png")]
    assert sdist.stat().st_size < 3.3e6  # text, three quarters of it tests; with the plots of benchmarks 2 MB more

    result = hook(source, "prepare_metadata_for_build_wheel")
    assert result.returncode == 0, result.stderr
    (metadata,) = (source / "out").glob("*.dist-info/METADATA")
    text = metadata.read_text()
    for line in ("Requires-Dist: torch>=2.11", "Requires-Dist: numpy>=1.26", "Requires-Python: <3.14,>=3.11"):
        assert line in text.splitlines()


def test_a_wheel_in_isolation_names_build_isolation(tmp_path: Path) -> None:
    error = hook(isolated(tmp_path), "build_wheel").stderr.strip().splitlines()[-1]
    assert "No module named 'torch'" in error
    assert "build isolation" in error and "--no-build-isolation" in error


def test_a_build_that_leaves_a_gpu_out_says_so(tmp_path: Path) -> None:
    fake = fake_torch(tmp_path / "fake", "2.11.0", "13.0", cuda_home=tmp_path, gpus=1)
    note = setup_py(tmp_path, -2, TP_EXT_CUDA="auto", CXX="no-such-compiler", PYTHONPATH=fake)
    assert note.startswith(f"tp_ext: there is a GPU, but no nvcc in CUDA_HOME={tmp_path}: building for the CPU only.")
    assert "CUDA toolkit 13.0" in note


# 2.9 is less than 2.11 as a version, and greater as a string.
@pytest.mark.parametrize("version", ["2.9.1", "2.10.0+cpu", "1.13.1"])
def test_old_torch(tmp_path: Path, version: str) -> None:
    error = setup_py(tmp_path, PYTHONPATH=fake_torch(tmp_path / "fake", version, None))
    assert error.startswith(f"tp_ext needs torch >= 2.11, this is {version}")


def test_cuda_asked_of_a_cpu_only_torch(tmp_path: Path) -> None:
    fake = fake_torch(tmp_path / "fake", "2.11.0+cpu", None)
    error = setup_py(tmp_path, TP_EXT_CUDA="1", PYTHONPATH=fake)
    assert error.startswith("TP_EXT_CUDA=1 needs a torch built with CUDA, this is the CPU-only 2.1")


def test_cuda_asked_without_a_toolkit(tmp_path: Path) -> None:
    fake = fake_torch(tmp_path / "fake", "2.11.0", "13.0", cuda_home=tmp_path)
    error = setup_py(tmp_path, TP_EXT_CUDA="1", PYTHONPATH=fake)
    assert error.startswith(f"TP_EXT_CUDA=1 needs nvcc, and there is none in CUDA_HOME={tmp_path}: ")
    assert "toolkit 13.0" in error


@pytest.mark.parametrize("env", [{"CXX": "no-such-compiler"}, {"CXX": "", "PATH": ""}])
def test_missing_compiler(tmp_path: Path, env: dict[str, str]) -> None:
    fake = fake_torch(tmp_path / "fake", "2.11.0", None)
    error = setup_py(tmp_path, TP_EXT_CUDA="0", PYTHONPATH=fake, **env)
    name = env["CXX"] or "c++"
    assert error.startswith(f"tp_ext needs a C++ compiler, {name!r} is not found: ")


@pytest.mark.exhaustive  # the previous test has fakes of torch, which are imported faster
def test_missing_compiler_with_the_real_torch(tmp_path: Path) -> None:
    error = setup_py(tmp_path, TP_EXT_CUDA="0", CXX="no-such-compiler")
    assert error.startswith("tp_ext needs a C++ compiler, 'no-such-compiler' is not found: ")


@pytest.mark.exhaustive  # the next test has fakes of torch, which are imported faster
def test_import_under_another_torch(tmp_path: Path) -> None:
    running = tp_build.build_info()["torch_running"]
    error = import_error(copy_of_package(tmp_path, "2.1.3", None))
    assert error.startswith(f"ImportError: tp_ext was built for torch 2.1.3, this is torch {running}")
    assert "pip install --no-build-isolation" in error


@pytest.mark.parametrize(
    ("built", "running"),
    [  # torch and its CUDA
        (("2.11.0", None), ("2.12.0", None)),
        (("2.1.0", None), ("2.11.0", None)),
        (("2.15.0+cu132", "13.2"), ("2.15.0+cpu", None)),
        (("2.15.0+cu132", "13.2"), ("2.15.0+cu126", "12.6")),
    ],
)
def test_mismatch_is_seen_before_the_library_is_opened(
    tmp_path: Path, built: tuple[str, str | None], running: tuple[str, str | None]
) -> None:
    fake = fake_torch(tmp_path / "fake", *running)
    error = import_error(copy_of_package(tmp_path, *built), fake)
    assert f"built for torch {built[0]}" in error and f"this is torch {running[0]}" in error


@pytest.mark.parametrize(
    ("built", "running"),
    [
        (("2.15.0+cu132", "13.2"), ("2.15.1+cu130", "13.0")),  # only the minor version counts
        (("2.15.0+cu132", None), ("2.15.0+cu126", "12.6")),  # a CPU-only build of tp_ext
    ],
)
def test_a_fitting_torch_goes_on_to_open_the_library(
    tmp_path: Path, built: tuple[str, str | None], running: tuple[str, str | None]
) -> None:
    fake = fake_torch(tmp_path / "fake", *running)
    error = import_error(copy_of_package(tmp_path, *built), fake)
    assert "tp_ext's compiled library does not load (" in error


@pytest.mark.parametrize(
    ("built", "running", "gpus", "warned"),
    [  # CUDA of the build, of torch
        (None, "13.2", 1, True),
        (None, "13.2", 0, False),
        (None, None, 1, False),
        ("13.2", "13.2", 1, False),
    ],
)
def test_a_cpu_only_build_on_a_machine_with_a_gpu_warns_once(
    tmp_path: Path, built: str | None, running: str | None, gpus: int, warned: bool
) -> None:
    package, fake = (
        copy_of_package(tmp_path, "2.15.0", built),
        fake_torch(tmp_path / "fake", "2.15.0", running, gpus=gpus),
    )
    (package / "tp_ext/__init__.py").write_text("")
    command = "import tp_ext._build, importlib; importlib.import_module('tp_ext._build')"
    result = run(sys.executable, "-c", command, cwd=package, PYTHONPATH=f"{fake}:{package}")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("CPU-only build of tp_ext on a machine with a GPU") == warned
    assert not warned or ("CUDA toolkit 13.2" in result.stderr and "TP_EXT_CUDA=1" in result.stderr)


@pytest.mark.skipif(tp_build.build_info()["cuda"] is not None, reason="a build with CUDA kernels")
def test_a_cpu_only_build_refuses_cuda_tensors_in_a_sentence() -> None:
    import torch

    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("tp_ext::"):
            refuses = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
            assert refuses == name.startswith("tp_ext::_"), name
    operator = torch.ops.tp_ext._multi_tensor_squared_norm.default
    with pytest.raises(NotImplementedError, match=r"_squared_norm: this is a CPU-only build of tp_ext, it has no CUDA"):
        operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), [torch.ones(3)])


@pytest.mark.parametrize("running", ["2.11.0", "2.15.1+cpu"])
def test_a_wheel_has_a_library_for_each_torch(tmp_path: Path, running: str) -> None:
    """The import opens the library of the running minor version of torch, whatever the patch version; versions are
    compared as numbers."""
    fake = fake_torch(tmp_path / "fake", running, None)
    error = import_error(wheel(tmp_path, "2.11.0", "2.15.0"), fake)
    assert error.startswith("ImportError: tp_ext's compiled library does not load (")
    assert f"_libs/torch{running[:4]}/_C" in error


@pytest.mark.parametrize("running", ["2.9.0", "2.16.0a0+git1"])
def test_a_wheel_names_the_torchs_that_it_works_with(tmp_path: Path, running: str) -> None:
    fake = fake_torch(tmp_path / "fake", running, None)
    error = import_error(wheel(tmp_path, "2.15.0", "2.14.1", "2.11.0"), fake)
    assert error.startswith(
        f"ImportError: this wheel of tp_ext works with torch 2.11, 2.14, 2.15, this is torch {running}:"
    )
    assert "install one of these, or build tp_ext for this torch: run 'pip install" in error


def test_a_library_of_another_torch_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    fake, package = fake_torch(tmp_path / "fake", "2.15.0", None), wheel(tmp_path, "2.15.0", "2.11.0")
    libraries = package / "tp_ext" / "_libs"
    (name,) = (file.name for file in (libraries / "torch2.15").glob("_C*.so"))
    shutil.copy(libraries / "torch2.11" / name, libraries / "torch2.15" / name)
    error = import_error(package, fake)
    assert error.startswith("ImportError: tp_ext is damaged, ") and f"torch2.15/{name} is not a library for" in error
    shutil.copy(libraries / "torch2.11" / "_built_for.py", libraries / "torch2.15" / "_built_for.py")
    error = import_error(package, fake)
    assert error.startswith("ImportError: tp_ext was built for torch 2.11.0, this is torch 2.15.0")


def test_the_library_needs_no_newer_system_than_wheels_may() -> None:
    """This call of libstdc++ is newer than RHEL 9's and the only one of that kind: docs/develop/release.md."""
    libraries = [*PACKAGE.glob("_C*.so"), PACKAGE / "libtp_ext.so"]
    assert len(libraries) == 2
    assert not [file for file in libraries if b"_ZNSt18condition_variable4waitE" in file.read_bytes()]


@pytest.mark.parametrize("missing", ["_built_for.py", "_C*.so"])
def test_import_without_a_build(tmp_path: Path, missing: str) -> None:
    package = copy_of_package(tmp_path, "2.15.0", None)
    for path in (package / "tp_ext").glob(missing):
        path.unlink()
    error = import_error(package, fake_torch(tmp_path / "fake", "2.15.0", None))
    assert error.startswith("ImportError: tp_ext is not built")
    assert "pip install --no-build-isolation" in error


@pytest.mark.smoke
def test_build_info() -> None:
    import torch

    info = tp_build.build_info()
    assert set(info) == {
        *("tp_ext", "torch_built", "torch_running", "cuda", "cuda_archs", "compiler"),
        *("cuda_available", "products"),
    }
    assert info["torch_running"] == torch.__version__
    assert info["torch_built"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert (info["cuda"] is None) == (not info["cuda_archs"])
    assert not info["cuda_available"] or info["cuda"] is not None
