"""manifest.json of an export: what the packages were made of and for, their inputs, and the digests of all files."""

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tp_ext.checkpoint.files.plain_values import read_json

VERSION = 1
NAME = "manifest.json"
ALIGNMENT = 64  # of each weight in its file, as torch allocates: kernels may round otherwise at other addresses
_FEATURES = (
    "avx",
    "fma",
    "f16c",
    "bmi",
    "amx",
    "vnni",
    "sve",
    "asimd",
    "bf16",
    "sse4",
    "popcnt",
    "lzcnt",
    "abm",
    "movbe",
)


class ExportError(ValueError):
    """An export that these ranks cannot load."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: ``shape`` has the name of a dynamic dim in place of a length."""

    name: str
    dtype: str
    shape: list[int | str]

    def text(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class StoredWeight:
    """A weight in the file of a rank: it begins ``offset`` bytes after the file's begin."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


@dataclass
class Manifest:
    """The contents of manifest.json.

    Attributes:
        id: of the export, the same in the names of all its groups. p: ranks. backend: theirs when it was exported.
        bits: ``"eager"``: the results have the bits of Python's eager call; ``"inductor"``: they are equal to rounding.
        isa: the processor's architecture and features for which the code was compiled.
        dims: the least and the largest length of each dynamic dim; None: no bound.
        vocab_size, max_seq: of an export that generates, else None.
        logits: of an export that generates: ``"gathered"`` of the whole vocabulary, or ``"sharded"``; else "".
        inputs: those of rank 0. caches: the shapes of each rank's caches, the last inputs of an export that generates.
        weights: of each rank. files: their sha256.
        arguments: of the example, in their order; of a constant its ``repr``, of an input None.
    """

    id: str
    torch: str
    p: int
    backend: str | None
    bits: str
    isa: list[str]
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    dims: dict[str, list[int | None]]
    vocab_size: int | None
    max_seq: int | None
    logits: str
    caches: list[list[list[int]]]
    weights: list[list[StoredWeight]]
    files: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str | None] = field(default_factory=dict)
    version: int = VERSION

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the manifest of a folder.

        Raises:
            ExportError: there is none, or not one of this version.
        """
        path = folder / NAME
        try:
            entries = read_json(path, "folder")
            if entries["version"] != VERSION:
                raise ExportError(
                    f"folder: {path} has version {entries['version']!r}, and this library reads {VERSION}"
                )
            for name in ("inputs", "outputs"):
                entries[name] = [TensorSpec(**entry) for entry in entries[name]]
            entries["weights"] = [[StoredWeight(**entry) for entry in of_rank] for of_rank in entries["weights"]]
            return cls(**entries)
        except OSError as error:
            raise ExportError(f"folder: {str(folder)!r} has no {NAME} that can be read: {error}") from error
        except ExportError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ExportError(f"folder: {path} is not the manifest of an export: {error}") from error

    def inputs_of(self, rank: int) -> list[TensorSpec]:
        """Returns the inputs of a rank, which may have more heads than another."""
        caches = self.caches[rank]
        first = len(self.inputs) - len(caches)
        of_rank = [replace(spec, shape=[*shape]) for spec, shape in zip(self.inputs[first:], caches, strict=True)]
        return [*self.inputs[:first], *of_rank]

    def files_of(self, rank: int) -> list[str]:
        """Returns the names of a rank's files."""
        return [name for name in self.files if name.startswith((f"{package_name(rank)}/", weights_name(rank)))]

    def library_of(self, rank: int) -> str:
        """Returns the name of a rank's library.

        Raises:
            ExportError: the manifest names none.
        """
        for name in self.files_of(rank):
            if name.endswith(".so"):
                return name
        raise ExportError(f"folder: its {NAME} names no library of rank {rank}")

    def write(self, folder: Path) -> None:
        (folder / NAME).write_text(json.dumps(asdict(self), indent=1) + "\n")


def package_name(rank: int) -> str:
    """Returns the name of a rank's folder of compiled code: a package of AOTInductor, unpacked."""
    return f"rank_{rank:05}.pt2"


def weights_name(rank: int) -> str:
    return f"rank_{rank:05}.weights"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ExportError(f"dtype: {name!r} must be one of torch's")
    return dtype


def digest(path: Path) -> str:
    """Returns the sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def processor() -> list[str]:
    """Returns the architecture of this processor and those of its features that a compiler may use."""
    features: set[str] = set()
    with Path("/proc/cpuinfo").open() as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                features.update(word for word in value.split() if word.startswith(_FEATURES))
    return [platform.machine(), *sorted(features)]


def write_weights(path: Path, tensors: dict[str, Tensor]) -> list[StoredWeight]:
    """Writes each tensor once, also one of several names, at a multiple of ALIGNMENT. Returns where they are."""
    stored: list[StoredWeight] = []
    offsets: dict[tuple[int, torch.Size, tuple[int, ...]], int] = {}
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            key = tensor.data_ptr(), tensor.shape, tensor.stride()
            if key not in offsets or not tensor.numel():
                file.seek(-file.tell() % ALIGNMENT, 1)
                offsets[key] = file.tell()
                if tensor.numel():
                    file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            stored.append(StoredWeight(name, dtype_name(tensor.dtype), list(tensor.shape), offsets[key]))
        file.truncate(max(file.tell(), 1))  # an empty file cannot be mapped
    return stored


def map_weights(path: Path, stored: Sequence[StoredWeight]) -> dict[str, Tensor]:
    """Returns the tensors of a file, which is mapped into memory, and so in it once.

    Raises:
        ExportError: the file is shorter than it says.
    """
    contents = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    tensors: dict[str, Tensor] = {}
    for weight in stored:
        shape: Any = torch.Size(weight.shape)
        dtype = dtype_of(weight.dtype)
        end = weight.offset + shape.numel() * dtype.itemsize
        if end > contents.numel():
            raise ExportError(f"folder: {path} is shorter than its weights")
        tensors[weight.name] = contents[weight.offset : end].view(dtype).view(shape)
    return tensors
