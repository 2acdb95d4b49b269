"""Types of ``spmd_types``: every layer has them, and without any one of its collectives it has not.

One process with torch's fake group is enough: the values do not matter.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tp_ext
from tests.helpers import ranks, registry
from tests.helpers.meshes import mesh_of
from tests.helpers.registry.entries import FFN
from tp_ext._ops.binding import declarations

spmd = pytest.importorskip("spmd_types")
I, P, R, S, V = spmd.I, spmd.P, spmd.R, spmd.S, spmd.V  # noqa: E741

N, H, VOCABULARY = 8, 8, 16
SP, HIDDEN = {"sequence_parallel": True}, {"activations": "hidden"}


class Case(NamedTuple):
    """A layer or function, the types of its inputs and result along "tp", and its number of collectives, each of
    forward with its conjugate of backward. ``two``: on a mesh ("x", "tp"), x being the weights' group and the rows
    sharded over it; ``modes``: with local types, and with those of full tensors; ``unseen``: collectives without which
    the local types are right nevertheless."""

    make: Callable[[Any], Callable[..., Any]]
    inputs: tuple[Any, ...]
    result: Any
    collectives: int
    two: bool = False
    modes: tuple[bool, ...] = (True, False)
    unseen: tuple[int, ...] = ()  # collectives without which the types are the same


def _layer(kind, *args, **options):
    return lambda groups: kind(*args, **groups, **options)


def _function(function, *args, **options):
    return lambda groups: lambda *inputs: function(*inputs, groups["group"], *args, **options)


def _small(case, sp):
    """A case of the registry, as one of types."""
    types = {"tokens": S(0) if sp else I, "features": S(1)}
    inputs = _ids() if case.takes == "ids" else _x(types[case.takes], FFN if case.takes == "features" else H)
    options = {"collectives": case.collectives[sp], "unseen": case.unseen if sp else (), "modes": (True, False)}
    if not case.full_types:
        options["modes"] = (True,)

    def make(groups):
        layer = case.make(sequence_parallel=sp, **groups)
        return _Called(layer, {name: value for name, value in case.call.items() if name != "total_tokens"})

    return Case(make, (inputs,), types[case.gives], **options)


class _Called(nn.Module):
    """A layer with keywords of its call."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x):
        return self.layer(x, **self.call)


def _x(held, width=H):
    """An input of this type, the shards being halves."""
    shape = [N, width]
    if isinstance(held, spmd.Shard):
        shape[held.dim] //= 2
    return lambda: torch.randn(shape, requires_grad=True), held


def _ids():
    return lambda: torch.arange(N) % VOCABULARY, R


def _block(groups, norm=tp_ext.RMSNorm, **options):
    return Block(norm, **groups, **options)


def _coalesced(groups):
    model = _block(groups, tp_ext.LayerNorm, **SP)
    tp_ext.coalesce_gradients(model)
    return model


class Block(nn.Module):
    """Every collective of a layer that a model has, with a residual stream."""

    def __init__(self, norm, **options):
        super().__init__()
        self.embedding = tp_ext.VocabParallelEmbedding(VOCABULARY, H, **options)
        self.norm1, self.norm2 = norm(H, **options), norm(H, **options)
        self.mlp = tp_ext.ParallelMLP(H, 2 * H, activation="swiglu", **options)
        full = {"hidden_size": H} if options.get("activations") == "hidden" else {}
        self.dropout = tp_ext.Dropout(0.1, **options, **full)
        self.head = tp_ext.VocabParallelLMHead(H, VOCABULARY, bias=True, **options)
        self.loss = tp_ext.VocabParallelCrossEntropy(group=options["group"], vocab_size=VOCABULARY, reduction="sum")

    def forward(self, ids, target):
        x = self.embedding(ids)
        x = self.dropout(self.mlp(self.norm1(x)), x)
        return self.loss(self.head(self.norm2(x)), target)


class Experts(nn.Module):
    def __init__(self, **options):
        super().__init__()
        options |= {"shared_experts": 1, "bias": True, "router": tp_ext.RouterConfig()}
        self.moe = tp_ext.ParallelMoE(H, H, 4, 2, **options)

    def forward(self, x):
        return self.moe(x)


class _Loss(nn.Module):
    """The loss of a head."""

    def __init__(self, **options):
        super().__init__()
        self.head = tp_ext.VocabParallelLMHead(H, VOCABULARY, **options)

    def forward(self, x, target):
        return self.head.loss(x, target)


LINEAR, MLP = (H, H), (H, 2 * H)
ONE_AXIS = {
    "copy": Case(_function(tp_ext.copy_to_region), (_x(I),), R, 1),
    "reduce": Case(_function(tp_ext.reduce_from_region), (_x(P),), I, 1),
    "scatter": Case(_function(tp_ext.scatter_to_region), (_x(I),), S(1), 1),
    "gather": Case(_function(tp_ext.gather_from_region), (_x(S(1)),), I, 1),
    "all_gather": Case(_function(tp_ext.all_gather_region), (_x(S(0)),), R, 1),
    "reduce_scatter": Case(_function(tp_ext.reduce_scatter_region), (_x(P),), S(0), 1),
    "all_to_all": Case(_function(tp_ext.all_to_all_region, 1, 0), (_x(S(0)),), S(1), 1, modes=(False,)),
    "column, gathered": Case(_layer(tp_ext.ColumnParallelLinear, *LINEAR, gather_output=True), (_x(I),), I, 2),
    "row, scattered": Case(_layer(tp_ext.RowParallelLinear, *LINEAR, input_is_parallel=False), (_x(I),), I, 2),
    "experts": Case(_layer(Experts), (_x(I),), I, 3, modes=(True,)),
    # Tokens of a shard are V, and so are rows and sums of a sharded ffn; without these three their numbers do not fit
    "experts, tokens": Case(_layer(Experts, **SP), (_x(S(0)),), S(0), 5, modes=(True,), unseen=(1, 2, 3)),
    "loss": Case(_function(tp_ext.vocab_parallel_cross_entropy), (_x(S(1)), _ids()), I, 1),
    "loss without logits": Case(_layer(_Loss), (_x(I), _ids()), I, 2),
    "loss without logits, tokens": Case(_layer(_Loss, **SP), (_x(S(0)), _ids()), I, 2),
    "norm, hidden": Case(_layer(tp_ext.LayerNorm, H, **HIDDEN), (_x(S(1)),), S(1), 1),
    "model": Case(_block, (_ids(), _ids()), I, 5),
    "model, tokens": Case(lambda groups: _block(groups, tp_ext.LayerNorm, **SP), (_ids(), _ids()), I, 10),
    "model, coalesced": Case(_coalesced, (_ids(), _ids()), I, 10),
    "model, hidden": Case(lambda groups: _block(groups, **HIDDEN), (_ids(), _ids()), I, 7),
}


TWO_AXES = {
    "column": Case(_layer(tp_ext.ColumnParallelLinear, *LINEAR), (_x(I),), S(1), 3, two=True),
    "row": Case(_layer(tp_ext.RowParallelLinear, *LINEAR, **HIDDEN), (_x(S(1)),), S(1), 3, two=True),
    "row, tokens": Case(_layer(tp_ext.RowParallelLinear, *LINEAR, **SP), (_x(S(1)),), S(0), 4, two=True, modes=(True,)),
    "norm": Case(_layer(tp_ext.RMSNorm, H), (_x(I),), I, 1, two=True, modes=(False,)),
    "model": Case(
        lambda groups: _block(groups, tp_ext.LayerNorm, **HIDDEN), (_ids(), _ids()), I, 18, two=True, modes=(False,)
    ),
}
ONE_AXIS |= {
    f"{name}{', tokens' * sp}": _small(case, sp)
    for name, case in registry.CASES.items()
    for sp in (False, True)
    if case.collectives
}
CASES = {"one axis": ONE_AXIS, "two axes": TWO_AXES}
COLLECTIVES = ("converted", "summed", "exchanged")


def _mesh_of(case):
    """A new fake group of 2 or 4 ranks, its mesh, and the layer's groups."""
    shape, names = ((2, 2), ("x", "tp")) if case.two else ((2,), ("tp",))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2 * len(shape))
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    groups = {"group": mesh["tp"]}
    return mesh, groups | {"weight_group": mesh["x"]} if case.two else groups


def _run(case, mesh, module, local):
    """Runs a case under the checker, with the types of its row as those of the inputs and of the result."""
    with tp_ext.debug.typecheck(module if isinstance(module, nn.Module) else None, mesh, local=local):
        with spmd.no_typecheck():
            tensors = [make() for make, _ in case.inputs]
        rows = {"x": S(0)} if case.two else {}  # other rows on the ranks along x
        inputs = [_typed(tensor, {"tp": held, **rows}) for tensor, (_, held) in zip(tensors, case.inputs, strict=True)]
        y = module(*inputs)
        spmd.assert_type(y, {"tp": case.result})
        assert spmd.get_axis_local_type(y, "tp") is (V if isinstance(case.result, spmd.Shard) else case.result)
    return y


def _typed(tensor, of):
    shards = [axis for axis, held in of.items() if held == S(0)]
    if len(shards) == 2:
        return spmd.assert_type(
            tensor, {}, partition_spec=spmd.PartitionSpec(tuple(shards), *[None] * (tensor.dim() - 1))
        )
    return spmd.assert_type(tensor, of)


def _without_each_collective(case, local):
    """Runs a case without each of its collectives in turn; returns the type of each error, or "nothing"."""
    mesh, groups = _mesh_of(case)
    module, rules = case.make(groups), importlib.import_module("tp_ext.debug.type_rules")
    y = _run(case, mesh, module, local)
    if y.dim() == 0 and not case.two:
        y.backward()
    said, left = [], [-1]

    def counted(collective):
        def called(x, group, *args):
            left[0] -= bool(group)
            if group and left[0] == -1:
                return rules.rules.einsum("...->...", x, linear_in=(0,))
            return collective(x, group, *args)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(rules, name, counted(getattr(rules, name)))
        for index in range(1000):
            left[0] = index
            try:
                _run(case, mesh, module, local)
            except spmd.SpmdTypeError as error:
                said.append(type(error).__name__)
            else:
                if left[0] >= 0:
                    break
                said.append("nothing")
    dist.destroy_process_group()
    return said


def _each(axes, local):
    return {name: _without_each_collective(case, local) for name, case in CASES[axes].items() if local in case.modes}


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("axes", list(CASES))
def test_every_collective_of_a_layer_is_needed(axes, local):
    said = ranks.run_fresh(_each, axes, local, timeout=300)
    assert said
    for name, found in said.items():
        case = CASES[axes][name]
        assert found == ["nothing" if i in case.unseen else "SpmdTypeError" for i in range(case.collectives)], name


def _experts_over_ranks(group, shape, sp, options):
    """The types of y and of the loss of a router."""
    mesh = mesh_of(*shape, names=("ep", "tp"))
    experts = {"group": mesh["tp"], "expert_group": mesh["ep"], "sequence_parallel": sp, **options}
    layer = tp_ext.ParallelMoE(H, H, 4, 2, bias=True, shared_experts=1, **experts)
    with tp_ext.debug.typecheck(layer, mesh):
        with spmd.no_typecheck():
            x = torch.randn(4, H, requires_grad=True)
        held = {"tp": V if sp else I, "ep": V}
        x = spmd.assert_type(x, {name: held[name] for name, n in zip(("ep", "tp"), shape, strict=True) if n > 1})
        y, losses = layer(x), layer.losses
        names = [name for name in held if mesh[name].size() > 1]
        return [{name: spmd.get_axis_local_type(t, name).name for name in names} for t in (y, losses.total)]


LOSSES = {"balance_loss": 0.1, "z_loss": 0.1}
DROPPING = {"capacity": 1.0, "drop_order": "weight", "attach_loss": 1.0}


@pytest.mark.parametrize(
    "shape, sp, options, result, loss",
    [
        ((2, 2), False, {}, {"tp": "I", "ep": "V"}, {"tp": "I", "ep": "V"}),
        ((2, 2), True, {}, {"tp": "V", "ep": "V"}, {"tp": "I", "ep": "V"}),
        ((2, 1), False, DROPPING, {"ep": "V"}, {"ep": "V"}),
        ((1, 2), True, {"sequences": True}, {"tp": "V"}, {"tp": "I"}),
    ],
)
def test_experts_have_types(shape, sp, options, result, loss):
    """Along the expert group as any data, along the tensor-parallel one as an MLP; the loss as that of a model."""
    over = {"balance_over": "sequence"} if options.get("sequences") else {}
    options = {name: value for name, value in options.items() if name != "sequences"}
    options["router"] = tp_ext.RouterConfig(**LOSSES, **over)
    p = shape[0] * shape[1]
    assert ranks.run(_experts_over_ranks, p, shape, sp, options) == [[result, loss]] * p


def test_every_operator_that_communicates_has_a_rule():
    rules = importlib.import_module("tp_ext.debug.type_rules").RULES
    groups = {"group", "weight_group", "rows", "columns"}
    operators = {name: inspect.signature(function) for name, function in declarations.items() if name[0] != "_"}

    def communicates(name):  # rows of moe_permute are a tensor
        return any(p.annotation is str and p.name in groups for p in operators[name].parameters.values())

    assert set(filter(communicates, operators)) <= set(rules)
    assert set(rules) <= set(operators)


def _refused(program):
    """Returns the message of the checker's error in a program on two ranks; None if there is no error."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tp = dist.group.WORLD
    model = nn.Sequential(nn.Linear(H, H), tp_ext.RMSNorm(H, group=tp), tp_ext.ParallelMLP(H, 2 * H, group=tp))
    with tp_ext.debug.typecheck(model, tp):
        x = spmd.assert_type(torch.randn(N, H, requires_grad=True), {tp: spmd.I})
        try:
            program(model, x, tp)
        except spmd.SpmdTypeError as error:
            return str(error)


def _right(model, x, tp):
    (model(x) + x).mean().backward()


def _without_gradients(model, x, tp):
    with spmd.no_typecheck():
        norm = tp_ext.RMSNorm(H, group=tp, sequence_parallel=True)
    with tp_ext.debug.typecheck(norm, tp), torch.no_grad():
        norm(tp_ext.scatter_to_region(x, tp, 0))
        norm(tp_ext.scatter_to_region(x, tp, 0))


def _positions_of_the_user(model, x, tp):
    with spmd.no_typecheck():
        positions = torch.randint(N, (N,))
    x[positions[: N // 2]].sum().backward()


def _gradient_of_one_rank(model, x, tp):
    _right(model, torch.nn.functional.linear(model[0](x), model[2].up.weight), tp)


def _sum_of_equals(model, x, tp):
    tp_ext.reduce_from_region(model(x), tp)


def _activation_of_partial_sums(model, x, tp):
    torch.relu(spmd.reinterpret(tp_ext.scatter_to_region(x, tp), tp, src=V, dst=P))


def _loss_of_one_rank(model, x, tp):
    model[2].up(x)[0].sum().backward()


@pytest.mark.parametrize(
    ("program", "match"),
    [
        (_right, None),
        (_without_gradients, None),
        (_positions_of_the_user, None),
        (_gradient_of_one_rank, "Invariant type on axis .* cannot mix with other types"),
        (_sum_of_equals, r"all_reduce\(.*\) expects its input to be P on axis .* but it is I"),
        (_activation_of_partial_sums, "cannot propagate through non-linear ops"),
        (_loss_of_one_rank, "backward.* on a Varying loss"),
    ],
)
def test_programs(program, match):
    said = ranks.run_fresh(_refused, program)
    assert said is None if match is None else re.search(match, said), said


def _errors():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh, said = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), []
    wrapped = fully_shard(nn.Linear(H, H), mesh=mesh)
    wrong = [(wrapped, mesh, {}), (None, mesh, {"strict": "yes"}), ("model", mesh, {}), (None, 3, {}), (None, "tp", {})]
    for module, over, options in wrong:
        try:
            with tp_ext.debug.typecheck(module, over, **options):
                pass
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    sys.modules["spmd_types.checker"] = None  # as if it were not installed
    try:
        with tp_ext.debug.typecheck(None, mesh):
            pass
    except ImportError as error:
        said.append(str(error))
    return said


def test_errors():
    assert ranks.run_fresh(_errors) == [
        "ValueError: module: 'weight' is a DTensor and must be a plain tensor: check the model before FSDP2 wraps it",
        "TypeError: strict: 'yes' must be True or False",
        "TypeError: module: str must be an nn.Module or None",
        "TypeError: mesh: 3 must be a ProcessGroup, a DeviceMesh of one axis, a group's name or None",
        "ValueError: mesh: 'tp' must be the name of a process group",
        "typecheck needs spmd_types: pip install 'tp_ext[typecheck]'",
    ]


def _one_rank():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    model = tp_ext.ParallelMLP(H, H, group=dist.group.WORLD)
    with tp_ext.debug.typecheck(model, dist.group.WORLD):
        model(torch.randn(N, H)).sum().backward()
    with tp_ext.debug.typecheck(model):
        model(torch.randn(N, H)).sum().backward()


def test_one_rank_needs_no_types():
    ranks.run_fresh(_one_rank)
