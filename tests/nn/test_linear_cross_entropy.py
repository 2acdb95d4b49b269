"""linear_cross_entropy against F.linear and the cross entropy of all logits. fp64 bound: 1e-12, rounding of short sums.

Compiled, recomputed, in other dtypes, with main_grad: test_linear_cross_entropy_training.py.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.vocabulary import close, dense, widths
from tp_ext.debug import count_collectives
from tp_ext.sharding import split_sizes

HIDDEN, ROWS = 6, (5, 3)


def make(vocab, rows=ROWS, dtype=torch.float64):
    """hidden, weight, bias, target with two ignored rows."""
    target = torch.randint(0, vocab, rows)
    if target.numel() > 3:
        target.view(-1)[1:3] = -100
    return (torch.randn(*rows, HIDDEN, dtype=dtype), torch.randn(vocab, HIDDEN, dtype=dtype)), (
        torch.randn(vocab, dtype=dtype),
        target,
    )


def local_rows(full, group, width):
    """This rank's rows of the vocabulary; padding is rubbish."""
    if width is None:
        return full.split(split_sizes(len(full), group.size()))[group.rank()].clone()
    rubbish = torch.full((group.size() * width - len(full), *full.shape[1:]), 1e4, dtype=full.dtype)
    return torch.cat([full, rubbish]).split(width)[group.rank()].clone()


def run(group, operands, g, g_entropy, width, sp, options):
    """The loss, entropies, and the gradients of two backwards."""
    (x, weight), (bias, target) = operands
    vocab = len(weight)
    x = x.tensor_split(group.size())[group.rank()] if sp else x
    leaves = [x.clone(), local_rows(weight, group, width), local_rows(bias, group, width)]
    for leaf in leaves:
        leaf.requires_grad_()
    o = {"sequence_parallel": sp, "total_tokens": len(target) if sp else None, **options}
    result = tp_ext.linear_cross_entropy(*leaves[:2], target, group, bias=leaves[2], vocab_size=vocab, **o)
    results = result if o.get("return_entropy") else (result,)
    upstream = (g, g_entropy)[: len(results)]
    first = torch.autograd.grad(results, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(results, leaves, upstream)
    assert all(map(torch.equal, first, second))
    return [one.detach() for one in results], first


def assert_dense(p, operands, width=None, sp=False, bounds=close, **options):
    (x, weight), (bias, target) = operands
    leaves = [one.double().clone().requires_grad_() for one in (x, weight, bias)]
    known = ("z_loss", "ignore_index", "reduction", "label_smoothing")
    logits = F.linear(*leaves)
    want = dense(logits, target, **{k: v for k, v in options.items() if k in known})
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1) * (target != options.get("ignore_index", -100))
    g, g_entropy = torch.rand_like(want), torch.rand_like(entropy)
    wants = (want, entropy) if options.get("return_entropy") else (want,)
    grads = torch.autograd.grad(wants, leaves, (g, g_entropy)[: len(wants)])
    all_results = ranks.run(run, p, operands, g.to(x.dtype), g_entropy.to(x.dtype), width, sp, options)
    for results, _ in all_results:
        for result, expected, first in zip(results, wants, all_results[0][0], strict=True):
            assert torch.equal(result, first)
            torch.testing.assert_close(result.double(), expected.detach(), **bounds)
    dx, *sharded = zip(*(gradients for _, gradients in all_results), strict=True)
    if sp:
        dx = [torch.cat(dx)] * p
    for one in dx:
        torch.testing.assert_close(one.double(), grads[0], **bounds)
    for parts, expected in zip(sharded, grads[1:], strict=True):
        full = torch.cat(parts)
        assert not full[len(expected) :].any()
        torch.testing.assert_close(full[: len(expected)].double(), expected, **bounds)


OPTIONS = list(
    itertools.product(
        (1, 2, 3, 4), (0.0, 0.1), (0.0, 1e-2), ("none", "mean", "sum"), (False, True), (False, True), (None, 4)
    )
)


@pytest.mark.thinned
@pytest.mark.parametrize(("p", "smoothing", "z_loss", "reduction", "sp", "entropy", "chunk"), OPTIONS)
def test_every_option_with_even_uneven_and_padded_vocabularies(p, smoothing, z_loss, reduction, sp, entropy, chunk):
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction, "return_entropy": entropy}
    for vocab in (12, 13):
        for width in widths(p, vocab):
            assert_dense(p, make(vocab), width, sp, chunk_tokens=chunk, **options)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("rows", [(0,), (1,), (2, 1, 3)], ids=str)
def test_rows_of_any_shape(rows, reduction):
    assert_dense(2, make(7, rows), reduction=reduction, chunk_tokens=2)


@pytest.mark.parametrize("p", [1, 2])
def test_all_rows_ignored_and_another_ignore_index(p):
    (x, weight), (bias, target) = make(7)
    assert_dense(p, ((x, weight), (bias, torch.full_like(target, 3))), ignore_index=3)
    assert_dense(p, ((x, weight), (bias, target.clamp(min=0))), ignore_index=3, reduction="sum")


def _masked(group, operands):
    (x, weight), (bias, target) = operands
    bias = bias.clone()
    bias[::2] = -torch.inf  # of every rank
    leaves = [x.clone().requires_grad_(), local_rows(weight, group, None).requires_grad_()]
    loss, entropy = tp_ext.linear_cross_entropy(
        *leaves, target, group, bias=local_rows(bias, group, None), return_entropy=True, reduction="none"
    )
    (loss.sum() + entropy.sum()).backward()
    return entropy.detach(), leaves[0].grad


def test_masked_columns_have_no_entropy():
    (x, weight), (bias, _) = operands = make(12)
    operands[1][1].fill_(1)
    x = x.clone().requires_grad_()
    log_p = F.linear(x, weight[1::2], bias[1::2]).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    (entropy.sum() - log_p[..., 0].sum()).backward()
    for got, grad in ranks.run(_masked, 2, operands):
        torch.testing.assert_close(got, entropy.detach(), **close)
        torch.testing.assert_close(grad, x.grad, **close)


def _asked(group, operands, frozen, reduction):
    (x, weight), (_, target) = operands
    leaves = [x.clone(), local_rows(weight, group, None)]
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i not in frozen)
    loss = tp_ext.linear_cross_entropy(*leaves, target, group, vocab_size=len(weight), reduction=reduction)
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    each = [torch.autograd.grad(loss.sum(), leaf, retain_graph=True)[0] for leaf in trained]  # as two halves
    loss.sum().backward()
    assert all(torch.equal(leaf.grad, one) for leaf, one in zip(trained, each, strict=True))
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("frozen", [(), (0,), (1,)], ids=str)
def test_gradients_are_computed_where_they_are_needed(frozen, reduction):
    operands = make(12)
    leaves = [one.clone().requires_grad_() for one in operands[0]]
    dense(F.linear(*leaves), operands[1][1], reduction=reduction).sum().backward()
    for rank, (dx, dw) in enumerate(ranks.run(_asked, 2, operands, frozen, reduction)):
        assert (dx is None) == (0 in frozen) and (dw is None) == (1 in frozen)
        if dx is not None:
            torch.testing.assert_close(dx, leaves[0].grad, **close)
        if dw is not None:
            torch.testing.assert_close(dw, leaves[1].grad.chunk(2)[rank], **close)


N, V, CHUNKS = 24, 48, 4


def _count(group, reduction, sp, entropy):
    p = group.size()
    x = torch.randn(N // p if sp else N, HIDDEN, requires_grad=True)
    weight = torch.randn(V // p, HIDDEN, requires_grad=True)
    o = {"reduction": reduction, "sequence_parallel": sp, "chunk_tokens": N // CHUNKS, "return_entropy": entropy}
    with count_collectives() as forward:
        result = tp_ext.linear_cross_entropy(x, weight, torch.arange(N), group, **o)
    with count_collectives() as backward:
        (sum(one.sum() for one in result) if entropy else result.sum()).backward()
    return [
        {kind: (n, c.select(kind=kind).payload_bytes) for kind, n in c.by_kind().items()} for c in (forward, backward)
    ]


S = N * HIDDEN * 4


@pytest.mark.parametrize("p", [1, 2])
def test_collectives_to_the_byte(p):
    one, chunks = (1, 16 * (N + 1) * 2), (CHUNKS, 16 * (N + CHUNKS) * 2)
    gathers = (2 * CHUNKS, chunks[1] + S)
    cases = {
        ("mean", False, False): [{"all_gather": chunks, "all_reduce": (CHUNKS, S)}, {}],
        ("mean", True, False): [{"all_gather": gathers, "reduce_scatter": (CHUNKS, S)}, {}],
        ("none", False, False): [{"all_gather": one}, {"all_reduce": (CHUNKS, S)}],
        ("none", True, False): [
            {"all_gather": (CHUNKS + 1, one[1] + S)},
            {"all_gather": (CHUNKS, S), "reduce_scatter": (CHUNKS, S)},
        ],
        ("mean", False, True): [{"all_gather": chunks, "all_reduce": (1, 4 * N)}, {"all_reduce": (CHUNKS, S)}],
    }
    for case, counts in cases.items():
        assert ranks.run(_count, p, *case) == [counts if p > 1 else [{}, {}]] * p, case


def _chunks(group, hidden, dtype, weight_grad, entropy):
    """The chunks of a loss, each of which gathers its statistics."""
    x = torch.randn(2048, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, hidden, dtype=dtype, requires_grad=weight_grad)
    target = torch.randint(8, (2048,), generator=torch.Generator().manual_seed(0))
    with count_collectives() as counted:
        tp_ext.linear_cross_entropy(x, weight, target, group, return_entropy=entropy)
    return counted.by_kind()["all_gather"]


def test_default_number_of_chunks():
    """In half types on the CPU a chunk has as many tokens as the weight has columns, from 64 to 256: it reads and
    writes the fp32 sum of the weight's gradient."""
    low = torch.bfloat16
    for case, number in {
        (512, torch.float32, True, False): 22,
        (512, low, True, False): 8,
        (128, low, True, False): 16,
        (32, low, True, False): 28,
        (512, low, False, False): 28,
        (512, low, True, True): 32,
    }.items():
        assert ranks.run(_chunks, 2, *case) == [number] * 2, case


def _peak(group, dtype, reduction):
    """The most bytes at once but for the gradients, which the loss with logits needs, too; by those of the logits.

    Half types are left out: oneDNN packs a whole operand of a product, with and without the logits.
    """
    tokens, vocab = 2048, 16384
    x = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab // group.size(), 8, dtype=dtype, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:  # a dispatch mode would be traced
        loss = tp_ext.linear_cross_entropy(x, weight, torch.arange(tokens), group, reduction=reduction)
        torch.autograd.grad(loss, (x, weight), torch.ones_like(loss))
    sizes = [event.nbytes() for event in events.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = max(itertools.accumulate(sizes))
    gradients = (x.numel() + weight.numel()) * x.element_size()
    return (most - gradients) / (tokens * weight.shape[0] * x.element_size())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("p", [1, 2])
def test_peak_memory_is_a_twentieth_of_the_logits(p, dtype, reduction):
    assert max(ranks.run(_peak, p, dtype, reduction)) <= 0.05


@on_ranks(2)
def test_bad_arguments_are_refused_before_any_collective(group):
    (x, weight), (_, target) = make(12)
    own = local_rows(weight, group, None)

    def refused(error, match, *args, **options):
        with pytest.raises(error, match=match), CommDebugMode() as comm:
            tp_ext.linear_cross_entropy(*args, group, **{"vocab_size": len(weight), **options})
        assert comm.get_total_counts() == 0

    refused(ValueError, r"weight: 12 rows must be this rank's shard of vocab_size = 12", x, weight, target)
    refused(ValueError, r"weight: shape \(12,\) must have 2 dims", x, weight[:, 0], target)
    refused(ValueError, r"x: shape \[5, 3, 5\] must end in the 6 input features", x[..., 1:], own, target)
    refused(ValueError, r"target: shape \[5\] must be \[5, 3\], that of x", x, own, target[:, 0])
    refused(TypeError, r"target: dtype Int must be int64", x, own, target.int())
    refused(TypeError, r"weight|x: dtype Float must be that of weight, Double", x.float(), own, target)
    refused(ValueError, r"reduction: 'max' must be one of", x, own, target, reduction="max")
    refused(ValueError, r"chunk_tokens: 0 must be at least 1, or None", x, own, target, chunk_tokens=0)
    refused(ValueError, r"label_smoothing: 2 must be in", x, own, target, label_smoothing=2.0)
    refused(ValueError, r"total_tokens: -1 must be an integer", x, own, target, total_tokens=-1)
    refused(ValueError, r"bias: shape \[1\] must be the 6", x, own, target, bias=own[:1, 0])
    refused(IndexError, r"target: 12 must be in \[0, vocab_size\)", x, own, target.clamp(min=12))
