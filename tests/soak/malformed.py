"""Damaged and hostile checkpoints and exports: every load ends soon, in a documented error or in a whole state.

Each round damages a copy of a good directory in one way and loads it. A load may raise OSError, ValueError, KeyError,
TypeError or UnpicklingError; of a module that it has left untouched, unless a data file could not be read. If it
succeeds, it has written every number, and with the right ones if the damage was elsewhere. A changed bit inside the
numbers of a safetensors file cannot be seen. Time and memory of each round are bounded:

    .venv/bin/python -m tests.soak.malformed --rounds 10000 --seed 0
"""

import argparse
import dataclasses
import faulthandler
import json
import os
import pickle
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import tp_ext

ALLOWED = (OSError, ValueError, KeyError, TypeError, pickle.UnpicklingError)
MARKER = -12345.0
SECONDS = 5.0  # of the processor, for one load; a load that waits is ended after four minutes
MEBIBYTES = 256  # of growth of the resident set, over all rounds
SHAPE = (12, 10)


def model_of(value):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SHAPE[1], SHAPE[0]), nn.Linear(SHAPE[0], SHAPE[1]))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.fill_(value if value == MARKER else value + number)
    return model


def trained(value):
    model = model_of(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        optimizer.state[param] = {"step": torch.tensor(value), "exp_avg": param.detach().clone()}
        optimizer.state[param]["exp_avg_sq"] = param.detach().clone()
    return model, optimizer


def in_chunks(model, rows):
    """Its weights in chunks of some rows, as several ranks write them."""
    from tp_ext.checkpoint.chunked_tensor import ChunkedTensor
    from tp_ext.chunks import LocalChunk

    state = {}
    for name, value in model.state_dict().items():
        first = [0] * value.dim()
        chunks = [LocalChunk((at, *first[1:]), value[at : at + rows], True) for at in range(0, len(value), rows)]
        state[name] = ChunkedTensor(value.shape, chunks, dtype=value.dtype, device=value.device)
    return state


def make_checkpoint(path):
    model, optimizer = trained(1.0)
    tp_ext.save_checkpoint(path, model, optimizer, step=7, numbers=torch.arange(5))
    extra = (path / "extra.pt").read_bytes()
    state = tp_ext.sharded_state_dict(model, optimizer)
    state["model"] = in_chunks(model, 3)
    shutil.rmtree(path)
    writer = dcp.FileSystemWriter(path, thread_count=3)
    dcp.save(state, storage_writer=writer, no_dist=True)
    (path / "extra.pt").write_bytes(extra)


def make_exports(path):
    tp_ext.save_safetensors(path / "one", model_of(1.0))
    tp_ext.save_safetensors(path / "many", model_of(1.0), max_shard_size=300)


# Ways to damage a file


def flip(draw, data):
    for _ in range(draw.choice([1, 1, 1, 2, 8])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def overwrite(draw, data):
    at = draw.randrange(len(data))
    some = draw.choice([b"\x00", b"\xff", b"\x7f", b".", b"(", b"2", b"e", b"\x94", b"\x86", b"r", b"9", b"}", b"["])
    data[at : at + draw.choice([1, 4, 8])] = some * draw.choice([1, 4, 8])


def truncate(draw, data):
    del data[draw.randrange(len(data)) :]


def insert(draw, data):
    at = draw.randrange(len(data) + 1)
    data[at:at] = draw.randbytes(draw.choice([1, 2, 8, 100]))


def remove(draw, data):
    at = draw.randrange(len(data))
    del data[at : at + draw.choice([1, 2, 8, 100])]


def repeat(draw, data):
    a, b = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    data[b:b] = data[a:b]


BYTES = [flip, flip, overwrite, truncate, insert, remove, repeat]


def change_bytes(draw, file):
    data = bytearray(file.read_bytes())
    how = draw.choice(BYTES)
    how(draw, data)
    file.write_bytes(data)
    return f"{how.__name__} {file.name}"


def change_place(draw, file):
    """Puts something else at the file's name."""
    others = sorted(other for other in file.parent.iterdir() if other != file and other.is_file())
    kind = draw.choice(["missing", "pipe", "folder", "dangling", "device", "swapped", "empty", "large", "loop"])
    if kind == "swapped" and others:
        other = draw.choice(others)
        mine, its = file.read_bytes(), other.read_bytes()
        file.write_bytes(its)
        other.write_bytes(mine)
        return f"swapped {file.name} {other.name}"
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind in ("dangling", "device", "loop"):
        file.symlink_to({"dangling": "nowhere", "device": "/dev/zero", "loop": file.name}[kind])
    elif kind == "empty":
        file.touch()
    elif kind == "large":
        file.touch()
        os.truncate(file, 1 << 40)
    return f"{kind} {file.name}"


def nested(depth, kind):
    value = kind()
    for _ in range(depth):
        value = kind((value, value))
    return value


STRANGE = [-1, 0, 1, 3, 2**31, 2**62, 2**63, 2**100, None, True, 1.5, "", "x", "x" * 5000, b"", [], {}, ()]
STRANGE += ["..", "/etc/passwd", "a\0b", ".metadata", torch.Size((3,)), torch.Size((2**40, 2**40)), torch.float16]
STRANGE += [torch.complex64, torch.Size(()), torch.Size([1] * 70), nested(60, list), nested(60, tuple)]


def slots(value, into, depth=0):
    """Every place in a value that can be set: (container, key)."""
    if depth > 6:
        return into
    if dataclasses.is_dataclass(value):
        items = list(vars(value).items())
    elif isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return into
    for key, one in items:
        into.append((value, key))
        slots(one, into, depth + 1)
        if isinstance(key, MetadataIndex):
            slots(key, into, depth + 1)
    return into


def put(container, key, value):
    if dataclasses.is_dataclass(container):
        object.__setattr__(container, key, value)
    else:
        container[key] = value


def change_metadata(draw, file):
    metadata = pickle.loads(file.read_bytes())
    how = draw.choice(["value", "value", "value", "swap", "drop", "chunks", "overlap", "size"])
    container, key = draw.choice(slots(metadata, []))
    if how == "value":
        put(container, key, draw.choice(STRANGE))
    elif how == "swap":
        other, its_key = draw.choice(slots(metadata, []))
        get = lambda c, k: getattr(c, k) if dataclasses.is_dataclass(c) else c[k]  # noqa: E731
        mine, its = get(container, key), get(other, its_key)
        put(container, key, its)
        put(other, its_key, mine)
    elif how == "drop" and isinstance(container, dict | list):
        del container[key]
    else:
        entry = draw.choice([e for e in metadata.state_dict_metadata.values() if hasattr(e, "chunks") and e.size])
        if how == "overlap":
            a, b = draw.choices(entry.chunks, k=2)
            a.offsets, a.sizes = b.offsets, b.sizes
        elif how == "size":
            entry.size = torch.Size(draw.choice([0, 1, 12, 13, 2**40]) for _ in entry.size)
        else:
            offsets = [draw.randint(0, n - 1) for n in entry.size]
            sizes = [draw.randint(0, n - at) for n, at in zip(entry.size, offsets, strict=True)]
            entry.chunks[draw.randrange(len(entry.chunks))] = ChunkStorageMetadata(*map(torch.Size, (offsets, sizes)))
    try:
        content = pickle.dumps(metadata)
    except Exception:  # a key that cannot be hashed
        content = b""
    file.write_bytes(content)
    return f"{how} in .metadata"


def change_json(draw, content):
    """A JSON object, with one value in it changed; as text, so that it may be no JSON, too."""
    value = json.loads(content)
    container, key = draw.choice(slots(value, []))
    how = draw.choice(["value", "drop", "rename", "text"])
    plain = [one for one in STRANGE[:18] if type(one) in (int, float, str, list, bool, type(None))]
    if how == "value":
        container[key] = draw.choice([*plain, {}, "F16", "F64", "I8", "BOOL", [0, 2**63], [8, 4], [-1, 4]])
    elif how == "drop":
        del container[key]
    elif how == "rename" and isinstance(container, dict):
        container[draw.choice(["", "x", "..", "model.safetensors", "__metadata__"])] = container.pop(key)
    text = json.dumps(value)
    if how == "text":
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice(["[" * 2000, '{"a":' * 2000, "9" * 5000, '"', "\\ud800", "NaN"]) + text[at:]
    return text.encode(), f"json {how}"


def change_header(draw, file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, how = change_json(draw, data[8 : 8 + length])
    claimed = draw.choice([len(header)] * 8 + [0, 1, 2**31, 2**63 - 1, 2**64 - 1])
    file.write_bytes(claimed.to_bytes(8, "little") + header + data[8 + length :])
    return f"{how} in the header"


def change_index(draw, file):
    content, how = change_json(draw, file.read_bytes())
    file.write_bytes(content)
    return f"{how} in the index"


def damage_checkpoint(draw, folder):
    """(what was done, whether numbers may be others then)"""
    files = sorted(folder.iterdir())
    way = draw.random()
    if way < 0.4:
        return change_metadata(draw, folder / ".metadata"), True
    file = folder / ".metadata" if way < 0.6 else draw.choice(files)
    how = (change_bytes if way < 0.9 else change_place)(draw, file)
    return how, "swapped" in how or file.name != "extra.pt"


def damage_export(draw, folder):
    files = sorted(folder.iterdir())
    index = folder / "model.safetensors.index.json"
    way = draw.random()
    if way < 0.3 and index.exists():
        return change_index(draw, index), True
    shards = [file for file in files if file != index]
    if way < 0.6:
        return change_header(draw, draw.choice(shards)), True
    file = draw.choice(files)
    return (change_bytes if way < 0.85 else change_place)(draw, file), True


class Round:
    """One damaged directory and its load."""

    def __init__(self, good, work, seed):
        self.good, self.work, self.seed = good, work, seed

    def run(self):
        """(what was done, what came of it); raises AssertionError for what must not be."""
        draw = random.Random(self.seed)
        kind = draw.choice(["checkpoint", "checkpoint", "one", "many"])
        folder = self.work / "x"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.good / kind, folder)
        how, others = (damage_checkpoint if kind == "checkpoint" else damage_export)(draw, folder)
        model, optimizer = trained(MARKER)
        begin = time.process_time()
        try:
            if kind == "checkpoint":
                assert isinstance(tp_ext.load_checkpoint(folder, model, optimizer), dict)
            else:
                tp_ext.load_safetensors(folder, model)
            outcome = "loaded"
        except ALLOWED as error:
            outcome = type(error).__name__
            assert len(str(error)) < 20_000, f"{how}: an error of {len(str(error))} characters"
            untouched = all(value.eq(MARKER).all() for value in model.parameters())
            assert untouched or (kind == "checkpoint" and isinstance(error, OSError)), f"{how}: partly loaded: {error}"
        seconds = time.process_time() - begin
        assert seconds < SECONDS, f"{how}: {seconds:.1f} s"
        if outcome == "loaded":
            want = model_of(1.0).state_dict()
            for name, value in model.state_dict().items():
                assert MARKER not in value, f"{how}: {name} is not loaded"
                assert others or torch.equal(value, want[name]), f"{how}: {name} has other numbers"
        return f"{kind}: {how}", outcome


def soak(seed, rounds, first=0):
    """Counts of outcomes by kind of damage; the failures, with the seed that repeats each."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="soak_malformed_"))
    counts, failures = Counter(), []
    resident = 0
    try:
        make_checkpoint(folder / "checkpoint")
        make_exports(folder)
        for number in range(first, first + rounds):
            faulthandler.dump_traceback_later(240, exit=True)
            try:
                how, outcome = Round(folder, folder / "work", f"{seed} {number}").run()
                counts[f"{how.partition(':')[0]} {outcome}"] += 1
            except Exception as error:
                failures.append(f"--seed {seed} --first {number} --rounds 1: {type(error).__name__}: {error}")
            if number == first + rounds // 10:
                resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
        if grown > MEBIBYTES << 10:
            failures.append(f"the resident set has grown by {grown} KiB")
    finally:
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(folder, ignore_errors=True)
    return counts, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    arguments = parser.parse_args()
    begin = time.monotonic()
    counts, failures = soak(arguments.seed, arguments.rounds, arguments.first)
    took = time.monotonic() - begin
    print(f"seed {arguments.seed}: {arguments.rounds} rounds in {took:.0f} s: {dict(sorted(counts.items()))}")
    print("\n".join(failures) or "every load ended in a documented error or in a whole state")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
