"""Files of others that hold plain values: JSON, and what ``torch.save`` wrote. Nothing in them is executed."""

import json
import os
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from tp_ext.checkpoint.files.pinned_directory import open_regular

LARGEST_JSON = 1 << 26  # bytes: the objects take many times the memory of the file; 500,000 entries of an index


def read_json(path: str | os.PathLike[str], argument: str = "path") -> dict[str, Any]:
    """Returns the JSON object that a file holds.

    Raises:
        OSError: it cannot be read, or is no regular file. ValueError: it is too large, no JSON, no object, or one that
            two programs may read in two ways: with a key twice, or a NaN. Both name ``argument`` and the file.
    """
    where = f"{argument}: {os.fspath(path)!r}"
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > LARGEST_JSON:
            raise ValueError(f"{where} has {size} bytes and must have at most {LARGEST_JSON} to be JSON")
        content = file.read(LARGEST_JSON)
    return parse_json(content, where)


def parse_json(text: str | bytes, where: str) -> dict[str, Any]:
    """Returns the JSON object of a text; ValueError as :func:`read_json`, which begins with ``where``."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, not {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r:.200} is there twice")
    return read


def _number(name: str) -> float:
    # Infinity stands in configurations of transformers, as the limit of a time step
    return float(name) if name != "NaN" else _refuse_nan()


def _refuse_nan() -> NoReturn:
    raise ValueError("NaN is no number")


def read_saved(
    path: Path, argument: str, keys: Collection[str] = (), *, mmap: bool = False, weights_only: bool | None = True
) -> dict[str, Any]:
    """Returns the dict that ``torch.save`` wrote, on the CPU.

    Args:
        keys: those that it must have. mmap: the tensors are mapped, not read.
        weights_only: as ``torch.load``; False executes what the file says.

    Raises:
        OSError: it cannot be read, or is no regular file. pickle.UnpicklingError: it holds more than tensors and plain
            values. ValueError: it is damaged, or holds no dict with ``keys``. All name
            ``argument`` and the file.
    """
    open_regular(path).close()  # opening a pipe may block forever
    return load_saved(str(path), f"{argument}: {str(path)!r}", keys, mmap=mmap, weights_only=weights_only)


def load_saved(
    file: str | IO[bytes],
    where: str,
    keys: Collection[str] = (),
    *,
    mmap: bool | None = None,
    weights_only: bool | None = True,
) -> dict[str, Any]:
    """Does the same for an open file; messages begin with ``where``."""
    try:
        saved = torch.load(file, map_location="cpu", mmap=mmap, weights_only=weights_only)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        # torch's message has many lines, with the advice to load the file without this protection
        reason = str(error).partition("WeightsUnpickler error:")[2] or str(error)
        raise pickle.UnpicklingError(
            f"{where} must hold tensors and plain values only, and is not loaded: {reason.strip().splitlines()[0]}"
        ) from error
    except Exception as error:  # torch.load raises any error for a damaged file
        raise ValueError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(saved, dict) or not saved.keys() >= set(keys):
        wanted = f"a dict with {sorted(keys)}" if keys else "a dict"
        raise ValueError(f"{where} must hold {wanted}, not {type(saved).__name__}")
    return saved
