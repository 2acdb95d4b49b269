"""A sharded model, compiled ahead of time: one package a rank."""

import contextlib
import math
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.export import Dim, ExportedProgram

from tp_ext import _ops
from tp_ext._checks import check_flag, check_int, check_type
from tp_ext._object_collectives import all_gather_objects, call_and_gather, call_on_all_ranks
from tp_ext.export.decoding import DecodingStep
from tp_ext.export.graph_operators import call_whole, rename_group
from tp_ext.export.load import (
    ExportedModel,
    check_processes,
    load_exported,
    name_of_export,
    register,
    unregister,
)
from tp_ext.export.manifest import (
    NAME,
    Manifest,
    StoredWeight,
    digest,
    package_name,
    processor,
    weights_name,
    write_weights,
)
from tp_ext.export.trace import Example, TracedCall, specs, trace
from tp_ext.group import ALONE, ParallelGroup, process_group
from tp_ext.model.census import census

_BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.06}  # of results that are equal to rounding
_MANY = 33  # rows
_COMPILER = {
    "aot_inductor.package_constants_in_so": False,  # else each graph and each load has a copy of the weights
    "aot_inductor.enable_line_tables": False,
}


def export_model(
    model: nn.Module,
    example: Example,
    folder: str | Path,
    *,
    dynamic_shapes: Any = None,
    generate: bool = False,
    max_seq: int | None = None,
    batch: int = 1,
) -> None:
    """Writes a sharded model as files that :func:`tp_ext.load_exported` and C++ programs run, without its Python code.

    All ranks of the model's group call it. The graph of ``torch.export`` keeps the operators of this library and is
    compiled by AOTInductor; what it computes is compared with the model before the call returns.

    Args:
        model: of our layers, of :func:`tp_ext.auto`, or of :func:`tp_ext.huggingface.from_pretrained`; on the CPU, in
            eval mode; fp32, bf16 or fp64, also with weights in int8 or int4.
        example: the arguments of a call, the same on all ranks: a tensor, a tuple, or a dict of keyword arguments. What
            is no tensor is a constant of the graph, which a caller may pass again.
        folder: new or empty. It gets ``manifest.json``, and of each rank ``rank_00000.weights`` and a folder
            ``rank_00000.pt2``, an unpacked package of AOTInductor.
        dynamic_shapes: as of ``torch.export.export``, by the names of the arguments; default: those of the example.
        generate: exports a step of decoding with static caches, for :meth:`ExportedModel.generate`. The model is
            causal: of our layers with ``forward(ids, caches=)``, or of transformers. ``example`` is a prompt.
        max_seq: with ``generate``, the largest number of tokens, prompt included.
        batch: with ``generate``, the number of sequences.

    Communicates: the model's own collectives; which ranks have failed.

    Raises:
        ValueError: what cannot be exported, with the module and the operator; results that differ from the model's.
        FileExistsError: the folder is not empty.
    """
    group = _group_of(model)
    ranks = process_group(group.name) if group.name else None
    check_processes(ranks)
    folder = Path(folder)
    with torch.no_grad():
        call_on_all_ranks(ranks, lambda: _check(model, generate, max_seq, batch))
        call_on_all_ranks(ranks, lambda: _check_folder(folder))
        call = call_on_all_ranks(ranks, lambda: _call(model, example, generate, max_seq, batch))
        call.train(False)
        shapes = call_on_all_ranks(ranks, lambda: _shapes(call, dynamic_shapes))
        export = all_gather_objects(secrets.token_hex(8), ranks)[0]
        _write(call, shapes, folder, export, group, ranks)
        try:
            exported = load_exported(folder, group.name)
            equal = call_and_gather(ranks, lambda: _has_its_bits(call, exported))
        except BaseException:
            if group.rank == 0:
                (folder / NAME).unlink(missing_ok=True)  # without it the folder is no export
            raise
        if group.rank == 0 and not all(equal):
            exported.manifest.bits = "inductor"
            exported.manifest.write(folder)
        call_on_all_ranks(ranks, lambda: None)  # the manifest is written


def _group_of(model: nn.Module) -> ParallelGroup:
    """Returns the only group of the model's layers.

    Raises:
        ValueError: there are several.
    """
    check_type(nn.Module, "an nn.Module", model=model)
    groups = {group for group in census(model).groups_in_use() if group.size > 1}
    if len(groups) > 1:
        names = ", ".join(sorted(group.name for group in groups))
        raise ValueError(f"model: its layers have the groups {names}, and a model of one group can be exported")
    return groups.pop() if groups else ALONE


def _check(model: nn.Module, generate: bool, max_seq: int | None, batch: int) -> None:
    check_flag(generate=generate)
    check_int(least=1, batch=batch)
    if generate:
        check_int(least=1, max_seq=max_seq)
    elif max_seq is not None or batch != 1:
        raise ValueError("max_seq, batch: are options of generate=True")
    if torch.is_autocast_enabled("cpu"):
        raise ValueError("model: must not be exported under autocast; convert it, as by .to(torch.bfloat16)")
    for path, module in model.named_modules():
        kind = f"module {path!r} ({type(module).__name__})"
        if module.training:
            raise ValueError(f"model: {kind} is in training mode; call .eval()")
        if getattr(getattr(module, "context_group", None), "size", 1) > 1:
            raise ValueError(f"model: {kind} has a context group, and context parallelism cannot be exported")
        if getattr(module, "invariant_blocks", None) is not None:
            raise ValueError(f"model: {kind} was built in tp_invariant, and cannot be exported")
    if experts := census(model).routing_layers:
        path, layer = next(iter(experts.items()))
        raise ValueError(
            f"model: module {path!r} ({type(layer).__name__}) routes tokens to experts, and cannot be exported"
        )
    _check_tensors(model)


def _check_tensors(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise ValueError(f"model: {name} is a {type(tensor).__name__}, and must be a plain tensor")
        if tensor.device.type != "cpu":
            raise ValueError(f"model: {name} is on {tensor.device}, and only models on the CPU can be exported")
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype not in _BOUNDS:
            raise ValueError(f"model: {name} has dtype {tensor.dtype}, which must be one of {list(_BOUNDS)}")


def _check_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"folder: {str(folder)!r} must be new or empty")


def _call(
    model: nn.Module, example: Example, generate: bool, max_seq: int | None, batch: int
) -> TracedCall | DecodingStep:
    """Returns the call as a module on a list of tensors, having called it."""
    call = TracedCall(model, example)
    state = {name: tensor._version for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    # A step of decoding has inputs of its own: the example gives it a prompt, and nothing that a step does not take
    if generate:
        ids = call.tensors[0] if call.tensors else None
        if ids is None or ids.dtype != torch.int64 or ids.dim() != 2 or ids.shape[0] != batch or max_seq is None:
            raise ValueError(f"example: must be a prompt, an int64 tensor [batch = {batch}, n]")
        for name, tensor in zip(call.names[1:], call.tensors[1:], strict=True):
            if name != "labels" and (name != "attention_mask" or not tensor.bool().all()):
                raise ValueError(
                    f"example: {name} must be left out with generate=True: texts have no padding, and a step takes ids"
                )
        if ids.shape[1] == 1 and max_seq > 1:
            ids = ids.repeat(1, 2)  # torch.export takes a length of one for a constant
        step = DecodingStep(model, ids[:, :max_seq].contiguous(), max_seq)
        step.eval()
        step(list(step.tensors))
        return step
    # Called once before it is traced: a graph would drop, or repeat in each call, what a forward writes
    call.tensors = [tensor.detach().contiguous() for tensor in call.tensors]
    versions = [tensor._version for tensor in call.tensors]
    call(list(call.tensors))
    if versions != [tensor._version for tensor in call.tensors]:
        raise ValueError("model: writes to its inputs, and an export returns its outputs alone")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if state[name] != tensor._version:
            raise ValueError(f"model: writes to {name!r} in eval mode, and the state of an export does not change")
    return call


def _shapes(call: TracedCall | DecodingStep, dynamic_shapes: Any) -> list[Any]:
    if isinstance(call, TracedCall):
        return call.dynamic_shapes(dynamic_shapes)
    if dynamic_shapes is not None:
        raise ValueError("dynamic_shapes: must be None with generate=True, whose prompts have any length up to max_seq")
    length = {1: Dim("length", min=1, max=call.max_seq)} if call.max_seq > 1 else None
    return [length, *[None] * (len(call.tensors) - 1)]


def _write(
    call: TracedCall | DecodingStep,
    shapes: list[Any],
    folder: Path,
    export: str,
    group: ParallelGroup,
    ranks: ProcessGroup | None,
) -> None:
    """Writes the files of all ranks, and the manifest."""
    folder.mkdir(parents=True, exist_ok=True)

    decoding = call if isinstance(call, DecodingStep) else None

    def write() -> tuple[list[StoredWeight], list[list[int]], dict[str, str]]:
        program = trace(call, call.tensors, shapes)
        described.append(specs(program, call.names, call.output_names))
        rename_group(program, group, name_of_export(export))
        call_whole(program)
        with _named(export, ranks):
            files = _compile(program, folder / package_name(group.rank))
        library = next(file for file in files if file.suffix == ".so")
        files.append(folder / weights_name(group.rank))
        stored = _write_weights(program, library, files[-1])
        caches = [list(tensor.shape) for tensor in decoding.tensors[2:]] if decoding is not None else []
        return stored, caches, {file.relative_to(folder).as_posix(): digest(file) for file in files}

    described: list[Any] = []
    weights, caches, digests = zip(*call_and_gather(ranks, write), strict=True)
    if group.rank == 0:
        inputs, outputs, dims = described[0]
        Manifest(
            id=export,
            torch=torch.__version__,
            p=group.size,
            backend=None if ranks is None else dist.get_backend(ranks),
            bits="eager",
            isa=processor(),
            inputs=inputs,
            outputs=outputs,
            dims=dims,
            vocab_size=None if decoding is None else decoding.vocab_size,
            max_seq=None if decoding is None else decoding.max_seq,
            logits="" if decoding is None else "gathered" if decoding.vocab_size == outputs[0].shape[-1] else "sharded",
            caches=list(caches),
            weights=list(weights),
            files={name: value for of_rank in digests for name, value in of_rank.items()},
            arguments=call.texts if isinstance(call, TracedCall) else {},
        ).write(folder)
    call_on_all_ranks(ranks, lambda: None)  # the manifest is written


@contextlib.contextmanager
def _named(export: str, ranks: ProcessGroup | None) -> Iterator[None]:
    """Registers the group by the name of the export: fakes of operators ask for it."""
    if ranks is None:
        yield
        return
    register(name_of_export(export), ranks)
    try:
        yield
    finally:
        unregister(name_of_export(export))


def _compile(program: ExportedProgram, package: Path) -> list[Path]:
    """Writes a package of AOTInductor as a folder, where the graph is loaded in place. Returns its files."""
    contents = package / "data" / "aotinductor" / "model"  # as in an archive
    contents.mkdir(parents=True)
    # A folder of the rank's own: the code of two ranks may be alike, and they would write one file. Inductor does not
    # quote its paths in the command of the compiler
    plain = re.fullmatch(r"[\w/.+-]+", str(package.resolve()), re.ASCII)
    with tempfile.TemporaryDirectory(prefix=".compiling_", dir=package if plain else None) as scratch:
        options = {**_COMPILER, "aot_inductor.package": True, "aot_inductor.output_path": scratch}
        args, kwargs = program.example_inputs
        files: Any = torch._inductor.aot_compile(program.module(check_guards=False), args, kwargs, options=options)
        needed = [Path(file) for file in files if str(file).endswith((".so", ".json"))]
        return [Path(shutil.copyfile(file, contents / file.name)) for file in needed]


def _write_weights(program: ExportedProgram, library: Path, path: Path) -> list[StoredWeight]:
    graph = _ops.compiled_graph(str(library.resolve()))
    tensors = {**program.state_dict, **program.constants}
    return write_weights(path, {name: tensors[name] for name in sorted(graph.weight_names())})


class _Difference:
    """The difference between outputs of the model and of its export: none, rounding, or more.

    It raises at the end, since a rank that raised between two collectives would leave the others in them.
    """

    def __init__(self) -> None:
        self.equal, self.problem = True, ""

    def look(self, expected: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        for value, output in zip(expected, outputs, strict=True):
            if torch.equal(value, output):
                continue
            self.equal = False
            error, size = (value.double() - output.double()).abs().max(), value.double().abs().max()
            if not error <= _BOUNDS.get(value.dtype, 0.0) * size:
                self.problem = f"model: the exported one differs by {float(error):.3g} of {float(size):.3g}"

    def is_none(self) -> bool:
        """Returns whether there is none. ValueError: there is more than rounding."""
        if self.problem:
            raise ValueError(self.problem)
        return self.equal


def _has_its_bits(call: TracedCall | DecodingStep, exported: ExportedModel) -> bool:
    """Returns whether the exported model has the bits of the call.

    Raises:
        ValueError: it differs by more than by rounding.
    """
    difference = _Difference()
    if isinstance(call, DecodingStep):
        return _decodes_alike(call, exported, difference)
    bounds = exported.manifest.dims
    smallest = _resized(call, exported, {dim: least or 1 for dim, (least, _) in bounds.items()})
    # More rows than the example has may take another kernel of a layer, such as those of weights in few bits
    each = math.ceil(_MANY ** (1 / max(1, len(bounds))))
    sizes = {dim: max(least or 1, each if most is None else min(most, each)) for dim, (least, most) in bounds.items()}
    many = _resized(call, exported, sizes)
    for tensors in (call.tensors, smallest):
        difference.look(call(list(tensors)), exported.run(tensors))
    try:
        expected = call(list(many))
    except (RuntimeError, IndexError, ValueError):  # a bound that is larger than, say, the model's table of positions
        return difference.is_none()
    difference.look(expected, exported.run(many))
    return difference.is_none()


def _resized(call: TracedCall, exported: ExportedModel, lengths: dict[str, int]) -> list[Tensor]:
    """Returns the example's tensors, their open dims cut to these lengths or repeated."""
    tensors = list(call.tensors)
    for i, spec in enumerate(exported.manifest.inputs):
        for dim, length in enumerate(spec.shape):
            if isinstance(length, str):
                places = torch.arange(lengths[length]) % tensors[i].shape[dim]
                tensors[i] = tensors[i].index_select(dim, places)
    return tensors


def _decodes_alike(step: DecodingStep, exported: ExportedModel, difference: _Difference) -> bool:
    """Compares decoding over caches with the model's: a long prompt and one token, and a short one and some."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(step.vocab_size, (step.batch, step.max_seq), generator=generator)
    cached, whole = difference, _Difference()
    for lengths in ([step.max_seq - 1, 1], [1, 1, 3]):
        caches = [[torch.zeros_like(tensor) for tensor in step.tensors[2:]] for _ in range(2)]
        start, outputs = 0, list[Tensor]()
        for length in lengths:
            ids = text[:, start : start + length].contiguous()
            if ids.shape[1]:
                inputs = [ids, torch.tensor(start)]
                outputs = exported.run([*inputs, *caches[1]])
                cached.look(step([*inputs, *caches[0]]), outputs)
                start += ids.shape[1]
        whole.look([step.uncached(text[:, :start].contiguous())], outputs)
    whole.is_none()
    return cached.is_none()
