"""Build information of this copy of tp_ext, and the check that it fits the running torch.

A C++ extension works with one minor version of torch only. The dynamic linker would report a mismatch
as an undefined symbol, or the process would crash; so versions are compared here, before `load` opens
the library. A build from source has one library, next to this file; a wheel has one for each minor
version of torch, in `_libs/torch2.11` and so on, and the import chooses.
"""

import importlib
import importlib.util
import mmap
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tp_ext._version import __version__

_LIBRARIES = Path(__file__).parent / "_libs"
_REBUILD = "run 'pip install --no-build-isolation --no-deps --force-reinstall .' in its source tree"


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _choose() -> None:
    """Puts the folder of a wheel's library for the running torch on the path of the package."""
    versions = sorted(_minor(folder.name.removeprefix("torch")) for folder in _LIBRARIES.glob("torch*"))
    running = _minor(str(torch.__version__))
    if versions and running not in versions:
        known = ", ".join(f"{major}.{minor}" for major, minor in versions)
        raise ImportError(
            f"this wheel of tp_ext works with torch {known}, this is torch {torch.__version__}: install one of these, "
            f"or build tp_ext for this torch: {_REBUILD}."
        )
    if versions:
        sys.modules[__package__].__path__.append(str(_LIBRARIES / "torch{}.{}".format(*running)))


def _check_library(path: str, version: str) -> None:
    """Raises ImportError if the library was compiled for another torch than the file next to it says."""
    mark = f"tp_ext built for torch {'.'.join(version.split('.')[:2])}."
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(mark.encode()) < 0:
            raise ImportError(f"tp_ext is damaged, {path} is not a library for torch {version}: install tp_ext again.")


def _check() -> ModuleType:
    """Returns the module that setup.py wrote next to the library; ImportError if it does not fit torch."""
    try:
        built_for = importlib.import_module("tp_ext._built_for")
    except ModuleNotFoundError:
        raise ImportError(f"tp_ext is not built: {_REBUILD}.") from None
    running = str(torch.__version__)
    if _minor(built_for.TORCH) != _minor(running):
        raise ImportError(f"tp_ext was built for torch {built_for.TORCH}, this is torch {running}: {_REBUILD}.")
    cuda, running_cuda = built_for.TORCH_CUDA, torch.version.cuda
    if cuda is not None and (running_cuda is None or _minor(cuda)[0] != _minor(running_cuda)[0]):
        raise ImportError(
            f"tp_ext was built for torch {built_for.TORCH}, CUDA {cuda}, this is torch {running}, "
            f"{f'CUDA {running_cuda}' if running_cuda else 'no CUDA'}: {_REBUILD}."
        )
    library = importlib.util.find_spec("tp_ext._C")
    if library is None or library.origin is None:
        raise ImportError(f"tp_ext is not built for {sys.implementation.cache_tag}: {_REBUILD}.")
    _check_library(library.origin, built_for.TORCH)
    # device_count, unlike is_available, does not initialise CUDA, so that the process can still be forked
    if cuda is None and running_cuda is not None and torch.cuda.device_count() > 0:
        warnings.warn(
            "this is a CPU-only build of tp_ext on a machine with a GPU: its operators refuse CUDA tensors. Install "
            f"the CUDA toolkit {running_cuda}, set CUDA_HOME to its folder and TP_EXT_CUDA=1, then {_REBUILD}.",
            stacklevel=2,
        )
    return built_for


_choose()
_built_for = _check()


def load() -> ModuleType:
    """Loads the compiled library, which registers the operators `torch.ops.tp_ext`."""
    try:
        return importlib.import_module("tp_ext._C")
    except ImportError as error:
        raise ImportError(f"tp_ext's compiled library does not load ({error}): {_REBUILD}.") from error


def build_info() -> dict[str, Any]:
    """Returns the versions to put into a bug report.

    Returns:
        `tp_ext`: version of this package; `torch_built`, `torch_running`: torch at build time and
        now; `cuda`: CUDA toolkit that compiled the kernels, None in a CPU-only build; `cuda_archs`:
        the GPU architectures compiled for; `compiler`: the C++ compiler; `cuda_available`: whether
        CUDA tensors work here, that is whether there are both kernels and a GPU; `products`: the
        library of torch that multiplies fp32 matrices in layers on the CPU, measured at the first call.
    """
    built = load().build_info()
    return {
        "tp_ext": __version__,
        "torch_built": _built_for.TORCH,
        "torch_running": str(torch.__version__),
        "cuda": built["cuda"],
        "cuda_archs": built["cuda_archs"].replace(";", " ").split(),
        "compiler": built["compiler"],
        "cuda_available": built["cuda"] is not None and torch.cuda.is_available(),
        "products": load().cpu_products(),
    }
