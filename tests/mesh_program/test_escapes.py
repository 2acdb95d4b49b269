"""Ways by which numbers leave a tensor that varies: tables of them, and walks over all that torch has."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tests.mesh_program.cases import FIXED_LENGTHS, LENGTH_READS, LENGTHS
from tests.mesh_program.test_families import _arguments
from tp_ext import P, lax
from tp_ext.debug import simulate
from tp_ext.mesh_program.escapes import VaryingValueError
from tp_ext.mesh_program.varying import Varying

X, SPEC = torch.arange(24.0).view(8, 3), P("x")


def _mapped(function, out_specs=SPEC, x=X, check=True, **axes):
    """Results of a map of shards [4, 3] of x, of all ranks."""

    def run(rank, mesh):
        return tp_ext.spmd(mesh, in_specs=P("x"), out_specs=out_specs, check=check)(function)(x)

    return simulate(run, {"x": 2, **axes})


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_that_depend_on_values_cannot_be_read(name):
    """By shape: any of the values; and all ways to read one length."""

    def program(a):
        value = LENGTHS[name](a)
        for read in LENGTH_READS.values() if name == "mask" else [LENGTH_READS["shape"]]:
            with pytest.raises(VaryingValueError, match=r"the lengths of the value, which come from|number of chunks"):
                read(value)
        return a

    _mapped(program, y=1)


def test_the_message_has_the_line_that_found_the_lengths():
    with pytest.raises(
        RuntimeError, match=r"shape: .* come from nonzero of .*test_escapes\.py:\d+, may differ along 'x'"
    ):
        _mapped(lambda a: torch.full((), float(a.nonzero().shape[0])), out_specs=P())


@pytest.mark.parametrize("name", FIXED_LENGTHS)
def test_other_lengths_can_be_read(name):
    """The same as without types."""
    lengths = {True: [], False: []}

    def program(a, check):
        value = FIXED_LENGTHS[name](a)
        parts = {key: read(value) for key, read in LENGTH_READS.items() if key != "chunk"}
        lengths[check].append({k: len(v) if isinstance(v, list | tuple) else v for k, v in parts.items()})
        return a

    for check in lengths:
        _mapped(lambda a, check=check: program(a, check), check=check)
    assert lengths[True] == lengths[False] and len(lengths[True]) == 2


def test_lengths_of_uneven_shards_cannot_be_read():
    with pytest.raises(
        RuntimeError, match="shape: the lengths of the value, which come from uneven shards of in_specs"
    ):
        _mapped(lambda a: torch.full((), a.shape[0]), P(), x=torch.ones(5, 3))
    whole = _mapped(lambda a: (a * 2).flatten(1), x=torch.ones(5, 3))
    assert all(torch.equal(y, torch.full((5, 3), 2.0)) for y in whole)


def test_values_of_such_lengths_are_computed_with():
    chosen = _mapped(lambda a: a[a > 4].sin())
    assert all(torch.equal(y, X[X > 4].sin()) for y in chosen)
    counts = _mapped(lambda a: lax.psum(torch.ones_like(a[a > 4]).sum(), "x"), P())
    assert counts == [torch.tensor(float((X > 4).sum()))] * 2


def test_text_is_the_same_on_all_ranks():
    """It shows how to see the values, and has none: a program could compute with them."""
    found = [[], []]

    def program(a):
        texts = [repr(a), str(a), f"{a}", f"{a[0, 0]}", "%s" % a, repr(a[a > 4]), repr({"a": [a]})]  # noqa: UP031
        found[int(float(a.plain_rank))].extend(texts)
        return a

    def run(rank, mesh):
        def ranked(a):
            a.plain_rank = rank
            return program(a)

        tp_ext.spmd(mesh, in_specs=P("x"), out_specs=P("x"))(ranked)(X)

    simulate(run, {"x": 2})
    assert found[0] == found[1] and len(found[0]) == 7
    assert "shape=(4, 3), dtype=torch.float32" in found[0][0] and "all_gather it over 'x'" in found[0][0]
    assert not any("12." in text for text in found[0])
    shown = []
    _mapped(lambda a: (shown.append(str(lax.all_gather(a, "x", invariant=True))), a)[1])
    assert shown == [str(X)] * 2


class _Dispatched(TorchDispatchMode):
    """Notes whether an operator has found lengths from values."""

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_index = "index.Tensor" in str(func) and all(
            i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1]
        )
        self.found = self.found or (torch.Tag.dynamic_output_shape in func.tags and not by_index)
        return func(*args, **(kwargs or {}))


def _functions():
    """The public functions of torch that take tensors, and the operators with the tag, by their names."""
    variable, composed = torch._C._VariableFunctions, set(torch.functional.__all__)
    for owner, names in (
        (torch.Tensor, dir(torch.Tensor)),
        (torch, composed | {name for name in dir(variable) if hasattr(torch, name)}),
        (F, dir(F)),
        (torch.linalg, dir(torch.linalg)),
        (torch.special, dir(torch.special)),
        (torch.ops.aten, filter(_is_tagged, dir(torch.ops.aten))),
    ):
        for name in sorted(names):
            public = not name.startswith("_") or owner is torch.ops.aten
            if public and callable(function := getattr(owner, name, None)) and not isinstance(function, type):
                yield f"{getattr(owner, '__name__', 'aten')}.{name}", function


def _is_tagged(name):
    operator = getattr(torch.ops.aten, name) if name.isidentifier() and not name.startswith("__") else None
    forms = operator.overloads() if hasattr(operator, "overloads") else ()
    return any(torch.Tag.dynamic_output_shape in getattr(operator, form).tags for form in forms)


def _dynamic_calls():
    """Yields calls whose results' lengths depend on values, one of every function, with arguments that it takes."""
    a = torch.arange(12.0).view(4, 3) + 1
    arguments = [*_arguments(a), ([a > 3],)]
    for name, function in _functions():
        for first, others in itertools.product((a, a[:, 0], a.long(), a[:, 0].long(), a > 3), arguments):
            with _Dispatched() as mode:
                try:
                    result = function(first.clone(), *others)
                except Exception:  # not its arguments
                    continue
            if mode.found and any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in tree_leaves(result)):
                yield name, function, (first, *others)
                break


def test_results_of_all_operators_that_find_lengths_are_marked():
    """A result is marked if an operator with the tag runs in a function of torch, or the function is refused."""
    calls = list(_dynamic_calls())
    assert len({name.rpartition(".")[2] for name, _, _ in calls}) >= 12
    reached = {name.rpartition(".")[2] for name, _, _ in calls}
    # the first takes other arguments, the others are composed of operators without the tag; LENGTHS has them
    assert set(filter(_is_tagged, dir(torch.ops.aten))) - reached <= {"_ctc_loss", "one_hot", "linalg_lstsq"}
    unmarked = []

    def program(a):
        for name, function, arguments in calls:
            zero = a.sum() * 0

            def vary(t, zero=zero):
                return t | (zero > 0) if t.dtype == torch.bool else t + zero.to(t.dtype)

            try:
                result = function(*tree_map_only(torch.Tensor, vary, arguments))
            except VaryingValueError:
                continue
            varying = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Varying) and leaf.dim()]
            if not all(leaf.lengths for leaf in varying):
                unmarked.append(name)
        return a

    _mapped(program)
    assert not unmarked


_OF_THE_PROCESS = {"data_ptr", "_cdata", "__hash__", "__dict__", "line", "grad_fn", "_grad_fn", "register_hook"}
_OF_THE_PROCESS |= {"register_post_accumulate_grad_hook", "__dlpack_c_exchange_api__", "__weakref__", "_use_count"}


def _read_attributes(a, read):
    """Notes what every attribute of a tensor gives to Python, called without arguments and with two kinds of them."""
    for name in dir(torch.Tensor):
        if name in _OF_THE_PROCESS:
            continue
        for arguments in (None, (), (a,), (0,), ("",), (4,)):
            try:
                value = getattr(a if name.endswith("__") else a.clone(), name)
                value = value if arguments is None else value(*arguments)
            except Exception:
                value = []
            leaves = [leaf for leaf in tree_leaves(value) if not isinstance(leaf, torch.Tensor) and not callable(leaf)]
            read[name, arguments is None, str(arguments and arguments[0])[:1]] = [
                str(leaf).partition(" at 0x")[0] for leaf in leaves
            ]


@pytest.mark.parametrize("masked", [False, True])
def test_no_attribute_of_a_tensor_gives_python_what_differs_between_ranks(masked):
    """All of torch.Tensor's, so those of a later version, too: on two ranks with other values, and other lengths."""
    read = [{}, {}]

    def run(rank, mesh):
        def program(a):
            _read_attributes(a[a > 4] if masked else a * 1.5, read[rank])
            return a

        tp_ext.spmd(mesh, in_specs=P("x"), out_specs=P("x"))(program)(X)

    simulate(run, {"x": 2})
    assert len(read[0]) > 2000
    assert [key for key in read[0] if read[0][key] != read[1][key]] == []


@on_ranks(2)
def test_arguments_by_keywords(group):
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    x, w = torch.arange(8.0).view(4, 2), torch.arange(6.0).view(2, 3).requires_grad_()

    def product(a, b, scale=1.0, *, bias=None):
        y = a @ b * scale
        return y if bias is None else y + bias

    def over(*specs):
        return tp_ext.spmd(mesh, in_specs=specs, out_specs=P("x"))(product)

    two, three = over(P("x"), P()), over(P("x"), P(), None)
    for y in two(x, b=w), two(a=x, b=w), two(b=w, a=x), two(x, w, bias=0.0), three(b=w, scale=1.0, a=x):
        torch.testing.assert_close(y, x @ w)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), w)[0], torch.autograd.grad((x @ w).sum(), w)[0])
    skipped = tp_ext.spmd(mesh, in_specs=(P("x"), None, P()), out_specs=P("x"))(lambda a, flag=True, b=None: a @ b)
    assert torch.equal(skipped(x, b=w), x @ w)
    only = tp_ext.spmd(mesh, in_specs=P("x"), out_specs=P("x"))(lambda a, *, b: a + b)
    assert torch.equal(only(x, b=x), 2 * x)
    rest = tp_ext.spmd(mesh, in_specs=(P("x"), P("x"), P("x")), out_specs=P("x"))(lambda *t, scale=1: sum(t) * scale)
    assert torch.equal(rest(x, x, x, scale=2), 6 * x)
    for call, error, message in (
        (lambda: two(x, w, bias=w), TypeError, "the keyword argument 'bias' has tensors and must have a place"),
        (lambda: two(x, w, other=w), TypeError, "unexpected keyword argument 'other'"),
        (lambda: two(x, a=x, b=w), TypeError, "multiple values for argument 'a'"),
        (lambda: two(x, w, scale=2.0), ValueError, "in_specs: 2 specs must be as many as the values, 3"),
        (
            lambda: tp_ext.spmd(mesh, in_specs=P("x"), out_specs=P("x"))(torch.sin)(input=x),
            TypeError,
            r"spmd: sin has no signature, so \['input'\] must be positional arguments",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
