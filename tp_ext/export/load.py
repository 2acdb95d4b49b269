"""Exported models as functions of this process."""

import threading
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _register_process_group, _unregister_process_group
from torch.utils import _pytree as pytree

from tp_ext import _ops
from tp_ext._checks import check_int
from tp_ext.export.manifest import (
    ExportError,
    Manifest,
    TensorSpec,
    digest,
    dtype_name,
    dtype_of,
    map_weights,
    processor,
    weights_name,
)
from tp_ext.group import Group, ParallelGroup, parallel_group, process_group
from tp_ext.nn.sampling import vocab_parallel_sample
from tp_ext.random import manual_seed

_registered: dict[str, tuple[ProcessGroup, int]] = {}  # name of an export -> its group, and how many models use it
_lock = threading.Lock()


def name_of_export(export: str) -> str:
    """Returns the name under which the group of an export is registered."""
    return f"tp_ext.export.{export}"


def register(name: str, group: ProcessGroup) -> None:
    """Registers the group under the name, too, until as many :func:`unregister`.

    Raises:
        ValueError: another group has the name.
    """
    with _lock:
        registered, users = _registered.get(name, (group, 0))
        if registered is not group:
            raise ExportError("group: the export is in use over another group; delete that model first")
        if not users:
            _register_process_group(name, group)  # type: ignore[arg-type]
        _registered[name] = group, users + 1


def unregister(name: str) -> None:
    with _lock:
        group, users = _registered.pop(name)
        if users > 1:
            _registered[name] = group, users - 1
        else:
            _unregister_process_group(name)  # type: ignore[arg-type]


def check_processes(ranks: ProcessGroup | None) -> None:
    """Raises ExportError for simulated ranks: the code of an export finds its group by a name, one in a process."""
    if ranks is not None and dist.get_backend(ranks) == "simulated":
        raise ExportError("group: simulated ranks share a process, and an export needs one for each; use torchrun")


class ExportedModel:
    """A model that :func:`tp_ext.export_model` wrote, on its inputs in the order of ``manifest.inputs``.

    Inputs are tensors, by position or by name, of the dtypes and shapes of the manifest; a caller may pass constants of
    the example again. The result is the output, or a tuple of several. Nothing is recorded for autograd.

    Raises:
        TypeError, ValueError: an input that the manifest does not describe, another value of a constant; before any
            communication.
    """

    def __init__(self, manifest: Manifest, graph: _ops.CompiledGraph, group: ParallelGroup) -> None:
        self.manifest, self.group = manifest, group
        self._graph = graph
        self.inputs = manifest.inputs_of(group.rank)
        specs = self.inputs[len(self.inputs) - len(manifest.caches[group.rank]) :]
        self._caches = [torch.zeros([int(n) for n in spec.shape], dtype=dtype_of(spec.dtype)) for spec in specs]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.run(self._inputs(args, kwargs))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        names = [spec.name for spec in self.inputs]
        arguments = self.manifest.arguments or dict.fromkeys(names)
        values: dict[str, Any] = {}
        places, extra = list(arguments), []
        for leaf in pytree.tree_leaves(list(args)):
            # A tensor is the next input, also where a caller leaves out the constants before it
            while places and isinstance(leaf, Tensor) and arguments[places[0]] is not None:
                places.pop(0)
            if places:
                values[places.pop(0)] = leaf
            else:
                extra.append(leaf)
        for argument, value in kwargs.items():
            parts = [name for name in arguments if name == argument or name.startswith(f"{argument}.")]
            leaves = pytree.tree_leaves(value)
            if not parts or values.keys() & parts or len(leaves) != len(parts):
                raise TypeError(f"{argument}: must be an argument of the example, of {list(arguments)}, each once")
            values.update(zip(parts, leaves, strict=True))
        for name, value in values.items():
            constant = arguments[name]
            if constant is not None and (isinstance(value, Tensor) or repr(value) != constant):
                shown = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise ValueError(f"{name}: {shown} must be {constant}, a constant of the export")
        return [values[name] for name in names if name in values] + extra

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the outputs as a list."""
        specs = self.inputs
        if len(tensors) != len(specs):
            raise TypeError(
                f"inputs: {len(tensors)} tensors must be {len(specs)}: {', '.join(s.text() for s in specs)}"
            )
        lengths: dict[str, int] = {}
        for tensor, spec in zip(tensors, specs, strict=True):
            self._check(tensor, spec, lengths)
        return self._graph.run([tensor.detach().contiguous() for tensor in tensors])

    def _check(self, tensor: Any, spec: TensorSpec, lengths: dict[str, int]) -> None:
        if not isinstance(tensor, Tensor) or dtype_name(tensor.dtype) != spec.dtype or tensor.device.type != "cpu":
            shown = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else repr(tensor)
            raise TypeError(f"{spec.name}: {shown} must be a tensor of {spec.dtype} on the CPU")
        fits = tensor.dim() == len(spec.shape)
        for length, given in zip(spec.shape, tensor.shape, strict=False):
            if isinstance(length, int):
                fits = fits and length == given
            else:
                least, largest = self.manifest.dims[length]
                fits = fits and (least or 1) <= given <= (given if largest is None else largest)
                fits = fits and lengths.setdefault(length, given) == given
        if not fits:
            bounds = ", ".join(
                f"{d} from {b[0]} to {b[1] or 'any'}" for d, b in self.manifest.dims.items() if d in spec.shape
            )
            raise ValueError(
                f"{spec.name}: shape {tuple(tensor.shape)} must be {spec.text()}{bounds and f', {bounds}'}"
            )

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Collection[int] = (),
        callback: Callable[[int], bool] | None = None,
    ) -> Tensor:
        """Returns the prompt with up to ``max_new_tokens`` tokens appended: the same ones on every rank.

        Args:
            prompt: ``[batch, n]``, int64.
            temperature, top_k, top_p: see :func:`tp_ext.vocab_parallel_sample`.
            seed: given to :func:`tp_ext.manual_seed` before the first token.
            stop: ids after which no token is appended; with batch = 1.
            callback: gets each new id, with batch = 1, and ends the text by returning False.

        Raises:
            ValueError: an export without ``generate=True``; more than ``max_seq`` tokens; options as of
                :func:`tp_ext.vocab_parallel_sample`.
        """
        max_seq = self.manifest.max_seq
        if max_seq is None:
            raise ValueError("generate: the model was exported without generate=True")
        check_int(least=1, max_new_tokens=max_new_tokens)
        self._check(prompt, self.inputs[0], {})
        length = prompt.shape[1]
        if length + max_new_tokens > max_seq:
            raise ValueError(f"max_new_tokens: {length} + {max_new_tokens} tokens must not exceed max_seq = {max_seq}")
        if prompt.shape[0] > 1 and (stop or callback is not None):
            raise ValueError(f"prompt: stop and callback need one sequence, not {prompt.shape[0]}")
        options: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "vocab_size": self.manifest.vocab_size,
        }
        group = self.group.name if self.manifest.logits == "sharded" else None
        manual_seed(seed)
        for cache in self._caches:
            cache.zero_()  # a NaN of the last text would pass the mask
        ids, new = prompt, prompt
        for _ in range(max_new_tokens):
            position = torch.tensor(ids.shape[1] - new.shape[1])
            logits = self._graph.run([new.contiguous(), position, *self._caches])[0]
            new = vocab_parallel_sample(logits, group, **options)[:, None]
            ids = torch.cat([ids, new], 1)
            if (callback is not None and not callback(int(new))) or (stop and int(new) in stop):
                break
        return ids


def load_exported(folder: str | Path, group: Group = None) -> ExportedModel:
    """Loads this rank's part of a model that :func:`tp_ext.export_model` wrote.

    Args:
        folder: as of the export.
        group: as many ranks as those of the export; another backend may have other bits.

    An export is a program: load those whose author you trust. The digests find files that have changed, and no author.

    Communicates: two numbers of each rank: whether it can load, and the export that it has.

    Raises:
        ValueError: on all ranks: another number of ranks, another torch, a processor without the features of the one
            that exported, a file that was changed, other exports on the ranks.
    """
    resolved = parallel_group(group)
    ranks = process_group(group) if resolved.size > 1 else None
    check_processes(ranks)
    problem: ExportError | None = None
    model, export = None, "0"
    try:
        manifest = Manifest.read(Path(folder))
        export = manifest.id
        _check_place(manifest, resolved)
        _check_files(manifest, Path(folder), resolved.rank)
        model = _load(manifest, Path(folder), resolved)
    except ExportError as error:
        problem = error
    except Exception as error:  # the other ranks wait for an answer
        problem = ExportError(f"folder: {str(folder)!r} cannot be loaded: {error}")
        problem.__cause__ = error
    if ranks is not None:
        _agree(ranks, problem, export)
    if problem is not None:
        raise problem
    assert model is not None
    return model


def _check_place(manifest: Manifest, group: ParallelGroup) -> None:
    if manifest.p != group.size:
        raise ExportError(f"group: {group.size} ranks must be the {manifest.p} of the export")
    if manifest.torch != torch.__version__:
        raise ExportError(f"torch: {torch.__version__} must be the version of the export, {manifest.torch}")
    here = processor()
    if missing := [feature for feature in manifest.isa if feature not in here]:
        raise ExportError(f"isa: this processor has no {', '.join(missing)}, for which the export was compiled")


def _check_files(manifest: Manifest, folder: Path, rank: int) -> None:
    for name in manifest.files_of(rank):
        path = folder / name
        if not path.is_file():
            raise ExportError(f"folder: {path} does not exist")
        if digest(path) != manifest.files[name]:
            raise ExportError(f"folder: {path} is another file than the one that was exported")


def _load(manifest: Manifest, folder: Path, group: ParallelGroup) -> ExportedModel:
    graph = _ops.compiled_graph(str((folder / manifest.library_of(group.rank)).resolve()))
    weights = map_weights(folder / weights_name(group.rank), manifest.weights[group.rank])
    graph.load_weights(weights)
    model = ExportedModel(manifest, graph, group)
    if group.name:
        name = name_of_export(manifest.id)
        register(name, process_group(group.name))
        weakref.finalize(model, unregister, name)
    return model


def _agree(ranks: ProcessGroup, problem: ExportError | None, export: str) -> None:
    """Raises on all ranks if one has a problem, or another export."""
    word = int(export, 16)
    word -= (word >> 63) << 64
    words = torch.empty(ranks.size(), 2, dtype=torch.int64)
    dist.all_gather_into_tensor(words, torch.tensor([[problem is not None, word]]), group=ranks)
    failed, exports = words.unbind(1)
    if problem is None and failed.any():
        raise ExportError(
            f"folder: rank {int(failed.argmax())} of {ranks.size()} cannot load its part; its error says why"
        )
    if problem is None and (exports != exports[0]).any():
        other = int((exports != exports[0]).nonzero()[0])
        raise ExportError(f"folder: rank {other} has another export than rank 0; all must have that of one call")
