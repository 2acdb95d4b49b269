"""The text of ``train_gpt.py``: read from files, split into a training and a held-out part, cut into batches."""

import argparse
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported where it is used: a mistake in --data is answered before torch is there
    import torch
    from torch import Tensor


def read_text(path: Path | None, limit: int) -> bytes:
    """At most ``limit`` bytes, files in the order of their names; a file with a NUL byte near its start is no text."""
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    files = [root] if root.is_file() else sorted(root.glob("*.py" if path is None else "**/*"))
    chunks, total = [], 0
    for file in files:
        content = file.read_bytes() if file.is_file() else b""
        if content and b"\0" not in content[:4096]:
            chunks.append(content[: limit - total])
            total += len(chunks[-1])
        if total >= limit:
            break
    return b"".join(chunks)


def split(text: bytes, seq_length: int) -> tuple[bytes, bytes]:
    """Training text and held-out text: the last 5%, at least one sequence. Exits if there is too little."""
    if not text:
        sys.exit("--data: must hold text; there is no file, or all are empty or binary (a NUL byte in the first 4096)")
    needed = 2 * (seq_length + 1)
    if len(text) < needed:
        sys.exit(
            f"--data: {len(text)} bytes of text must be at least {needed}, for a training and a held-out sequence of "
            f"--seq-length = {seq_length}"
        )
    held_out = max(len(text) // 20, seq_length + 1)
    return text[:-held_out], text[-held_out:]


def batch_of(
    text: "Tensor", step: int, options: argparse.Namespace, device: "torch.device"
) -> tuple["Tensor", "Tensor"]:
    """Inputs and next bytes ``[batch, seq]`` of uint8 text, of all data-parallel ranks. They depend on seed and step
    only, so every mesh trains on the same batches, and a resumed run on those it would have seen."""
    import torch

    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - options.seq_length, (options.batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(options.seq_length + 1)].long().to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
