"""Published bugs of the mean over tokens: of ranks, microbatches and shards of a sequence that have unequal numbers of
them, against the loss and gradients of the whole batch in one process, in fp64."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.right_and_wrong import check

VOCAB, HIDDEN, SEQ = 7, 4, 6
IGNORED = -100


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, VOCAB)).double()


def batch(replicas):
    """ids and target of each replica, ``[2, SEQ]``: the first sequences have few valid tokens."""
    generator = torch.Generator().manual_seed(4)
    ids, target = torch.randint(VOCAB, (2, replicas, 2, SEQ), generator=generator)
    for i, sequence in enumerate(target.flatten(0, 1)):
        sequence[1 + i :] = IGNORED
    return ids, target


def mean(logits, target):
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def gradients(net):
    return [param.grad.clone() for param in net.parameters()]


def of_one_process(ids, target):
    net = model()
    loss = mean(net(ids.flatten(0, -2)), target)
    loss.backward()
    return [loss.detach(), *gradients(net)]


def _trained(group, ids, target):
    mesh = tp_ext.init_mesh("cpu")
    run = tp_ext.parallelize(model(), mesh, microbatches=2, loss=mean)
    loss = run.step(ids[run.data_rank], target[run.data_rank])
    ours = [loss, *gradients(run.state)]
    net, losses = model(), []
    for one, goal in zip(ids[run.data_rank], target[run.data_rank], strict=True):
        losses.append(mean(net(one), goal) / 2)  # the number of accumulation steps
        losses[-1].backward()
    published = [sum(losses).detach(), *gradients(net)]
    for tensor in published:
        dist.all_reduce(tensor)
        tensor /= group.size()  # DDP and FSDP2 take the mean
    return ours, published


def test_gradient_accumulation_weights_tokens_and_not_microbatches():
    """The Trainer averaged the means of the accumulation steps, so that a token of a short sequence weighed more than
    one of a long sequence: https://github.com/huggingface/transformers/pull/34191."""
    ids, target = batch(1)
    check(ranks.run(_trained, 1, ids, target), of_one_process(ids, target))


def test_data_parallel_ranks_with_unequal_numbers_of_tokens():
    """Each rank and microbatch divided its loss by its own number of valid tokens, and gradients were averaged:
    https://github.com/pytorch/torchtitan/pull/2206."""
    ids, target = batch(2)
    check(ranks.run(_trained, 2, ids, target), of_one_process(ids, target))


def _over_context(group, ids, target, published):
    """The mean loss and its gradients with the tokens of a sequence on two ranks, ours or as published."""
    mesh = tp_ext.init_mesh("cpu", cp=2)
    layout = tp_ext.ContextLayout([SEQ], group=mesh["cp"], balance=False)
    mean_over = {} if published == "local means" else {"mean_over": mesh["cp"]}
    if published == "shifted shards":
        own = layout.shard(ids)
        own_target = F.pad(own[1:], (0, 1), value=IGNORED)
    else:
        own, own_target = layout.shard(ids), layout.shard(target)
    net = model()
    loss = tp_ext.vocab_parallel_cross_entropy(net(own), own_target, None, vocab_size=VOCAB, **mean_over)
    loss.backward()
    found = [loss.detach(), *gradients(net)]
    for tensor in found[1:] if mean_over else found:
        dist.all_reduce(tensor)
        tensor /= group.size()
    return found


def _both_over_context(group, ids, target, published):
    return _over_context(group, ids, target, ""), _over_context(group, ids, target, published)


def test_context_ranks_with_unequal_numbers_of_tokens():
    """Each context-parallel rank divided the sum of its losses by its own number of unmasked tokens:
    https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 9."""
    ids, target = (one[0, 0] for one in batch(1))
    target[1:4] = ids[2:5]  # four tokens of six count, three of them on one rank
    check(ranks.run(_both_over_context, 2, ids, target, "local means"), of_one_process(ids[None], target))


def test_labels_are_shifted_before_the_sequence_is_cut():
    """The model shifted the labels of each rank's shard, so that the last token of each had no label:
    https://github.com/huggingface/transformers/pull/36607."""
    ids = batch(1)[0][0, 0]
    target = F.pad(ids[1:], (0, 1), value=IGNORED)
    check(ranks.run(_both_over_context, 2, ids, target, "shifted shards"), of_one_process(ids[None], target))


SMOOTHING = 0.2


def _smoothed(group, logits, target):
    results = []
    for ours in (True, False):
        own = logits.chunk(2, -1)[group.rank()].clone().requires_grad_()
        options = {"reduction": "none", "vocab_size": logits.shape[-1]}
        if ours:
            loss = tp_ext.vocab_parallel_cross_entropy(own, target, group, label_smoothing=SMOOTHING, **options)
        else:
            plain = tp_ext.vocab_parallel_cross_entropy(own, target, group, **options)
            largest = tp_ext.all_gather_region(own.detach().amax(-1, keepdim=True), group, -1).amax(-1, keepdim=True)
            total = tp_ext.reduce_from_region((own - largest).exp().sum(-1, keepdim=True), group)
            log_probabilities = own - largest - total.log()
            share = SMOOTHING * own.shape[-1] / (own.shape[-1] - 1)  # of the vocabulary of this rank
            loss = (1 - share) * plain - share * log_probabilities.mean(-1)
        loss.sum().backward()
        results.append([loss.detach(), tp_ext.gather_from_region(own.grad, group)])
    return results


def test_label_smoothing_is_spread_over_the_whole_vocabulary():
    """Label smoothing took this rank's shard of the vocabulary for all of it, so that the loss differs between
    tensor-parallel ranks: https://github.com/NVIDIA/Megatron-LM/issues/7464."""
    torch.manual_seed(5)
    logits = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 5, 7])
    loss = F.cross_entropy(logits, target, label_smoothing=SMOOTHING, reduction="none")
    loss.sum().backward()
    check(ranks.run(_smoothed, 2, logits.detach(), target), [loss.detach(), logits.grad])


def both_sums(net, ids, target):
    """The sums of the losses of the next token and of the one after it, and the numbers of their labels."""
    labels = torch.stack([target, tp_ext.next_tokens(target, 1, fill=IGNORED)[..., 0]])
    logits = net(ids).flatten(0, -2)
    sums = [F.cross_entropy(logits, one.flatten(), ignore_index=IGNORED, reduction="sum") for one in labels]
    return torch.stack(sums), (labels != IGNORED).flatten(1).sum(1)


def _multi_token(group, ids, target, published):
    mesh, rank = tp_ext.init_mesh("cpu"), group.rank()
    further = tp_ext.next_tokens(target, 1, fill=IGNORED)
    labels = torch.cat([target[..., None], further], -1)

    def loss(logits, goal):
        rows = [goal[..., i].flatten() for i in range(2)]
        options = {"ignore_index": IGNORED, "reduction": "sum"}
        return torch.stack([F.cross_entropy(logits.flatten(0, -2), one, **options) for one in rows])

    def count(goal):
        return (goal != IGNORED).flatten(0, -2).sum(0)

    run = tp_ext.parallelize(model(), mesh, microbatches=2, loss=loss, reduction="sum", count=count)
    value = run.step(ids[rank], labels[rank])
    ours = [value, *gradients(run.state)]
    net = model()
    sums, own = both_sums(net, ids[rank], target[rank])
    tokens = own[:1].clone()
    dist.all_reduce(tokens)
    if published == "local numbers":
        sums = sums * torch.stack([torch.ones(()), own[0] / own[1]])
    wrong = (sums / tokens).sum()
    wrong.backward()
    found = [wrong.detach(), *gradients(net)]
    for tensor in found:
        dist.all_reduce(tensor)
    return ours, found


def of_both(ids, target):
    net = model()
    sums, counts = both_sums(net, ids.flatten(0, -2), target.flatten(0, -2))
    loss = (sums / counts).sum()
    loss.backward()
    return [loss.detach(), *gradients(net)]


def test_each_depth_of_multi_token_prediction_has_its_own_number_of_tokens():
    """The losses of multi-token prediction were divided by the number of labels of the next token, of which there are
    more: https://github.com/NVIDIA/Megatron-LM/issues/2417."""
    ids, target = batch(2)
    check(ranks.run(_multi_token, 2, ids, target, "number of the next token"), of_both(ids, target))


def test_multi_token_prediction_counts_the_tokens_of_all_data_ranks():
    """The loss of multi-token prediction was scaled by the numbers of valid tokens of each data-parallel rank, which
    gives 14/3 for 4: https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 3."""
    ids, target = batch(2)
    check(ranks.run(_multi_token, 2, ids, target, "local numbers"), of_both(ids, target))
