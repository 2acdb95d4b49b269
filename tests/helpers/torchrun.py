"""torchrun for tests: its own code, in processes that are forked from the ranks' server and need not import torch.

The launcher and the ranks are processes as torchrun makes them (sessions, signals, environment, output, exit codes),
but of a server that has imported torch and tp_ext; a process that imports them itself takes some seconds. ``cold=True``
starts what a user starts, ``python -m torch.distributed.run``.
"""

import atexit
import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.helpers import ranks
from tests.helpers.other_host import move_to_another_host
from tests.helpers.paths import ROOT

_MODULE = "torch.distributed.run"


class Job:
    """A torchrun that runs, the leader of a session of its own; what it and its ranks print is in ``file``."""

    def __init__(self, arguments: Sequence[str], file: Path, folder: Path, hostname: str, cold: bool, **more: str):
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment |= ranks.STRICT | more
        self._file = file
        self._process: Any
        if cold:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *arguments],
                env=environment,
                stdout=file.open("w"),
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
                preexec_fn=(lambda: move_to_another_host(hostname)) if hostname else None,
            )
        else:
            ranks.start_forkserver()
            call = (arguments, str(file), str(folder), hostname, environment)
            process = ranks._context.Process(target=_launcher, args=call, daemon=True)
            process.start()
            self._process = _Process(process.pid, process)
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, seconds: float) -> int:
        """The exit code; after so much time everything is killed, and TimeoutExpired raised."""
        try:
            return self._process.wait(seconds)
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends the launcher, if it runs still, and its ranks, which end with it or lead sessions of their own."""
        if self.poll() is None:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                for pid in [*self.ranks(), self.pid]:
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(30)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def ranks(self) -> list[int]:
        """Process ids of the ranks of this host, in their order."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    @property
    def output(self) -> str:
        return self._file.read_text()


def start(
    arguments: Sequence[str], file: Path, folder: Path, hostname: str = "", cold: bool = False, **environment: str
) -> Job:
    """torchrun with ``arguments`` in ``folder``, with a ``hostname`` in what looks like another machine."""
    return Job(arguments, file, folder, hostname, cold, **environment)


class _Process:
    """As much of subprocess.Popen as torchrun uses, of a process that is a child of this one or of the server."""

    def __init__(self, pid: int, child_of_server: Any = None) -> None:
        self.pid, self.returncode, self._child = pid, None, child_of_server

    def poll(self) -> int | None:
        if self.returncode is None:
            if self._child is not None:
                self.returncode = self._child.exitcode
            elif (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
                self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("torchrun", timeout or 0.0)
            time.sleep(0.02)
        return code


def _launcher(arguments: Sequence[str], file: str, folder: str, hostname: str, environment: dict[str, str]) -> None:
    """``python -m torch.distributed.run`` in a process that the server has made."""
    os.setsid()
    if hostname:
        move_to_another_host(hostname)
    os.chdir(folder)
    with open(file, "w") as output:
        _redirect(output, output)

    def run() -> None:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        SubprocessHandler._popen = _forked_rank
        sys.argv = [_MODULE, *arguments]
        runpy.run_module(_MODULE, run_name="__main__")

    _program(run, environment)


def _forked_rank(handler: Any, args: Sequence[str], environment: dict[str, str]) -> _Process:
    """Instead of ``python -u script arguments``: the script in a fork of the launcher."""
    assert args[:2] == (sys.executable, "-u"), args
    if pid := os.fork():
        return _Process(pid)
    os.setsid()
    _redirect(handler._stdout, handler._stderr)
    os.closerange(3, 65536)  # the launcher's sockets: they shall close with it

    def run() -> None:
        sys.argv = list(args[2:])
        sys.path.insert(0, str(Path(args[2]).resolve().parent))
        runpy.run_path(args[2], run_name="__main__")

    _program(run, environment)


def _redirect(stdout: IO | None, stderr: IO | None) -> None:
    for number, name, file in ((1, "stdout", stdout), (2, "stderr", stderr)):
        if file is not None:
            os.dup2(file.fileno(), number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


def _program(run: Any, environment: dict[str, str]) -> NoReturn:
    """Runs it as the interpreter does that was started with it; what was there before the fork has no effect."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    os.environ.clear()
    os.environ.update(environment)
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def variables(rank: int, size: int) -> Iterator[None]:
    """The variables that torchrun sets for each process, and those before again afterwards."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "run"}  # the process group exists
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
