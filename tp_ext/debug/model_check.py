"""Checks of a model over its ranks, for tests and for a training script once in a while."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tp_ext._object_collectives import gathered
from tp_ext.debug.model_rules import foreign_parameters, misplaced
from tp_ext.debug.replication import (
    Entry,
    Held,
    Key,
    dealt,
    differences,
    entries,
    explain,
    held_pieces,
    local,
    missing,
    own_pieces,
    replicated_pieces,
)
from tp_ext.group import NOT_GIVEN, Group, global_ranks, group_name, job_ranks, parallel_group, process_group
from tp_ext.nn.module import ParallelModule, model_group
from tp_ext.parallel.ddp_guard import mixing_wraps

Batch = Any  # a tensor, or dicts, lists and tuples of them; anything else in it is passed over

EXPLAINED = 8
"""Of so many tensors that differ the values are exchanged; the others are named."""


def check(
    model: nn.Module, *, group: Group = NOT_GIVEN, optimizer: Optimizer | None = None, batch: Batch = None
) -> None:
    """Raises if :func:`findings` finds anything.

    Communicates as :func:`findings`. Raises:
        RuntimeError: the same on every rank, with all findings. ValueError: see :func:`findings`.
    """
    found = findings(model, group=group, optimizer=optimizer, batch=batch)
    if found:
        raise RuntimeError(f"model: {len(found)} findings\n" + "\n".join(f"- {sentence}" for sentence in found))


def findings(
    model: nn.Module, *, group: Group = NOT_GIVEN, optimizer: Optimizer | None = None, batch: Batch = None
) -> list[str]:
    """Mistakes of the model over the ranks of its group, a sentence each; the same list on every rank.

    - parameters, buffers and gradients that should be replicated and differ: which, on which rank, where, both values
      (:func:`assert_replicated`);
    - a parameter that only some ranks have, or whose dtype, ``requires_grad`` or sharding differs over them; a module
      in training mode on some ranks only;
    - a local tensor that has not the shape its sharding gives this rank;
    - two ranks with the same bits where their slices should differ (constants aside);
    - DDP or FSDP2 over ranks that hold different shards (:mod:`tp_ext.parallel.ddp_guard`);
    - weights tied on some ranks only, or that were tied and came apart;
    - generators in different states: torch's default generator of each device that holds parameters must agree, or
      dropout masks and initial weights differ;
    - no layer with a group in a job of several ranks;
    - a dropout of torch between a column and a row linear, ``sequence_parallel`` in one of the two only;
    - parameters of ``optimizer`` that are not the model's: it was made before layers were replaced;
    - a ``batch`` that differs over the ranks.

    Args:
        model: the whole model, wrapped or not, called on every rank of the group at the same point of the program.
        group: default the group of the model's layers. With another one, the data axis, say, everything is taken as
            replicated over it, and generators may differ.
        optimizer: of the model's parameters.
        batch: what the model is given: a tensor, or dicts, lists and tuples of tensors. Nothing of it is kept between
            calls, so no batch is known that is not given here; :class:`enable` compares all of them.

    Communicates: one exchange of some 200 bytes a parameter; a second one, of values, if there are differences.
    Under FSDP2 see :func:`assert_replicated`.

    Raises:
        ValueError: without ``group``, the layers of the model are of several.
    """
    forgotten = _forgotten(model) if group is NOT_GIVEN else []
    name = model_group(model) if group is NOT_GIVEN or group is None else group_name(group)
    p = parallel_group(name).size
    table = entries(model, name)
    alone = [*forgotten, *misplaced(model), *(foreign_parameters(model, optimizer) if optimizer is not None else ())]
    alone += [*mixing_wraps(model), *_wrong_shapes(table), *_came_apart(model, table)]
    if p == 1:
        return alone
    pieces = {key: piece for entry in table for key, piece in replicated_pieces(entry, name)}
    given = dict(_tensors("batch", batch))
    pieces |= {(one, -1, 0): local(tensor) for one, tensor in given.items()}
    held = dict(zip(pieces, held_pieces(pieces.values()), strict=True))
    facts_here = _facts(model, table, _is_sharded_over(model, name)) | dict.fromkeys(given, "given")
    mine = _Report(alone, facts_here, _slices(table, name), held)
    reports = gathered(mine, process_group(name))
    all_held = [one.held for one in reports]
    facts = [one.facts for one in reports]
    found = _told_alone([one.alone for one in reports]) + _disagreements(facts) + _same_slices(reports)
    known = set.intersection(*(set(one) for one in facts))  # of what only some ranks have the facts tell
    found += [sentence for sentence in missing(all_held) if sentence.split(":")[0].removesuffix(".grad") in known]
    different = differences(all_held)
    found += explain(different[:EXPLAINED], pieces, all_held, name) if different else []
    return found + [f"{key[0]}: must be the same on all ranks that hold it" for key in different[EXPLAINED:]]


def _tensors(name: str, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _tensors(f"{name}[{key!r}]", value)
    elif isinstance(batch, list | tuple):
        for i, value in enumerate(batch):
            yield from _tensors(f"{name}[{i}]", value)


def _forgotten(model: nn.Module) -> list[str]:
    """A sentence if no layer has a group though the job has several ranks."""
    ranks = job_ranks()
    if ranks == 1 or any(module.tp_group.name for module in _layers(model)):
        return []
    return [f"model: no layer is sharded, in a job of {ranks} ranks: pass group= to the layers, or to this function"]


def _layers(model: nn.Module) -> Iterator[ParallelModule]:
    return (module for module in model.modules() if isinstance(module, ParallelModule))


def _is_sharded_over(model: nn.Module, group: str) -> bool:
    ranks = global_ranks(group)
    return any(global_ranks(layer.tp_group.name) == ranks for layer in _layers(model) if layer.tp_group.size > 1)


class _Report(NamedTuple):
    """What a rank tells the others: what it can see alone; what all must agree on; its slices, by parameter."""

    alone: list[str]
    facts: dict[str, str]
    slices: dict[str, list[tuple[int, Held]]]
    held: dict[Key, Held]


def _wrong_shapes(table: list[Entry]) -> Iterator[str]:
    for entry in table:
        name = entry.name.rpartition(".")[2]
        if entry.layer is not None and name in entry.layer.tp_shardings:
            expected, p = entry.layer.local_shape(name), entry.layer.tp_group.size
            if entry.tensor.shape != expected:
                shape = tuple(entry.tensor.shape)
                yield f"{entry.name}: shape {shape} must be {tuple(expected)}, by its sharding at p = {p}"


def _came_apart(model: nn.Module, table: list[Entry]) -> Iterator[str]:
    """Tied parameters that are nobody else's, though there is one of their kind: ``to_empty`` of a model on the meta
    device makes two of one."""
    uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    for entry in table:
        name = entry.name.rpartition(".")[2]
        if entry.layer is not None and name in entry.layer.tied and uses[id(entry.tensor)] == 1:
            like = [e.name for e in table if e is not entry and e.sharding == entry.sharding is not None]
            like = [e for e in like if model.get_parameter(e).shape == entry.tensor.shape]
            if like:
                yield f"{entry.name}: was tied to another parameter and is its own now; tie it again, to one of {like}"


def _facts(model: nn.Module, table: list[Entry], own: bool) -> dict[str, str]:
    """What must be the same on all ranks."""
    facts = {}
    for name, tensor, _, sharding in table:
        cut = f"dim {sharding.dim} cut in {[part.size for part in sharding.parts]}" if sharding else "replicated"
        facts[name] = f"{tensor.dtype}, requires_grad={tensor.requires_grad}, {cut}"
    for name, module in model.named_modules():
        facts[f"module {name or 'model'}"] = "train()" if module.training else "eval()"
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            facts[f"{name} and {first[id(param)]}"] = "one parameter"
    if own:
        for device in sorted({entry.tensor.device for entry in table}, key=str):
            if device.type in ("cpu", "cuda"):
                state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
                facts[f"torch's default generator of the {device.type}"] = f"state {held_pieces([state])[0].checksum:x}"
    return facts


def _slices(table: list[Entry], group: str) -> dict[str, list[tuple[int, Held]]]:
    """Of each sharded parameter its pieces: where each starts, and its checksum."""
    _, p, rank = parallel_group(group)
    slices = {}
    for name, tensor, _, sharding in table:
        if sharding is None or tensor.is_meta or dealt(tensor, group):
            continue
        if isinstance(tensor, DTensor) and all(part.copies == 1 for part in sharding.parts):
            # The same slice of each rank's shard: no need to gather
            starts, pieces = [rank], [local(tensor)]
        else:
            starts = [piece.start for piece in sharding.slices(rank, p)]
            pieces = list(own_pieces(tensor, sharding, rank, p))
        slices[name] = list(zip(starts, held_pieces(pieces), strict=False))
    return slices


def _told_alone(sentences: list[list[str]]) -> list[str]:
    found = []
    for sentence in dict.fromkeys(s for one in sentences for s in one):
        ranks = [rank for rank, one in enumerate(sentences) if sentence in one]
        found.append(sentence if len(ranks) == len(sentences) else f"on ranks {ranks}: {sentence}")
    return found


def _disagreements(facts: list[dict[str, str]]) -> list[str]:
    """Names with the same disagreement in one sentence."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for one in facts for name in one):
        values = tuple(one.get(name, "missing") for one in facts)
        if len(set(values)) > 1:
            names.setdefault(values, []).append(name)
    found = []
    for values, alike in names.items():
        told = [f"{v} on ranks {[r for r, w in enumerate(values) if w == v]}" for v in dict.fromkeys(values)]
        more = f" and {len(alike) - 3} more" if len(alike) > 3 else ""
        hint = "; seed them alike, with tp_ext.manual_seed" if "generator" in alike[0] else ""
        found.append(f"{', '.join(alike[:3])}{more}: {', '.join(told)}{hint}")
    return found


def _same_slices(reports: list[_Report]) -> list[str]:
    found = []
    for name in reports[0].slices:
        for a, b in itertools.combinations(range(len(reports)), 2):
            pairs = zip(reports[a].slices[name], reports[b].slices.get(name, []), strict=False)
            other = [(x, y) for (start, x), (start_b, y) in pairs if start != start_b]
            if other and all(x == y for x, y in other) and any(x.varied for x, _ in other):
                found.append(
                    f"{name}: ranks {a} and {b} hold the same bits and should hold different slices; something took "
                    "one for a copy of the other (a DDP wrap over both, a broadcast, a state dict of another rank)"
                )
                break
    return found
