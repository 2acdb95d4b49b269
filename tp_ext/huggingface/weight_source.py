"""Full weights of a sharded model, one after the other, as inference engines take them from a trainer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.nn.utils.parametrize import ParametrizationList

from tp_ext._checks import check_bool
from tp_ext.checkpoint.gather import ranks_of, without_data_axes
from tp_ext.checkpoint.pipeline import agreed_entries, check_same, gather_whole, over_stages, whole_entries
from tp_ext.group import NOT_GIVEN
from tp_ext.huggingface.adapter_files import PREFIX, file_names, loaded_adapter
from tp_ext.huggingface.conversion import TensorGroup, groups_of_model
from tp_ext.huggingface.save import full_config
from tp_ext.mesh import mesh_axes
from tp_ext.model.census import Census, census
from tp_ext.model.fqn import Entry
from tp_ext.model.stages import Stages
from tp_ext.nn.lora import LoRALinear
from tp_ext.nn.lora_weight import LoRAWeight
from tp_ext.nn.low_bits import LowBits
from tp_ext.parallel.run import ParallelRun

EngineNames = Mapping[str, Any] | Callable[[str], Any] | None


class ParamMeta(NamedTuple):
    """The name, the dtype and the full shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Metadata(list[Any]):
    """What a source declares of its tensors, for engines that read an attribute and for those that call a method."""

    def __call__(self) -> Metadata:
        return self


def weight_source(
    model: Stages | ParallelRun,
    *,
    dtype: torch.dtype | None = None,
    merge_adapters: bool = True,
    names: EngineNames = None,
    mesh: DeviceMesh | None = None,
) -> WeightSource:
    """Makes a source of the full weights of a sharded model, for inference engines: names, dtypes and shapes first,
    then the tensors one by one, without a gather of the whole model.

    ::

        source = tp_ext.huggingface.weight_source(model)
        engine.prepare([(meta.name, meta.dtype, meta.shape) for meta in source.metadata()])
        for name, tensor in source:                     # on all ranks, in lockstep
            if rank == 0:
                engine.load(name, tensor)

    Where vLLM can be imported the source is a ``vllm.distributed.weight_transfer.base.WeightSource``.

    Args:
        model: a module, wrapped or not; the list of the stages of a pipeline that this rank holds; or what
            :func:`tp_ext.parallelize` returned, whose mesh it takes. Names and values of a model of transformers are
            those of the files that :func:`save_pretrained` writes; of another model those of
            :func:`tp_ext.full_state_dict`.
        dtype: of the tensors of floating point; None: that of each parameter. Weights in int8 or int4 need it.
        merge_adapters: yields the weights with the adapters of :func:`tp_ext.add_lora` in them, and no adapters; the
            model stays as it is. False: the weights without, and after them the tensors of the adapters, with the names
            of :func:`save_adapter`.
        names: our name -> the name that the engine wants, as a dict, in which others keep theirs, or as a function of
            each name; a list of names for the parts of a fused parameter (q, k, v; gate, up).
        mesh: as :func:`tp_ext.full_state_dict`.

    Communicates: one all-reduce of two numbers over each group, and with a pipeline an exchange of names and shapes.

    Raises, on all ranks:
        TypeError: an argument of another type.
        ValueError: ``names`` that name no tensor, or two tensors alike, or parts that there are not; a weight in int8
            or int4 without ``dtype``; a layer that is merged already, or whose adapter would be merged into a weight
            that is another layer's, too; others as :func:`tp_ext.full_state_dict`.
    """
    if isinstance(model, ParallelRun):
        mesh = model.mesh if mesh is None else mesh
    stages: Stages = model.state if isinstance(model, ParallelRun) else model
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: {dtype!r} must be a floating-point torch.dtype, or None")
    check_bool(merge_adapters=merge_adapters)
    if names is not None and not isinstance(names, Mapping) and not callable(names):
        raise TypeError(f"names: {names!r} must be a dict or a function, from our names to those of the engine")
    return _class_of_source()(stages, dtype, merge_adapters, names, mesh)


class WeightSource:
    """A source of full weights, which :func:`weight_source` makes. It may be iterated over any number of times; each
    pass yields the values that the weights then have.

    Every rank that holds the model iterates, in lockstep: to the same tensor, and no further. When a tensor is yielded,
    all communication for it has ended, so that ranks which break off a pass at the same tensor may begin another.

    A pass communicates one all-reduce of two numbers over each group, then for each tensor what
    :func:`tp_ext.full_state_dict` does; with FSDP2 also an all-gather of each factor of an adapter. Besides the
    shards there is one full tensor at a time; where files hold it in another form (the experts of Mixtral), those of a
    group: one stack of expert matrices. A pass raises ValueError, on all ranks, if the model no longer has the tensors
    of :attr:`metadata`.
    """

    _meta: type = ParamMeta

    def __init__(
        self, model: Stages, dtype: torch.dtype | None, merge: bool, names: EngineNames, mesh: DeviceMesh | None
    ) -> None:
        self._model, self._dtype, self._merge, self._mesh = model, dtype, merge, mesh
        self._expected: dict[str, tuple[torch.Size, torch.dtype]] | None = None
        self._read()
        self._whole = whole_entries(self._entries, self._ranks, unique=True)
        self._groups = self._groups_of_model()
        self._names: dict[str, list[str]] = {}
        parts: dict[str, tuple[int, list[int]]] = {}
        for of_stage in over_stages(_parts_of(self._entries), self._ranks) if names is not None else ():
            parts |= of_stage
        plain = [
            (group.sources[0], name) for group in self._groups if group.transform is None for name in group.targets
        ]
        self._parts = {name: parts[source] for source, name in plain if source in parts}

        def described() -> dict[str, str]:
            self._names = _renamed([name for group in self._groups for name in group.targets], names, self._parts)
            return {str(meta): "" for meta in self.metadata()}

        check_same("dtype, names", described, self._ranks)

    @cached_property
    def metadata(self) -> Metadata:
        """``name``, ``dtype`` and full ``shape`` of each tensor, in the order of iteration: an attribute, as vLLM has
        it, that may also be called, ``metadata()``. Communicates nothing."""
        return Metadata(
            self._meta(name, self._dtype_of(tensor.dtype), tuple(part.shape))
            for group in self._groups
            for target, tensor in group.targets.items()
            for name, part in self._named(target, tensor)
        )

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Begins a pass, as ``iter``: the name that vLLM has for it."""
        return iter(self)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._read()
        for group in self._groups:
            pairs = self._tensors_of(group)
            # Without a variable for the tensor, which would keep it while the next one is gathered
            while pairs:
                yield self._sent(*pairs.pop())

    def _read(self) -> None:
        """Reads the entries of the model as they are now, with the names that they have without adapters."""
        known = census(self._model, mesh_axes(NOT_GIVEN, self._mesh))
        self._ranks = ranks_of(known)

        def read() -> dict[str, Entry]:
            plain, self._computed = _plain_entries(known, self._dtype, self._merge)
            shapes = {name: (entry.shape, entry.value.dtype) for name, entry in plain.items()}
            expected = shapes if self._expected is None else self._expected
            for name in (*expected, *shapes):
                if shapes.get(name) != expected.get(name):
                    raise ValueError(f"model: {name!r} must be as it was when the source was made: make a new source")
            self._expected = shapes
            return plain

        self._entries = agreed_entries(known, self._ranks, read)

    def _groups_of_model(self) -> list[TensorGroup]:
        full = {
            name: torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, device="meta")
            for name, entry in self._whole.items()
            if entry.tensor is not None
        }
        tied_to = {name: self._whole[name].tied for name in full}
        adapters = [TensorGroup([name], {name: full.pop(name)}) for name in list(full) if name.startswith(PREFIX)]
        self._pretrained = _pretrained(self._model)
        if self._pretrained is None:
            groups = [TensorGroup([name], {name: full[name]}) for name in full if tied_to[name] == name]
        else:
            objects = {tied: object() for tied in tied_to.values()}
            groups = groups_of_model(self._pretrained, full, {name: objects[tied] for name, tied in tied_to.items()})
        return groups + adapters

    def _dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    @torch.no_grad()
    def _tensors_of(self, group: TensorGroup) -> list[tuple[str, Tensor]]:
        """Gathers the tensors of a group, the last one first."""
        # Before the gather a cast saves bytes; conversions get what the files are converted from
        sources = [self._full(name, cast=group.transform is None) for name in group.sources]
        if self._pretrained is None or group.transform is None:
            converted = dict(zip(group.targets, sources, strict=True))
        else:
            converted = group.convert(self._pretrained, sources)
        return [pair for name in group.targets for pair in self._named(name, converted[name])][::-1]

    def _full(self, name: str, *, cast: bool) -> Tensor:
        tensor = self._whole[name].tensor
        assert tensor is not None
        if cast:
            tensor = tensor._replace(dtype=self._dtype_of(tensor.dtype))
        entry = self._entries.get(name)
        if entry is not None and tensor.stages[0] == self._ranks.stage:
            layer = self._computed.get(name)
            value = entry.value.detach() if layer is None else _computed_weight(layer, entry.value, self._merge)
            entry = entry._replace(value=value.to(tensor.dtype))
        full = gather_whole(tensor, entry, self._ranks)
        assert full is not None
        return full

    def _named(self, target: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the tensor with the engine's name, or its parts with theirs."""
        names = self._names.get(target, [target])
        if len(names) == 1:
            return [(names[0], tensor)]
        dim, sizes = self._parts[target]
        return list(zip(names, tensor.split(sizes, dim), strict=True))

    @torch.no_grad()
    def _sent(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        tensor = tensor.to(self._dtype_of(tensor.dtype))
        # A part of a stack would keep all of it
        alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        return name, tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


@cache
def _class_of_source() -> type[WeightSource]:
    """Returns the class of sources: where vLLM can be imported, a subclass of vLLM's."""
    try:
        base = importlib.import_module("vllm.distributed.weight_transfer.base")
        bases = (WeightSource, base.WeightSource)
        return type("WeightSource", bases, {"_meta": base.ParamMeta, "__doc__": WeightSource.__doc__})
    except Exception:  # of any kind: an installation that cannot be imported is none
        return WeightSource


def _plain_entries(
    known: Census, dtype: torch.dtype | None, merge: bool
) -> tuple[dict[str, Entry], dict[str, nn.Module]]:
    """Returns the entries of a model as if it had neither adapters nor quantised weights, then those of the adapters
    that are not to be merged; and the layers whose weights must be computed, by the name of the weight.

    Raises:
        ValueError: see :func:`weight_source`.
    """
    linears = [layer for layer in known.layers.values() if isinstance(layer, LoRALinear)]
    base_of: dict[nn.Module, nn.Module] = {layer.base_layer: layer for layer in linears}
    for _, module in known.modules:
        if isinstance(module, ParametrizationList) and isinstance(module[0], LoRAWeight):
            base_of[module] = module[0]
    state, record = known.state(), loaded_adapter(known)
    of_files = file_names(known, state)
    originals = {} if record is None else record.originals
    entries: dict[str, Entry] = {}
    computed: dict[str, nn.Module] = {}
    adapters: dict[str, Entry] = {}
    for name, entry in state.items():
        if entry.extra:
            continue
        if name in of_files:
            adapters[PREFIX + of_files[name]] = entry
            if name not in originals:
                continue
            entry = entry if merge else entry._replace(value=originals[name])
        layer = base_of.get(entry.owner)
        local = entry.local
        if isinstance(layer, LoRAWeight):
            name, local = name.replace("parametrizations.", "").removesuffix(".original"), "weight"
        elif layer is not None:
            name = f"{name.removesuffix(f'base_layer.{local}')}{local}"
        form = getattr(entry.owner, "form", None)
        if isinstance(form, LowBits) and local in ("weight_packed", "weight_scale"):
            if local == "weight_scale":
                continue
            if dtype is None:
                raise ValueError(f"dtype: must be given, since {name!r} is a weight in {form.bits} bits")
            rows, columns = entry.value.shape
            # Its shape alone is read
            shape = rows, columns * (2 if form.bits == 4 else 1)
            value = torch.empty((), dtype=dtype, device=entry.value.device).expand(shape)
            name, entry = name.removesuffix("_packed"), entry._replace(layout=form.layout, value=value)
            layer = layer or entry.owner
        elif layer is not None and merge and local == "weight":
            if sum(other.value is entry.value for other in state.values()) > 1:
                raise ValueError(
                    f"merge_adapters: {name!r} is another layer's weight, which must not get the adapter; untie it"
                )
        else:
            layer = None
        entries[name] = entry
        if layer is not None:
            computed[name] = layer
    return entries | ({} if merge else adapters), computed


@torch.no_grad()
def _computed_weight(layer: Any, value: Tensor, merge: bool) -> Tensor:
    """Returns this rank's shard of the weight of a layer, dequantised and with the adapter in it; ``value`` is that of
    the entry."""
    if isinstance(layer, LoRAWeight):
        factors = layer.lora_A, layer.lora_B, layer.lora_magnitude
        return layer.adapted(without_data_axes(value), *(f if f is None else without_data_axes(f) for f in factors))
    base = layer.base_layer if isinstance(layer, LoRALinear) else layer
    if isinstance(base.form, LowBits):
        weight = base.form.dequantized(*map(without_data_axes, (base.weight_packed, base.weight_scale)))
    else:
        weight = without_data_axes(base.weight).clone()
    if merge and isinstance(layer, LoRALinear):
        a, b = layer.lora_A.weight, layer.lora_B.weight
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        layer.add_product_(weight, without_data_axes(a), without_data_axes(b))
    return weight


def _parts_of(entries: Mapping[str, Entry]) -> dict[str, tuple[int, list[int]]]:
    """Returns the dim and the sizes of the parts of each fused parameter."""
    parts = {}
    for name, entry in entries.items():
        for sharding, _ in entry.layout:
            if len(sharding.parts) > 1:
                parts[name] = sharding.dim % len(entry.shape), [part.size for part in sharding.parts]
    return parts


def _renamed(
    ours: Sequence[str], names: EngineNames, parts: Mapping[str, tuple[int, list[int]]]
) -> dict[str, list[str]]:
    """Returns the names that the engine wants of each of our tensors.

    Raises:
        TypeError, ValueError: see :func:`weight_source`.
    """
    if names is None:
        return {}
    if isinstance(names, Mapping) and (unknown := [name for name in names if name not in ours]):
        raise ValueError(f"names: {unknown} must be names of the model's tensors, such as {list(ours)[:3]}")
    renamed: dict[str, list[str]] = {}
    taken: dict[str, str] = {}
    for name in ours:
        wanted = names.get(name, name) if isinstance(names, Mapping) else names(name)
        # One name, or a list with one for each part of a fused tensor, which engines keep apart
        several = isinstance(wanted, list | tuple)
        renamed[name] = list(wanted) if several else [wanted]
        if not all(isinstance(text, str) and text for text in renamed[name]) or not renamed[name]:
            raise TypeError(f"names: of {name!r} it must give a name or a list of names, not {wanted!r}")
        count = len(parts[name][1]) if name in parts else 1
        if several and len(renamed[name]) != count:
            raise ValueError(f"names: {name!r} has {count} parts and must have as many names, not {wanted!r}")
        # Of two tensors of one name an engine would keep the last, silently
        for text in renamed[name]:
            other = taken.setdefault(text, name)
            if other != name or renamed[name].count(text) > 1:
                raise ValueError(f"names: {other!r} and {name!r} must have names of their own, not both {text!r}")
    return renamed


def _pretrained(model: Stages) -> transformers.PreTrainedModel | None:
    """Returns the model of transformers that knows names and conversions of files; of a pipeline one on meta."""
    module: Any = model
    while isinstance(module, nn.Module) and not isinstance(module, transformers.PreTrainedModel):
        # DDP and torch.compile have the model as their only module
        inner = [child for name, child in module.named_children() if name in ("module", "_orig_mod")]
        if len(inner) != 1 or len(list(module.children())) != 1:
            break
        module = inner[0]
    if isinstance(module, transformers.PreTrainedModel):
        return module
    stages = list(model) if isinstance(model, list | tuple) else [model]
    cls, options = stages[0].__dict__.get("tp_whole_model", (object, {}))
    if not issubclass(cls, transformers.PreTrainedModel):
        return None
    with torch.device("meta"):
        whole = cls(full_config(options["config"], options["tp_ext_plan"]))
    whole._weight_conversions = options["_weight_conversions"]
    return whole
