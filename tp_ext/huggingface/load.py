"""A pretrained model: each rank reads its own slices of the files."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from tp_ext import auto
from tp_ext._checks import check_bool, check_path
from tp_ext._object_collectives import (
    broadcast_from_first,
    call_and_gather,
    call_on_all_ranks,
    raise_on_all_ranks,
)
from tp_ext.auto.argument_checks import shares_of_plan
from tp_ext.auto.search.hints import PlanOptions
from tp_ext.checkpoint.files.safetensors_slices import SlicedTensor
from tp_ext.checkpoint.files.saved_dtypes import check_saved_dtype, is_plain_float
from tp_ext.checkpoint.gather import chunk_slices, ranks_of, write_full
from tp_ext.group import ALONE, NOT_GIVEN, Group, parallel_group, process_group
from tp_ext.huggingface.conversion import TensorGroup, groups_to_load
from tp_ext.huggingface.folder import (
    CONFIG,
    check_config,
    class_of,
    files_of,
    load_generation_config,
    of_file,
    refuse_quantised_files,
)
from tp_ext.huggingface.methods import replace_methods
from tp_ext.huggingface.new_weights import allocate, compute, generator_states
from tp_ext.huggingface.quantised import Quantised, forms_of
from tp_ext.low_precision.quantize import check_low_bits
from tp_ext.mesh import mesh_axes
from tp_ext.mesh_program.partition_spec import P
from tp_ext.model.census import census
from tp_ext.model.fqn import Entry
from tp_ext.share_sizes import checked_weights, split_sizes

T = TypeVar("T")

BATCH = 3  # of the example: no factor of a dim of usual models; so are the numbers of tokens
TOKEN_NUMBERS = (5, 7, 11, 13, 17, 19, 23, 29, 37, 67, 131, 257, 521)
LABELS_OF_TOKENS = (
    "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification",
)  # fmt: skip
LABELS_OF_ROWS = ("ForSequenceClassification", "ForImageClassification")


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    model_class: type[transformers.PreTrainedModel] | None = None,
    dtype: torch.dtype | None = None,
    hints: Mapping[str, str | P] | None = None,
    sequence_parallel: bool | str = False,
    example: Mapping[str, Any] | tuple[Any, ...] | None = None,
    device: torch.device | str | None = None,
    strict: bool = False,
    invariant_blocks: int | None = None,
    quantize: str | None = None,
    block: int = 64,
    shares: Iterable[float] | None = None,
    **config_overrides: Any,
) -> Any:
    """Loads a model of transformers, sharded over a group by :func:`tp_ext.auto.plan`, in eval mode.

    The model is built on meta, planned and sharded there; then each rank allocates its shards and reads their slices
    of the safetensors files. Buffers that no file has are computed, ties made.

    Args:
        path: a folder with ``config.json`` and ``model.safetensors``, or several files and their index.
        group: the ranks over which the model is sharded; None: one process. mesh: its axis ``tp`` is the group.
        model_class: a class of transformers; default: the one that ``config.json`` names.
        dtype: of the parameters; default: that of the configuration, or else of the first tensor.
        hints, sequence_parallel: as for :func:`tp_ext.auto.plan`.
        example: arguments of forward, for the plan; default: a few tokens, with ``labels`` where the class has a loss
            over them; or an image.
        device: default: torch's default device.
        strict: whether the files must have all tensors of the model and no others. If not, it is as in transformers:
            missing ones, such as a new head, are drawn by the model's ``_init_weights``, the same on all ranks and for
            every number of them; others are ignored; a warning lists them.
        invariant_blocks: as for :func:`tp_ext.auto.plan`: training has the same bits for every number of ranks.
        quantize, block: quantises the linears' weights as they are read, as
            :func:`tp_ext.low_precision.quantize_` would afterwards: ``"int8"`` or ``"int4"``.
        shares: as for :func:`tp_ext.auto.plan`: one number for each rank; default: that of :func:`tp_ext.shares`.
        config_overrides: attributes of the configuration, such as ``attn_implementation="eager"``.

    Returns:
        The model; ``model.tp_ext_plan`` is its plan. Its ``generate`` samples the same tokens on all ranks, from rank
        0's generator; its ``resize_token_embeddings`` is an error.

    A parameter sharded on its first dim is read without a byte of other ranks; one sharded on its last dim row by row,
    by whole rows where a row's slice has less than 1 KiB. A tensor that the files hold in another form, such as the
    experts of Mixtral, is read whole and converted. Peak memory: the shards, quantised ones in few bits, and one
    tensor's shard (or, if it is converted, that tensor).

    Communicates: two exchanges of errors over the group, and one of fingerprints (:func:`tp_ext.auto.apply`); a
    broadcast of the state of rank 0's generator, from which missing tensors are drawn, whole, on all ranks; with
    ``quantize="int8"`` two all-reduces for each weight that is sharded on its inputs: of a number, by which an error of
    a rank ends all, and of a number per output.

    Raises:
        On all ranks: OSError: a file that cannot be read. KeyError: ``strict`` and missing or unexpected tensors.
        ValueError: a tensor of another shape than the configuration's, or integers or floats of 8 bits for
        floating-point numbers; scales of quantised weights; an override that the
        configuration does not have; what :func:`tp_ext.auto.plan` raises. TypeError: ``group`` and ``mesh``, or
        neither; another type.
    """
    _check_arguments(path, group, mesh, model_class, dtype, device)
    check_bool(strict=strict)
    if quantize is not None:
        check_low_bits(quantize, block)
    axes = mesh_axes(group, mesh)
    parallel = parallel_group(axes.tp)
    ranks = process_group(parallel.name) if parallel is not ALONE and parallel.name else None
    where = torch.device(device) if device is not None else torch.get_default_device()
    # Weights that no file has are drawn from rank 0's generators, to the bits of one process
    states = broadcast_from_first(lambda: generator_states(where), [ranks] if ranks is not None else [])
    options = PlanOptions({} if hints is None else hints, None, sequence_parallel, invariant_blocks)
    shares = None if shares is None else checked_weights(shares)
    with ExitStack() as opened:
        made: list[tuple[Any, ...]] = []

        def prepare() -> list[str]:
            shares_of_plan(shares, parallel.size, options)
            made.append(_prepared(Path(path), opened, model_class, dtype, where, config_overrides, strict, states))
            return sorted(made[0][3].values)

        # Ranks may read folders of their own disks
        for rank, lacking in enumerate(of_ranks := _gathered(ranks, prepare)):
            if lacking != of_ranks[0]:
                raise ValueError(
                    f"path: the files of all ranks must have the same tensors; those of rank 0 lack {of_ranks[0]}, of "
                    f"rank {rank} {lacking}"
                )
        model, files, groups, left = made[0]

        def plan_it() -> auto.Plan:
            return _plan(model, example, parallel.size, options, shares)

        auto.apply(_on_all(ranks, plan_it), model, parallel.name or None, invariant_blocks=invariant_blocks)
        forms = _on_all(ranks, lambda: forms_of(model, quantize, block)) if quantize else {}
        later = {id(layer.weight) for layer in forms}
        allocate(model, where, later)
        known = census(model)
        # Not state(), which refuses the weights on meta that are allocated when they are read
        state = model.state_dict(keep_vars=True).items()
        entries = {entry.name: entry for entry in (known.resolve(key, value) for key, value in state)}
        with torch.no_grad():
            for name in list(left.values):
                # Popped: the full tensor is freed when this rank has its shard
                value, entry = left.values.pop(name), entries[name]
                if id(entry.value) in later:  # on all ranks, whose files have the same tensors
                    raise ValueError(f"quantize: no file has {name!r}, a weight to be quantised")
                write_full(value, entry.value, entry.layout)
        _on_all(ranks, lambda: _read(model, entries, files, groups, Quantised(forms, where)))
    if parallel.size > 1:
        replace_methods(model)
    if parallel.rank == 0:
        _warn(model, path, left)
    return model.eval()


def _gathered(ranks: ProcessGroup | None, act: Callable[[], T]) -> list[T]:
    """Returns :func:`call_and_gather`; without a group, what this process computes: others may not load a model."""
    return [act()] if ranks is None else call_and_gather(ranks, act)


def _on_all(ranks: ProcessGroup | None, act: Callable[[], T]) -> T:
    return act() if ranks is None else call_on_all_ranks(ranks, act)


def _check_arguments(path: Any, group: Any, mesh: Any, model_class: Any, dtype: Any, device: Any) -> None:
    """Raises TypeError or ValueError for what needs no file to be seen."""
    check_path("the path of a folder", path=path)
    if group is NOT_GIVEN and mesh is None:
        raise TypeError("group: must be given, or mesh; None: the model of one process")
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if model_class is not None and not is_model:
        raise TypeError(f"model_class: {model_class!r} must be a class of transformers' models, or None")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and is_plain_float(dtype)):
        raise TypeError(f"dtype: {dtype!r} must be a floating-point torch.dtype of at least 16 bits, or None")
    try:
        torch.device(device if device is not None else "cpu")
    except (RuntimeError, TypeError):
        raise ValueError(f"device: {device!r} must be a device of torch") from None


def load_weights(model: transformers.PreTrainedModel, path: str | os.PathLike[str]) -> None:
    """Reads the files of a folder into a sharded model that exists.

    Communicates and raises as :func:`from_pretrained`, without its plan.
    """
    known = census(model)
    ranks, failure = ranks_of(known), None
    try:
        with ExitStack() as opened:
            entries = known.state()
            files = files_of(Path(path), opened)
            refuse_quantised_files(files, model, Path(path))
            groups, _ = groups_to_load(model, _shapes(files))
            _matched(model, groups, Path(path), {name: entry.shape for name, entry in entries.items()})
            _read(model, entries, files, groups, Quantised({}, torch.device("cpu")))
    except Exception as error:  # of any kind: it must reach the other ranks
        failure = error
    raise_on_all_ranks(failure, ranks.axes, ranks.device)


def _shapes(files: Mapping[str, SlicedTensor]) -> dict[str, Tensor]:
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in files.items()}


def _prepared(
    path: Path,
    opened: ExitStack,
    model_class: type[transformers.PreTrainedModel] | None,
    dtype: torch.dtype | None,
    device: torch.device,
    overrides: Mapping[str, Any],
    strict: bool,
    states: list[Tensor],
) -> tuple[transformers.PreTrainedModel, dict[str, SlicedTensor], list[TensorGroup], SimpleNamespace]:
    """Builds the model on meta.

    Returns:
        The model, in which tensors that no file has are initialised; the tensors of the files; the conversions from
        tensors of the files to those of the model; the names that only one of both has.
    """
    cls = class_of(path, model_class)
    with of_file(path / CONFIG, cls.__name__):
        config, unused = cls.config_class.from_pretrained(
            str(path), local_files_only=True, return_unused_kwargs=True, **overrides
        )
    # A misspelt option would leave the configuration as it is, without a word
    if unused:
        raise ValueError(f"config_overrides: {sorted(unused)} must be attributes of {type(config).__name__}")
    check_config(config, path, overrides)
    files = files_of(path, opened)
    if dtype is None:
        floats = (dtype for tensor in files.values() if is_plain_float(dtype := tensor.dtype))
        dtype = config.dtype or next(floats, None)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and is_plain_float(dtype)):
        raise ValueError(
            f"path: {str(path / CONFIG)!r} has dtype {dtype!r}, which must be of floats of at least 16 bits"
        )
    # No rank has memory for the whole model
    with of_file(path / CONFIG, cls.__name__), torch.device("meta"):
        model = cls._from_config(config, dtype=dtype)
    _cast_to_float(model, dtype)
    # As transformers: trainers load tokenizers and references from there
    model.name_or_path = model.config._name_or_path = str(path)
    refuse_quantised_files(files, model, path)
    groups, conversions = groups_to_load(model, _shapes(files))
    left = _matched(model, groups, path, {name: tensor.shape for name, tensor in model.state_dict().items()}, strict)
    left.values = compute(model, left.computed, device, states)
    model.tie_weights()
    model._weight_conversions = conversions
    load_generation_config(model, path)
    return model, files, groups, left


def _plan(
    model: transformers.PreTrainedModel,
    example: Any,
    p: int,
    of_plan: PlanOptions,
    shares: Iterable[float] | None,
) -> auto.Plan:
    """Returns the plan of the model as it trains; as it infers, if its code then branches on random numbers
    (LayerDrop)."""
    weights = shares_of_plan(shares, p, of_plan)
    if example is None:  # under sequence parallelism a rank without tokens would leave all whole
        least = next((n for n in range(p, TOKEN_NUMBERS[-1] + 1) if all(split_sizes(n, p, weights))), p)
        example = example_of(model, least if of_plan.sequence_parallel else 1)
    options: dict[str, Any] = {
        name: getattr(of_plan, name) for name in ("hints", "sequence_parallel", "invariant_blocks")
    }
    options["shares"] = weights
    try:
        return auto.plan(model.train(), example, p, **options)
    except ValueError as error:
        if str(error).startswith("invariant_blocks"):
            raise
        return auto.plan(model.eval(), example, p, **options)


def _cast_to_float(model: transformers.PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Makes those parameters fp32 that the class keeps in it."""
    patterns = model._get_dtype_plan(dtype)
    for name, parameter in model.named_parameters():
        if any(pattern in name for pattern in patterns) and parameter.is_floating_point():
            parameter.data = parameter.data.float()


def _matched(
    model: transformers.PreTrainedModel,
    groups: list[TensorGroup],
    path: Path,
    shapes: Mapping[str, torch.Size],
    strict: bool = True,
) -> SimpleNamespace:
    """Checks the names, full shapes and dtypes of all tensors.

    Returns:
        ``computed``: all names of the model's tensors that no file has; ``missing_keys``: those that its class does not
        expect to compute; ``unexpected_keys``: names of the files' tensors that the model does not have.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    in_files = {name: tensor for group in groups for name, tensor in group.targets.items()}
    # Files have a tied tensor under one of its names: under the others it is not missing
    ids_in_files = {id(state[name]) for name in in_files if name in state}
    left = SimpleNamespace(
        missing_keys={
            name for name, tensor in state.items() if name not in in_files and id(tensor) not in ids_in_files
        },
        unexpected_keys={name for name in in_files if name not in state},
    )
    left.computed = set(left.missing_keys)
    # By the patterns of the class, as transformers
    model._adjust_missing_and_unexpected_keys(left)
    if strict and (left.missing_keys or left.unexpected_keys):
        raise KeyError(
            f"path: {str(path)!r} for {type(model).__name__}: missing {sorted(left.missing_keys)}, unexpected "
            f"{sorted(left.unexpected_keys)}"
        )
    for group in groups:
        group.targets = {name: tensor for name, tensor in group.targets.items() if name in state}
        for name, tensor in group.targets.items():
            if tensor.shape != shapes[name]:
                raise ValueError(
                    f"path: {name!r} has shape {tuple(tensor.shape)} in {str(path)!r} and must have "
                    f"{tuple(shapes[name])}, that of the configuration"
                )
            check_saved_dtype(name, tensor.dtype, state[name].dtype, f"path: {str(path)!r}")
    return left


def _warn(model: nn.Module, path: str | os.PathLike[str], left: SimpleNamespace) -> None:
    words = f"path: {str(path)!r} for {type(model).__name__}: "
    if left.missing_keys:
        words += f"no file has {sorted(left.missing_keys)}; they are initialised and must be trained. "
    if left.unexpected_keys:
        words += f"the model does not have {sorted(left.unexpected_keys)}; they are not read."
    if left.missing_keys or left.unexpected_keys:
        warnings.warn(words.rstrip(), stacklevel=3)


@torch.no_grad()
def _read(
    model: transformers.PreTrainedModel,
    entries: Mapping[str, Entry],
    files: Mapping[str, SlicedTensor],
    groups: list[TensorGroup],
    quantised: Quantised,
) -> None:
    """Reads this rank's slices; for tensors that are converted, all of them. Ends early where another rank fails."""
    read: dict[int, str] = {}
    pairs = (pair for group in groups for pair in _converted_tensors(model, files, group))
    with quantised:
        for name, tensor in pairs:
            entry = entries[name]
            if quantised.takes(entry):
                if not quantised.read(name, tensor, entry):
                    return
                continue
            first = read.setdefault(id(entry.value), name)
            # Tied tensors that a file has twice: the second is compared, not written
            if first == name:
                write_full(tensor, entry.value, entry.layout)
                continue
            for offsets, chunk, _ in entry.layout.local_chunks(entry.value)[1]:
                if not torch.equal(tensor[chunk_slices(offsets, chunk)].to(chunk), chunk):
                    raise ValueError(f"path: {first!r} and {name!r} are one tensor in the model and must be equal")


def _converted_tensors(
    model: transformers.PreTrainedModel, files: Mapping[str, SlicedTensor], group: TensorGroup
) -> Iterator[tuple[str, Tensor | SlicedTensor]]:
    """The tensors of the model that a group makes; in a file where nothing is converted."""
    if not group.targets:  # that the class ignores
        return
    if group.transform is None:
        yield from ((name, files[group.sources[0]]) for name in group.targets)
        return
    # Whole: which slices of the sources a converted shard needs is not known
    sources = [files[name][(slice(None),) * len(files[name].shape)] for name in group.sources]
    yield from ((name, tensor) for name, tensor in group.convert(model, sources).items() if name in group.targets)


def example_of(model: transformers.PreTrainedModel, tokens: int = 1) -> dict[str, Any]:
    """Returns a batch of tokens or images, with labels where the class has a loss; at least ``tokens`` tokens a row.

    Raises:
        ValueError: the model's main input is neither.
    """
    kind, names = type(model).__name__, set(inspect.signature(model.forward).parameters)
    text = model.config.get_text_config()
    example: dict[str, Any] = {}
    tokens = next((n for n in TOKEN_NUMBERS if n >= tokens), tokens)
    if model.main_input_name == "input_ids":
        count = getattr(text, "vocab_size", 2)
        example["input_ids"] = torch.arange(1, BATCH * tokens + 1).view(BATCH, tokens) % count
        if "labels" in names and kind.endswith(LABELS_OF_TOKENS):
            size = getattr(model.config, "num_labels", 2) if kind.endswith("ForTokenClassification") else count
            example["labels"] = example["input_ids"] % size
    elif model.main_input_name == "pixel_values":
        height, width = _image_size(model.config)
        example["pixel_values"] = torch.zeros(BATCH, getattr(model.config, "num_channels", 3), height, width)
    else:
        raise ValueError(f"example: must be given for {kind}, whose main input is {model.main_input_name!r}")
    if "labels" in names and kind.endswith(LABELS_OF_ROWS):
        example["labels"] = torch.arange(BATCH) % model.config.num_labels
    if "use_cache" in names:
        example["use_cache"] = False
    return example


def _image_size(config: transformers.PreTrainedConfig) -> tuple[int, int]:
    size = getattr(config, "image_size", 224)
    return (size, size) if isinstance(size, int) else (size[0], size[1])
