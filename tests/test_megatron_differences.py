"""Where Megatron-core's numbers are known to be wrong or its gradients unfinished, on two ranks: ours are those of the
unsharded torch module, theirs still are not. When one of theirs is fixed, its test fails, and docs/guide/migrating.md,
which lists them, has to follow.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.megatron_on_cpu import MISSING, VERSION, fill, layer_config, megatron, run
from tests.helpers.oracle import own_tokens

pytestmark = pytest.mark.skipif(MISSING, reason="needs megatron-core")


def check(results, right, what):
    """Of each rank's (theirs, ours): ours are right everywhere, theirs on one rank at least are not."""
    wrong = False
    for (theirs, ours), want in zip(results, right, strict=True):
        torch.testing.assert_close(ours, want, rtol=2e-6, atol=2e-6)
        wrong = wrong or theirs.shape != want.shape or not torch.allclose(theirs, want, rtol=1e-4, atol=1e-4)
    assert wrong, f"Megatron-core {VERSION} now agrees on {what}: update docs/guide/migrating.md"


def _regions(group, case):
    rank = group.rank()
    with megatron(group) as m:
        copies = (m.copy_to_tensor_model_parallel_region, lambda x: tp_ext.copy_to_region(x, group))
        reduces = (m.reduce_from_tensor_model_parallel_region, lambda x: tp_ext.reduce_from_region(x, group))
        if case == "reduce of a transposed tensor":
            return [region(torch.full((3, 2), rank + 1.0).t()) for region in reduces]
        if case == "reduce leaves its input":
            tensors = [torch.full((2, 3), rank + 1.0) for _ in reduces]
            for region, x in zip(reduces, tensors, strict=True):
                region(x)
            return tensors
        if case == "copy leaves the upstream gradient":
            tensors = [torch.full((2, 3), rank + 1.0) for _ in copies]
            for region, g in zip(copies, tensors, strict=True):
                region(torch.ones(2, 3, requires_grad=True)).backward(g)
            return tensors
        assert case == "copy of an expanded gradient"
        inputs = [torch.ones(2, 3, requires_grad=True) for _ in copies]
        for region, x in zip(copies, inputs, strict=True):
            region(x).sum().backward()
        return [x.grad for x in inputs]


REGIONS = {
    "reduce of a transposed tensor": [torch.full((2, 3), 3.0)] * 2,
    "reduce leaves its input": [torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)],
    "copy leaves the upstream gradient": [torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)],
    "copy of an expanded gradient": [torch.full((2, 3), 2.0)] * 2,
}


@pytest.mark.parametrize("case", REGIONS)
def test_regions(case):
    check(run(_regions, 2, case), REGIONS[case], case)


LOGITS, TARGET = torch.tensor([[0.0, 1, 2, 3], [3, 0, -1, 2]]), torch.tensor([3, 1])


def _loss(group, target, smoothing):
    """Theirs and ours, and whether the logits are as they were."""
    own = LOGITS.chunk(2, -1)[group.rank()].contiguous()
    with megatron(group) as m:
        kept, given = own.clone(), own.clone()
        theirs = m.vocab_parallel_cross_entropy(given, target, 0.75 * smoothing)  # spread over 3 of 4 classes
        options = {"label_smoothing": smoothing, "vocab_size": 4, "reduction": "none"}
        ours = tp_ext.vocab_parallel_cross_entropy(kept, target, group, **options)
    return (theirs, ours), (given, kept)


@pytest.mark.parametrize(("target", "smoothing"), [(TARGET, 0.2), (torch.tensor([3, -100]), 0.0)])
def test_loss_with_label_smoothing_or_ignored_rows(target, smoothing):
    right = F.cross_entropy(LOGITS, target, label_smoothing=smoothing, reduction="none")
    results = [losses for losses, _ in run(_loss, 2, target, smoothing)]
    check(results, [right] * 2, "label smoothing" if smoothing else "ignore_index")


def test_loss_leaves_the_logits():
    results = [logits for _, logits in run(_loss, 2, TARGET, 0.0)]
    check(results, LOGITS.chunk(2, -1), "logits that the loss does not overwrite")


def _gathered(group, ours):
    if ours:
        return tp_ext.vocab_parallel_cross_entropy(LOGITS, TARGET, group, vocab_size=4)
    with megatron(group) as m:
        return m.vocab_parallel_cross_entropy(LOGITS.clone(), TARGET)


def test_loss_of_gathered_logits():
    """The loss of four ids out of eight, too high by about log p; ours refuses."""
    ranks.run_raises(_gathered, 2, ValueError, "logits_local: 4 columns must be .* not the gathered logits", True)
    for loss in run(_gathered, 2, False):
        right = F.cross_entropy(LOGITS, TARGET, reduction="none")
        assert not torch.allclose(loss, right), f"Megatron-core {VERSION} now refuses gathered logits"
        torch.testing.assert_close(loss[0], torch.tensor(1.1333369))


def _ids(group, ours):
    ids = torch.tensor([4, -1])
    if ours:
        return tp_ext.VocabParallelEmbedding(4, 3, group=group)(ids)
    with megatron(group) as m:
        config = layer_config(group)
        return m.VocabParallelEmbedding(4, 3, init_method=nn.init.normal_, config=config)(ids)


def test_ids_outside_the_vocabulary():
    ranks.run_raises(_ids, 2, IndexError, "4", True)
    for y in run(_ids, 2, False):
        assert not y.any(), f"Megatron-core {VERSION} no longer embeds ids outside the vocabulary as zeros"


def _sizes(group, ours):
    if ours:
        layer = tp_ext.ColumnParallelLinear(3, 5, group=group)
        return layer.weight.shape[0]
    with megatron(group) as m:
        m.ColumnParallelLinear(3, 5, init_method=nn.init.normal_, config=layer_config(group))


def test_sizes_that_p_does_not_divide():
    assert run(_sizes, 2, True) == [3, 2]
    # Megatron makes its groups, a collective, and imports itself at first use
    match = "5 is not divisible by 2"
    ranks.run_raises(_sizes, 2, AssertionError, match, False, in_turns=False, timeout=180)


def _unfinished(group, case, dense, norm, x, dy):
    """The gradient of a parameter that all ranks hold, or whose weight is frozen, when backward has returned."""
    p, rank = group.size(), group.rank()
    results = []
    with megatron(group) as m:
        options = {"config": layer_config(group, sp=case != "bias of a frozen column"), "bias": True}
        options["init_method"] = fill(dense.weight.detach())
        if case == "bias of a row":
            theirs = m.RowParallelLinear(4, 6, input_is_parallel=True, skip_bias_add=False, **options)
            ours = tp_ext.RowParallelLinear.from_linear(dense, group=group, sequence_parallel=True)
            for layer in (theirs, ours):
                y = layer(x.chunk(p, -1)[rank].contiguous())
                (y[0] if isinstance(y, tuple) else y).backward(own_tokens(dy, group))
                results.append(layer.bias.grad)
            return results
        theirs = m.ColumnParallelLinear(4, 6, **options)
        if case == "bias of a frozen column":
            ours = tp_ext.ColumnParallelLinear.from_linear(dense, group=group)
            for layer in (theirs, ours):
                layer.weight.requires_grad_(False)
                y = layer(x)
                (y[0] if isinstance(y, tuple) else y).backward(dy.chunk(p, -1)[rank])
                results.append(torch.zeros(0) if layer.bias.grad is None else layer.bias.grad)
            return results
        ours = tp_ext.ColumnParallelLinear.from_linear(dense, group=group, sequence_parallel=True)
        # their norms are torch's or Apex's with a mark on the weight, which Megatron's training loop reads
        norms = nn.LayerNorm(4).double(), tp_ext.LayerNorm(4, group=group, sequence_parallel=True, dtype=x.dtype)
        for layer, one in zip((theirs, ours), norms, strict=True):
            one.load_state_dict(norm)
            y = layer(one(own_tokens(x, group)))
            (y[0] if isinstance(y, tuple) else y).backward(dy.chunk(p, -1)[rank])
            results.append(one.weight.grad)
        return results


@pytest.mark.parametrize("case", ["bias of a row", "weight of a norm", "bias of a frozen column"])
def test_gradients_that_backward_leaves_unfinished(case):
    """Under sequence parallelism each rank has the partial gradient of its own tokens; Megatron's
    finalize_model_grads sums them. Of a frozen weight's bias there is no gradient at all, even on one rank."""
    dense, norm = nn.Linear(4, 6).float().double(), nn.LayerNorm(4).double()
    x, dy = torch.randn(4, 4).double(), torch.randn(4, 6).double()
    dense(norm(x) if case == "weight of a norm" else x).backward(dy)
    right = {
        "bias of a row": [dense.bias.grad] * 2,
        "weight of a norm": [norm.weight.grad] * 2,
        "bias of a frozen column": dense.bias.grad.chunk(2),
    }[case]
    results = run(_unfinished, 2, case, dense, norm.state_dict(), x, dy)
    check(results, right, f"the gradient of the {case}")
    if case != "bias of a frozen column":
        torch.testing.assert_close(sum(theirs for theirs, _ in results), right[0])
