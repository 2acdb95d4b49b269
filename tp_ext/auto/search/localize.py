"""The local model on fakes: integers that its code reads, and the proof that every call has the local shapes of the
plan.

Forward code computes shapes from integers that modules hold (``num_heads``, ``split_size``), or reads of their
config. On a rank some must be smaller. They are found (:mod:`tp_ext.auto.search.integers`) by running the model with
local shapes and no weights, and comparing its calls from Python, one by one, with those of the unsharded model: the
result of each must have the local lengths of its dims. A model whose calls all agree computes local shards; that it
runs without an exception would prove nothing."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext.auto.record.boundary import install
from tp_ext.auto.record.dims import Atom, Dim, by_atom
from tp_ext.auto.record.edits import Conversion, LeafPath, SizeCall
from tp_ext.auto.record.forwards import argument_names
from tp_ext.auto.record.multi_head import forward_on_fakes
from tp_ext.auto.record.record import Record
from tp_ext.auto.record.trace import trace
from tp_ext.auto.record.unchanged import unchanged
from tp_ext.auto.search.choose import Decision, local_length
from tp_ext.auto.search.flow import Flow
from tp_ext.auto.search.reasons import failure_of
from tp_ext.auto.search.sizes import Observer, SizedForward
from tp_ext.auto.search.summed_calls import localize_norms
from tp_ext.conversions import S
from tp_ext.sharding import Sharding

VIEW_CALLS = {
    "__getitem__", "expand", "reshape", "view", "unsqueeze", "squeeze", "contiguous", "transpose",
    "repeat_interleave", "to", "flatten", "type_as", "clone", "repeat",
}  # fmt: skip
MAX_VIEWS = 8

ADVICE = (
    "sizes that the code takes from a replicated input, or writes as numbers, are not those of a rank: write -1, or an "
    "integer of the module"
)
BRANCHES = "code that branches on a length has another one there: let it branch on a switch of the module"
PythonCall = tuple[str, str, list[tuple[int, ...]]]  # module, function, shapes of the result
Shapes = dict[str, tuple[int, ...]]
PatchesOf = Mapping[str, Mapping[str, tuple[int, int]]]
SizesOf = Mapping[str, Sequence[SizeCall]]  # module -> its calls with sizes
Patches = dict[str, dict[str, tuple[int, int]]]  # module -> {attribute or config.attribute: (full, local)}


class MismatchError(Exception):
    """A call of the local model whose shapes are not those of the plan; ``at``: its place among the wanted ones."""

    def __init__(self, module: str, text: str, at: int = 0) -> None:
        super().__init__(f"{module or 'the model'}: {text}")
        self.module, self.text, self.at = module, text, at


@dataclass(frozen=True, kw_only=True)
class LocalEdits:
    """The edits of a plan that change shapes: with them a model computes what a rank computes."""

    p: int
    roles: Mapping[str, str]
    heads: Sequence[str]
    shardings: Mapping[str, Sharding]  # of parameters, by all their names
    buffers: Mapping[str, Sequence[Sharding]]
    conversions: Sequence[Conversion]
    token_sizes: Callable[[int], list[int]]  # those of each rank


class Localized:
    """The local model of a rank, made of a model by the edits of a plan.

    ``flow`` says which calls it must make; it is not needed to see which calls it makes.
    """

    def __init__(self, model: nn.Module, example: Any, edits: LocalEdits, flow: Flow | None = None) -> None:
        self.model, self.example, self.edits, self.p = model, example, edits, edits.p
        self._flow = flow
        self.runs = 0

    @property
    def flow(self) -> Flow:
        assert self._flow is not None
        return self._flow

    def sizes(self, rank: int) -> dict[Atom, int]:
        """Local lengths of the sharded atoms."""
        sizes: dict[Atom, int] = {}
        for decision in self.flow.types.chosen:
            sizes.update(decision.sizes(rank))
        # Code sees logits of all columns: sharded logits answer with their full shape
        return {atom: size for atom, size in sizes.items() if atom not in self.flow.types.whole_heads}

    def expected(self, rank: int) -> list[PythonCall]:
        """The calls from Python of the unsharded model, with local shapes."""
        record, sizes, tokens = self.flow.types.record, self.sizes(rank), self.flow.types.tokens

        def shape(tensor: Tensor, index: int) -> tuple[int, ...]:
            if id(tensor) in self.flow.local:
                return tuple(local_length(dim, sizes) for dim in record.dims_of(tensor))
            lengths = list(tensor.shape)
            # By the place of the call: a tensor may be whole in some uses and sharded on its tokens in others
            if tokens is not None and (token_range := tokens.range_of_call(tensor, index)) is not None:
                dim, atom, sizes_of = token_range.dim, token_range.atom, self.edits.token_sizes
                lengths[dim] = local_length(record.dims_of(tensor)[dim], {atom: sizes_of(atom.size)[rank]})
            return tuple(lengths)

        return [(m, name, [shape(t, i) for t in results]) for i, (m, name, results) in self.numbered_calls()]

    def numbered_calls(self) -> list[tuple[int, tuple[str, str, list[Tensor]]]]:
        """The calls from Python of the unsharded model outside of layers, with their places among all."""
        calls = self.flow.types.record.python_calls
        return [(i, call) for i, call in enumerate(calls) if call[0] not in self.edits.roles]

    @functools.cached_property
    def dims_with(self) -> dict[Atom, list[Dim]]:
        """The dims of all tensors, by their atoms: walked once, since each layer asks for those of its own."""
        return by_atom(dim for dims in self.flow.types.record.dims.values() for dim in dims)

    def local_values(self, rank: int, decisions: Sequence[Decision]) -> dict[int, list[int]]:
        """Lengths of products of atoms -> their lengths on a rank, for those that have an atom of these decisions."""
        lengths, local_lengths = self.sizes(rank), dict[int, set[int]]()
        sizes = {atom: lengths[atom] for decision in decisions for atom in decision.sharded if atom in lengths}
        for factors in {id(dim): dim for atom in sizes for dim in self.dims_with.get(atom, ())}.values():
            for start in range(len(factors)):
                full = local = 1
                for atom in factors[start:]:
                    full *= atom.size
                    local *= local_length([atom], sizes)
                    if full != local:
                        local_lengths.setdefault(full, set()).add(local)
        return {full: sorted(local) for full, local in local_lengths.items()}

    @contextlib.contextmanager
    def local_model(self, rank: int, patches: PatchesOf, sizes: SizesOf) -> Iterator[Shapes]:
        """Makes the model one rank's, in place, and yields the local shapes of its parameters and buffers; puts
        everything back at the end.

        A copy would not do: functions in a model that refer to its modules would refer to the originals."""
        model, p = self.model, self.p
        state = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        shapes = {n: tuple(s.local_shape(state[n].shape, rank, p)) for n, s in self.edits.shardings.items()}
        for name, shardings in self.edits.buffers.items():
            shape = state[name].shape
            for sharding in shardings:
                shape = sharding.local_shape(shape, rank, p)
            shapes[name] = tuple(shape)
        with unchanged(model):
            for name in self.edits.heads:
                features = state[f"{name}.weight"].shape[1 if is_conv1d(model.get_submodule(name)) else 0]
                model.get_submodule(name).forward = _LogitsOf(features)
            for name, role in self.edits.roles.items():
                module = model.get_submodule(name)
                # What the layer in its place would read of another shape
                if role == "column" and is_conv1d(module):
                    module.nf = shapes[f"{name}.weight"][1]  # type: ignore[assignment]
                elif role == "vocab":
                    module.padding_idx = None  # type: ignore[assignment]  # may be the row of another rank
                elif role == "attention":
                    module.forward = forward_on_fakes(module)
            localize_norms(model, [edit for edit in self.edits.conversions if edit.at == "call"], rank, p)
            lengths: list[int] = []
            for edit in self.edits.conversions:
                hook, module = _LocalConversion(edit, rank, self.edits, lengths), model.get_submodule(edit.module)
                if edit.at == "argument" and S in edit.types:
                    module.register_forward_pre_hook(hook.of_arguments, with_kwargs=True)
                elif edit.at == "output" and edit.of_tokens:
                    module.register_forward_hook(hook.of_output)
            patch(model, patches)
            for name, calls in sizes.items():
                for inner, pause in SizedForward(model.get_submodule(name), name, calls).install():
                    install(inner, [pause])
            yield shapes

    def lines(self) -> list[str]:
        """The lines of the user's source with the calls of :meth:`expected`."""
        return [self.flow.types.record.lines[i] for i, _ in self.numbered_calls()]

    def observer(self, rank: int) -> Observer:
        """A mode for :meth:`run` that makes all sizes right, and notes which were not."""
        wanted: dict[str, list[tuple[str, list[tuple[int, ...]]]]] = {}
        for module, name, shapes in self.expected(rank):
            wanted.setdefault(module, []).append((name, shapes))
        return Observer(wanted, self.edits.roles)

    def run(
        self, rank: int, patches: PatchesOf, sizes: SizesOf | None = None, observer: Observer | None = None
    ) -> tuple[list[PythonCall], MismatchError | None]:
        """Runs the local model with these integers and sizes; returns its calls, and what it raised."""
        self.runs += 1
        record, raised = Record(), None
        if observer is not None:
            observer.record = record
        try:
            with self.local_model(rank, patches, sizes or {}) as shapes:
                options: dict[str, Any] = {"record": record, "operators": False, "mode": observer, "puts_back": False}
                trace(self.model, self.example, shapes=shapes, **options)
        except Exception as error:
            # Of any type: wrong integers lead to wrong views, wrong indices and failed assertions of the user's code
            raised = MismatchError(record.modules[-1], f"{failure_of(error)}; {ADVICE}")
        calls = [
            (m, name, [tuple(t.shape) for t in results])
            for m, name, results in record.python_calls
            if m not in self.edits.roles
        ]
        return calls, raised

    def checked(self, rank: int, patches: PatchesOf, sizes: SizesOf) -> list[PythonCall]:
        """Returns the calls of the local model.

        Raises:
            MismatchError: they are not those of the plan.
        """
        calls, raised = self.run(rank, patches, sizes)
        _, mismatch = compare_calls(self.expected(rank), calls, raised, self.lines())
        if mismatch is not None:
            raise mismatch
        return calls

    def calls(self, rank: int, patches: PatchesOf, sizes: SizesOf) -> list[PythonCall]:
        """Returns the calls of the local model.

        Raises:
            MismatchError: its code raised an exception.
        """
        calls, raised = self.run(rank, patches, sizes)
        if raised is not None:
            raise raised
        return calls


def digest(calls: Sequence[PythonCall]) -> str:
    """A hash of calls from Python and their shapes, in any order: code that iterates over a set has another in each
    process."""
    return hashlib.sha256("\n".join(sorted(map(repr, calls))).encode()).hexdigest()


def is_conv1d(module: nn.Module) -> bool:
    """True if a module is the ``Conv1D`` of transformers: a linear layer with weight ``[in, out]``."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


class _LogitsOf:
    """The forward of a head on fakes: its output has the full vocabulary, as the model's code expects."""

    def __init__(self, features: int) -> None:
        self.features = features

    def __call__(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], self.features)


class _LocalConversion:
    """A boundary at which a tensor has another shape behind it, on fakes: by calls that the proof does not see."""

    def __init__(self, edit: Conversion, rank: int, edits: LocalEdits, lengths: list[int]) -> None:
        self.edit, self.rank, self.edits = edit, rank, edits
        self.lengths = lengths  # that of the tokens sharded last; shared by all boundaries

    def of_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return replaced_argument(module, args, kwargs, self.edit.path, self.converted)

    def of_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return replaced(output, self.edit.path, self.converted)

    def converted(self, x: Tensor) -> Tensor:
        dim, factor = self.edit.dim, self.edit.factor
        with torch._C.DisableTorchFunction():
            if factor is not None:
                return x.narrow(dim, 0, x.shape[dim] // factor.size * factor.local_size(self.rank, self.edits.p))
            if self.edit.after is S and self.edit.before is not S:
                self.lengths[:] = [x.shape[dim]]
                return x.narrow(dim, 0, self.edits.token_sizes(x.shape[dim])[self.rank])
            if self.edit.after is S:
                return x
            # Shards may be uneven, so that the full length does not follow from this rank's
            return x.new_empty(*x.shape[:dim], self.lengths[0], *x.shape[dim + 1 :])


def argument_path(module: nn.Module, args: Any, kwargs: Any, path: LeafPath) -> LeafPath | None:
    """The path of an argument in this call, which passes by name what the example passes by position, or the reverse.

    Returns None if the call leaves the argument to its default.
    """
    key, rest = path[1], path[2:]
    if key in kwargs if isinstance(key, str) else key < len(args):
        return path
    names = argument_names(module)
    if isinstance(key, str):
        return (0, names.index(key), *rest) if key in names[: len(args)] else None
    # A default is no tensor of the example, and has no place in the plan
    return (1, names[key], *rest) if key < len(names) and names[key] in kwargs else None


def replaced_argument(
    module: nn.Module, args: Any, kwargs: Any, path: LeafPath, function: Callable[[Tensor], Tensor]
) -> tuple[Any, Any]:
    """Returns the arguments with the function applied to the tensor at a path of the plan; unchanged if the call does
    not pass it."""
    path_in_call = argument_path(module, args, kwargs, path)
    both: tuple[Any, Any] = args, kwargs
    # A call may have another kind of argument in its place
    if path_in_call is None or not isinstance(leaf_at(both, path_in_call), Tensor):
        return both
    return replaced(both, path_in_call, function)


def leaf_at(value: Any, path: Sequence[Any]) -> Any:
    """Returns what a path leads to in a nested structure; None: nothing."""
    for key in path:
        is_container = isinstance(value, list | tuple | Mapping)
        try:
            value = value[key] if is_container else getattr(value, str(key))
        except (LookupError, AttributeError, TypeError):
            return None
    return value


def replaced(value: Any, path: LeafPath, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies a function to the tensor at a path of a nested structure; copies the containers on the path."""
    if not path:
        return function(value)
    key, rest = path[0], path[1:]
    if isinstance(value, tuple):
        items = [replaced(item, rest, function) if i == key else item for i, item in enumerate(value)]
        # A named tuple takes its items as arguments
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    # The caller's container stays as it is: other code may hold it
    changed = copy.copy(value)
    if isinstance(changed, list | Mapping):
        changed[key] = replaced(value[key], rest, function)  # type: ignore[index]
    else:
        setattr(changed, str(key), replaced(getattr(value, str(key)), rest, function))
    return changed


def compare_calls(
    wanted: Sequence[PythonCall], got: Sequence[PythonCall], raised: MismatchError | None, lines: Sequence[str] = ()
) -> tuple[int, MismatchError | None]:
    """Returns how many wanted calls the local model made, and the first that differs.

    ``lines``: of the user's source, where each wanted call is.

    Code branches on sizes: ``repeat_kv`` of one repetition returns at once. So either side may have some more calls
    that are only views, where the next call agrees again."""
    i = j = 0
    while i < len(wanted) and j < len(got):
        want, have = wanted[i], got[j]
        if want != have:
            if skip := _views_before(wanted, i, have):
                i += skip
            elif skip := _views_before(got, j, want):
                j += skip
            elif want[:2] != have[:2]:
                text = (
                    f"{_shown(want, lines, i)} is not called next on a rank, but {have[1]} in {have[0] or 'the model'}"
                )
                return i, MismatchError(want[0], f"{text}; {BRANCHES}", i)
            else:
                text = f"{_shown(want, lines, i)} has shapes {have[2]} locally and must have {want[2]}"
                return i, MismatchError(want[0], text, i)
            continue
        i, j = i + 1, j + 1
    # Before missing calls, which an exception explains
    if raised is not None:
        raised.at = i
        return i, raised
    if i < len(wanted):
        return i, MismatchError(wanted[i][0], f"{_shown(wanted[i], lines, i)} is not called on a rank; {BRANCHES}", i)
    # Nothing says which local shapes a call in addition must have
    if j < len(got):
        return i, MismatchError(got[j][0], f"{got[j][1]} is called on a rank in addition; {BRANCHES}", i)
    return i + 1, None


def _shown(call: PythonCall, lines: Sequence[str], i: int) -> str:
    return f"{call[1]} ({lines[i]})" if i < len(lines) and lines[i] else call[1]


def _views_before(calls: Sequence[PythonCall], start: int, other: PythonCall) -> int:
    """The number of calls from ``start`` that are views in one module and lead to a call like the other; 0: none do."""
    module, name, _ = calls[start]
    # Only views may be skipped, which compute no numbers
    if name not in VIEW_CALLS:
        return 0
    for number in range(1, MAX_VIEWS + 1):
        # Views at the end lead to no common call by which both sides agree again
        if start + number >= len(calls):
            return 0
        last = calls[start + number - 1]
        if last[0] != module or last[1] not in VIEW_CALLS:
            return 0
        if calls[start + number] == other:
            return number
    return 0


def patch(model: nn.Module, patches: Mapping[str, Mapping[str, tuple[int, int]]]) -> None:
    """Sets integers of modules; integers of a config are set on the module's own copy of it."""
    for name, changes in patches.items():
        module = model.get_submodule(name)
        for holder in {attribute.partition(".")[0] for attribute in changes if "." in attribute}:
            # Modules share a config, and those that are whole must keep the full number
            module.__dict__[holder] = copy.copy(getattr(module, holder))
        for attribute, (_, new) in changes.items():
            holder, _, attribute_name = attribute.rpartition(".")
            (getattr(module, holder) if holder else module).__dict__[attribute_name] = new
