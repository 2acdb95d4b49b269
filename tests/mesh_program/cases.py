"""Families of programs on a mesh, a table each, for test_families.py: every member, not an example."""

import io
import operator
import pickle
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import tp_ext
from tp_ext import lax

# Operators of Python: of two tensors, a tensor and a number, a number and a tensor; integers where torch wants them
_NUMBERS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge")
_BITS = ("lshift", "rshift", "and_", "or_", "xor")
OPERATORS = {}
for _name in _NUMBERS + _BITS:
    _f, _bits = getattr(operator, _name), _name in _BITS
    OPERATORS[f"a {_name} a"] = (lambda a, f=_f: f(a, a), _bits)
    OPERATORS[f"a {_name} 2"] = (lambda a, f=_f: f(a, 2), _bits)
    OPERATORS[f"2 {_name} a"] = (lambda a, f=_f: f(2, a), _bits)
    OPERATORS[f"u {_name} a"] = (lambda a, f=_f: f(torch.full((4,), 2).to(a.dtype), a), _bits)
    if _name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        _in_place = getattr(operator, "i" + _name.strip("_"))
        OPERATORS[f"a {_name}= 2"] = (lambda a, f=_in_place: f(a.clone(), 2), _bits)
OPERATORS |= {
    "2.5 pow a": (lambda a: 2.5**a, False),
    "a matmul a": (lambda a: a[:, None] @ a[None], False),
    "u matmul a": (lambda a: torch.ones(4, 4) @ a, False),
    "neg": (lambda a: -a, False),
    "abs": (lambda a: abs(a), False),
    "invert": (lambda a: ~a, True),
}


# Writes of a [4, 3], which varies, to u [4, 3], which does not: every form of them
def _statistics(norm):
    def run(u, a):
        norm(a, u[0], u[1] + 1)

    return run


WRITES = {
    "u[0] = a": lambda u, a: u.__setitem__(0, a[0]),
    "u += a": lambda u, a: operator.iadd(u, a),
    "u **= a": lambda u, a: operator.ipow(u, a),
    "out": lambda u, a: torch.add(a, 1, out=u),
    "out tuple": lambda u, a: torch.max(a, 0, out=(u[0], torch.zeros(3, dtype=torch.long))),
    "out second": lambda u, a: torch.frexp(a, out=(torch.zeros(4, 3), u.int())),
    "data": lambda u, a: setattr(u, "data", a),
    "grad": lambda u, a: setattr(u, "grad", a),
    "foreach": lambda u, a: torch._foreach_add_([u], [a]),
    "foreach copy": lambda u, a: torch._foreach_copy_([u], [a]),
    "view": lambda u, a: u.view(-1).copy_(a.reshape(-1)),
    "pvary keeps u": lambda u, a: lax.pvary(u, "x").copy_(a),
    "expand_as keeps u": lambda u, a: u.expand_as(a).copy_(a),
    "view_as keeps u": lambda u, a: u.view_as(a).copy_(a),
    "reshape_as keeps u": lambda u, a: u.reshape_as(a).copy_(a),
    "type_as keeps u": lambda u, a: u.type_as(a).copy_(a),
    "broadcast_tensors keeps u": lambda u, a: torch.broadcast_tensors(u, a)[0].copy_(a),
    "meshgrid keeps u": lambda u, a: torch.meshgrid(u[0], a[0], indexing="ij")[0].copy_(a[0, 0]),
    "atleast_1d keeps u": lambda u, a: torch.atleast_1d(u, a)[0].copy_(a),
    "batch_norm": _statistics(lambda a, mean, var: F.batch_norm(a, mean, var, training=True)),
    "batch_norm by place": _statistics(lambda a, mean, var: F.batch_norm(a, mean, var, None, None, True)),
    "torch.batch_norm": _statistics(
        lambda a, mean, var: torch.batch_norm(a, None, None, mean, var, True, 0.1, 1e-5, False)
    ),
    "instance_norm": _statistics(lambda a, mean, var: F.instance_norm(a.T[None], mean, var)),
    "BatchNorm1d": lambda u, a: nn.BatchNorm1d(3)(a),
    "InstanceNorm1d": lambda u, a: nn.InstanceNorm1d(3, track_running_stats=True)(a.T[None]),
    "embedding max_norm": lambda u, a: F.embedding(a.long() % 4, u + 1, max_norm=1.0),
    "as_subclass": lambda u, a: u.copy_(a.as_subclass(torch.Tensor)),
    "init": lambda u, a: nn.init.constant_(u, a[0, 0]),
}
READS = {
    "item": lambda a: a[0, 0].item(),
    "format": lambda a: f"{a[0, 0]:.2f}",
    "bool": lambda a: bool(a[0, 0] > 0),
    "tolist": lambda a: a.tolist(),
    "index": lambda a: [1, 2][a[0, 0].long() * 0],
    "in": lambda a: 3.0 in a,
    "dlpack": torch.from_dlpack,
    "storage": lambda a: a.storage(),
    "untyped_storage": lambda a: bytes(a.untyped_storage()),
    "set_": lambda a: torch.zeros(3).set_(a),
    "set_ of a storage": lambda a: torch.zeros(3).set_(a.untyped_storage()),
    "apply_": lambda a: a.apply_(lambda value: value),
    "map_": lambda a: a.map_(a, lambda value, _: value),
    "is_set_to": lambda a: a.is_set_to(torch.zeros(3)),
    "pickle": pickle.dumps,
    "save": lambda a: torch.save(a, io.BytesIO()),
    "range": lambda a: range(a[0, 0].long()),
    "max": lambda a: max(a.flatten()),
    "nested": lambda a: torch.nested.nested_tensor([a, a]),
    "jagged": lambda a: torch.nested.nested_tensor([a, a[:2]], layout=torch.jagged),
    "as_nested": lambda a: torch.nested.as_nested_tensor([a, a[:2]]),
    "sparse": lambda a: a.to_sparse(),
    "csr": lambda a: a.to_sparse_csr(),
    "coo": lambda a: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), a[0, :2]),
}
# Values whose lengths depend on values of a [4, 3]: they may be computed with, and no length of them can be read
LENGTHS = {
    "mask": lambda a: a[a > 4],
    "mask of rows": lambda a: a[a[:, 0] > 4, 1:],
    "mask of u": lambda a: torch.ones(4, 3)[a > 4],
    "bytes": lambda a: a[(a > 4).byte()],
    "nonzero": lambda a: a.nonzero(),
    "nonzero tuple": lambda a: torch.nonzero(a > 4, as_tuple=True)[0],
    "aten": lambda a: torch.ops.aten.nonzero(a),
    "overload": lambda a: torch.ops.aten.nonzero.default(a),
    "argwhere": lambda a: (a > 4).argwhere(),
    "where": lambda a: torch.where(a > 4)[0],
    "masked_select": lambda a: torch.ones(4, 3).masked_select(a > 4),
    "unique": lambda a: a.unique(),
    "unique counts": lambda a: torch.unique(a, return_counts=True)[1],
    "unique dim": lambda a: torch.unique(a, dim=0),
    "unique_consecutive": lambda a: torch.unique_consecutive(a),
    "repeat_interleave": lambda a: torch.ones(4).repeat_interleave(a[:, 0].long()),
    "repeat_interleave alone": lambda a: torch.repeat_interleave(a[:, 0].long()),
    "bincount": lambda a: a.flatten().long().bincount(),
    "one_hot": lambda a: F.one_hot(a.long()),
    "lstsq": lambda a: torch.linalg.lstsq(a, a)[0],
    "arange": lambda a: torch.arange(a[0, 1].long()),
    "zeros": lambda a: torch.zeros(a[0, 1].long()),
    "narrow": lambda a: torch.ones(30).narrow(0, 0, a[0, 1].long()),
    "expand": lambda a: torch.ones(1).expand(a[0, 1].long()),
    "a result of one": lambda a: (a[a > 4] * 2).sin() + 1,
    "in place": lambda a: a[a > 4].mul_(2),
    "a view of one": lambda a: a[a > 4][:, None].T,
    "two": lambda a: torch.cat([torch.ones(1), a[a > 4]]),
    "psum over another axis": lambda a: lax.psum(lax.pvary(a[a > 4], "y"), "y"),
    "uneven slices": lambda a: lax.psum_scatter(torch.ones(3), "x") + 0 * a[0, 0],
}
LENGTH_READS = {
    "shape": lambda a: a.shape[0],
    "size": lambda a: a.size(0),
    "len": len,
    "numel": lambda a: a.numel(),
    "torch.numel": torch.numel,
    "nelement": lambda a: a.nelement(),
    "nbytes": lambda a: a.nbytes,
    "stride": lambda a: a.stride(),
    "is_same_size": lambda a: a.is_same_size(torch.ones(3)),
    "iter": lambda a: [0 for _ in a],
    "unbind": lambda a: a.unbind(0),
    "split": lambda a: a.split(1),
    "torch.split": lambda a: torch.split(a, 2),
    "chunk": lambda a: a.chunk(100),
}
# where lengths do not depend on values that vary, they can be read, as those of ``u`` and ``a``
FIXED_LENGTHS = {
    "a": lambda a: a,
    "an index": lambda a: a[torch.tensor([0, 1])],
    "an index that varies": lambda a: torch.ones(30)[a.long()],
    "a mask of u": lambda a: a[torch.ones(4, 3) > 0],
    "where of three": lambda a: torch.where(a > 4, a, 0.0),
    "nonzero of u": lambda a: torch.ones(4, 3).nonzero(),
    "repeat_interleave": lambda a: a.repeat_interleave(2, 0),
    "repeat_interleave of u": lambda a: a.repeat_interleave(torch.tensor([1, 2, 1, 1]), 0),
    "output_size": lambda a: torch.ones(4).repeat_interleave(a[:, 0].long() * 0 + 1, output_size=4),
    "one_hot": lambda a: F.one_hot(a.long(), 40),
    "nonzero_static": lambda a: a.nonzero_static(size=5),
    "index of the rank": lambda a: a + lax.axis_index("x"),
    "gathered mask": lambda a: lax.psum(a, "x")[lax.psum(a, "x") > 4],
    "max": lambda a: a.max(0).values,
}
# values that vary where torch asks no type of them, and those that compiled functions make: the result varies
FOLLOWED = {
    "tensor": torch.tensor,
    "as_tensor": lambda a: torch.as_tensor(a, dtype=torch.float64),
    "asarray": lambda a: torch.asarray(a, copy=True),
    "new_tensor": lambda a: torch.ones(1).new_tensor(a),
    "full": lambda a: torch.full((3,), a[0, 0]),
    "full_like": lambda a: torch.full_like(torch.ones(3), a[0, 0]),
    "new_full": lambda a: torch.ones(1).new_full((3,), a[0, 0]),
    "arange": lambda a: torch.arange(a[0, 1] * 0 + 3),
    "alpha": lambda a: torch.add(torch.ones(3), torch.ones(3), alpha=a[0, 1]),
    "beta": lambda a: torch.addmv(torch.ones(3), torch.ones(3, 3), torch.ones(3), beta=a[0, 1]),
    "iteration": lambda a: torch.stack([row * 2 for row in a]),
    "compiled": lambda a: torch.compile(lambda t: t * 2, backend="eager")(a),
    "compiled with u": lambda a: torch.compile(lambda t, u: t * u, backend="eager")(a, torch.ones(3)),
}
# by names: in-place methods that torch has, with arguments for those that take none of the default ones
IN_PLACE = sorted(
    name
    for name in dir(torch.Tensor)
    if name.endswith("_") and not name.startswith("_") and name not in ("requires_grad_", "share_memory_", "rename_")
)
CREATED_WITH_OUT = ("arange", "range", "linspace", "logspace", "eye", "ones", "zeros", "empty", "full", "rand")


class Uneven(NamedTuple):
    """A program whose result has shards of other lengths: of this rank's rows of x [10, 2], or of all of them."""

    program: object
    in_spec: tp_ext.P
    want: object


_ALL, _ROWS = tp_ext.P(), tp_ext.P("x")
UNEVEN = {
    "psum_scatter": Uneven(lambda a: lax.psum_scatter(a[:5], "x"), _ALL, lambda x, p: p * x[:5]),
    "psum_scatter sizes": Uneven(
        lambda a: lax.psum_scatter(a, "x", sizes=[1, *[0] * (lax.axis_size("x") - 2), 9]),
        _ALL,
        lambda x, p: p * x,
    ),
    "all_to_all": Uneven(lambda a: lax.all_to_all(a[:5], "x", 0, 1)[:, :2], _ALL, lambda x, p: x[:5]),
    "mask": Uneven(lambda a: a[a[:, 0] > 4], _ROWS, lambda x, p: x[x[:, 0] > 4]),
    "argument": Uneven(lambda a: a[:7], _ROWS, lambda x, p: torch.cat([s[:7] for s in x.tensor_split(p)])),
    "none on a rank": Uneven(lambda a: a[a[:, 0] > 17], _ROWS, lambda x, p: x[x[:, 0] > 17]),
}
