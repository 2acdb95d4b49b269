"""Operators that Python calls without boxing (csrc/python/direct_call.h): the results of torch.ops, also under modes
and subclasses."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tp_ext import _ops
from tp_ext._ops import binding

DIRECT = {name: function for name, function in vars(_ops).items() if type(function) is type(len)}


def arguments(name):
    """Of a call as the layers make it, p = 1."""
    torch.manual_seed(0)
    x, w, b, row = (torch.randn(*shape, requires_grad=True) for shape in ((3, 4), (5, 4), (5,), (4,)))
    cos = torch.ones(3, 2)
    return {
        "column_parallel_linear": (x, w, b, "", False, None, None, 1),
        "row_parallel_linear": (x, w, None, "", True, [3], None, 1, True),
        "bias_act": (x, row, "gelu"),
        "gated_act": (x, None, "swiglu"),
        "rms_norm": (x, row, 1e-5),
        "layer_norm": (x, row, None, 1e-5),
        "rms_norm_residual": (x, x.detach() + 1, row, 1e-5),
        "layer_norm_residual": (x, x.detach() + 1, row, row, 1e-5),
        "all_reduce_rms_norm": (x, x.detach() + 1, row, 1e-5, ""),
        "attention": (x.view(1, 1, 3, 4), w.view(1, 1, 5, 4), w.view(1, 1, 5, 4), None, False),
        "rope": (x.view(3, 1, 4), cos, cos, False, torch.tensor([2, 0, 2])),
        "bias_dropout_residual": (x, row, None, torch.tensor(7), 0.5, 12, 12, 0),
        "moe_permute": (x, torch.tensor([[0], [-1], [2]]), 4, None),
        "moe_unpermute": (w, torch.tensor([[0], [-1], [2]]), row[:3, None]),
        "vocab_parallel_argmax": (x, "", 0, 3, 3, [3]),
        "vocab_parallel_sample": (x, "", 0, 4, 4, 0.5, 2, None, None),
        "vocab_parallel_embedding": (torch.tensor([0, 4]), w, "", 0, 5, 5, False, None),
    }.get(name, (x, "") if name in ("copy_to_region", "reduce_from_region") else (x, "", -1, None))


def overload(name):
    return getattr(torch.ops.tp_ext, name).default


def results(function, args):
    """The one or two tensors that the function returns."""
    returned = function(*args)
    return returned if isinstance(returned, tuple) else (returned,)


def gradients(ys, args):
    leaves = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.autograd.grad(sum(y.sin().sum() for y in ys), leaves, allow_unused=True)


def test_there_are_direct_calls():
    assert len(DIRECT) >= 15 and {"copy_to_region", "column_parallel_linear", "rms_norm"} < set(DIRECT)


@pytest.mark.core
@pytest.mark.parametrize("name", DIRECT)
def test_same_result_as_torch_ops(name):
    args = arguments(name)
    direct_outputs, overload_outputs = (results(function, args) for function in (DIRECT[name], overload(name)))
    assert len(direct_outputs) == len(overload_outputs)
    for mine, other in zip(direct_outputs, overload_outputs, strict=True):
        assert torch.equal(mine, other)
        assert type(mine.grad_fn) is type(other.grad_fn)
    if direct_outputs[0].grad_fn is not None:
        assert all(map(torch.equal, gradients(direct_outputs, args), gradients(overload_outputs, args)))


@pytest.mark.parametrize("name", DIRECT)
def test_all_arguments_are_read_without_torch_ops(name):
    """What the layers pass does not take the slow way: an overload that cannot be called is never called."""

    def never(*args, **kwargs):
        raise AssertionError(f"{name} went through torch.ops with {args} {kwargs}")

    function = binding.library.direct_call(name, never)
    assert all(map(torch.equal, results(function, arguments(name)), results(DIRECT[name], arguments(name))))
    with pytest.raises(AssertionError, match="through"):
        function(*arguments(name)[:-1])


def test_unsupported_inputs_take_torch_ops():
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.equal(_ops.column_parallel_linear(x, weight=w, bias=None, group=""), x @ w.T)
    assert torch.equal(_ops.copy_to_region(torch.nn.Parameter(x), ""), x)
    seen = []

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    _ops.rms_norm(x.as_subclass(Wrapped), None, 1e-5)
    assert overload("rms_norm") in seen


def test_function_modes_see_the_operator():
    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen, x = [], torch.ones(2)
    with Watch():
        _ops.copy_to_region(x, "")
    assert seen == [overload("copy_to_region")]


@pytest.mark.core
def test_compile_sees_the_operator():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: _ops.rms_norm(x, None, 1e-5), fullgraph=True, backend=backend)
    x = torch.randn(3, 4)
    assert torch.equal(compiled(x), _ops.rms_norm(x, None, 1e-5))
    assert [node.target for node in graphs[0].graph.nodes if node.op == "call_function"] == [overload("rms_norm")]


def test_profiler_sees_the_operator():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _ops.rms_norm(torch.randn(3, 4), None, 1e-5)
    assert "tp_ext::rms_norm" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("rms_norm", (torch.ones(3, 4), None, "eps")),  # of the wrong type
        ("rms_norm", (None, None, 1e-5)),
        ("copy_to_region", (torch.ones(2),)),  # too few
        ("copy_to_region", (torch.ones(2), "", 1)),  # too many
        ("copy_to_region", (torch.ones(2), "\ud800")),  # no text
        ("scatter_to_region", (torch.ones(2), "", 2**70, None)),
        ("scatter_to_region", (torch.ones(2), "", 0, [2.5])),
        ("copy_to_region", (torch.ones(2), "nobody")),  # refused by the operator
        ("scatter_to_region", (torch.ones(2), "", 7, None)),
        ("row_parallel_linear", (torch.ones(3), torch.ones(2, 4), None, "", False, None, None, 1, True)),
    ],
)
def test_errors_are_those_of_torch_ops(name, args):
    with pytest.raises(Exception) as theirs:
        overload(name)(*args)
    with pytest.raises(theirs.type) as ours:
        DIRECT[name](*args)
    assert str(ours.value) == str(theirs.value)


def test_only_operators_of_the_table():
    with pytest.raises(ValueError, match="'nothing' must be an operator of the table"):
        binding.library.direct_call("nothing", print)
