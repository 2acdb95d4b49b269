"""Commands in stages under one deadline: each in a process of its own, so that a hang or a crash loses nothing else.

A stage ends at the latest N seconds after the first one began; time that an earlier one leaves is available to the
later ones. The file of results is written after every stage, atomically.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
TAIL = 25  # lines of a command's output that the results keep when it fails
NOT_STARTED = 127  # the shell's code for a command that is not there
Result = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """`junit`: where pytest writes the results of its tests. `seconds`: its own limit, from the moment it may begin."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    junit: Path | None = None
    seconds: float = float("inf")


@dataclass(frozen=True)
class Stage:
    """`until`: seconds from the start of all stages by which it has ended. `in_turn`: all commands are started and wait
    for a line of input, which they get one after the other. `note`: why it is not run. `cannot`: output of a failing
    command which means that its tool does not work here; that is not a failure of ours.
    """

    name: str
    commands: Sequence[Command]
    until: float
    in_turn: bool = False
    note: str = ""
    cannot: str = ""


Begun = tuple[Command, subprocess.Popen | None, IO[bytes]]  # None: it could not be started


class Run:
    """Runs stages and keeps ``results.json`` in ``folder``, and next to it all output in ``log.txt``."""

    def __init__(self, folder: Path, about: Result, cores: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.log, self.cores = folder / "results.json", folder / "log.txt", cores
        self.results: Result = {**about, "seconds": 0.0, "stages": []}
        self.log.write_text("")
        self._lock, self._start = threading.Lock(), time.monotonic()
        self._running: set[subprocess.Popen] = set()
        self._save()

    def together(self, stages: Sequence[Stage], then: Callable[[Result], None] | None = None) -> None:
        """Runs the stages side by side, with as many commands at once as cores; ``then`` adds to the results."""
        commands, each = ThreadPoolExecutor(self.cores), ThreadPoolExecutor(max(1, len(stages)))
        try:
            done = [each.submit(self._run, stage, self._submit(commands, stage)) for stage in stages]
            for future in done:
                future.result()
        finally:  # interrupted: what runs is ended
            for process in list(self._running):
                _kill(process)
            commands.shutdown(cancel_futures=True)
            each.shutdown(cancel_futures=True)
        if then is not None:
            then(self.results)
            self._save()

    def failed(self) -> list[str]:
        return [stage["name"] for stage in self.results["stages"] if stage["status"] in ("failed", "timed out")]

    def _submit(self, pool: ThreadPoolExecutor, stage: Stage) -> list[Future[list[Result]]]:
        if stage.note:
            return []
        if stage.in_turn:
            return [pool.submit(self._in_turn, stage)]
        return [pool.submit(lambda c=command: [self._finish(stage, *self._begin(c))]) for command in stage.commands]

    def _in_turn(self, stage: Stage) -> list[Result]:
        begun = [self._begin(command, subprocess.PIPE) for command in stage.commands]
        return [self._finish(stage, *one) for one in begun]

    def _begin(self, command: Command, stdin: int = subprocess.DEVNULL) -> Begun:
        output = tempfile.TemporaryFile()  # noqa: SIM115, closed when the command has ended
        try:
            process = subprocess.Popen(
                list(command.argv),
                cwd=ROOT,
                env=os.environ | command.environment,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its children end with it
            )
        except OSError as error:
            output.write(str(error).encode())
            return command, None, output
        self._running.add(process)
        return command, process, output

    def _finish(self, stage: Stage, command: Command, process: subprocess.Popen | None, output: IO[bytes]) -> Result:
        began, code = time.monotonic(), NOT_STARTED
        if process is not None:
            code = _wait(process, min(command.seconds, self._start + stage.until - began))
            self._running.discard(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
        output.close()
        status = {None: "timed out", 0: "passed"}.get(code, "failed")
        if status == "failed" and stage.cannot and re.search(stage.cannot, text):
            status = "unavailable"
        result: Result = {"name": command.name, "status": status, "exit_code": code}
        result["seconds"] = round(time.monotonic() - began, 1)
        result |= _counted(command.junit)
        if status != "passed":
            result["output"] = text.splitlines()[-TAIL:]
        with self._lock, self.log.open("a") as log:
            log.write(f"\n=== {stage.name}, {command.name}: {status} after {result['seconds']} s\n{text}")
        return result

    def _run(self, stage: Stage, futures: list[Future[list[Result]]]) -> None:
        began = time.monotonic()
        commands = [result for future in futures for result in future.result()]
        with self._lock:
            self._done(stage, began, commands)

    def _done(self, stage: Stage, began: float, commands: list[Result]) -> None:
        states = {command["status"] for command in commands}
        order = ("timed out", "failed", "unavailable", "passed")
        status = "not run" if stage.note else next(state for state in order if state in states)
        result: Result = {"name": stage.name, "status": status, "seconds": round(time.monotonic() - began, 1)}
        for key in ("passed", "failed", "skipped"):
            if any(key in command for command in commands):
                result[key] = sum(command.get(key, 0) for command in commands)
        self.results["stages"].append(result | {"note": stage.note, "commands": commands})
        counts = "".join(f", {result[key]} {key}" for key in ("passed", "failed", "skipped") if key in result)
        print(f"{stage.name}: {status}{counts}, {result['seconds']} s {stage.note}".rstrip(), flush=True)
        for command in commands:
            if command["status"] not in ("passed", "unavailable"):
                named = command.get("failures") or command["output"][-3:]
                print("".join(f"    {command['name']}: {text}\n" for text in named), end="", flush=True)
        self._save()

    def _save(self) -> None:
        self.results["seconds"] = round(time.monotonic() - self._start, 1)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.results, indent=1) + "\n")
        os.replace(new, self.file)


def _wait(process: subprocess.Popen, seconds: float) -> int | None:
    """The exit code, or None if the command exceeded its time and was ended; a command in turn gets its input first."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"\n")
            process.stdin.close()
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        _kill(process)
        return None


def _kill(process: subprocess.Popen) -> None:
    """Kills the command and its children, which are in its session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _counted(junit: Path | None) -> Result:
    """Pytest's counts of its tests; empty if it did not get that far."""
    if junit is None:
        return {}
    try:
        cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {}
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skips: dict[str, int] = {}
    for case in cases:
        if (skip := case.find("skipped")) is not None:
            reason = skip.get("message", "")
            skips[reason] = skips.get(reason, 0) + 1
    counts = {"passed": len(cases) - len(bad) - sum(skips.values()), "failed": len(bad), "skipped": sum(skips.values())}
    return {**counts, "failures": [f"{c.get('classname')}::{c.get('name')}" for c in bad], "skips": skips}
