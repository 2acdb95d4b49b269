"""A model scaled down for the proof by values: of every dim that is sharded, a few units remain.

Layers of large models do not fit the memory in which the proof runs. What is sharded repeats a unit, a head or a
feature, so that a model with fewer of them has the code, the collectives and the mistakes of the large one; so has one
with fewer features between its blocks. It is the model of a rank that communicates nothing: its integers are found as
those of ranks are."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext.auto.proof.copies import copy_of_structure
from tp_ext.auto.proof.prove_values import UnprovenError
from tp_ext.auto.proof.random_values import FEW
from tp_ext.auto.record.arguments import with_tensors
from tp_ext.auto.record.dims import Atom, contains
from tp_ext.auto.search.choose import Decision, constant_atoms, local_length
from tp_ext.auto.search.integers import IntegerSearch
from tp_ext.auto.search.localize import Localized, MismatchError, PatchesOf, Shapes, SizesOf, is_conv1d, patch
from tp_ext.auto.search.rounds import Planner
from tp_ext.share_sizes import split_sizes

NORMS = nn.LayerNorm, nn.RMSNorm
LARGE_DIM = 1024  # elements of a dim that is not sharded, from which on it has fewer
MAX_SCALED_RUNS = 40  # of a search for integers
ROWS = 2 * FEW  # of a table, and classes: there is one for every position of a short example
FEWER = 272, 16  # then the first such dim has this many, the next as many more: no usual size of a head


@dataclass(frozen=True)
class _SmallerShape:
    """A smaller shape, in the place of a sharding."""

    shape: tuple[int, ...]
    size: int
    dim: int

    def local_shape(self, shape: Sequence[int], rank: int, p: int) -> tuple[int, ...]:
        return self.shape

    def local_size(self, rank: int, p: int) -> int:
        return self.shape[self.dim]


class _Smaller(Localized):
    """The model with smaller dims, as if it were that of a rank."""

    def __init__(self, full: Localized, shapes: Mapping[str, Any], kept: Mapping[Atom, int]) -> None:
        edits = replace(full.edits, p=1, shardings=shapes, heads=[])
        # Nothing has its full length, nor have logits
        flow = replace(full.flow, local=set(full.flow.types.record.dims))
        super().__init__(full.model, full.example, edits, flow)
        self.kept = kept

    def sizes(self, rank: int) -> dict[Atom, int]:
        return dict(self.kept)

    @contextlib.contextmanager
    def local_model(self, rank: int, patches: PatchesOf, sizes: SizesOf) -> Iterator[Shapes]:
        with super().local_model(rank, patches, sizes) as shapes:
            for name, module in self.model.named_modules():
                if isinstance(module, NORMS) and f"{name}.weight" in shapes:
                    module.normalized_shape = shapes[f"{name}.weight"]
            yield shapes


def scaled_down(part: Planner) -> tuple[nn.Module, Any]:
    """Returns a model without weights, and an example for it, with fewer units of all that a planner shards.

    Raises:
        UnprovenError: its integers are not found, or the plan has something that has no smaller form.
    """
    state = part.state()
    if state.flow.buffers or state.flow.slices or "attention" in state.types.roles.values():
        raise UnprovenError("buffers, constants or attention layers that are sharded have no smaller form")
    tables = {
        decision.atom for decision in state.types.chosen if any(_is_table(part, name) for name in decision.parameters)
    }
    tables |= state.types.whole_heads
    units = _units(state.types.chosen, tables)
    others = _others(part, units)
    # Integers for fewer unsharded features may not be found, where those of fewer units are
    for kept in [{**units, **others}, units] if others else [units]:
        shapes = _shapes(part, kept)
        smaller = _Smaller(part.localized(state), shapes, kept)
        try:
            local, _ = IntegerSearch(smaller, 0, max_runs=MAX_SCALED_RUNS).find()
        except MismatchError as mismatch:
            failed = f"with fewer units, {mismatch}"
            continue
        if local.sizes:
            failed = "the sizes of views that its code computes have no smaller form"
            continue
        model = copy_of_structure(part.model)
        _shrink(model, shapes)
        patch(model, local.patches)
        return model, _with_fewer_ids(part.example, min((units[atom] for atom in tables), default=None))
    raise UnprovenError(failed)


def _units(decisions: Sequence[Decision], tables: Collection[Atom]) -> dict[Atom, int]:
    """Returns the numbers of units of sharded atoms that remain: two a rank, one more where ranks have unequal numbers.

    Atoms of different length keep different lengths: an integer of the code must have one meaning."""
    targets = [(d, target) for d in decisions for target in (d.slowest if d.group is None else [d.group])]
    lengths = sorted({target.size for _, target in targets})
    units: dict[Atom, int] = {}
    two = _two_a_rank(decisions)
    for decision, target in targets:
        ranks = decision.p if decision.group is None else decision.p // decision.atom.size
        least = max(-(-ROWS // ranks), two) if decision.atom in tables else two
        few = ranks * (least + lengths.index(target.size)) + bool(target.size % ranks)
        units[target] = min(target.size, few)
    return units


def _two_a_rank(decisions: Sequence[Decision]) -> int:
    """Returns how many units there are for each rank: two, or as many as leave no rank without one by its share."""
    shares = next((decision.shares for decision in decisions), None)
    if shares is None:
        return 2
    p, most = len(shares), max(decision.atom.size for decision in decisions)
    return next(n for n in itertools.count(2) if n * p >= most or all(split_sizes(n * p, p, shares)))


def _others(part: Planner, units: Iterable[Atom]) -> dict[Atom, int]:
    """Returns fewer elements for the large unsharded atoms of parameters; atoms of buffers, which have values, stay."""
    record = part.record
    of_buffers = [dim for _, tensor in record.buffers.values() for dim in record.dims_of(tensor)]
    large = {
        atom
        for atom in constant_atoms(record, buffers=False)
        if atom.size >= LARGE_DIM and atom.parts is None and atom not in set(units)
    }
    large = {atom for atom in large if not any(contains(dim, atom) for dim in of_buffers)}
    sizes = dict(zip(sorted({atom.size for atom in large}), itertools.count(*FEWER), strict=False))
    return {atom: sizes[atom.size] for atom in large}


def _shapes(part: Planner, kept: Mapping[Atom, int]) -> dict[str, _SmallerShape]:
    """The parameters that become smaller, by all their names."""
    shapes: dict[str, _SmallerShape] = {}
    for name, tensor in part.record.parameters.values():
        shape = tuple(local_length(dim, kept) for dim in part.record.dims_of(tensor))
        changed = [i for i, (old, new) in enumerate(zip(tensor.shape, shape, strict=True)) if old != new]
        if changed:
            shape_ = _SmallerShape(shape, tensor.shape[changed[0]], changed[0])
            shapes.update(dict.fromkeys(part.names[name], shape_))
    return shapes


def _shrink(model: nn.Module, shapes: Mapping[str, _SmallerShape]) -> None:
    """Gives a model's parameters their smaller shapes, on meta, and layers of torch the numbers that belong to them."""
    # Tied ones stay tied; with the old one, so that its id is its own
    smaller_by_id: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for name, shape in shapes.items():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        old = module._parameters[attribute]
        assert old is not None
        if id(old) not in smaller_by_id:
            new = torch.empty(shape.shape, dtype=old.dtype, device="meta")
            smaller_by_id[id(old)] = old, nn.Parameter(new, requires_grad=old.requires_grad)
            smaller_by_id[id(old)][1].__dict__.update(old.__dict__)
        module._parameters[attribute] = smaller_by_id[id(old)][1]
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = weight.shape
        elif is_conv1d(module):
            module.nx, module.nf = weight.shape  # type: ignore[assignment]
        elif isinstance(module, NORMS):
            module.normalized_shape = tuple(weight.shape)
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.num_embeddings, module.embedding_dim = weight.shape
            # The padding row of the full table may lie after the last row of the smaller table
            if module.padding_idx is not None:
                module.padding_idx %= module.num_embeddings


def _is_table(part: Planner, name: str) -> bool:
    owners = [part.modules[alias.rpartition(".")[0]] for alias in part.names[name]]
    return any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in owners)


def _with_fewer_ids(example: Any, rows: int | None) -> Any:
    """The example with integers below the rows of the smallest table; negative ones, which losses ignore, stay."""

    def fewer(x: Tensor) -> Tensor:
        # Other tensors are no indices, and without a table no index can be too large
        if x.dtype not in (torch.int32, torch.int64) or x.is_meta or rows is None:
            return x
        return torch.where(x < rows, x, x % rows)

    return with_tensors(example, fewer)
