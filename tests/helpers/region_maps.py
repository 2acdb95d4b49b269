"""The oracle of the region tests: what a region does to the list of all ranks' tensors, in plain
torch and in one process.

A region is a pair of linear maps, its forward and its backward, and the backward of each is the
forward of its conjugate. `emulate` is differentiable any number of times, like the regions.
"""

from dataclasses import dataclass, field

import torch

import tp_ext

NAMES = [
    "copy_to_region",
    "reduce_from_region",
    "scatter_to_region",
    "gather_from_region",
    "all_gather_region",
    "reduce_scatter_region",
    "all_to_all_region",
]
CONJUGATE = {
    "copy_to_region": "reduce_from_region",
    "scatter_to_region": "gather_from_region",
    "all_gather_region": "reduce_scatter_region",
    "all_to_all_region": "all_to_all_region",
}
CONJUGATE |= {b: a for a, b in CONJUGATE.items()}
NUMBERS = {  # of conformance cases, docs/reference/correctness.md; those with lists of sizes: 9
    1: ("copy_to_region", {}),
    2: ("reduce_from_region", {}),
    3: ("scatter_to_region", {}),
    4: ("gather_from_region", {}),
    5: ("scatter_to_region", {"dim": 0}),
    6: ("all_gather_region", {}),
    7: ("gather_from_region", {"dim": 0}),
    8: ("reduce_scatter_region", {}),
    11: ("all_to_all_region", {"split_dim": 0, "concat_dim": 1}),
}


@dataclass(frozen=True)
class Case:
    """One call, the same on all ranks, and the shape of the full tensor."""

    name: str
    shape: tuple[int, ...]
    options: dict = field(default_factory=dict)

    def __call__(self, x, group):
        return getattr(tp_ext, self.name)(x, group, **self.options)

    @property
    def number(self):
        """The number of the conformance case, or None."""
        if self.name in ("all_gather_region", "reduce_scatter_region") and self.options.keys() == {"dim", "sizes"}:
            return 9
        return next((number for number, known in NUMBERS.items() if known == (self.name, self.options)), None)

    def __str__(self):
        options = "-".join(f"{k}={v}" for k, v in self.options.items()).replace(" ", "")
        number = f"case_{self.number:02}-" if self.number else ""
        return f"{number}{self.name.removesuffix('_region')}-{options}".rstrip("-")

    def explicit(self, p):
        """The options with every dim counted from 0 and every length spelled out."""
        o, ndim = dict(self.options), len(self.shape)
        if self.name == "all_to_all_region":
            for which in ("split", "concat"):
                dim = o[f"{which}_dim"] = o[f"{which}_dim"] % ndim
                o[f"{which}_sizes"] = o.get(f"{which}_sizes") or lengths(self.shape[dim], p)
        elif self.name not in ("copy_to_region", "reduce_from_region"):
            default = 0 if self.name in ("all_gather_region", "reduce_scatter_region") else -1
            o["dim"] = o.get("dim", default) % ndim
            o["sizes"] = o.get("sizes") or lengths(self.shape[o["dim"]], p)
        return o

    def local_shape(self, rank, p):
        """The shape of the input on `rank`."""
        o, shape = self.explicit(p), list(self.shape)
        if self.name == "all_to_all_region" and o["split_dim"] != o["concat_dim"]:
            shape[o["concat_dim"]] = o["concat_sizes"][rank]
        if self.name in ("gather_from_region", "all_gather_region"):
            shape[o["dim"]] = o["sizes"][rank]
        return shape

    def inputs(self, p, dtype=torch.float64):
        """A tensor of small whole numbers per rank: their sums are exact in any dtype."""
        shapes = [self.local_shape(rank, p) for rank in range(p)]
        return [torch.randint(-4, 5, s).to(dtype) for s in shapes]

    def emulate(self, xs):
        """The outputs of all ranks from the inputs of all ranks."""
        return list(_Emulate.apply(self.name, self.explicit(len(xs)), *xs))


def lengths(n, p):
    """The sizes of torch.tensor_split of n."""
    return [n // p + (rank < n % p) for rank in range(p)]


def cases(p):
    """Every region with even, uneven and empty shards on several dims."""
    some = [0, 3, 1, 2][:p] if p > 1 else [3]
    total, uneven = sum(some), 2 * p + 1
    yield Case("copy_to_region", (3, 4))
    yield Case("reduce_from_region", (3, 4))
    for name in ("scatter_to_region", "gather_from_region", "all_gather_region", "reduce_scatter_region"):
        yield Case(name, (2 * p, 4 * p))
        for dim in (0, 1, -1):
            yield Case(name, (2 * p, 3 * p, p), {"dim": dim})
        for dim in (0, -2):
            yield Case(name, (total, 2), {"dim": dim, "sizes": some})
        if name in ("scatter_to_region", "reduce_scatter_region"):
            yield Case(name, (uneven, 3), {"dim": 0})
            yield Case(name, (2, max(p - 1, 1)), {"dim": 1})  # nothing for the last rank
    exchange = "all_to_all_region"
    yield Case(exchange, (2 * p, 3 * p), {"split_dim": 0, "concat_dim": 1})
    yield Case(exchange, (2 * p, 3, p), {"split_dim": -1, "concat_dim": 0})
    yield Case(exchange, (2 * p, 3), {"split_dim": 0, "concat_dim": 0})
    yield Case(exchange, (uneven, 2 * p), {"split_dim": 0, "concat_dim": 1})
    yield Case(exchange, (uneven, total), {"split_dim": 0, "concat_dim": -1, "concat_sizes": some})
    yield Case(
        exchange,
        (2, total, uneven),
        {"split_dim": 1, "concat_dim": 2, "split_sizes": some, "concat_sizes": lengths(uneven, p)},
    )


def simple_cases(p):
    """Every region once, evenly."""
    for name in NAMES[:-1]:
        yield Case(name, (2 * p, 4 * p))
    yield Case(NAMES[-1], (2 * p, 4 * p), {"split_dim": 0, "concat_dim": 1})


def _forward(name, xs, dim=0, sizes=None, split_dim=0, concat_dim=0, split_sizes=None, concat_sizes=None):
    p = len(xs)
    if name == "copy_to_region":
        return [x.clone() for x in xs]
    if name == "scatter_to_region":
        return [x.split(sizes, dim)[rank].clone() for rank, x in enumerate(xs)]
    if name in ("gather_from_region", "all_gather_region"):
        return [torch.cat(xs, dim) for _ in range(p)]
    if name in ("reduce_from_region", "reduce_scatter_region"):
        total = torch.stack(xs).sum(0)
        cut = total.split(sizes, dim) if name == "reduce_scatter_region" else [total] * p
        return [part.clone() for part in cut]
    rows = split_sizes if split_dim == concat_dim else [split_sizes] * p
    cut = [x.split(row, split_dim) for x, row in zip(xs, rows, strict=True)]
    return [torch.cat([parts[rank] for parts in cut], concat_dim) for rank in range(p)]


class _Emulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, options, *xs):
        back = options
        if name == "all_to_all_region":
            one_dim = options["split_dim"] == options["concat_dim"]
            if one_dim and not isinstance(options["split_sizes"][0], list):
                # row k: what rank k sends to each; the inverse sends back what came in
                options = {**options, "split_sizes": [options["split_sizes"]] * len(xs)}
            split = options["split_sizes"]
            back = {
                "split_dim": options["concat_dim"],
                "concat_dim": options["split_dim"],
                "split_sizes": [list(c) for c in zip(*split, strict=True)] if one_dim else options["concat_sizes"],
                "concat_sizes": split,
            }
        ctx.back = CONJUGATE[name], back
        return tuple(_forward(name, xs, **options))

    @staticmethod
    def backward(ctx, *gs):
        return None, None, *_Emulate.apply(*ctx.back, *gs)
