"""docs/guide/multi_node.md as it stands there: its script under two agents that stand for two hosts, killed and
restarted; its templates."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest
import yaml

from tests.helpers import ranks, torchrun
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "guide" / "multi_node.md").read_text()
SECONDS = 300


def _block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)[number]


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _agent(folder: Path, index: int, *options: str, cold: bool = False) -> torchrun.Job:
    """torchrun of one host, with two ranks."""
    (folder / "train.py").write_text(_block("python"))
    more = {"CHECKPOINT": str(folder / "checkpoint"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = ["--nnodes=2", "--nproc-per-node=2", *options, "train.py"]
    return torchrun.start(words, folder / f"output{index}", folder, f"host{index}", cold, **more)


def _end(agents: list[torchrun.Job], seconds: float) -> list[int]:
    try:
        return [agent.wait(seconds) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()


def _losses(folder: Path) -> dict[int, list[str]]:
    """The losses that were printed, by step; a step that was done again has several."""
    losses: dict[int, list[str]] = {}
    for index in (0, 1):
        output = folder / f"output{index}"
        for step, loss in re.findall(r"^step (\d+): loss (\S+)", output.read_text() if output.exists() else "", re.M):
            losses.setdefault(int(step), []).append(loss)
    return losses


def _run_script(group, folder: Path) -> None:
    """The script on one host, in ranks that run already."""
    environment = {"RANK": str(group.rank()), "LOCAL_RANK": str(group.rank()), "WORLD_SIZE": str(group.size())}
    environment |= {"LOCAL_WORLD_SIZE": "2", "CHECKPOINT": str(folder / "checkpoint")}
    output = folder / "output0" if group.rank() == 0 else Path(os.devnull)
    with (
        mock.patch.dict("os.environ", environment),
        mock.patch("torch.distributed.init_process_group"),
        mock.patch("torch.distributed.destroy_process_group"),
        output.open("w") as file,
        contextlib.redirect_stdout(file),
    ):
        exec(compile(_block("python"), "train.py", "exec"), {"__name__": "__main__"})


@pytest.fixture
def whole(tmp_path) -> dict[int, list[str]]:
    """The losses of an uninterrupted run."""
    (tmp_path / "whole").mkdir()
    ranks.run(_run_script, 4, tmp_path / "whole", timeout=120)
    losses = _losses(tmp_path / "whole")
    assert list(losses) == list(range(6)) and all(len(found) == 1 for found in losses.values())
    return losses


@pytest.mark.exhaustive
def test_static_rendezvous(whole, tmp_path):
    address = ["--master-addr=127.0.0.1", f"--master-port={_free_port()}"]
    agents = [_agent(tmp_path, index, f"--node-rank={index}", *address, cold=True) for index in (0, 1)]
    codes = _end(agents, SECONDS)
    assert codes == [0, 0], "".join((tmp_path / f"output{index}").read_text() for index in (0, 1))
    assert _losses(tmp_path) == whole


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "cold"])
def test_a_worker_that_dies_is_restarted_and_the_losses_are_those_of_an_uninterrupted_run(cold, whole, tmp_path):
    endpoint = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{_free_port()}", "--rdzv-id=1"]
    options = [*endpoint, "--max-restarts=3", "--local-addr=127.0.0.1"]
    agents = [_agent(tmp_path, index, *options, cold=cold) for index in (0, 1)]
    deadline = time.monotonic() + SECONDS
    while 2 not in _losses(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(agents[1].ranks()[0], signal.SIGKILL)
    codes = _end(agents, SECONDS)
    assert codes == [0, 0], "".join((tmp_path / f"output{index}").read_text() for index in (0, 1))
    killed = _losses(tmp_path)
    assert killed.keys() == whole.keys()
    assert all(set(killed[step]) == set(whole[step]) for step in whole)


def test_templates_can_be_parsed():
    subprocess.run(["bash", "-n"], input=_block("bash", 2), text=True, check=True)
    job = yaml.safe_load(_block("yaml"))
    for pods in job["spec"]["pytorchReplicaSpecs"].values():
        assert pods["template"]["spec"]["containers"][0]["command"] == ["torchrun", "train.py"]
        assert pods["restartPolicy"] == "OnFailure" and pods["replicas"] == 1
