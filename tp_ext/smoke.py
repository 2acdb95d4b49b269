"""The command ``python -m tp_ext.smoke``: shows in seconds that an installation works, without tests or a compiler.

Compares layers, loss and checkpoint of 1, 2 and 4 simulated ranks with plain torch, and trains on two processes over
``tp_shm`` and over gloo, whose losses must be the same bit for bit.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn

from tp_ext._build import build_info
from tp_ext.checkpoint.directory import load_checkpoint, save_checkpoint
from tp_ext.checkpoint.full import full_state_dict
from tp_ext.group import Group
from tp_ext.nn.linear import ColumnParallelLinear, RowParallelLinear
from tp_ext.nn.loss import vocab_parallel_cross_entropy
from tp_ext.simulation import simulate

_RANKS = (1, 2, 4)
_BACKENDS = ("tp_shm", "gloo")


def _model(group: Group) -> nn.Sequential:
    up, down = ColumnParallelLinear(16, 64, group=group), RowParallelLinear(64, 16, group=group)
    return nn.Sequential(up, nn.GELU(), down)


def _layers(rank: int, group: Group, up: nn.Linear, down: nn.Linear, x: Tensor) -> list[Tensor]:
    own = x.clone().requires_grad_()
    first = ColumnParallelLinear.from_linear(up, group=group)
    second = RowParallelLinear.from_linear(down, group=group)
    y = second(F.gelu(first(own)))
    y.square().sum().backward()
    assert own.grad is not None
    return [y.detach(), own.grad]


def _check_layers() -> None:
    up, down, x = nn.Linear(16, 64), nn.Linear(64, 16), torch.randn(12, 16, requires_grad=True)
    y = down(F.gelu(up(x)))
    y.square().sum().backward()
    for p in _RANKS:
        for got in simulate(_layers, p, up, down, x.detach()):
            torch.testing.assert_close(got, [y.detach(), x.grad], rtol=1e-4, atol=1e-4)


def _loss(rank: int, group: dist.ProcessGroup, logits: Tensor, targets: Tensor) -> Tensor:
    width = logits.shape[1] // dist.get_world_size(group)
    own = logits[:, rank * width : (rank + 1) * width]
    return vocab_parallel_cross_entropy(own, targets, group)


def _check_loss() -> None:
    logits, targets = torch.randn(16, 32), torch.randint(32, (16,))
    for p in _RANKS:
        for got in simulate(_loss, p, logits, targets):
            torch.testing.assert_close(got, F.cross_entropy(logits, targets))


def _save(rank: int, group: Group, path: Path) -> dict[str, Tensor]:
    model = _model(group)
    save_checkpoint(path, model)
    return full_state_dict(model)


def _load(rank: int, group: Group, path: Path) -> dict[str, Tensor]:
    model = _model(group)
    nn.init.zeros_(model.get_parameter("0.weight"))
    load_checkpoint(path, model)
    return full_state_dict(model)


def _check_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        saved = simulate(_save, 2, path)[0]
        for p in _RANKS:
            for loaded in simulate(_load, p, path):
                torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


def _train(rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for backend in _BACKENDS:
        dist.init_process_group(backend, init_method=f"file://{folder}/{backend}", rank=rank, world_size=2)
        torch.manual_seed(0)
        model, losses = _model(dist.group.WORLD), []
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            loss = model(torch.randn(8, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        Path(folder, f"{backend}.{rank}.losses").write_text(str(losses))
        dist.destroy_process_group()


def _check_processes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_train, (folder,), nprocs=2)
        losses = {path.name: path.read_text() for path in Path(folder).glob("*.losses")}
    assert len(losses) == 4 and len(set(losses.values())) == 1, losses


def main() -> int:
    """Runs the command and returns its exit code; a check that fails raises."""
    torch.manual_seed(0)
    print(", ".join(f"{name} {value}" for name, value in build_info().items()))
    for what, check in {
        f"linears on {_RANKS} ranks": _check_layers,
        f"loss on {_RANKS} ranks": _check_loss,
        f"checkpoint of 2 ranks on {_RANKS}": _check_checkpoint,
        f"training of 2 processes over {' and '.join(_BACKENDS)}": _check_processes,
    }.items():
        check()
        print(f"{what}: right")
    print(f"smoke: tp_ext works with torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
