"""Every rule is a theorem: for each atom that it leaves free, the operator of shards is the shard of the operator.

A program runs once on full tensors and once on each rank's shards, along each free atom of its parameters; every
result must be that of the full run, sliced by the dims that the rules gave it, or add up to it where the atom is
contracted."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tp_ext.auto.record.dims import Atom, Dim, atoms, contains, majors
from tp_ext.auto.record.record import Record, Step, tensors
from tp_ext.auto.record.rules import from_notation
from tp_ext.auto.record.trace import trace

P = 2
Function = Callable[..., Any]
ids = torch.tensor([[0, 3, 5], [1, 1, 4]])

# name: (shapes of parameters, program, sizes of the atoms of the parameters that stay free)
PROGRAMS: dict[str, tuple[list[tuple[int, ...]], Function, list[int]]] = {
    "view divides": ([(3, 24)], lambda x: x.view(3, 4, 6), [3, 4, 6]),
    "view joins": ([(3, 4, 6)], lambda x: x.reshape(12, 6), [3, 4, 6]),
    "view joins and divides": ([(4, 6)], lambda x: x.view(2, 12), [2, 2, 6]),
    "view across factors": ([(2, 4, 3)], lambda x: x.view(3, 8), []),
    "view across factors, then along": ([(6, 4, 5)], lambda x: x.reshape(4, 3, 2, 5), [5]),
    "view that fits no factor": ([(6, 4)], lambda x: x.view(4, 6), []),
    "q, k, v as a dim of 3": ([(5, 24)], lambda x: x.view(5, 3, 8) + torch.cat(x.split(8, 1), 1).view(5, 3, 8), [5, 8]),
    "transpose": ([(3, 4, 6)], lambda x: x.transpose(0, 2).permute(1, 0, 2), [3, 4, 6]),
    "squeeze": ([(3, 1, 6)], lambda x: x.squeeze(1).unsqueeze(0), [3, 6]),
    "expand": ([(3, 1, 6)], lambda x: x.expand(3, 4, 6) * 2, [3, 6]),
    "repeat of key-value heads": ([(2, 5, 4)], lambda x: x[:, None].expand(2, 3, 5, 4).reshape(6, 5, 4), [2, 4, 5]),
    "repeat": ([(4, 6)], lambda x: x.repeat(1, 2), [4, 6]),
    "split in parts": ([(4, 18)], lambda x: [t * 2 for t in x.split([6, 6, 6], 1)], [4, 6, 6, 6]),
    "split in unequal parts": ([(4, 16)], lambda x: [t * 2 for t in x.split([8, 4, 4], 1)], [4, 4, 4, 8]),
    "slices": ([(4, 12)], lambda x: (x[:, :8], x[:, 8:]), [4, 4, 8]),
    "slices of heads": ([(4, 12)], lambda x: x.view(4, 3, 4)[..., :2], [2, 2, 3, 4]),
    "strided slice": ([(4, 12)], lambda x: x[:, ::2], [4, 6]),
    "strided slice that leaves a rest": ([(4, 9)], lambda x: x[:, ::2], [4]),
    "select": ([(4, 6)], lambda x: x[1], [6]),
    "half rotary": ([(4, 8)], lambda x: x + torch.cat([-x[:, 4:], x[:, :4]], 1), [4, 4]),
    "cat": ([(4, 6), (4, 8)], lambda x, y: torch.cat([x, y], 1) * 2, [4, 6, 8]),
    "stack": ([(4, 6), (4, 6)], lambda x, y: torch.stack([x, y], 1), [4, 6]),
    "index by a tensor": ([(6, 4)], lambda x: x[ids], [4]),
    "index_select": ([(6, 4)], lambda x: x.index_select(0, ids[0]), [4]),
    "gather": ([(2, 6, 4), (2, 3, 4)], lambda x, y: x.gather(1, (y * 0).long()), [2, 3, 4]),
    "scatter": ([(2, 6), (2, 3)], lambda x, y: x.scatter(1, ids, y), [2]),
    "index_add": ([(6, 4), (3, 4)], lambda x, y: x.index_add(0, ids[0], y), [4]),
    "index_put": ([(6, 4), (3, 4)], lambda x, y: x.index_put((ids[0],), y), [4]),
    "embedding": ([(6, 4)], lambda x: nn.functional.embedding(ids, x), [4, 6]),
    "pointwise, broadcast": ([(4, 6), (6,), (4, 1)], lambda x, y, z: (x * y + z).tanh_(), [4, 6]),
    "masked_fill": ([(4, 6)], lambda x: x.masked_fill(x > 0, 1.0), [4, 6]),
    "where": ([(4, 6), (6,)], lambda x, y: torch.where(x > 0, x, y), [4, 6]),
    "linear": ([(3, 4), (6, 4), (6,)], nn.functional.linear, [3, 4, 6]),
    "linear of three dims": ([(2, 3, 4), (6, 4)], nn.functional.linear, [2, 3, 4, 6]),
    "matmul of heads": ([(2, 3, 4, 6), (2, 3, 6, 5)], torch.matmul, [2, 3, 4, 5, 6]),
    "baddbmm": ([(2, 4, 5), (2, 4, 6), (2, 6, 5)], torch.baddbmm, [2, 4, 5, 6]),
    "mv": ([(4, 6), (6,)], torch.mv, [4, 6]),
    "softmax": ([(4, 6)], lambda x: x.softmax(-1), [4]),
    "mean of all": ([(4, 6)], lambda x: x.mean(), []),
    "variance": ([(4, 6)], lambda x: x.var(0, keepdim=True), [6]),
    "topk": ([(4, 6)], lambda x: x.topk(2, -1), [4]),
    "sort": ([(4, 6)], lambda x: x.sort(0), [6]),
    "cumsum": ([(4, 6)], lambda x: x.cumsum(1), [4]),
    "roll": ([(4, 6)], lambda x: x.roll(1, 1), [4]),
    "elementwise maximum": ([(4, 6), (4, 6)], torch.maximum, [4, 6]),
    "maximum of a dim": ([(4, 6)], lambda x: x.max(1), [4]),
    "layer norm": ([(4, 6), (6,)], lambda x, w: nn.functional.layer_norm(x, (6,), w, w), [4]),
    "group norm": ([(4, 6, 5), (6,)], lambda x, w: torch.native_group_norm(x, w, w, 4, 6, 5, 2, 1e-5), [2, 4]),
    "batch norm": ([(4, 6, 5), (6,)], lambda x, w: nn.functional.batch_norm(x, None, None, w, w, True), [6]),
    "batch norm in evaluation": (
        [(4, 6, 5), (6,)], lambda x, w: nn.functional.batch_norm(x, w.detach(), w.exp().detach(), w, w), [6],
    ),
    "instance norm": ([(4, 6, 5), (6,)], lambda x, w: nn.functional.instance_norm(x, weight=w, bias=w), [6]),
    "tril": ([(4, 6, 6)], torch.tril, [4]),
    "pad": ([(4, 6)], lambda x: nn.functional.pad(x, (1, 0)), [4]),
    "unfold": ([(4, 6)], lambda x: x.unfold(1, 2, 2), [4]),
    "complex": ([(4, 6, 2)], lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), [4, 6]),
    "convolution": ([(2, 4, 9), (6, 4, 3), (6,)], nn.functional.conv1d, [2, 4, 6]),
    "depthwise convolution": ([(2, 4, 9), (4, 1, 3)], lambda x, w: nn.functional.conv1d(x, w, groups=4), [2, 4]),
    "convolution in groups": (
        [(2, 6, 9), (4, 3, 3), (4,)], lambda x, w, b: nn.functional.conv1d(x, w, b, groups=2), [2, 2],
    ),
    "depthwise convolution with two results": (
        [(2, 4, 9), (8, 1, 3)], lambda x, w: nn.functional.conv1d(x, w, groups=4), [2, 4],
    ),
    "transposed convolution": (
        [(2, 4, 5, 5), (4, 6, 3, 3), (6,)], lambda x, w, b: nn.functional.conv_transpose2d(x, w, b, 2), [2, 4, 6],
    ),
    "transposed convolution in groups": (
        [(2, 4, 9), (4, 3, 3), (6,)], lambda x, w, b: nn.functional.conv_transpose1d(x, w, b, groups=2), [2, 2],
    ),
    "convolution of one image": ([(4, 9, 9), (6, 4, 3, 3)], nn.functional.conv2d, [4, 6]),
    "pooling": (
        [(2, 6, 8, 8)],
        lambda x: [
            nn.functional.max_pool2d(x, 2), nn.functional.max_pool2d(x, 2, return_indices=True)[1],
            nn.functional.avg_pool2d(x, 2), nn.functional.adaptive_avg_pool2d(x, 3),
            nn.functional.adaptive_avg_pool2d(x, 1), nn.functional.adaptive_max_pool2d(x, 3),
            nn.functional.max_pool1d(x[..., 0], 2), nn.functional.avg_pool1d(x[..., 0], 2),
            nn.functional.lp_pool2d(x, 2, 2),
            nn.functional.adaptive_avg_pool1d(x[..., 0], 3), nn.functional.adaptive_max_pool1d(x[..., 0], 3),
        ],
        [2, 6],
    ),
    "pooling of volumes": (
        [(2, 6, 4, 4, 4)],
        lambda x: [
            nn.functional.max_pool3d(x, 2), nn.functional.avg_pool3d(x, 2), nn.functional.adaptive_avg_pool3d(x, 3),
            nn.functional.interpolate(x, scale_factor=2), nn.functional.interpolate(x, 6, mode="trilinear"),
        ],
        [2, 6],
    ),
    "interpolation": (
        [(2, 6, 4, 4)],
        lambda x: [
            nn.functional.interpolate(x, scale_factor=2), nn.functional.interpolate(x, 6, mode="bilinear"),
            nn.functional.interpolate(x, 7, mode="bicubic"), nn.functional.interpolate(x, 6, mode="nearest-exact"),
            nn.functional.interpolate(x, 3, mode="bilinear", antialias=True),
            nn.functional.interpolate(x, 3, mode="area"), nn.functional.interpolate(x[..., 0], 6, mode="linear"),
        ],
        [2, 6],
    ),
    "padding of images": (
        [(2, 6, 4, 4)],
        lambda x: [nn.functional.pad(x, (1, 1, 2, 2), mode) for mode in ("reflect", "replicate")],
        [2, 6],
    ),
    "pixel shuffle": ([(2, 12, 3, 3)], lambda x: nn.functional.pixel_shuffle(x, 2), [2, 3]),
    "pixel unshuffle": ([(2, 3, 4, 4)], lambda x: nn.functional.pixel_unshuffle(x, 2), [2, 3]),
    "unfold of images": ([(2, 6, 4, 4)], lambda x: nn.functional.unfold(x, 2), [2, 6]),
    "fold": ([(2, 24, 9)], lambda x: nn.functional.fold(x, (4, 4), 2), [2, 6]),
    "Fourier transforms": ([(2, 6, 4, 4)], lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2, s=(4, 4)), [2, 6]),
    "activations without a tag": (
        [(4, 6)], lambda x: [nn.functional.hardswish(x), nn.functional.logsigmoid(x)], [4, 6],
    ),
    "prelu": ([(4, 6), (6,)], nn.functional.prelu, [4, 6]),
    "glu": ([(4, 12)], nn.functional.glu, [4, 6]),
    "glu of parts": ([(4, 8), (4, 4)], lambda x, y: nn.functional.glu(torch.cat([x, y], 1)[:, 4:]), [4, 4, 4]),
    "normalize": ([(4, 6)], nn.functional.normalize, [4]),
    "cosine similarity": ([(4, 6, 5), (4, 6, 5)], lambda x, y: nn.functional.cosine_similarity(x, y, -1), [4, 6]),
    "bilinear": ([(5, 4), (5, 6), (8, 4, 6), (8,)], nn.functional.bilinear, [4, 5, 6, 8]),
    "weight norm": ([(6, 4), (6, 1)], lambda v, g: torch._weight_norm(v, g, 0), [6]),
    "weight norm of columns": ([(6, 4), (1, 4)], lambda v, g: torch._weight_norm(v, g, 1), [4]),
    "weight norm of a middle dim": ([(6, 4, 3), (1, 4, 1)], lambda v, g: torch._weight_norm(v, g, 1), [4]),
    "new and like": ([(4, 6)], lambda x: torch.ones_like(x) * x + x.new_zeros(6), [4, 6]),
    "no rule": ([(4, 4)], torch.linalg.inv, []),
}  # fmt: skip


class Program(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], function: Function) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(*shape, dtype=torch.float64)) for shape in shapes)
        self.function = function

    def forward(self) -> Any:
        return self.function(*self.weights)


def _free(record: Record) -> list[Atom]:
    found: dict[int, Atom] = {}

    def add(dim: Dim) -> None:
        for atom in atoms(dim):
            for part in atom.parts or ():
                add(part)
            if atom.pinned is None and atom.parts is None:
                found[id(atom)] = atom

    for _, tensor in record.parameters.values():
        for dim in record.dims_of(tensor):
            add(dim)
    return list(found.values())


def _coordinates(dim: Dim, atom: Atom) -> list[int]:
    """The index of each element of a dim along an atom, -1 in parts that do not have it."""
    factors = atoms(dim)
    if not factors:
        return [-1]
    first, inner = factors[0], _coordinates(factors[1:], atom) if len(factors) > 1 else [-1]
    own = [-1] * first.size
    if first is atom:
        own = list(range(first.size))
    elif first.parts is not None:
        own = [c for part in first.parts for c in _coordinates(part, atom)]
    return [a if a >= 0 else b for a in own for b in inner]


def _kept(dim: Dim, atom: Atom, rank: int) -> list[int]:
    """The elements of a dim that a rank has."""
    mine = {i for i in range(atom.size) if i * P // atom.size == rank}
    return [i for i, c in enumerate(_coordinates(dim, atom)) if c < 0 or c in mine]


def _shard(full: Tensor, dims: list[Dim], atom: Atom, rank: int) -> Tensor:
    for i, dim in enumerate(dims):
        full = full.index_select(i, torch.tensor(_kept(dim, atom, rank), dtype=torch.int64))
    return full


class _Captured(TorchDispatchMode):
    """The operators of a run on real tensors, those that the record has."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor], list[Tensor]]] = []
        self.values: list[list[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = [t for _, t in tensors([list(args), kwargs])], [t for _, t in tensors(result)]
        if inputs and outputs:
            self.calls.append((func, args, kwargs or {}, inputs, outputs))
            self.values.append([t.clone() for t in outputs])
        return result


def _local_call(func: Any, args: Any, step: Step, record: Record, atom: Atom, rank: int) -> tuple[Any, Any]:
    """The operator and its arguments with local sizes."""
    args = list(args)
    shapes = [[len(_kept(dim, atom, rank)) for dim in record.dims_of(t)] for t in step.outputs]
    source = record.dims_of(step.inputs[0])
    if step.name.startswith("new_"):
        args[1] = shapes[0]
    if step.name == "native_group_norm":
        args[3], args[4], args[6] = *shapes[0][:2], shapes[1][1]
    if step.name == "convolution" and args[8] > 1:
        channels = step.inputs[0].shape[1] // args[8]  # of a group
        args[8] = len(_kept(source[1], atom, rank)) // channels
    if step.name in ("view", "_unsafe_view", "expand", "reshape"):
        args[1] = shapes[0]
        return (torch.ops.aten.reshape.default if step.name != "expand" else func), args
    if step.name == "split_with_sizes" or step.name == "split":
        axis = (args[2] if len(args) > 2 else 0) % len(source)
        return torch.ops.aten.split_with_sizes.default, [args[0], [shape[axis] for shape in shapes], axis]
    if step.name == "slice" and (len(args) < 5 or args[4] == 1):
        axis = args[1] if len(args) > 1 else 0
        kept, start = _kept(source[axis], atom, rank), args[2] or 0
        first = sum(i < start for i in kept)
        args[2], args[3] = first, first + shapes[0][axis]
    return func, args


def _check(record: Record, captured: _Captured, weights: list[Tensor], atom: Atom) -> int:
    """Replays a program on shards along an atom; returns how many results had it."""
    steps = record.steps
    assert [step.name for step in steps] == [call[0]._schema.name.split("::")[1] for call in captured.calls]
    local = {id(w): [_shard(w, record.dims_of(f), atom, r) for r in range(P)] for w, (_, f) in
             zip(weights, record.parameters.values(), strict=True)}  # fmt: skip
    with_atom = 0
    for step, (func, args, kwargs, inputs, outputs), values in zip(steps, captured.calls, captured.values, strict=True):
        for tensor, fake in zip(inputs, step.inputs, strict=True):
            local.setdefault(id(tensor), [_shard(tensor, record.dims_of(fake), atom, r) for r in range(P)])
        results = []
        for rank in range(P):
            own, own_args = _local_call(func, args, step, record, atom, rank)
            given, named = tree_map(
                lambda t, rank=rank: local[id(t)][rank] if isinstance(t, Tensor) else t, (own_args, kwargs)
            )
            results.append([t for _, t in tensors(own(*given, **named))])
        for place, (full, fake) in enumerate(zip(values, step.outputs, strict=True)):
            shards = [result[place] for result in results]
            wanted = [_shard(full, record.dims_of(fake), atom, r) for r in range(P)]
            if contains(step.contracted, atom):
                extra = (
                    1 if step.name in ("addmm", "baddbmm") or (step.name == "convolution" and len(inputs) > 2) else 0
                )
                sum_ = torch.stack(shards).sum(0)
                if extra:
                    added = inputs[0 if step.name != "convolution" else 2]
                    places = [1] * (inputs[1].dim() - 2)
                    sum_ = sum_ - (P - 1) * (added.view(-1, *places) if step.name == "convolution" else added)
                torch.testing.assert_close(sum_, full, rtol=1e-12, atol=1e-12)
                shards = wanted
            else:
                if math.prod(step.outputs[place].shape) and any(contains(dim, atom) for dim in record.dims_of(fake)):
                    with_atom += 1
                for shard, expected in zip(shards, wanted, strict=True):
                    torch.testing.assert_close(shard, expected, rtol=1e-12, atol=1e-12)
            local[id(outputs[place])] = shards
    return with_atom


def _run(shapes: list[tuple[int, ...]], function: Function) -> Iterator[tuple[Record, int]]:
    torch.manual_seed(0)
    program = Program(shapes, function)
    record = trace(program, ())
    with torch.no_grad(), _Captured() as captured:
        program()
    for atom in _free(record):
        if any(step.name == "embedding" and contains(step.contracted, atom) for step in record.steps):
            continue  # the rows of a table: the layer looks up its own and sums
        yield record, _check(record, captured, list(program.weights), atom)


@pytest.mark.parametrize("name", PROGRAMS)
def test_operators_of_shards_are_shards_of_operators(name: str) -> None:
    shapes, function, free = PROGRAMS[name]
    record = trace(Program(shapes, function), ())
    assert sorted(atom.size for atom in _free(record)) == free
    for _ in _run(shapes, function):
        pass


def test_pinned_says_operator_module_and_line() -> None:
    record = trace(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5)), (torch.zeros(3, 4),))
    weights = {name: record.dims_of(t) for name, t in record.parameters.values()}
    for dim in (weights["0.weight"][0], weights["2.weight"][1]):
        (atom,) = atoms(dim)
        assert str(atom.pinned).startswith("native_layer_norm in 1 (test_rules.py:")
    (free,) = majors(weights["2.weight"][0])
    assert free.atom.pinned is None


def test_notation_refuses_what_it_cannot_mean() -> None:
    for line, words in {
        "a b": "one '->'",
        "a b -> a b -> a": "one '->'",
        "a $ -> a": "must be names",
        "a * -> a": "at most one",
    }.items():
        with pytest.raises(ValueError, match=words):
            from_notation(line)
