"""Random programs of the collectives, and their meaning: an interpreter that holds the values of all ranks at once.

A program is a list of steps on a stack of values [N, N] on every rank. The interpreter knows no axes along which values
vary: autograd differentiates the whole computation, in which each rank has its own copy of everything.
"""

import itertools
import random

import torch

import tp_ext
from tp_ext import lax

N = 12  # divisible by the products of the sizes of meshes that are tried
ARGUMENTS = 3


def draw(seed, sizes):
    """Returns in_specs, steps and out_spec of a program."""
    r = random.Random(seed)
    names = list(sizes)
    in_specs = [_spec(r, r.sample(names, r.randint(0, len(names)))) for _ in range(ARGUMENTS)]
    shapes = [_local(spec, sizes) for spec in in_specs]
    varies = [set(spec.axes) for spec in in_specs]
    steps = []
    for _ in range(r.randint(3, 9)):
        k, axis = r.randrange(len(shapes)), r.choice(names)
        p = sizes[axis]
        shape, along = list(shapes[k]), set(varies[k])
        kind = r.choice(list(CALLS))
        argument = None
        if kind in ("mul", "add"):
            same = [j for j, other in enumerate(shapes) if other == shapes[k]]
            argument = r.choice(same)
            along |= varies[argument]
        elif kind == "matmul":
            fits = [j for j, other in enumerate(shapes) if other[0] == shape[1]]
            if not fits:
                continue
            argument = r.choice(fits)
            shape[1] = shapes[argument][1]
            along |= varies[argument]
        elif kind == "transpose":
            shape.reverse()
        elif kind in ("psum", "pmean", "pmax"):
            along.discard(axis)
        elif kind in ("psum_scatter", "all_gather", "gather_invariant"):
            argument = r.randrange(2)
            if kind == "psum_scatter":
                if shape[argument] % p:
                    continue
                shape[argument] //= p
            else:
                shape[argument] *= p
                if shape[argument] > 4 * N:
                    continue
            along = along - {axis} if kind == "gather_invariant" else along | {axis}
        elif kind == "all_to_all":
            argument = r.randrange(2)
            if shape[argument] % p:
                continue
            shape[argument] //= p
            shape[1 - argument] *= p
            along.add(axis)
        elif kind == "ppermute":
            ranks = r.sample(range(p), r.randint(1, p))
            argument = list(zip(ranks, r.sample(range(p), len(ranks)), strict=True))
            along.add(axis)
        elif kind in ("index", "pvary"):
            along.add(axis)
        steps.append((kind, k, axis, argument))
        shapes.append(shape)
        varies.append(along)
    return in_specs, steps, _spec(r, sorted(varies[-1]))


def _spec(r, axes):
    dims = [[], []]
    for axis in axes:
        dims[r.randrange(2)].append(axis)
    return tp_ext.P(*(tuple(dim) for dim in dims))


def _local(spec, sizes):
    shape = [N, N]
    for dim, axes in enumerate(spec.dims):
        for axis in axes:
            shape[dim] //= sizes[axis]
    return shape


CALLS = {  # of a step: the stack, x, the axis, the argument
    "mul": lambda stack, x, axis, argument: x * stack[argument],
    "add": lambda stack, x, axis, argument: x + stack[argument],
    "matmul": lambda stack, x, axis, argument: x @ stack[argument] / N,
    "tanh": lambda stack, x, axis, argument: x.tanh(),
    "transpose": lambda stack, x, axis, argument: x.T,
    "psum": lambda stack, x, axis, argument: lax.psum(x, axis),
    "pmean": lambda stack, x, axis, argument: lax.pmean(x, axis),
    "pmax": lambda stack, x, axis, argument: lax.pmax(x, axis),
    "psum_scatter": lambda stack, x, axis, argument: lax.psum_scatter(x, axis, argument),
    "all_gather": lambda stack, x, axis, argument: lax.all_gather(x, axis, argument),
    "gather_invariant": lambda stack, x, axis, argument: lax.all_gather(x, axis, argument, invariant=True),
    "all_to_all": lambda stack, x, axis, argument: lax.all_to_all(x, axis, argument, 1 - argument),
    "ppermute": lambda stack, x, axis, argument: lax.ppermute(x, axis, argument),
    "index": lambda stack, x, axis, argument: x * (lax.axis_index(axis) + 1),
    "pvary": lambda stack, x, axis, argument: lax.pvary(x, axis),
}


def run(steps, values):
    """The program as a user writes it, on one rank."""
    stack = list(values)
    for kind, k, axis, argument in steps:
        stack.append(CALLS[kind](stack, stack[k], axis, argument))
    return stack[-1]


def interpret(in_specs, steps, out_spec, values, sizes):
    """The joined result of all ranks, in one process."""
    names = list(sizes)
    ranks = list(itertools.product(*(range(p) for p in sizes.values())))
    stacks = {}
    for at in ranks:
        place = dict(zip(names, at, strict=True))
        stacks[at] = [_slice(value, spec, place, sizes) for value, spec in zip(values, in_specs, strict=True)]
    for kind, k, axis, argument in steps:
        which = names.index(axis)
        peers = {at: [(*at[:which], i, *at[which + 1 :]) for i in range(sizes[axis])] for at in ranks}
        found = {}
        for at in ranks:
            x, me = stacks[at][k], at[which]
            xs = [stacks[peer][k] for peer in peers[at]]
            if kind in ("mul", "add", "matmul"):
                y = stacks[at][argument]
                found[at] = x * y if kind == "mul" else x + y if kind == "add" else x @ y / N
            elif kind in ("tanh", "transpose", "pvary"):
                found[at] = {"tanh": torch.tanh, "transpose": torch.t, "pvary": torch.clone}[kind](x)
            elif kind in ("psum", "pmean"):
                found[at] = sum(xs) / (len(xs) if kind == "pmean" else 1)
            elif kind == "pmax":
                found[at] = torch.stack(xs).amax(0)
            elif kind == "psum_scatter":
                found[at] = sum(xs).tensor_split(len(xs), argument)[me]
            elif kind in ("all_gather", "gather_invariant"):
                found[at] = torch.cat(xs, argument)
            elif kind == "all_to_all":
                found[at] = torch.cat([x.tensor_split(len(xs), argument)[me] for x in xs], 1 - argument)
            elif kind == "ppermute":
                source = {b: a for a, b in argument}.get(me)
                found[at] = torch.zeros_like(x) if source is None else xs[source].clone()
            elif kind == "index":
                found[at] = x * (me + 1)
        for at in ranks:
            stacks[at].append(found[at])
    results = {at: stacks[at][-1] for at in ranks}
    for dim in (1, 0):
        for axis in reversed(out_spec.dims[dim]):
            which = names.index(axis)
            results = {
                at: torch.cat([results[(*at[:which], i, *at[which + 1 :])] for i in range(sizes[axis])], dim)
                for at in results
                if at[which] == 0
            }
    return results[(0,) * len(names)]


def _slice(value, spec, at, sizes):
    for dim, axes in enumerate(spec.dims):
        for axis in axes:
            value = value.tensor_split(sizes[axis], dim)[at[axis]]
    return value
