"""The sizes of shares, and the errors of :func:`tp_ext.shares`, the same on all ranks."""

import contextlib
import random
from fractions import Fraction
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist

import tp_ext
from tests.helpers import ranks
from tp_ext import common_generator
from tp_ext.debug import simulate
from tp_ext.share_sizes import current_shares, split_sizes


def _by_fractions(n, weights):
    exact = [n * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    sizes = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda rank: (int(exact[rank]) - exact[rank], rank))
    for rank in order[: n - sum(sizes)]:
        sizes[rank] += 1
    return sizes


def test_sizes_are_largest_remainders_of_exact_shares():
    rng = random.Random(1)
    extremes = [0, 1, 3, 0.1, 0.2, 0.3, 1 / 3, 1e308, 5e-324, 2**70, 1e-200]
    for _ in range(3000):
        weights = tuple(
            rng.choice([rng.choice(extremes), rng.random(), rng.randint(0, 9)]) for _ in range(rng.randint(2, 6))
        )
        if any(weights):
            n = rng.choice([0, 1, 2, 7, 128, 50257])
            sizes = split_sizes(n, len(weights), weights)
            assert sizes == _by_fractions(n, weights) and sum(sizes) == n
            assert all(size == 0 for size, weight in zip(sizes, weights, strict=True) if weight == 0)


def test_equal_weights_are_tensor_split():
    for n in range(30):
        for p in range(2, 7):
            sizes = [len(part) for part in torch.arange(n).tensor_split(p)]
            assert split_sizes(n, p, (0.1,) * p) == split_sizes(n, p, (7,) * p) == split_sizes(n, p) == sizes
    assert split_sizes(2, 3, (4, 1, 1)) == [2, 0, 0]


BAD = [
    ([1, -1], ValueError),
    ([0, 0.0], ValueError),
    ([], ValueError),
    ([1, float("nan")], ValueError),
    ([1, float("inf")], ValueError),
    ([1, -float("inf")], ValueError),
    ([numpy.float64("nan"), 1], ValueError),
    ([True, 1], TypeError),
    ([numpy.bool_(True), 1], TypeError),
    (["1", 1], TypeError),
    ([1, None], TypeError),
    ([1, 1j], TypeError),
    ("12", TypeError),
    (3, TypeError),
    ({1: 2}, TypeError),
    ([torch.tensor(1), 1], TypeError),
]


@pytest.mark.parametrize(("weights", "error"), BAD, ids=[repr(weights) for weights, _ in BAD])
def test_weights_that_are_none(weights, error):
    with pytest.raises(error, match="weights: "):
        tp_ext.shares(weights)
    with pytest.raises(TypeError, match="tokens: "):
        tp_ext.shares([1, 1], tokens=2)


def test_contexts_nest():
    given = [numpy.int64(2), numpy.float32(0.5), 1]
    with tp_ext.shares(given):
        assert current_shares().weights == tuple(given)
        with tp_ext.shares(None):
            assert current_shares() is None
        with tp_ext.shares(numpy.array([1, 2]), tokens=False):
            assert current_shares() == ((1, 2), False)
        with contextlib.suppress(RuntimeError), tp_ext.shares([1, 1]):
            raise RuntimeError
        assert tp_ext.ColumnParallelLinear(4, 4, group=None).shares is None
        assert current_shares().weights == tuple(given)
    assert current_shares() is None


LAYERS = {
    "column": lambda group: tp_ext.ColumnParallelLinear(4, 4, group=group),
    "column of a linear": lambda group: tp_ext.ColumnParallelLinear.from_linear(torch.nn.Linear(4, 4), group=group),
    "on meta": lambda group: tp_ext.RowParallelLinear(4, 4, group=group, device="meta"),
    "norm": lambda group: tp_ext.RMSNorm(4, group=group, sequence_parallel=True),
    "dropout": lambda group: tp_ext.Dropout(0.5, group=group),
    "loss": lambda group: tp_ext.VocabParallelCrossEntropy(group=group, vocab_size=8),
    "head": lambda group: tp_ext.VocabParallelLMHead(4, 8, group=group),
    "embedding": lambda group: tp_ext.VocabParallelEmbedding(8, 4, group=group),
    "mlp": lambda group: tp_ext.ParallelMLP(4, 8, group=group),
    "attention": lambda group: tp_ext.ParallelAttention(8, 4, group=group),
    "experts": lambda group: tp_ext.ParallelMoE(4, 8, 2, 1, group=group),
}
DIFFERENT = {  # of the same sizes, too
    "other weights": [[2, 1, 1], [1, 2, 1], [2, 1, 1]],
    "weights of equal sizes": [[1, 1, 1], [1, 1, 1], [2, 2, 2]],
    "a rank outside": [[1, 1, 1], None, [1, 1, 1]],
    "the first rank outside": [None, [1, 1, 1], [1, 1, 1]],
    "one rank inside": [None, None, [1, 1, 1]],
    "a rank outside and other lengths": [None, [1, 1], [1, 1, 1]],
    "other lengths": [[1, 1], [1, 1, 1], [1, 1, 1]],
}


def _raised(rank, group, layer, weights):
    with tp_ext.shares(weights[rank]):
        try:
            module = LAYERS[layer](group)
            with contextlib.suppress(TypeError, AttributeError, RuntimeError):  # None is no tensor
                module(*([torch.ones(3) if layer == "dropout" else None] * (1 + (layer == "loss"))))
        except ValueError as error:
            return str(error)
    return None


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_must_agree(case, layer):
    texts = simulate(_raised, 3, layer, DIFFERENT[case])
    assert len(set(texts)) == 1 and texts[0].startswith("shares: must be the same on all ranks"), texts
    texts = simulate(_raised, 3, layer, [[1, 2]] * 3)
    assert len(set(texts)) == 1 and "[1, 2] are 2 weights" in texts[0] and "p = 3" in texts[0]
    assert simulate(_raised, 3, layer, [[1, 2, 4]] * 3) == [None] * 3


@pytest.mark.parametrize("backend", ["gloo", "tp_shm"])
def test_processes_must_agree(backend):
    right = [[1, 2], [1.0, 2.0]]  # the same numbers
    for texts in ranks.run(_in_group, 2, backend, [right, [[2, 1], [1, 2]], [[2, 1], None], [None, [1]], right]):
        assert texts[0] is None is texts[4] and texts[1].endswith("are [2, 1] on rank 0; [1, 2] on rank 1")
        assert texts[2].endswith("are [2, 1] on rank 0; None on rank 1")
        assert texts[3].endswith("are None on rank 0; [1] on rank 1")


def _over_the_store(group, *arguments):
    with mock.patch.object(common_generator, "device_of", lambda ranks, *_: torch.device("cuda")):
        return [_raised(group.rank(), group, layer, each) for layer, each in arguments]


def test_ranks_that_cannot_communicate_on_the_cpu_agree_by_the_store():
    outside = [("on meta", [None, [1, 2]]), ("norm", [[1, 2], None])]
    for texts in ranks.run(_over_the_store, 2, ("on meta", [[1, 2], [1.0, 2.0]]), *outside, ("norm", [None, None])):
        assert texts[0] is None is texts[3]
        assert texts[1].endswith("are None on rank 0; [1, 2] on rank 1")
        assert texts[2].endswith("are [1, 2] on rank 0; None on rank 1")


def _in_group(_, backend, weights):
    group = dist.new_group(backend=backend)
    result = [_raised(group.rank(), group, "column", each) for each in weights]
    dist.destroy_process_group(group)
    return result


def _alone(group):
    other = dist.new_group()
    if group.rank() == 0:
        tp_ext.RMSNorm(4, group=other)
    total = torch.ones(1)
    dist.all_reduce(total, group=other)
    return total.item()


def test_a_rank_may_build_a_layer_without_shares_alone():
    assert ranks.run(_alone, 2) == [2, 2]


def _tokens_differ(rank, group):
    with tp_ext.shares([1, 1], tokens=rank == 0):
        try:
            tp_ext.RMSNorm(4, group=group)
        except ValueError as error:
            return str(error)


def test_ranks_must_agree_on_tokens():
    texts = simulate(_tokens_differ, 2)
    assert texts[0] == texts[1] and "tokens=False on rank 1" in texts[0]


SP = {
    "column": lambda o: tp_ext.ColumnParallelLinear(8, 8, **o),
    "mlp": lambda o: tp_ext.ParallelMLP(8, 8, **o),
    "moe": lambda o: tp_ext.ParallelMoE(8, 8, 2, 1, **o),
    "dropout": lambda o: tp_ext.Dropout(0.5, **{k: v for k, v in o.items() if k != "dtype"}),
    "head": lambda o: tp_ext.VocabParallelLMHead(8, 8, **o),
    "attention": lambda o: tp_ext.ParallelAttention(8, 2, **o),
    "mla": lambda o: tp_ext.ParallelLatentAttention(
        8, 2, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, **o
    ),
}


def _without_total(rank, group, name):
    with tp_ext.shares([3, 1]):
        layer = SP[name]({"group": group, "sequence_parallel": True})
    keywords = {"batch_size": 1} if name in ("attention", "mla") else {}
    try:
        with tp_ext.debug.count_collectives() as counted:
            layer(torch.ones(4, 8), **keywords)
    except ValueError as error:
        assert counted.number == 0
        return str(error)


@pytest.mark.parametrize("name", SP)
def test_tokens_of_ranks_need_their_total(name):
    texts = simulate(_without_total, 2, name)
    assert texts[0] == texts[1] and texts[0].startswith("total_tokens: None")


REFUSED = {
    "weight_group": lambda g: tp_ext.ColumnParallelLinear(4, 4, group=g["tp"], weight_group=g["dp"]),
    "activations": lambda g: tp_ext.RowParallelLinear(4, 4, group=g["tp"], activations="hidden"),
    "pad_to_multiple_of": lambda g: tp_ext.VocabParallelEmbedding(9, 4, group=g["tp"], pad_to_multiple_of=4),
    "context_group": lambda g: tp_ext.ParallelAttention(4, 4, group=g["tp"], context_group=g["dp"]),
    "expert_group": lambda g: tp_ext.ParallelMoE(4, 4, 4, 1, group=g["tp"], expert_group=g["dp"]),
    "shares": lambda g: tp_ext.ColumnParallelLinear(4, 4, group=g["tp"], parts=[tp_ext.Part(4, copies=2)]),
    "vocab_size": lambda g: tp_ext.VocabParallelCrossEntropy(group=g["tp"]),
}


def _refused(rank, mesh, name):
    with tp_ext.shares([2, 1]):
        try:
            REFUSED[name](mesh)
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("name", REFUSED)
def test_options_without_shares_are_refused_by_name(name):
    texts = simulate(_refused, {"dp": 2, "tp": 2}, name)
    assert len(set(texts)) == 1 and texts[0].startswith(f"{name}: "), texts
