"""A vocabulary that ranks hold or mean differently is an error on all of them: never a number, never on one alone."""

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import count_collectives_of
from tests.helpers.vocabulary import close, columns, dense, make_rows
from tp_ext.sharding import split_sizes

pytestmark = pytest.mark.core


def _ask(group, what, width, given, target):
    """The result of `what` for logits of this rank's width; `given`: each rank's vocab_size, or sizes."""
    torch.manual_seed(group.rank())
    rank = group.rank()
    logits = torch.randn(3, width[rank], dtype=torch.float64)
    options = {"sizes" if isinstance(given[rank], list) else "vocab_size": given[rank]}
    if what == "loss":
        ids = torch.full((3,), target)
        return tp_ext.vocab_parallel_cross_entropy(logits.requires_grad_(), ids, group, **options)
    if what == "module":
        return tp_ext.VocabParallelCrossEntropy(group=group, **options)(logits, torch.full((3,), target))
    sampled = {"sample": {}, "top_k": {"top_k": 2}, "top_p": {"top_p": 0.5}, "both": {"top_k": 2, "top_p": 0.5}}
    if what in sampled:
        return tp_ext.vocab_parallel_sample(logits, group, **options, **sampled[what])
    return tp_ext.vocab_parallel_argmax(logits, group, **options)


WAYS = ["loss", "module", "argmax", "sample", "top_k", "top_p", "both"]
GPT2 = 50257  # p does not divide it
MISTAKES = {  # widths, vocab_size of each rank, a target, the message
    "none given": ((51, 50), (None, None), 3, r"vocab_size: must be given .*columns, \[51, 50\]; 101 if none"),
    "none given, the last target": (
        split_sizes(GPT2, 2),
        (None, None),
        GPT2 - 1,
        r"vocab_size: must be given .*\[25129, 25128\]; 50257 if none",
    ),
    "too small": ((51, 50), (99, 99), 3, r"logits_local: \[51, 50\] columns .* must be \[50, 49\], .*vocab_size = 99"),
    "too large": ((51, 50), (102, 102), 3, r"logits_local: \[51, 50\] columns .* must be \[51, 51\]"),
    "not the same": ((51, 50), (101, 100), 3, r"vocab_size: \[101, 100\] on the ranks must be the same"),
    "given on one": ((50, 50), (None, 99), 3, r"vocab_size: \[100, 99\] on the ranks must be the same"),
    "neither split nor equal": ((53, 51), (101, 101), 3, r"logits_local: \[53, 51\] columns .* must be \[51, 50\]"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("what", WAYS)
def test_an_error_on_every_rank(what, mistake):
    widths, given, target, match = MISTAKES[mistake]
    ranks.run_raises(_ask, 2, ValueError, match, what, widths, given, target, in_turns=False)


@pytest.mark.parametrize("what", ["loss", "argmax", "top_k", "top_p"])
@pytest.mark.parametrize(
    ("widths", "sizes"), [((20, 20), ([20, 3], [3, 20])), ((9, 9), ([12, 11], [12, 11]))], ids=["differ", "wrong"]
)
def test_sizes_that_the_ranks_do_not_have(what, widths, sizes):
    match = "sizes: must be the same on all ranks, and each rank must have its number of columns, p = 2"
    ranks.run_raises(_ask, 2, ValueError, match, what, widths, sizes, 3, in_turns=False)


def test_a_target_outside_is_an_error_on_every_rank():
    """Before the exchange where vocab_size is given; else a target is judged when the ranks' widths are known."""
    match = r"target: 8 must be in \[0, vocab_size\), \[0, 8\)"
    ranks.run_raises(_ask, 2, IndexError, match, "loss", (4, 4), (8, 8), 8)
    ranks.run_raises(_ask, 2, IndexError, match, "loss", (4, 4), (None, None), 8, in_turns=False)


def test_more_than_fp32_counts():
    """2^24 + 1 columns and one more: as fp32 numbers they were the same."""
    width = 1 << 24
    match = r"vocab_size: must be given .*\[16777217, 16777216\]"
    ranks.run_raises(_large, 2, ValueError, match, width, in_turns=False)


def _large(group, width):
    logits = torch.zeros(1, 1).expand(1, width + (group.rank() == 0))
    stats = tp_ext._ops.vocab_ce_stats(logits, torch.tensor([0]), 0, 1, 2 * logits.shape[1], -100, True)
    stats = tp_ext.all_gather_region(stats[None], group)
    tp_ext._ops.vocab_ce_loss(stats, torch.tensor([0]), 2 * logits.shape[1], -100, 0.0, 0.0)


def _compiled(group, what):
    torch._dynamo.reset()
    options = {"fullgraph": True, "backend": "aot_eager"}
    if what == "loss":
        made = torch.compile(tp_ext.vocab_parallel_cross_entropy, **options)
        return made(torch.randn(3, 51 - group.rank()), torch.tensor([1, 2, 3]), group.group_name)
    return torch.compile(tp_ext.vocab_parallel_argmax, **options)(torch.randn(3, 51 - group.rank()), group.group_name)


@pytest.mark.parametrize("what", ["loss", "argmax"])
def test_compiled_code_finds_it_too(what):
    ranks.run_raises(_compiled, 2, ValueError, "vocab_size: must be given", what, in_turns=False, timeout=120)


# The head, which knows group and vocabulary


def _head(group, x, target, weight, sp, pad):
    vocab, hidden = weight.shape
    head = tp_ext.VocabParallelLMHead(
        hidden, vocab, group=group, sequence_parallel=sp, pad_to_multiple_of=pad, dtype=weight.dtype
    )
    tp_ext.load_full_state_dict(head, {"weight": weight})
    p, rank = (1, 0) if group is None else (group.size(), group.rank())
    own, total = (x.tensor_split(p)[rank], len(x)) if sp else (x, None)
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 3}
    loss = head.loss(own, target, total, **options)
    loss.backward()
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        results.append([head.sample(own, total, top_k=5, temperature=0.8), head.argmax(own, total)])
        local, head.weight = head.weight, None  # as another pipeline stage has it
        results[-1].append(head.loss(own, target, total, weight=local, **options))
        head.weight = local
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and torch.equal(results[0][2], loss)
    assert not results[0][0].requires_grad
    return loss, tp_ext.full_state_dict(_grads(head))["weight"], results[0][:2]


def _grads(head):
    with torch.no_grad():
        head.weight.copy_(head.weight.grad)
    return head


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_head_gives_loss_and_ids(p, sp):
    x, weight = torch.randn(7, 6, dtype=torch.float64), torch.randn(13, 6, dtype=torch.float64)
    target = torch.randint(13, (7,))
    reference = weight.clone().requires_grad_()
    want = dense(x @ reference.T, target, label_smoothing=0.1, z_loss=0.01, ignore_index=3)
    want.backward()
    ids = _head(None, x, target, weight, False, None)[2]
    assert torch.equal(ids[1], (x @ weight.T).argmax(-1))
    for pad in (None, 4):
        for loss, grad, got in ranks.run(_head, p, x, target, weight, sp, pad):
            torch.testing.assert_close(loss, want.detach(), **close)
            torch.testing.assert_close(grad, reference.grad, **close)
            assert all(torch.equal(a, b) for a, b in zip(got, ids, strict=True))


@on_ranks(2)
def test_the_comparison_needs_no_collective_of_its_own(group):
    full, target = make_rows(13)
    local = columns(full, group.size(), group.rank())
    loss = lambda: tp_ext.vocab_parallel_cross_entropy(local, target, group, vocab_size=13)  # noqa: E731
    assert count_collectives_of(loss) == {"all_gather": 1}


# From dense layers


def _converted(group, table, dense_head, options):
    embedding = tp_ext.VocabParallelEmbedding.from_embedding(table, group=group, **options)
    head = tp_ext.VocabParallelLMHead.from_linear(dense_head, group=group, **options)
    for ours, theirs in ((embedding, table), (head, dense_head)):
        for name, param in theirs.named_parameters():
            local = getattr(ours, name)
            assert (local.dtype, local.requires_grad) == (param.dtype, param.requires_grad)
    return tp_ext.full_state_dict(embedding), tp_ext.full_state_dict(head), embedding.weight.shape


@pytest.mark.parametrize("p", [1, 3])
def test_from_embedding_and_from_linear(p):
    table, linear = nn.Embedding(13, 6, dtype=torch.bfloat16), nn.Linear(6, 13, dtype=torch.float64)
    table.weight.requires_grad_(False)
    linear.bias.requires_grad_(False)
    before = table.weight.clone(), linear.weight.clone()
    for options in ({}, {"pad_to_multiple_of": 4, "sequence_parallel": True}):
        for of_table, of_linear, shape in ranks.run(_converted, p, table, linear, options):
            torch.testing.assert_close(of_table, dict(table.state_dict()), rtol=0, atol=0)
            torch.testing.assert_close(of_linear, dict(linear.state_dict()), rtol=0, atol=0)
            assert p == 1 or (len(shape) == 2 and shape[0] < 13)
    assert torch.equal(before[0], table.weight) and torch.equal(before[1], linear.weight)


def _with_padding_idx(group, table, ids, upstream, sp):
    layer = tp_ext.VocabParallelEmbedding.from_embedding(table, group=group, sequence_parallel=sp)
    y = layer(ids)
    p, rank = group.size(), group.rank()
    y.backward(upstream.flatten(0, -2).tensor_split(p)[rank] if sp else upstream)
    made = tp_ext.VocabParallelEmbedding(13, 6, padding_idx=-2, group=group)
    zero = tp_ext.full_state_dict(made)["weight"][11].any()
    return y, tp_ext.full_state_dict(_grads(layer))["weight"], zero


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_padding_idx_is_that_of_torch(sp):
    table = nn.Embedding(13, 6, padding_idx=4, dtype=torch.float64)
    nn.init.normal_(table.weight)
    ids = torch.tensor([[4, 1, 12], [4, 0, 4], [9, 4, 1]])
    upstream = torch.randn(3, 3, 6, dtype=torch.float64)
    want = table(ids)
    want.backward(upstream)
    assert not table.weight.grad[4].any()
    ys, grads, zeros = zip(*ranks.run(_with_padding_idx, 3, table, ids, upstream, sp), strict=True)
    assert torch.equal(torch.cat(ys), want.flatten(0, 1)) if sp else all(torch.equal(y, want) for y in ys)
    for grad in grads:
        torch.testing.assert_close(grad, table.weight.grad, **close)
    assert not any(zeros)
