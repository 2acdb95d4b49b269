"""Traps of our own: features side by side, of which a rank has its shard of each part."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.traps.trap import INNER, WIDTH, Attention, add, images, trap

MORE = 2 * INNER - 4  # features of the second part: another number than those of the first
Made = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


class Joined(nn.Module):
    """Two hidden layers, with `f(self, x, a, b)` for what is done with the features of both."""

    def __init__(self, f: Made) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, MORE)
        self.c, self.f = nn.Linear(INNER + MORE, WIDTH), f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x, F.gelu(self.a(x)), self.b(x).tanh())


def joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts, -1)


# Rank r has a[r] | b[r], which are no columns next to each other
SHARDED: dict[str, Made] = {
    "linear": lambda s, x, a, b: s.c(joined(a, b)),
    "other_order": lambda s, x, a, b: s.c(joined(b, a)),
    "product": lambda s, x, a, b: joined(a, b) @ s.c.weight.T,
    "twice": lambda s, x, a, b: s.c(joined(a, b)) * s.c(joined(a.relu(), -b)).sigmoid(),
    "split_again": lambda s, x, a, b: s.c(joined(*(part.sin() for part in joined(a, b).split([INNER, MORE], -1)))),
    "in_two_steps": lambda s, x, a, b: s.c(joined(joined(*a.chunk(2, -1)), b)),
}
# Whole, or right all the same
OTHERS: dict[str, Made] = {
    "split_elsewhere": lambda s, x, a, b: s.c(joined(a, b).roll(1, -1)),
    "mixed": lambda s, x, a, b: s.c(joined(a, b).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)),
    "with_whole": lambda s, x, a, b: s.c(joined(a, x, b[..., WIDTH:])),
    "with_zeros": lambda s, x, a, b: s.c(joined(a, torch.zeros_like(b))) + b.sum(-1, True),
    "normalized": lambda s, x, a, b: s.c(joined(a, b).softmax(-1)),
    "by_length": lambda s, x, a, b: s.c(joined(a, b) / a.shape[-1]),
    "summed": lambda s, x, a, b: joined(a, b).mean(-1, keepdim=True) + x,
    "of_itself": lambda s, x, a, b: s.c(joined(a, a, a)[..., : INNER + MORE]) + b.sum(-1, True),
}
WHY = "the next layer has the features of a rank in two places"
for name, f in SHARDED.items():
    add(f"joined_{name}", functools.partial(Joined, f), WHY, share=0.9, p=(2, 3, 4))
for name, f in OTHERS.items():
    add(f"joined_{name}", functools.partial(Joined, f), WHY, p=(2, 3))


@trap("dropout masks the features of both", random=True, share=0.9)
class JoinedDropped(Joined):
    def __init__(self) -> None:
        super().__init__(lambda s, x, a, b: s.c(F.dropout(joined(a, b), 0.25, s.training)))


@trap("heads next to hidden features, as in Flux and PaLM", share=0.9, p=(2, 3, 4))
class JoinedHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH + INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        heads = self.scores(q, k).softmax(-1) @ v
        return self.out(joined(heads.transpose(1, 2).flatten(-2), F.gelu(self.up(x))))


@trap("the skips of a U-Net", share=0.5, p=(2, 3))
class JoinedSkips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, MORE)
        self.middle, self.up2, self.up1 = nn.Linear(MORE, INNER), nn.Linear(INNER + MORE, INNER), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.down1(x))
        b = F.silu(self.down2(a))
        y = F.silu(self.up2(joined(F.silu(self.middle(b)), b)))
        return self.up1(joined(y, a))


@trap("channels side by side", images, share=0.9, p=(2, 3))
class JoinedChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(3, 20, 1), nn.Conv2d(32, 4, 3)
        self.norm = nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(torch.cat([self.a(x), self.b(x).relu()], 1)))
