"""Steps of pipelines: frozen stages, evaluation and errors between steps, tied weights, buffers of models on meta."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tp_ext.parallel import PipelineShapeWarning, pipeline_stages

CLOSE = {"rtol": 1e-11, "atol": 1e-12}
X = torch.linspace(-1, 2, 32, dtype=torch.float64).view(8, 4)


def mse(output, target):
    return (output - target).square().mean()


def linears(number=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(number)))


def frozen(number=4):
    """A first stage without gradients, so that the input of the second needs none."""
    net = linears(number)
    net[0].requires_grad_(False)
    return net


class Tied(nn.Module):
    """The first and the last block share their weight."""

    def __init__(self):
        super().__init__()
        self.blocks = linears()
        self.blocks[3].weight = self.blocks[0].weight

    def pipeline_parts(self):
        return None, list(self.blocks), None

    def forward(self, x):
        return self.blocks(x)


def same_gradients(schedule, one):
    for stage in schedule.stages:
        for name, param in stage.named_parameters():
            want = one.get_parameter(name).grad
            assert (param.grad is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(param.grad, want, msg=name, **CLOSE)


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@on_ranks(2)
def test_a_first_stage_without_gradients(group, name):
    schedule, one = pipeline_stages(frozen(), group, schedule=name, microbatches=4, loss=mse), frozen()
    schedule.step(X, target=X + 1)
    mse(one(X), X + 1).backward()
    same_gradients(schedule, one)


def stage_param(schedule, name):
    return next(stage.get_parameter(name) for stage in schedule.stages if name in dict(stage.named_parameters()))


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
@on_ranks(2, backend="gloo")
def test_evaluation_between_steps_under_fsdp(group, name):
    """Gradients of two steps add up with evaluations between them, which use the weights of their time."""
    mesh = tp_ext.init_mesh("cpu", pp=1, dp=2)
    net = linears()
    net[1].eval()
    schedule = pipeline_stages(net, mesh["pp"], schedule=name, microbatches=2, loss=mse, fsdp=mesh["dp"])
    assert [module.training for module in net] == [True, False, True, True]
    one, x = linears(), X[4 * group.rank() :][:4]
    params = [dict(stage.named_parameters()) for stage in schedule.stages]
    for _ in range(2):
        torch.testing.assert_close(schedule.eval(x), one(x), **CLOSE)
        schedule.step(x, target=x)
        seen = schedule.eval(x, target=x)
        assert not seen.requires_grad
        torch.testing.assert_close(schedule.losses.mean(), mse(one(x), x).detach(), **CLOSE)
        mse(one(X), X).backward()
        for name, param in (item for stage in params for item in stage.items()):
            assert stage_param(schedule, name) is param
            torch.testing.assert_close(param.grad.full_tensor(), one.get_parameter(name).grad, msg=name, **CLOSE)
    with torch.no_grad():
        for param in (*schedule.parameters(), *one.parameters()):
            param.mul_(0.5)
    torch.testing.assert_close(schedule.eval(x), one(x), **CLOSE)


def _into_main_grad(param):
    param.main_grad += param.grad
    param.grad = None


@on_ranks(2, backend="gloo")
def test_tied_weights(group):
    """Hooks and main_grad that the weight has before; a gradient that no stage adds to stays as it was."""
    one, made = Tied(), Tied()
    for param in made.parameters():
        param.main_grad = torch.zeros_like(param)
        param.register_post_accumulate_grad_hook(_into_main_grad)
    schedule = pipeline_stages(made, group, microbatches=4, loss=mse)
    schedule.step(X, target=X)
    mse(one(X), X).backward()
    for name, param in schedule.stages[0].named_parameters():
        want = one.get_parameter("blocks.0.weight" if name == "blocks.3.weight" else name).grad
        torch.testing.assert_close(param.main_grad, want, msg=name, **CLOSE)
        assert param.grad is None

    weight = schedule.stages[0].get_parameter(f"blocks.{3 * group.rank()}.weight")
    weight.grad = given = torch.ones_like(weight)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"step: must not run under torch.no_grad\(\)"):
        schedule.step(X, target=X)
    assert weight.grad is given
    schedule.step(X, target=X)
    assert weight.grad is given and weight.grad.eq(1).all()


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
@on_ranks(1)
def test_a_step_after_an_error(group, name):
    """A loss that raises once leaves the gradients of tied weights and nothing else behind."""
    calls = []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 6:
            raise ValueError("once")
        return mse(output, target)

    tied = name != "1F1B"
    schedule = pipeline_stages(Tied() if tied else linears(), group, schedule=name, microbatches=4, loss=loss)
    schedule.step(X, target=X)
    before = {name: p.grad.clone() for stage in schedule.stages for name, p in stage.named_parameters()}
    with pytest.raises(ValueError, match="once"):
        schedule.step(X + 1, target=X)
    with pytest.raises(RuntimeError, match="losses: there must be a step with a target first"):
        assert schedule.losses is None
    for stage in schedule.stages:
        for name in ("blocks.0.weight", "blocks.3.weight") if tied else ():
            if name in dict(stage.named_parameters()):
                assert torch.equal(stage.get_parameter(name).grad, before[name])
    for param in schedule.parameters():
        param.grad = None
    schedule.step(X - 1, target=X)
    one = Tied() if tied else linears()
    want = mse(one(X - 1), X)
    want.backward()
    torch.testing.assert_close(schedule.loss, want.detach(), **CLOSE)
    for stage in schedule.stages:
        for name, param in stage.named_parameters():
            want = one.get_parameter("blocks.0.weight" if name == "blocks.3.weight" else name).grad
            torch.testing.assert_close(param.grad, want, msg=name, **CLOSE)


@on_ranks(2)
def test_evaluation_without_target(group):
    schedule = pipeline_stages(linears(), group, microbatches=2, loss=mse)
    for train in (False, True):
        if train:
            schedule.step(X, target=X)
        schedule.eval(X)
        for name in ("loss", "losses"):
            with pytest.raises(RuntimeError, match=f"{name}: there must be a step with a target first"):
                getattr(schedule, name)
    schedule.eval(X, target=X if group.rank() else None)
    torch.testing.assert_close(schedule.loss, mse(linears()(X), X).detach(), **CLOSE)


@on_ranks(2, backend="gloo")
def test_grad_accumulation_fusion(group):
    """main_grad of layers that add to it themselves, set after the stages are made; no second forward for shapes."""
    torch.manual_seed(0)
    options = {"group": None, "dtype": torch.float64}
    one = nn.Sequential(*(tp_ext.ColumnParallelLinear(4, 4, **options) for _ in range(2)))
    made = nn.Sequential(*(tp_ext.ColumnParallelLinear(4, 4, grad_accumulation_fusion=True, **options) for _ in one))
    made.load_state_dict(one.state_dict())
    schedule = pipeline_stages(made, group, microbatches=2, loss=mse)
    for param in schedule.parameters():
        param.main_grad = torch.zeros_like(param)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PipelineShapeWarning)
        schedule.step(X, target=X)
    mse(one(X), X).backward()
    for name, param in schedule.stages[0].named_parameters():
        found = param.main_grad if param.grad is None else param.main_grad + param.grad
        torch.testing.assert_close(found, one.get_parameter(name).grad, msg=name, **CLOSE)


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return super().forward(x) * self.scale


@on_ranks(2)
def test_a_parameter_that_fsdp_ignores(group):
    """A parameter that FSDP2 ignores keeps its dtype, and so gives the stage's output its own."""
    mesh = tp_ext.init_mesh("cpu", pp=2, dp=1)
    torch.manual_seed(0)
    made = nn.Sequential(Scaled(), Scaled())
    want = mse(made(X.float()), X).detach()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fsdp = {"mesh": mesh["dp"], "mp_policy": policy, "ignored_params": {block.scale for block in made}}
    schedule = pipeline_stages(made, mesh["pp"], microbatches=2, loss=mse, fsdp=fsdp)
    schedule.step(X.float(), target=X)
    torch.testing.assert_close(schedule.loss, want, rtol=0.02, atol=0)


class Table(nn.Module):
    """A linear layer with a table that is no parameter."""

    def __init__(self, device=None):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("table", torch.full((4,), 7.0, device=device), persistent=False)

    def forward(self, x):
        return self.linear(x) * self.table


def _fill(stage):
    for tensor in (*stage.parameters(), *stage.buffers()):
        nn.init.constant_(tensor, 3.0)


@on_ranks(2, backend="gloo")
def test_buffers_of_a_model_on_meta(group):
    """Buffers that are not on meta keep their values; those on meta that would get none are refused."""
    tp_ext.manual_seed(0)
    with torch.device("meta"):
        made, without = (nn.Sequential(Table(device), Table(device)) for device in ("cpu", None))
    schedule = pipeline_stages(made, group, microbatches=2, loss=mse, init=tp_ext.reset_parameters)
    assert all(table.eq(7).all() for table in schedule.stages[0].buffers())
    assert not any(param.is_meta for param in schedule.parameters())
    with pytest.raises(ValueError, match="init: must be a function of your own for a model on meta in which Table has"):
        pipeline_stages(without, group, microbatches=2, loss=mse, init=tp_ext.reset_parameters)
    real = linears(2)
    real[0].register_buffer("late", torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="model: the buffer 'late' of Linear must not be on meta"):
        pipeline_stages(real, group, microbatches=2, loss=mse, init=_fill)
    schedule = pipeline_stages(without, group, microbatches=2, loss=mse, init=_fill)
    assert all(table.eq(3).all() for table in schedule.stages[0].buffers())


class Cached(nn.Linear):
    """A layer with a cache outside of the model."""

    def forward(self, x):
        return super().forward(x) * table_of(x.shape[-1])


@functools.cache
def table_of(number):
    return torch.arange(1.0, number + 1)


class Doubled(nn.Linear):
    """A layer whose output depends on the kind of its input."""

    def forward(self, x):
        output = super().forward(x)
        return output if type(x) is not torch.Tensor else output.float()


def _refused(group, case):
    table_of.cache_clear()
    torch.manual_seed(0)
    kind = {"cache": Cached, "outputs": Doubled}.get(case, nn.Linear)
    made = Tied() if case == "tied" else nn.Sequential(*(kind(4, 4, dtype=torch.float64) for _ in range(2)))
    name = "ZBVZeroBubble" if case == "outputs" else "1F1B"
    schedule = pipeline_stages(made, group, schedule=name, microbatches=2, loss=mse)
    if case == "tied" and group.rank() == 0:
        schedule.stages[0].get_parameter("blocks.0.weight").requires_grad_(False)
    if case == "later":
        schedule.step(X, target=X)
        for param in schedule.parameters():
            param.requires_grad_(False)
    given = {"arg_mbs": [(x,) for x in X.chunk(2)]} if case == "mixed" else {}
    with torch.set_grad_enabled(case != "no_grad"):
        schedule.step(*(() if given else (X,)), target=X, **given)


REFUSED = {
    "cache": r"model: its call on fake tensors, .* has left some outside of the model",
    "tied": r"model: 'blocks.0.weight' must require a gradient on all stages",
    "later": r"model: requires_grad of '\w+.weight' must be as in the first step",
    "mixed": r"target: must not be given together with arg_mbs",
    "no_grad": r"step: must not run under torch.no_grad\(\)",
    "outputs": r"model: the outputs of stage 0, .*float32.*, must be those of the call on fake tensors, .*float64",
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    errors = (ValueError, TypeError, RuntimeError)
    p = 1 if case == "outputs" else 2  # each rank sees its own outputs
    ranks.run_raises(_refused, p, errors, REFUSED[case], case, in_turns=False)
