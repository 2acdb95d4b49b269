"""Changes that a plan makes at the boundaries of modules: plain data, which JSON can hold."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from tp_ext.conversions import I, S, Type
from tp_ext.sharding import Part, Sharding

LeafPath = tuple[str | int, ...]
"""Keys that lead to a tensor in nested arguments ``(args, kwargs)`` or results of a forward; () is the result
itself."""


def leaf_name(path: LeafPath) -> str:
    """A path as text, which JSON takes for a key."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class Factor:
    """A factor of a dim, sharded: the others are lengths of the run, such as that of the batch.

    Attributes:
        parts: those of the factor.
        is_minor: it is the fastest varying factor of the dim, else the slowest.
    """

    parts: tuple[Part, ...]
    is_minor: bool = True

    def sharding(self, dim: int) -> Sharding:
        return Sharding(dim, self.parts)

    @property
    def size(self) -> int:
        return self.sharding(0).size

    def local_size(self, rank: int, p: int) -> int:
        return self.sharding(0).local_size(rank, p)

    def divided(self, x: Tensor, dim: int, size: int) -> tuple[Tensor, int]:
        """Returns a view of x whose dim is two, the factor of length ``size`` and the others, and the place of it.

        Raises:
            ValueError: the dim has another length.
        """
        length = x.shape[dim]
        # First: an empty factor divides no length
        if length == size:
            return x, dim
        if not size or length % size:
            raise ValueError(f"a tensor {tuple(x.shape)} must have a multiple of {size} elements in dim {dim}")
        others = length // size
        # Batch x heads has the sharded factor last, heads x batch has it first
        if self.is_minor:
            return x.unflatten(dim, (others, size)), dim + 1
        return x.unflatten(dim, (size, others)), dim


@dataclass(frozen=True)
class Conversion:
    """A tensor at the boundary of a module that has another type on either side: forward code sees no difference.

    Its region is ``CONVERSIONS[before, after]`` of :mod:`tp_ext.conversions`. Three have none, since they send nothing:
    I to P, of a parameter that every rank adds to partial sums, is 1/p of it; S to S is a shard of tokens, whose full
    length is remembered for a recomputation in backward; R to I keeps the gradient of rank 0 alone.

    Attributes:
        module: name of the module. at: ``"parameter"``, ``"argument"`` or ``"output"`` of it; ``"call"``: a call of a
            function in its forward, over the sharded ``dim`` of its argument, from the end. path: where the tensor is;
            for a parameter its local name alone, for a call the function, its number and that of all calls of it.
        before, after: its types, in the order of forward: of an argument or a parameter outside of the module and
            inside, of an output inside and outside.
        dim: the sharded one, of an S. factor: its shards; None: those of the tokens.
        span: only these elements of an output: (dim from the end, start, stop); None: all.
        tokens: only while tokens are sharded. While they are whole, a P is an I behind it, and an S in front of it.
    """

    module: str
    at: str
    path: LeafPath
    before: Type
    after: Type
    dim: int = 0
    factor: Factor | None = None
    span: tuple[int, int, int] | None = None
    tokens: bool = False

    @property
    def types(self) -> tuple[Type, Type]:
        """The key of its region."""
        return self.before, self.after

    @property
    def of_tokens(self) -> bool:
        """True if its shards are those of tokens."""
        return self.tokens and S in self.types

    @property
    def sharding(self) -> Sharding:
        """The shards of a tensor whose tokens are whole."""
        assert self.factor is not None
        return self.factor.sharding(self.dim)


def gathered_output(module: str, path: LeafPath, sharding: Sharding) -> Conversion:
    """An output that has a sharded dim, such as attention weights, and is whole for the code that gets it."""
    return Conversion(module, "output", path, S, I, sharding.dim, Factor(tuple(sharding.parts)))


CALL = "tp_ext_call"  # attribute of the model while it runs
NAME = "tp_place"  # attribute of a module: the name that it had when the plan was applied


@dataclass(frozen=True)
class CallEdits:
    """What a call of a sharded model does otherwise than its plan: ``gathers`` of results in place of the plan's,
    ``slices`` of arguments in addition to them; ``whole_tokens``: no tokens are sharded."""

    gathers: tuple[Conversion, ...]
    slices: tuple[Conversion, ...]
    whole_tokens: bool = False


def edits_of(model: nn.Module) -> CallEdits | None:
    """What the call of a model that runs now does otherwise."""
    edits: CallEdits | None = model.__dict__.get(CALL, (None, ()))[0]
    return edits


@dataclass
class DirectCall:
    """The conversions of a call of a module by other code than the model's forward, which has whole tensors.

    Attributes:
        module: name of the module.
        values: of I to the types that arguments have in forward, and of those of results to I, where a rank holds
            other values. gradients: the same for tensors of which only the gradients differ.
        dims: for each slice of an argument, the number of its dims.
        options: switches that its calls in forward pass -> their values.
        results: for each of its calls in forward, the paths of its results with their lengths, 0 for those of a run.
        refused: why it cannot be called so; refused_gradients: why not while gradients are recorded.
    """

    module: str
    values: tuple[Conversion, ...] = ()
    gradients: tuple[Conversion, ...] = ()
    dims: tuple[int, ...] = ()
    options: dict[str, list[str]] = field(default_factory=dict)
    results: list[dict[str, list[int]]] = field(default_factory=list)
    refused: str = ""
    refused_gradients: str = ""

    @property
    def converts(self) -> bool:
        return bool(self.values or self.gradients or self.refused or self.refused_gradients)

    @property
    def has_shards(self) -> bool:
        """True if it takes or returns shards."""
        return any(S in edit.types for edit in self.values)

    def without(self, why: str) -> DirectCall:
        """The same call, refused for a reason."""
        return replace(self, values=(), gradients=(), dims=(), refused=why)


OTHER = "other"


@dataclass(frozen=True)
class Draw:
    """A call that draws a random mask: ``F.dropout`` or ``F.scaled_dot_product_attention``, in order within its module;
    or any calls of a module that draw in another way, for tensors that all ranks have.

    Attributes:
        module: the module whose forward calls it.
        call: ``"dropout"``, ``"scaled_dot_product_attention"`` or ``OTHER``.
        dim: the sharded dim of the tensor that is masked, None: replicated.
        factor: how that dim is sharded.
        tokens: ``dim`` is that of the tokens, where these are sharded; its lengths are those of the run.
        shape: of the tensor that is masked, or of the query, on every rank; None for what a run may change.
        always: it draws in eval mode, too.
        caller, number: the module whose forward called this one, and the place of that call among those that it makes
            of it, where calls draw differently; else None, 0.
    """

    module: str
    call: str
    dim: int | None = None
    factor: Factor | None = None
    tokens: bool = False
    shape: tuple[tuple[int, ...] | None, ...] | None = None
    always: bool = False
    caller: str | None = None
    number: int = 0

    @property
    def mask(self) -> tuple[object, ...]:
        """The difference that a draw makes."""
        return self.dim, self.factor, self.tokens


@dataclass(frozen=True)
class Collective:
    """A collective of one step.

    Attributes:
        kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``.
        module: where it happens.
        direction: ``"forward"`` or ``"backward"``.
        bytes: of the full tensor, at the example's sizes: what :func:`tp_ext.debug.count_collectives` calls payload.
    """

    kind: str
    module: str
    direction: str
    bytes: int


@dataclass(frozen=True)
class Output:
    """The result of a module's first call, for pictures.

    Attributes:
        module: name of the module. kind: its class. is_leaf: it calls no other module.
        shape, local: of its first tensor, full and on rank 0.
        state: ``"sharded"``, ``"partial"`` (it is summed over the ranks next) or ``"replicated"``.
    """

    module: str
    kind: str
    is_leaf: bool
    shape: tuple[int, ...]
    local: tuple[int, ...]
    state: str


@dataclass(frozen=True)
class SizeCall:
    """A call of a function with sizes as arguments, in order within its module.

    Attributes:
        name: of the function, such as ``"view"``.
        changes: (place among the sizes, the size that the code gives, that of a rank), at the sizes of the example.
    """

    name: str
    changes: tuple[tuple[int, int, int], ...] = ()
