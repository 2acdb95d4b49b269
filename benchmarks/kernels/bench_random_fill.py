"""Weights drawn by global index, whole and a rank's quarter of the columns, against torch's initialisers.

Torch gives the same weights for every number of ranks only by drawing all of them and keeping a part: that is the peer
of the quarter.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.lib.harness import Case, main
from tp_ext.random import Normal, TruncatedNormal, Uniform

COLUMNS, RANKS = 4096, 4
STD = 0.02
CUT = 2 * STD
Torchs = Callable[[Tensor], object]


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    rows, part = size // dtype.itemsize // COLUMNS, COLUMNS // RANKS
    full, theirs = (torch.empty(rows, COLUMNS, dtype=dtype, device=device) for _ in range(2))
    quarter = torch.empty(rows, part, dtype=dtype, device=device)
    seed = torch.tensor(7, dtype=torch.int64, device=device)
    whole, last = (COLUMNS, COLUMNS, 0), (part, COLUMNS, COLUMNS - part)
    kinds: dict[str, tuple[Uniform | Normal | TruncatedNormal, Torchs, float]] = {
        "uniform": (Uniform(-STD, STD), lambda t: t.uniform_(-STD, STD), STD / 3**0.5),
        "normal": (Normal(0.0, STD), lambda t: t.normal_(0.0, STD), STD),
        "truncated normal": (
            TruncatedNormal(0.0, STD, -CUT, CUT),
            lambda t: nn.init.trunc_normal_(t, 0.0, STD, -CUT, CUT),
            0.87963 * STD,  # of a normal one within two standard deviations
        ),
    }
    result = []
    for name, (init, torchs, std) in kinds.items():

        def check(init=init, torchs=torchs, std=std) -> None:
            """The part of a rank equals the part of the whole, bit by bit; and the distribution is torch's."""
            init.fill(full, seed, whole)
            init.fill(quarter, seed, last)
            torchs(theirs)
            assert torch.equal(quarter, full[:, -part:])
            for drawn in (full.float(), theirs.float()):
                assert abs(drawn.mean().item()) < 0.01 * std and abs(drawn.std().item() / std - 1) < 0.01

        def keep_a_part(torchs=torchs) -> None:
            torchs(theirs)
            quarter.copy_(theirs[:, -part:])

        shape = (rows, COLUMNS)
        fill, fill_part = (lambda i=init: i.fill(full, seed, whole)), (lambda i=init: i.fill(quarter, seed, last))
        drawn = {"torch eager": lambda t=torchs: t(theirs)}
        result += [
            Case(name, fill, drawn, check, size, shape=shape),
            Case(f"{name}, a quarter", fill_part, {"torch eager": keep_a_part}, check, size // RANKS, shape=shape),
        ]
    return result


if __name__ == "__main__":
    main(cases)
