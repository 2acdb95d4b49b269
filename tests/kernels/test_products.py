"""fp32 products of layers by either of torch's libraries, and the choice between them."""

import functools
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tp_ext
from tests.helpers import ranks, simulated
from tp_ext import _ops
from tp_ext.nn.attention.context_attention import context_attention

WIDTH, TOKENS = 256, 96  # products of 6 and more million multiplications
LIBRARIES = ("torch", "onednn")
both = pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()), reason="needs MKL and oneDNN"
)


def _layers(group, name):
    if name == "mlp":
        return tp_ext.ParallelMLP(WIDTH, 2 * WIDTH, group=group)
    if name == "moe":
        return tp_ext.ParallelMoE(WIDTH, WIDTH, 2, 2, group=group)
    if name == "head":
        return tp_ext.VocabParallelLMHead(WIDTH, 600, group=group)
    return tp_ext.ParallelAttention(WIDTH, 4, group=group)


def _run(name, group, dtype):
    """Output and gradients of a layer with the same weights and inputs for every number of ranks and type."""
    tp_ext.manual_seed(0)
    layer = _layers(group, name)
    layer = layer.to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS // 2, WIDTH, generator=generator).to(dtype).requires_grad_()
    if name == "head":
        y = layer.loss(x, torch.arange(TOKENS).view(2, -1))
        y.backward()
    else:
        y = layer(x)
        y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def _worst(group, name):
    results = zip(_run(name, group, torch.float32), _run(name, group, torch.float64), strict=True)
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in results if b.numel())


def _in_process(library, fn, **environment):
    """Returns the value of a function of this file in a new process, since a process chooses once."""
    return ranks.run_fresh(_chosen, fn, environment | {"TP_EXT_GEMM": library})


def _chosen(fn, environment):
    os.environ.pop("MKL_CBWR", None)  # of all ranks of tests: its products would be torch's
    os.environ.update(environment)
    return fn()


def errors():
    """Returns the largest difference from fp64 for each layer and number of ranks, relative to the largest element."""
    return {
        f"{n} {p}": max(simulated.run(_worst, p, n)) for n in ("mlp", "moe", "attention", "head") for p in (1, 2, 3)
    }


def differences():
    """Returns which calls of a linear of one rank have other bits than torch's, and errors of those that are traced."""
    layer, x = tp_ext.ColumnParallelLinear(WIDTH, WIDTH, group=None), torch.randn(TOKENS, WIDTH)
    functions = {
        "plain": (lambda: layer(x), lambda: nn.functional.linear(x, layer.weight, layer.bias)),
        "small": (lambda: layer(x[:8]), lambda: nn.functional.linear(x[:8], layer.weight, layer.bias)),
        "double": (
            lambda: layer.double()(x.double()),
            lambda: nn.functional.linear(x.double(), layer.weight, layer.bias),
        ),
    }
    different = {name: not torch.equal(ours(), torch_s()) for name, (ours, torch_s) in functions.items()}
    layer.float()
    vmapped = torch.func.vmap(layer)(x.view(2, -1, WIDTH)).flatten(0, 1)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    y = layer(x.requires_grad_())
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    by_func = torch.func.grad(lambda b: torch.func.functional_call(layer, {"bias": b}, (x,)).sum())(layer.bias.detach())
    weight = layer.weight.double()
    wanted = (2 * weight.T @ weight).sum(0)  # of each row of x
    errors = [
        y - vmapped,
        y - compiled,
        tangent - layer.weight.sum(1),
        by_func - TOKENS,
        (second - wanted) / wanted.abs().max(),
    ]
    return different, [error.abs().max().item() for error in errors]


@pytest.mark.parametrize("library", LIBRARIES)
def test_layers_have_the_values_of_fp64(library):
    worst = _in_process(library, errors)
    assert len(worst) == 12 and max(worst.values()) < 3e-6, worst


@both
@pytest.mark.parametrize("library", LIBRARIES)
def test_torch_has_the_products_that_others_must_see(library):
    different, errors = _in_process(library, differences)
    assert different == {"plain": library == "onednn", "small": False, "double": False}
    assert max(errors) < 2e-5, errors


def products():
    return tp_ext.build_info()["products"]


@both
def test_the_choice_is_made_once_a_machine(tmp_path):
    """Measured by the first process, and obeyed by the others, whatever they would measure."""
    first = _in_process("auto", products, XDG_CACHE_HOME=str(tmp_path))
    assert first.endswith("as measured in this process")
    (file,) = (tmp_path / "tp_ext").iterdir()
    chosen = file.read_text()
    assert set(chosen.split()) <= set(LIBRARIES) and first.startswith(chosen.split()[0])
    for few, many in (("torch", "onednn"), ("onednn", "torch")):
        file.write_text(f"{few} {many}\n")
        text = _in_process("auto", products, XDG_CACHE_HOME=str(tmp_path))
        assert text == f"{few}, of more than 2^24 multiplications {many}, as measured before, in {file}"
    file.write_text("tor")  # what was cut off is measured again
    assert "in this process" in _in_process("auto", products, XDG_CACHE_HOME=str(tmp_path))
    unwritable = tmp_path / "file"
    unwritable.write_text("")
    assert "in this process" in _in_process("auto", products, XDG_CACHE_HOME=str(unwritable))


@both
def test_where_bits_are_promised_products_are_torch_s():
    text = _in_process("onednn", products, MKL_CBWR="AVX2,STRICT")
    assert text == "torch, by MKL_CBWR, or as there is no MKL"


def test_a_wrong_choice_is_named():
    with pytest.raises(
        ranks.RankError, match="ValueError: TP_EXT_GEMM: 'mkl' must be one of 'auto', 'torch', 'onednn'"
    ):
        _in_process("mkl", products)


def calls():
    """Returns, for each layer and type, whether oneDNN's operator was called, and output and gradients."""
    results = {}
    for name in ("mlp", "moe", "attention", "head"):
        for dtype in (torch.float32, torch.bfloat16):
            with torch.autograd.profiler.profile() as profile:
                values = _run(name, None, dtype)
            called = any(event.name == "mkldnn::_linear_pointwise" for event in profile.function_events)
            results[name, dtype] = called, values
    return results


@both
def test_nothing_changes_where_torch_s_products_are_as_fast(tmp_path):
    """With the table that such a processor measures, as Intel's: no call and no bit is another one; nor is any in bf16
    with the other table."""
    _in_process("auto", products, XDG_CACHE_HOME=str(tmp_path))
    (products_file,) = (tmp_path / "tp_ext").iterdir()
    of_table = {}
    for library in LIBRARIES:
        products_file.write_text(f"{library} {library}\n")
        of_table[library] = _in_process("auto", calls, XDG_CACHE_HOME=str(tmp_path))
    for name, dtype in of_table["torch"]:
        (none, values), (some, others) = (of_table[library][name, dtype] for library in LIBRARIES)
        # For few tokens the head has kernels of its own, where the processor has AVX-512
        assert not none and (some == (dtype == torch.float32) or name == "head"), (name, dtype)
        assert all(map(torch.equal, values, others)) != some
    by_name = _in_process("torch", calls)
    assert all(all(map(torch.equal, values, by_name[case][1])) for case, (_, values) in of_table["torch"].items())


def _apart(results, wanted):
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(results, wanted, strict=True))


def _attend(attend, leaves, grad):
    y = attend(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


# Batch, heads, kv_heads, queries, keys, width, causal: whole tiles and parts, shared heads, a rectangle
ATTENTIONS = [
    (2, 2, 2, 256, 256, 64, True),
    (1, 6, 2, 331, 331, 40, True),
    (4, 2, 1, 70, 300, 16, False),
    (1, 4, 4, 65, 129, 128, False),
]


def attentions():
    """Returns, for each case in fp32 and bf16, the largest difference from fp64 relative to the largest element, and
    whether the bits are torch's, and those of two threads."""
    found = {}
    for case in ATTENTIONS:
        batch, heads, kv_heads, queries, keys, width, causal = case
        torch.manual_seed(0)
        shapes = [(batch, n, h, width) for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys))]
        exact = [torch.randn(shape, dtype=torch.float64) for shape in (*shapes, shapes[0])]
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [t.to(dtype) for t in exact]
            *leaves, grad = [t.transpose(1, 2).requires_grad_() for t in tensors]
            *leaves64, grad64 = [t.double().transpose(1, 2).requires_grad_() for t in tensors]
            dense = functools.partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
            ours = functools.partial(_ops.attention, scale=None, causal=causal)
            got = _attend(ours, leaves, grad)
            torch.set_num_threads(2)
            again = _attend(ours, leaves, grad)
            torch.set_num_threads(1)
            alike = [all(map(torch.equal, got, other)) for other in (_attend(dense, leaves, grad), again)]
            found[case, dtype] = _apart(got, _attend(dense, leaves64, grad64)), *alike
    return found


@pytest.mark.parametrize("library", LIBRARIES)
def test_attention_has_the_values_of_fp64(library):
    """By oneDNN other bits than torch's, in fp32; in bf16 with at most 512 keys attention is computed in fp32."""
    for (case, dtype), (error, torchs, again) in _in_process(library, attentions).items():
        assert error < (3e-6 if dtype == torch.float32 else 2**-7), (case, dtype, error)
        assert again and (dtype == torch.bfloat16 or torchs == (library == "torch")), (case, dtype)


def others():
    """Returns which calls have other bits than torch's, the error of a second derivative, and the largest difference
    of a ring of two ranks from fp64."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 16, 2, 256, 64).unbind(0)
    dense = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    calls = {
        "plain": (q, k, v),
        "few": tuple(t[:, :, :63] for t in (q, k, v)),
        "other numbers": (q, k[:, :, :200], v[:, :, :200]),
        "double": tuple(t.double() for t in (q, k, v)),
    }
    ours = functools.partial(_ops.attention, scale=None, causal=True)
    different = {name: not torch.equal(ours(*args), dense(*args)) for name, args in calls.items()}
    calls = {
        "more threads than heads": lambda f: f(q, k, v),
        "compiled": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)(q, k, v),
        "vmap": lambda f: torch.func.vmap(f)(q[None], k[None], v[None]),
    }
    q, k, v = (t[:1] for t in (q, k, v))
    torch.set_num_threads(3)
    different |= {name: not torch.equal(call(ours), call(dense)) for name, call in calls.items()}
    torch.set_num_threads(1)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    y = ours(*leaves)
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        torch.autograd.grad(y.sum(), leaves, create_graph=True)
    with sdpa_kernel(SDPBackend.MATH):  # which has one
        (first,) = torch.autograd.grad(ours(*leaves).sum(), leaves[0], create_graph=True)
        assert torch.autograd.grad(first.square().sum(), leaves)[1].any()
    return different, max(simulated.run(_ring_apart, 2))


def _ring_apart(group):
    layout = tp_ext.ContextLayout(batch=1, seq=512, group=group, balance=True)
    torch.manual_seed(0)
    whole = [torch.randn(1, 512, heads, 32, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    *leaves64, grad64 = [t.clone().requires_grad_() for t in whole]
    *leaves, grad = [layout.shard(t.float(), 1).requires_grad_() for t in whole]

    def dense(*parts):
        heads = [t.transpose(1, 2) for t in parts]
        return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)

    wanted = [layout.shard(t, 1) for t in _attend(dense, leaves64, grad64)]
    return _apart(_attend(lambda *parts: context_attention(*parts, layout, "ring"), leaves, grad), wanted)


@both
def test_other_attention_is_torchs():
    different, apart = _in_process("onednn", others)
    assert [name for name, differs in different.items() if differs] == ["plain"] and apart < 3e-6
