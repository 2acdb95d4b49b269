"""Random pairs of layouts: a model of bare tensors on a mesh, whose entries are sharded, copied, padded, fused, tied
and spread over stages at random."""

import random
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed import DeviceMesh

import tp_ext

AXES = ("pp", "dp", "x", "y")


@dataclass
class Side:
    """A model on some of the ranks: the sizes of its axes, and of each entry its shape, the stages that hold it, and
    its shardings, each with its axis.

    ``tied``: name -> the name of the entry that it is the same tensor as.
    """

    ranks: list[int]
    sizes: tuple[int, ...]
    entries: dict[str, tuple[tuple[int, ...], list[int], list[tuple[tp_ext.Sharding, str]]]] = field(
        default_factory=dict
    )
    tied: dict[str, str] = field(default_factory=dict)


def sizes_of(rng, ranks):
    """Sizes of the axes that multiply to the number of ranks."""
    sizes = [1, 1, 1, 1]
    while ranks > 1:
        factor = next(f for f in (2, 3, 5, 7) if ranks % f == 0)
        sizes[rng.randrange(4)] *= factor
        ranks //= factor
    return tuple(sizes)


def shardings_of(rng, shape, sizes, parts, fused):
    """Shardings of some dims over the last two axes, with parts, units, copies and padding where they fit; ``fused``:
    of dim 0 in any case, so that its parts are known."""
    shardings, dims = [], list(range(len(shape)))
    for axis in ("x", "y"):
        p = sizes[AXES.index(axis)]
        if not dims or (rng.random() < 0.3 and not (fused and 0 in dims)):
            continue
        dim = dims.pop(0 if fused and 0 in dims else rng.randrange(len(dims)))
        lengths = parts if dim == 0 and parts else (shape[dim],)
        cuts = []
        for length in lengths:
            unit = rng.choice([u for u in (1, 2, 3) if length % u == 0])
            copies = rng.choice([c for c in (1, 1, 2, p) if p % c == 0])
            padding = 0 if len(lengths) > 1 or rng.random() < 0.5 else -length % (unit * p)
            cuts.append(tp_ext.Part(length, unit, copies=copies, padding=padding))
        shardings.append((tp_ext.Sharding(dim, cuts), axis))
    return shardings


def draw(seed):
    """The number of ranks, up to 8, source, target, names, and the dtypes of source and target."""
    rng = random.Random(seed)
    p = rng.randint(1, 8)
    everyone = list(range(p))
    if p > 1 and rng.random() < 0.4:  # disjoint
        cut = rng.randint(1, p - 1)
        some, others = everyone[:cut], everyone[cut:]
    else:
        some, others = everyone[: rng.randint(1, p)], everyone[p - rng.randint(1, p) :]
    if rng.random() < 0.5:
        some, others = others, some
    source, target = (Side(ranks, sizes_of(rng, len(ranks))) for ranks in (some, others))
    names = {}
    for number in range(rng.randint(2, 5)):
        name, lengths = f"m{number}.w", tuple(rng.randint(1, 6) for _ in range(rng.choice([1, 1, 3])))
        shape = (sum(lengths), *(rng.randint(1, 5) for _ in range(rng.randint(0, 2))))
        kind = rng.choice(["same", "same", "split", "joined", "renamed"]) if len(lengths) > 1 else "same"
        whole, apart = (shape, lengths), {f"m{number}.w{i}": ((n, *shape[1:]), ()) for i, n in enumerate(lengths)}
        of_source = apart if kind == "joined" else {name: whole}
        of_target = {"split": apart, "renamed": {f"m{number}.v": whole}}.get(kind, {name: whole})
        for side, entries in ((source, of_source), (target, of_target)):
            for entry, (its_shape, parts) in entries.items():
                stages = [rng.randrange(side.sizes[0])]
                if side is target and rng.random() < 0.2:
                    stages = list(range(side.sizes[0]))
                fused = kind == "split" and side is source
                side.entries[entry] = its_shape, stages, shardings_of(rng, its_shape, side.sizes, parts, fused)
        if kind == "split":
            names |= {entry: (name, i) for i, entry in enumerate(apart)}
        elif kind == "joined":
            names[name] = list(apart)
        elif kind == "renamed":
            names[f"m{number}.v"] = name
    for side in (source, target):
        plain = [name for name in side.entries if side is source or name not in names]
        if plain and rng.random() < 0.4:
            side.tied["tied.w"] = rng.choice(plain)
    if "tied.w" in target.tied and "tied.w" not in source.tied:
        names["tied.w"] = target.tied["tied.w"]
    f32, bf16 = torch.float32, torch.bfloat16
    return p, source, target, names, rng.choice([(f32, f32), (f32, bf16), (bf16, f32)])


def fulls(seed, source, dtype):
    """The full tensors of the source."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, _, _) in source.entries.items()}


def full_of(name, target, names, full, source):
    """The full tensor that a target's entry gets, by names."""
    value = names.get(name, name)

    def part(source_name):
        if isinstance(source_name, str):
            return full[source.tied.get(source_name, source_name)]
        sharding = next(s for s, _ in source.entries[source_name[0]][2] if s.dim == 0)
        return full[source_name[0]].split([p.size for p in sharding.parts])[source_name[1]]

    return torch.cat([part(source_name) for source_name in value]) if isinstance(value, list) else part(value)


def layouts_on(rank, side, mesh):
    """The layouts of the entries that a rank holds, by name."""
    if rank not in side.ranks:
        return {}
    stage = mesh["pp"].get_local_rank()
    return {
        name: tp_ext.Layout(*((sharding, mesh[axis]) for sharding, axis in shardings))
        for name, (_, stages, shardings) in side.entries.items()
        if stage in stages
    }


def mesh_of(side):
    """Every rank calls it: groups are made by all."""
    return DeviceMesh("cpu", torch.tensor(side.ranks).view(side.sizes), mesh_dim_names=AXES)


def model_of(rank, side, layouts, values, dtype):
    """A model of modules with one parameter each; ``values``: full tensors by name."""
    if rank not in side.ranks:
        return None
    model = nn.Module()

    def module(name):
        path = name.rpartition(".")[0]
        if not hasattr(model, path):
            model.add_module(path, nn.Module())
        return getattr(model, path)

    for name, layout in layouts.items():
        owner, local = module(name), name.rpartition(".")[2]
        value = layout.shard(values[name]).to(dtype).clone()
        owner.register_parameter(local, nn.Parameter(value))
        tp_ext.declare_layouts(owner, {local: layout})
    for name, other in side.tied.items():
        if other in layouts:
            owner, local = module(name), name.rpartition(".")[2]
            owner.register_parameter(local, getattr(module(other), other.rpartition(".")[2]))
            tp_ext.declare_layouts(owner, {local: layouts[other]})
    return model
