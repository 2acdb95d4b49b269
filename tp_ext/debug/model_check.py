"""Checks of a model over its ranks, for tests and for a training script once in a while."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tp_ext._containers import contents_of, strided_parts
from tp_ext._object_collectives import all_gather_objects
from tp_ext.debug.model_rules import foreign_parameters, misplaced, not_finite, not_invariant, option_facts
from tp_ext.debug.replication import (
    ComparedTensor,
    PartKey,
    TensorDigest,
    compared_tensors,
    describe_differences,
    describe_missing,
    differing_keys,
    gradients,
    is_sharded_by_fsdp2,
    local_tensor,
    parameter_of,
    parts_of_shard,
    replicated_parts,
    tensor_digests,
)
from tp_ext.group import NOT_GIVEN, Group, global_ranks, job_ranks, parallel_group, process_group
from tp_ext.mesh import mesh_axes
from tp_ext.model.census import Census, census
from tp_ext.model.stages import Stages
from tp_ext.outside.optimizers import find_beyond_elements
from tp_ext.parallel.ddp_guard import find_mixed_wrappers

BatchTensors = Any  # what contents_of looks into

EXPLAINED = 8
"""The number of differing tensors whose values are exchanged; the others are only named."""


def check(
    model: Stages,
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    optimizer: Optimizer | None = None,
    batch: BatchTensors = None,
) -> None:
    """Raises if :func:`findings` finds anything.

    Communicates as :func:`findings`. Raises:
        RuntimeError: the same on every rank, with all findings. ValueError: see :func:`findings`.
    """
    sentences = findings(model, group=group, mesh=mesh, optimizer=optimizer, batch=batch)
    if sentences:
        text = f"model: {len(sentences)} findings\n" + "\n".join(f"- {sentence}" for sentence in sentences)
        raise RuntimeError(text + (_CAUSE if any(map(_is_of_weights, sentences)) else ""))


_CAUSE = (
    "\nranks whose weights differ drew or loaded others (call tp_ext.manual_seed before the model is made), or trained "
    "with other batches or masks"
)


def _is_of_weights(sentence: str) -> bool:
    """Returns whether a sentence is on a parameter or buffer that differs, by its name not a gradient or a batch."""
    name, _, text = sentence.removeprefix("over the ranks ").rpartition(": must be the same on ")
    return bool(text) and not name.startswith("batch") and parameter_of(name) == name


def findings(
    model: Stages,
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    optimizer: Optimizer | None = None,
    batch: BatchTensors = None,
) -> list[str]:
    """Returns mistakes of the model over the ranks of its groups, a sentence each; the same list on every rank.

    - parameters, buffers and gradients that should be replicated and differ, with rank, index and both values
      (:func:`assert_replicated`);
    - a parameter that only some ranks have, or whose dtype, ``requires_grad`` or sharding differs over them; a module
      in training mode on some ranks only;
    - a local tensor whose shape is not the one that its sharding gives this rank;
    - two ranks with the same bits where their slices, or the gradients of these, should differ (constants aside);
    - the first parameter or gradient of a rank that is not finite (of a gradient scaler's overflow, too);
    - DDP or FSDP2 over ranks that hold different shards (:mod:`tp_ext.parallel.ddp_guard`);
    - weights tied on some ranks only, or tied once and no longer;
    - generators in different states: torch's default generator of each device that holds parameters must agree, or
      dropout masks and initial weights differ;
    - no layer with a group in a job of several ranks;
    - a dropout of torch between a column and a row linear, ``sequence_parallel`` in one of the two only;
    - in a model with layers built in :func:`tp_ext.tp_invariant`, layers built outside of it, and torch's GELU, SiLU or
      sigmoid between two of its linears: bits would depend on the number of ranks;
    - parameters of ``optimizer`` that are not the model's: it was made before layers were replaced;
    - options of ``optimizer``, such as a learning rate, that differ over the ranks;
    - an ``optimizer`` that computes with whole tensors, such as ``torch.optim.Muon`` or Adafactor, over shards;
    - a ``batch`` that differs over the ranks.

    Args:
        model: the whole model, wrapped or not, called on every rank of the groups at the same point of the program.
        group: default every group of the model's layers and layouts, one after the other. Over another one, such as the
            data axis, everything is taken as replicated, and generators may differ.
        mesh: in place of ``group``: a mesh with axes as of :func:`tp_ext.init_mesh`. The model is compared
            over its groups, then over ``dp``, ``ep`` and ``cp``, along which it is replicated where FSDP2 does not
            shard it; the findings of all stages are returned, names that two stages of ``pp`` have, and declared copies
            (:func:`declare_tied`) that differ. Batches are compared along ``tp`` alone.
        optimizer: an optimizer of the model's parameters.
        batch: the model's input: tensors and NumPy arrays, in dicts, lists, tuples, dataclasses, what torch's pytree
            knows, and attributes of other objects. An object that may hold tensors and cannot be looked into, such as
            an iterator or a set of them, is a finding. Nothing of it is kept between calls, so only the batch given
            here is compared; :class:`compare_inputs` compares all ids and targets.

    Communicates, over each group: one exchange of some 200 bytes per parameter; a second one, of values, if there are
    differences. If there are several groups, one exchange of the findings over each axis; with ``pp`` one of the names.
    Under FSDP2 see :func:`assert_replicated`.

    Raises:
        ValueError: without ``group``, two groups of the model overlap and are no axes of one mesh; ``mesh`` has other
            axes. TypeError: ``group`` and ``mesh`` are both given.
    """
    over = mesh_axes(group, mesh)
    compared = parallel_group(group)  # over which everything is compared; not that of layers, which over names
    known = census(model, over if mesh is not None else None, assumed=compared)
    unsharded = mesh is not None and parallel_group(over.tp).size == 1
    forgotten = _forgotten(known) if group is NOT_GIVEN and not unsharded else []
    alone = [*forgotten, *misplaced(known), *not_invariant(known), *find_mixed_wrappers(known)]
    if optimizer is not None:
        alone += [*foreign_parameters(known, optimizer), *find_beyond_elements(known, optimizer)]
    nonfinite = list(not_finite(known))
    options = option_facts(optimizer) if optimizer is not None else {}
    if group is not NOT_GIVEN and group is not None:  # the caller compares over this group alone
        return _findings_over(compared.name, known, alone + nonfinite, options, batch)
    groups, data = known.groups, over.data.axes
    # Layers may have several groups of the same ranks, over which one comparison is enough
    names = list({tuple(global_ranks(name)): name for name in groups.within}.values())
    if len(names) < 2 and not data and over.pp.size == 1:
        return _findings_over(names[0] if names else "", known, alone + nonfinite, options, batch)
    # Without a group no rank compares: each says what it has found itself
    sentences = [] if names else _findings_over("", known, alone + _on_this_rank(nonfinite), {}, batch)
    for name in names:
        # Ranks that exchange tokens for experts have different batches, as they must
        compared_batch = None if _has_other_tokens(known, name) else batch
        sentences += _located(name, _findings_over(name, known, alone + nonfinite, options, compared_batch))
    for axis in data:
        if tuple(axis.ranks) in map(tuple, map(global_ranks, names)):
            continue  # that of the experts
        sentences += _located(axis.name, _findings_over(axis.name, known, [], options, None))
    if over.pp.size > 1:
        sentences += _over_stages(known, process_group(over.pp.name))
    # Along one axis after the other, so that each finding comes to all ranks, and all return one list
    for axis in (*groups.axes, *data, *([over.pp] if over.pp.size > 1 else [])):
        of_ranks = all_gather_objects(sentences, process_group(axis.name))
        sentences = [sentence for of_rank in of_ranks for sentence in of_rank]
    return list(dict.fromkeys(sentences))


def _located(group: str, sentences: list[str]) -> list[str]:
    return [f"over the ranks {global_ranks(group)}: {sentence}" for sentence in sentences]


def _on_this_rank(sentences: list[str]) -> list[str]:
    return [f"on rank {dist.get_rank()}: {sentence}" for sentence in sentences]


class _InStage(NamedTuple):
    """A parameter of a stage: its digest if other stages may have a copy, the name of the original if it is one."""

    digest: TensorDigest
    copy_of: str


def _over_stages(model: Census, pipeline: ProcessGroup) -> list[str]:
    """Returns a sentence for each parameter that several stages have under one name, and for each declared copy that
    differs from its original.

    Communicates: one exchange over the pipeline, of 100 bytes per parameter.
    """
    params = [entry for entry in model.parameters.values() if not entry.value.is_meta]
    digests = tensor_digests(local_tensor(entry.value) for entry in params)
    in_stage = {entry.name: _InStage(digest, entry.copy_of) for entry, digest in zip(params, digests, strict=True)}
    stages = all_gather_objects(in_stage, pipeline)
    originals: dict[str, list[int]] = {}
    for stage, of_stage in enumerate(stages):
        for name, param in of_stage.items():
            if param.copy_of != name:
                originals.setdefault(name, []).append(stage)
    sentences = [
        f"{name}: is in the stages {of} of the pipeline and must be in one: stages keep the names of the whole model"
        for name, of in originals.items()
        if len(of) > 1
    ]
    for stage, of_stage in enumerate(stages):
        for name, param in of_stage.items():
            for other in originals.get(param.copy_of, [])[:1]:
                original = stages[other][param.copy_of].digest
                if original.shape == param.digest.shape and original != param.digest:
                    sentences.append(
                        f"{name}: in stage {stage} must be equal to {param.copy_of} in stage {other}, of which it is a "
                        "copy: sum the gradients of both over the two stages"
                    )
    return sentences


def _findings_over(
    group: str, model: Census, alone: list[str], options: dict[str, str], batch: BatchTensors
) -> list[str]:
    """Returns the findings of one group, ``alone`` those of this rank without communication among them; ``options`` of
    the optimizer must be the same on all ranks."""
    table = compared_tensors(model, group)
    given_batch = contents_of(batch, "batch")
    alone = [*alone, *_wrong_shapes(table), *_no_longer_tied(model, table), *_not_compared(given_batch.unknown)]
    if not group:
        return alone
    tensors = {key: part for entry in table for key, part in replicated_parts(entry, group)}
    inputs = {name: part for given in given_batch.tensors.items() for name, part in strided_parts(*given)}
    tensors |= {(name, -1, 0): local_tensor(tensor) for name, tensor in inputs.items()}
    digests = dict(zip(tensors, tensor_digests(tensors.values()), strict=True))
    facts_here = _facts(model, table, _is_sharded_over(model, group)) | dict.fromkeys(inputs, "given") | options
    mine = _CheckReport(alone, facts_here, _slices(table, group), digests)
    # [Note: check exchanges checksums, once]
    reports = all_gather_objects(mine, process_group(group))
    all_digests = [report.held for report in reports]
    facts = [report.facts for report in reports]
    sentences = _merge_local_findings([report.alone for report in reports])
    sentences += _disagreements(facts) + _same_slices(reports)
    known = set.intersection(*(set(fact) for fact in facts))  # tensors that only some ranks have are in the facts
    absent = describe_missing(all_digests)
    sentences += [sentence for sentence in absent if parameter_of(sentence.split(":")[0]) in known]
    different = differing_keys(all_digests)
    sentences += describe_differences(different[:EXPLAINED], tensors, all_digests, group) if different else []
    return sentences + [f"{key[0]}: must be the same on all ranks that hold it" for key in different[EXPLAINED:]]


def _not_compared(unknown: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: a {kind} may hold tensors that cannot be compared; give a dict, list, tuple or dataclass of them"
        for name, kind in unknown.items()
    ]


def _forgotten(model: Census) -> list[str]:
    """Returns a sentence if no layer has a group though the job has several ranks; one of a single rank was given."""
    ranks = job_ranks()
    if (
        ranks == 1 or model.has_groups or any(group.size > 1 for group in model.groups_in_use())
    ):  # experts may be sharded alone
        return []
    return [f"model: no layer is sharded, in a job of {ranks} ranks: pass group= to the layers, or to this function"]


def _is_sharded_over(model: Census, group: str) -> bool:
    """Returns whether layers are sharded over the group, whose ranks then have the same tokens."""
    ranks = global_ranks(group)
    used = any(other.ranks == ranks for other in model.groups_in_use() if other.size > 1)
    return used and not _has_other_tokens(model, group)


def _has_other_tokens(model: Census, group: str) -> bool:
    """Returns whether the ranks of the group have different tokens: it is that of experts."""
    ranks = global_ranks(group)
    experts = (layer.expert_group for layer in model.experts.values())
    return any(group is not None and group.ranks == ranks for group in experts)


class _CheckReport(NamedTuple):
    """The report of a rank to the others: its local findings, facts that all must agree on, slices and digests."""

    alone: list[str]
    facts: dict[str, str]
    slices: dict[str, list[tuple[int, TensorDigest]]]
    held: dict[PartKey, TensorDigest]


def _wrong_shapes(table: list[ComparedTensor]) -> Iterator[str]:
    for entry in table:
        name, shape, layout = entry.name.rpartition(".")[2], entry.tensor.shape, entry.layout
        # A layer knows the full shapes; of other layouts the lengths must fit together
        if entry.layer is not None and name in entry.layer.tp_layouts and entry.layer.has_full_shape(name):
            expected = entry.layer.local_shape(name)
        elif all(-len(shape) <= sharding.dim < len(shape) for sharding, _ in layout):
            expected = layout.local_shape(layout.full_shape(shape))
        else:
            expected = torch.Size([])
        if shape != expected:
            p = math.prod(layout.sizes)
            yield f"{entry.name}: shape {tuple(shape)} must be {tuple(expected)}, by its sharding at p = {p}"


def _no_longer_tied(model: Census, table: list[ComparedTensor]) -> Iterator[str]:
    """Yields a sentence for each parameter that was tied and no longer is, though one of its shape exists: ``to_empty``
    of a model on the meta device makes two parameters of one."""
    uses = Counter(id(param) for _, param in model.model.named_parameters(remove_duplicate=False))
    for entry in table:
        name = entry.name.rpartition(".")[2]
        if id(entry.tensor) in model.copies:  # of a parameter of another stage, as declared
            continue
        if entry.layer is not None and name in entry.layer.tied and uses[id(entry.tensor)] == 1:
            like = [e.name for e in table if e is not entry and e.sharding == entry.sharding is not None]
            like = [e for e in like if model.model.get_parameter(e).shape == entry.tensor.shape]
            if like:
                yield f"{entry.name}: was tied to another parameter and is its own now; tie it again, to one of {like}"


def _facts(model: Census, table: list[ComparedTensor], generators: bool) -> dict[str, str]:
    """Returns the facts that must be the same on all ranks."""
    facts = {}
    for name, tensor, _, sharding, _ in table:
        cut = f"dim {sharding.dim} cut in {[part.size for part in sharding.parts]}" if sharding else "replicated"
        facts[name] = f"{tensor.dtype}, requires_grad={tensor.requires_grad}, {cut}"
    for name, module in model.modules:
        facts[f"module {name or 'model'}"] = "train()" if module.training else "eval()"
    first: dict[int, str] = {}
    for name, param in model.model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            facts[f"{name} and {first[id(param)]}"] = "one parameter"
    if generators:
        for device in sorted({entry.tensor.device for entry in table}, key=str):
            if device.type in ("cpu", "cuda"):
                state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
                facts[f"torch's default generator of the {device.type}"] = (
                    f"state {tensor_digests([state])[0].checksum:x}"
                )
    return facts


def _slices(table: list[ComparedTensor], group: str) -> dict[str, list[tuple[int, TensorDigest]]]:
    """Returns, for each sharded parameter and its gradient, the start and the digest of this rank's share of each
    part."""
    _, p, rank = parallel_group(group)
    slices = {}
    for entry in table:
        sharding = entry.sharding
        if sharding is None or entry.tensor.is_meta or is_sharded_by_fsdp2(entry.tensor, group):
            continue
        for name, tensor in ((entry.name, entry.tensor), *gradients(entry.name, entry.tensor)):
            if isinstance(tensor, DTensor) and all(not part.has_copies for part in sharding.parts):
                # The same slice of each rank's shard: no need to gather
                starts, shares = [rank], [local_tensor(tensor)]
            else:
                starts = [where.start for where in sharding.slices(rank, p)]
                shares = list(parts_of_shard(tensor, sharding, rank, p))
            if tensor is entry.tensor and len(set(sharding.local_sizes(p))) > 1 and len(shares) == 1:
                # Of shares of several lengths the first numbers: two ranks that drew alike have those in common
                count = min(sharding.local_sizes(p)) * shares[0].numel() // max(1, sharding.local_size(rank, p)) // 2
                shares = [shares[0].flatten()[:count]]
            digests = tensor_digests(shares)
            if tensor is not entry.tensor:  # of a mean over features, all rows are alike on all ranks
                varies = [_varies_along_each_dim(share) for share in shares]
                digests = [digest._replace(varied=varied) for digest, varied in zip(digests, varies, strict=True)]
            slices[name] = list(zip(starts, digests, strict=False))
    return slices


def _varies_along_each_dim(tensor: Tensor) -> bool:
    return all(bool((tensor != tensor.narrow(dim, 0, 1)).any()) for dim, n in enumerate(tensor.shape) if n > 1)


def _merge_local_findings(of_ranks: list[list[str]]) -> list[str]:
    merged = []
    for sentence in dict.fromkeys(sentence for sentences in of_ranks for sentence in sentences):
        ranks = [rank for rank, sentences in enumerate(of_ranks) if sentence in sentences]
        merged.append(sentence if len(ranks) == len(of_ranks) else f"on ranks {ranks}: {sentence}")
    return merged


def _disagreements(facts: list[dict[str, str]]) -> list[str]:
    """Returns a sentence for each disagreement; names with the same one share a sentence."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for fact in facts for name in fact):
        values = tuple(fact.get(name, "missing") for fact in facts)
        if len(set(values)) > 1:
            names.setdefault(values, []).append(name)
    sentences = []
    for values, alike in names.items():
        by_value = [f"{v} on ranks {[r for r, w in enumerate(values) if w == v]}" for v in dict.fromkeys(values)]
        more = f" and {len(alike) - 3} more" if len(alike) > 3 else ""
        hint = "; seed them alike, with tp_ext.manual_seed" if "generator" in alike[0] else ""
        sentences.append(f"{', '.join(alike[:3])}{more}: {', '.join(by_value)}{hint}")
    return sentences


def _alike(reports: list[_CheckReport], name: str, a: int, b: int) -> bool:
    """Returns whether two ranks hold the same bits of different slices, that are no constants."""
    pairs = zip(reports[a].slices.get(name, []), reports[b].slices.get(name, []), strict=False)
    other = [(x, y) for (start, x), (start_b, y) in pairs if start != start_b]
    return bool(other) and all(x == y for x, y in other) and any(x.varied for x, _ in other)


def _same_slices(reports: list[_CheckReport]) -> list[str]:
    sentences = []
    for name in reports[0].slices:
        param = parameter_of(name)
        for a, b in itertools.combinations(range(len(reports)), 2):
            if param != name and _alike(reports, param, a, b):
                continue  # of equal weights
            if _alike(reports, name, a, b):
                cause = (
                    "something summed it over ranks that hold different slices (an all-reduce of all gradients); sum "
                    "over data axes alone"
                    if param != name
                    else "something took one for a copy of the other (a DDP wrap over both, a broadcast, a state dict "
                    "of another rank), or each drew its shard from the same seed (pass init= to the layer)"
                )
                sentences.append(
                    f"{name}: ranks {a} and {b} hold the same bits and should hold different slices; {cause}"
                )
                break
    return sentences
