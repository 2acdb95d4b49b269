"""Rows of ``test_errors_on_one_rank.py`` of calls that change, compare or move whole models: bad on one rank, an error
of all ranks, and nothing has changed."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn, ones

import tp_ext
from tests.helpers import torchrun
from tp_ext import refit
from tp_ext.group import NOT_GIVEN
from tp_ext.huggingface import weight_source
from tp_ext.low_precision import Float8, compress_gradients, float8, quantize_
from tp_ext.mesh import mesh_axes
from tp_ext.parallel import ElasticData
from tp_ext.parallel.step_inputs import on_all_data_ranks


def block(group, width=6, dtype=torch.float32, **options):
    """Two layers, with adapters if ``r`` is given."""
    r = options.pop("r", None)
    layers = tp_ext.ColumnParallelLinear(4, width, group=group), tp_ext.RowParallelLinear(width, 4, group=group)
    net = nn.Sequential(*layers).to(dtype)
    if r is not None:
        tp_ext.add_lora(net, targets=["0", "1"], r=r, alpha=1.0)
    return net


def _state(value):
    """All of a module or an optimizer that a call could change."""
    if isinstance(value, torch.optim.Optimizer):
        return repr(value.state_dict())
    values = [
        (name, tensor.dtype, tensor.requires_grad, tensor.device, repr(tensor), repr(tensor.grad))
        for name, tensor in (*value.named_parameters(), *value.named_buffers())
    ]
    return values, [(name, type(module), module.extra_repr()) for name, module in value.named_modules()]


@contextmanager
def unchanged(*values):
    """Within it an error must leave modules and optimizers as they were."""
    before = list(map(_state, values))
    try:
        yield
    except Exception:
        for old, value in zip(before, values, strict=True):
            assert _state(value) == old, "half-changed"
        raise


def converted(convert, spoil=lambda net: None, **options):
    """A conversion of a model that is spoilt on the rank, or with an option that ``_of`` makes bad."""

    def call(group, bad):
        net = block(group)
        if bad:
            spoil(net)
        with unchanged(net):
            convert(net, **{name: of(bad) for name, of in options.items()})

    return call


def _lora(net, targets=("0",), r=2, alpha=1.0, dropout=0.0):
    tp_ext.add_lora(net, targets=targets, r=r, alpha=alpha, dropout=dropout)


def _nan(net):
    with torch.no_grad():
        net[1].weight[0, 0] = float("nan")


def _in_float8(net):
    setattr(net[0], "form", Float8())  # noqa: B010, as another conversion of it has left it


def _recipe(bad):
    return Float8(scaling="row" if bad else "tensor")


def _but_first(bad):
    return (lambda name, layer: name != "0") if bad else None


def _raising(bad):
    return (lambda name, layer: 1 / 0) if bad else None


def _averaged(spoil):
    """Means of compressed gradients, where one rank's gradients are spoilt."""

    def call(group, bad):
        net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        handle = compress_gradients(net, "int8", group=group)
        net(torch.randn(2, 4) * (group.rank() + 1)).square().sum().backward()
        if bad:
            spoil(net)
        with unchanged(net):
            try:
                handle.average()
            finally:
                assert not handle.residual("0.weight").any(), "half-changed"

    return call


def _main_grad(param):
    param.main_grad = torch.zeros_like(param)


def _refitted(bad_target):
    def call(group, bad):
        source, target = block(group), block(group, **(bad_target if bad else {}))
        with unchanged(target):
            refit.plan(source, target, process_group=group).run()

    return call


def _refit_later(change, is_read=True):
    def call(group, bad):
        source, target = block(group), block(group)
        plan = refit.plan(source, target, process_group=group)
        parameters = target[0]._parameters
        if bad:
            change(target, source)
        try:
            with unchanged(*[target] * is_read):
                plan.run()
        finally:  # later calls of this process may look at all live modules, and this one lives until it is collected
            target[0]._parameters = parameters

    return call


def _replaced(target, source):
    target[0].weight = nn.Parameter(torch.zeros_like(target[0].weight))


def _source_replaced(target, source):
    source[0].weight = nn.Parameter(torch.zeros_like(source[0].weight))


def _unreadable(target, source):
    target[0]._parameters = None


def _raising_batch(group, bad):
    data = mesh_axes(NOT_GIVEN, tp_ext.init_mesh("cpu", dp=group.size())).data
    on_all_data_ranks(lambda: [0][bad], data, torch.device("cpu"))


def _elastic(group, bad, **options):
    net = block(group)
    ElasticData(net, torch.optim.AdamW(net.parameters()), group=group, store=dist.HashStore(), replica="a", **options)


def _muon(spoil):
    def call(group, bad):
        net = block(group)
        others = [net[0].bias, net[1].bias]
        optimizer = tp_ext.optim.Muon([net[0].weight], lr=0.1, adamw_params=others)
        net(ones(2, 4)).sum().backward()
        if bad:
            spoil(net)
        with unchanged(net, optimizer):
            optimizer.step()

    return call


def _lost(net):
    net[0].weight.grad = None


def _sparse(net):
    net[0].bias.grad = net[0].bias.grad.to_sparse()


def _sparse_matrix(net):
    net[0].weight.grad = net[0].weight.grad.to_sparse()


def foreign(net, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(ones(2))]})


def _prepared(spoil):
    def call(group, bad):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState

        from tp_ext.huggingface import prepare

        states = PartialState, AcceleratorState, GradientState
        for state in states:
            state._reset_state()
        try:
            with torchrun.variables(group.rank(), group.size()):
                net = block(group)
                optimizer = torch.optim.AdamW(net.parameters())
                if bad:
                    spoil(net, optimizer)
                with unchanged(net):
                    prepare(Accelerator(cpu=True), net, optimizer)
        finally:
            for state in states:
                state._reset_state()

    return call


def _replicas(group, bad):
    mesh = tp_ext.init_mesh("cpu", dp=group.size())
    net = block(None)
    if bad:
        nn.init.zeros_(net[1].bias)
    tp_ext.parallelize(net, mesh, loss=nn.functional.mse_loss)


def _untrained(group, bad):
    net = block(None).requires_grad_(not bad)
    with unchanged(net):
        tp_ext.parallelize(net, tp_ext.init_mesh("cpu", dp=group.size()), loss=nn.functional.mse_loss)


def _keyword(group, bad):
    """A keyword of the first step of a pipeline, which stages get."""
    mesh = tp_ext.init_mesh("cpu", pp=group.size())
    model = nn.Sequential(*(_Scaled() for _ in range(3)))
    run = tp_ext.parallelize(model, mesh, loss=nn.functional.mse_loss, microbatches=3)
    run.step(ones(3, 4), ones(3, 4), scale=ones(3 + bad, 1))


class _Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, scale=None):
        return super().forward(x) * scale


def _found(group, bad):
    net = block(group)
    if bad:
        nn.init.zeros_(net[1].bias)
    if found := tp_ext.debug.findings(net):
        raise ValueError(found[0])


AGREED = {
    "a filter of float8": (
        converted(float8, filter=_but_first),
        r"filter: must name the same layers on all ranks, and '0' is named on ranks \[0, 2\]",
    ),
    "an error in a filter": (converted(float8, filter=_raising), "division by zero"),
    "a dtype of float8": (
        converted(float8, lambda net: net.double()),
        "0: float8: dtype torch.float64 must be one of",
    ),
    "a model of weight_source": (
        lambda g, bad: weight_source(block(g, dtype=torch.float64 if bad else torch.float32)),
        "module: '0.weight' must be the same on all ranks",
    ),
    "a layer of float8": (converted(float8, _in_float8), "0: must not be converted or quantised already"),
    "a recipe of float8": (converted(float8, recipe=_recipe), r"recipe: must be the same .*'tensor'.*'row'.*rank 1"),
    "the bits of quantize_": (
        converted(quantize_, weights=lambda bad: "int4" if bad else "int8", block=lambda bad: 2),
        "weights: must be the same on all ranks, and is 'int8' on rank 0, 'int4' on rank 1",
    ),
    "no bits of quantize_": (
        converted(quantize_, weights=lambda bad: "int3" if bad else "int8"),
        "weights: 'int3' must be one of",
    ),
    "a filter of quantize_": (
        converted(quantize_, weights=lambda bad: "int8", filter=_but_first),
        r"filter: must name the same layers on all ranks, and '0'",
    ),
    "a weight of int8": (converted(quantize_, _nan, weights=lambda bad: "int8"), "1.weight: must be finite"),
    "a weight of int4": (
        converted(quantize_, _nan, weights=lambda bad: "int4", block=lambda bad: 2),
        "1.weight: must be finite",
    ),
    "targets of add_lora": (converted(_lora, targets=lambda bad: ["1"] if bad else ["0"]), "targets: must name"),
    "r of add_lora": (converted(_lora, r=lambda bad: 0 if bad else 2), "r: 0 must be an integer of at least 1"),
    "another r of add_lora": (converted(_lora, r=lambda bad: 2 + bad), "r: must be .*3 on rank 1"),
    "dropout of add_lora": (converted(_lora, dropout=lambda bad: 0.5 * bad), "dropout: must be .*0.5 on rank 1"),
    "the options of compressed gradients": (
        lambda g, bad: compress_gradients(nn.Linear(4, 4), "int8", block=64 + 2 * bad, group=g),
        "model: parameters and options of rank 1 must be those of rank 0",
    ),
    "a bad option of compressed gradients": (
        lambda g, bad: compress_gradients(nn.Linear(4, 4), "int8", block=64 - bad, group=g),
        "block: 63 must be even",
    ),
    "a compressed gradient": (
        _averaged(lambda net: _main_grad(net[0].weight)),
        "main_grad of parameter 0, of shape .*, must be alike",
    ),
    "an exempt gradient": (
        _averaged(lambda net: _main_grad(net[1].weight)),
        "main_grad of parameter 2, of shape .*, must be alike",
    ),
    "a target of a refit": (_refitted({"width": 9}), "must"),
    "a source of a refit": (_refit_later(_source_replaced), "source: '0.weight' must be the parameter for which"),
    "a parameter of a refit": (
        _refit_later(_replaced),
        "target: '0.weight' must be the parameter for which the plan was made",
    ),
    "an unreadable target of a refit": (_refit_later(_unreadable, is_read=False), "has no attribute 'items'"),
    "an error of a batch": (_raising_batch, "list index out of range.* on data rank 1"),
    "an option of a replica": (
        lambda g, bad: _elastic(g, bad, timeout=5.0 + bad),
        "replica, timeout, min_replicas: must be the same",
    ),
    "a timeout of a replica": (lambda g, bad: _elastic(g, bad, timeout=5.0 - 9 * bad), "timeout"),
    "a lost gradient of Muon": (_muon(_lost), "parameter 0 has one on"),
    "a sparse gradient of Muon": (_muon(_sparse), "sparse"),
    "a sparse matrix of Muon": (_muon(_sparse_matrix), "sparse"),
    "an optimizer of prepare": (_prepared(foreign), "others: AdamW must be an optimizer of parameters of the model"),
    "a weight of prepare": (_prepared(lambda net, _: nn.init.zeros_(net[1].bias)), "'1.bias' must be the same"),
    "minutes of measure": (lambda g, bad: tp_ext.planner.measure(group=g, minutes=-1 if bad else 0.01), "minutes"),
    "an example of measure_shares": (
        lambda g, bad: tp_ext.planner.measure_shares(block(g), 3 if bad else (ones(2, 4),), g),
        "example: int must be a dict",
    ),
    "weights of data ranks": (_replicas, "model: must have the same weights on all data ranks, and '1.bias' differs"),
    "a model without gradients": (_untrained, "model: Sequential must have a parameter that requires a gradient"),
    "a keyword of a pipeline": (_keyword, r"scale: shape \(4, 1\) must have the 3 rows of the batch"),
    "what is replicated": (
        lambda g, bad: tp_ext.debug.assert_replicated(ones(2) + bad, group=g),
        r"tensor: must be the same .*\[1\] differ",
    ),
    "a finding of debug.findings": (_found, "1.bias: .*"),
}
