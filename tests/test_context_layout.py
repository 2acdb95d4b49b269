"""ContextLayout: which tokens each rank holds, and tensors cut and put together by it, with their gradients."""

import copy
import pickle
import random

import pytest
import torch

from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tp_ext import ContextLayout

pytestmark = pytest.mark.core

SEEDS = range(200)
TINY = [[], [0], [1], [1, 1, 1], [2, 0, 1], [3], [4], [0, 5, 0], [7], [13, 1, 0, 6]]


def layouts(p, *lengths, **options):
    """Returns the layouts of ranks 0, 1, .. of a group that need not exist, since a layout communicates nothing."""
    return [ContextLayout(*lengths, group=f"any@{rank}/{p}", **options) for rank in range(p)]


def drawn(seed):
    r = random.Random(seed)
    return r.randint(1, 6), [r.choice([0, 1, 2, r.randint(0, 9), r.randint(0, 70)]) for _ in range(r.randint(0, 12))]


def tokens_of(lengths):
    """(sequence, position) of each token."""
    return [(s, i) for s, n in enumerate(lengths) for i in range(n)]


def held(layout):
    """(sequence, position) of each token of the rank, from the public attributes."""
    sequences = [s for s, n in enumerate(layout.local_lengths) for _ in range(n)]
    return list(zip(sequences, layout.positions.tolist(), strict=True))


@pytest.mark.parametrize("balance", [True, False])
def test_each_token_is_on_one_rank_and_all_have_equally_many(balance):
    for p, lengths in [*map(drawn, SEEDS), *((p, one) for p in (1, 2, 3, 4) for one in TINY)]:
        every = layouts(p, lengths, balance=balance)
        found = [held(layout) for layout in every]
        assert sorted(token for own in found for token in own) == tokens_of(lengths)
        assert all(own == sorted(own) for own in found), "the tokens of a rank stay in order"
        sizes = every[0].sizes
        assert sizes == tuple(map(len, found)) and max(sizes) - min(sizes) <= 1
        assert all((one.sizes, one.tokens, one.lengths) == (sizes, sum(lengths), tuple(lengths)) for one in every)


def test_a_rank_holds_a_chunk_from_each_end_of_a_sequence():
    first, second, third = (held(layout) for layout in layouts(3, [12]))
    assert [[i for _, i in own] for own in (first, second, third)] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert [one.positions.tolist() for one in layouts(3, [12], balance=False)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_balanced_ranks_have_equally_much_to_attend_to(p):
    """A token attends to itself and those before it: position + 1 keys."""
    work = [(layout.positions + 1).sum().item() for layout in layouts(p, [64 * p])]
    assert len(set(work)) == 1
    contiguous = [(layout.positions + 1).sum().item() for layout in layouts(p, [64 * p], balance=False)]
    assert max(contiguous) > 1.4 * max(work)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_sequences_of_a_batch_are_cut_alike(p):
    for batch in (0, 1, 3):
        for seq in (0, 1, 2, 7, 20):
            for one, alone in zip(layouts(p, batch=batch, seq=seq), layouts(p, [seq]), strict=True):
                assert one.positions.tolist() == alone.positions.tolist() * batch
                assert one.local_lengths == alone.local_lengths * batch
                assert one.sizes == tuple(batch * n for n in alone.sizes)
                assert one.lengths == (seq,) * batch and one.tokens == batch * seq


def test_lengths_may_be_a_tensor():
    assert ContextLayout(torch.tensor([3, 0, 4], dtype=torch.int32), group=None).lengths == (3, 0, 4)


def test_one_rank_holds_everything_in_order():
    layout = ContextLayout([3, 0, 2], group=None)
    x = torch.arange(5)
    assert layout.positions.tolist() == [0, 1, 2, 0, 1]
    assert layout.shard(x) is x and layout.unshard(x) is x


def test_copies_and_pickles():
    layout = ContextLayout([3, 0, 4], group="any@1/2")
    for other in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert repr(other) == repr(layout) == "ContextLayout(3 sequences, tokens=7, p=2, rank=1, balance=True)"
        assert other.positions.equal(layout.positions)


def _round_trips(group, lengths, options, shapes):
    """For each shape with a dim: shard picks the tokens that the attributes name, unshard is its inverse, and their
    gradients are those of replicated work."""
    layout = ContextLayout(*lengths, group=group, **options)
    places = {token: i for i, token in enumerate(tokens_of(layout.lengths))}
    own = torch.tensor([places[token] for token in held(layout)], dtype=torch.long)
    for shape, dim, of_one in shapes:
        index = own[: len(own) // layout.batch] if of_one else own
        full = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        x = layout.shard(full, dim)
        assert x.equal(full.index_select(dim, index))
        weights = torch.randn_like(full)  # the same on all ranks
        (dx,) = torch.autograd.grad(x, full, weights.index_select(dim, index))
        assert dx.equal(weights), "the gradient of a replicated tensor is complete on every rank"
        again = layout.unshard(x.detach().requires_grad_(), dim)
        assert again.equal(full)
        y = x.detach().requires_grad_()
        (dy,) = torch.autograd.grad(layout.unshard(y, dim), y, weights)
        assert dy.equal(weights.index_select(dim, index))
        ids = torch.arange(full.numel()).view(shape)
        assert layout.unshard(layout.shard(ids, dim), dim).equal(ids)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("balance", [True, False])
def test_sharded_and_put_together_again(p, balance):
    for lengths in [*TINY, *(drawn(seed)[1] for seed in range(8))]:
        n = sum(lengths)
        shapes = [((n,), 0, False), ((n, 3), 0, False), ((2, n), 1, False), ((2, n, 3), -2, False)]
        ranks.run(_round_trips, p, (lengths,), {"balance": balance}, shapes)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_a_batch_sharded_and_put_together_again(p):
    for batch, seq in [(1, 7), (3, 5), (2, 1), (2, 8), (2, 0)]:
        shapes = [((batch * seq, 3), 0, False), ((batch, seq), 1, True), ((batch, seq, 3), -2, True)]
        ranks.run(_round_trips, p, (), {"batch": batch, "seq": seq}, shapes)


@on_ranks(2)
def test_communicates_one_gather(group):
    from tp_ext.debug import count_collectives

    layout = ContextLayout([5, 3], group=group)
    with count_collectives() as counts:
        x = layout.shard(torch.ones(8, 2, requires_grad=True))
    assert counts.number == 0
    with count_collectives() as counts:
        layout.unshard(x.detach())
    assert counts.by_kind() == {"all_gather": 1} and counts.payload_bytes == 8 * 2 * 4
    with count_collectives() as counts:
        x.sum().backward()
    assert counts.by_kind() == {"all_gather": 1}


@pytest.mark.parametrize(
    ("call", "exception", "match"),
    [
        (lambda g: ContextLayout(group=g), ValueError, "lengths: None must be given, or batch = None and seq = None"),
        (lambda g: ContextLayout([1], batch=1, seq=1, group=g), ValueError, r"\[1\] must be given, or batch = 1"),
        (lambda g: ContextLayout(batch=2, group=g), ValueError, "batch = 2 and seq = None"),
        (lambda g: ContextLayout([3, -1], group=g), ValueError, "lengths: -1 must not be negative"),
        (lambda g: ContextLayout([3, 1.0], group=g), TypeError, "lengths: 1.0 must be an integer"),
        (lambda g: ContextLayout(batch=1, seq=True, group=g), TypeError, "seq: True must be an integer"),
        (lambda g: ContextLayout([3], group=3), TypeError, "group: 3 must be"),
        (lambda g: ContextLayout(3, group=g), TypeError, "lengths: 3 must be a sequence of integers"),
        (lambda g: ContextLayout([3], group=g, balance="yes"), TypeError, "balance: 'yes' must be True or False"),
        (lambda g: ContextLayout([2], group=g).shard([1, 2]), TypeError, "x: list must be a tensor"),
        (lambda g: ContextLayout([2], group=g).unshard(3), TypeError, "x: int must be a tensor"),
        (lambda g: ContextLayout([3], group=g).shard(torch.ones(3), dim="0"), TypeError, "dim: '0' must be an integer"),
        (lambda g: ContextLayout([3], group=g).shard(torch.ones(4)), ValueError, "x: 4 elements .* must be the 3"),
        (lambda g: ContextLayout([3], group=g).shard(torch.ones(3), 1), IndexError, r"dim: 1 must be in \[-1, 1\)"),
        (lambda g: ContextLayout(batch=2, seq=3, group=g).shard(torch.ones(4)), ValueError, "the 6 .* or the 3 of one"),
        (lambda g: ContextLayout([4], group=g).unshard(torch.ones(3)), ValueError, "x: 3 .* must be the 2 tokens"),
        (
            lambda g: ContextLayout(batch=2, seq=4, group=g).unshard(torch.ones(2, 4), 1),
            ValueError,
            "the 2 tokens of one sequence",
        ),
    ],
)
def test_refuses_shapes_that_do_not_fit(call, exception, match):
    with pytest.raises(exception, match=match):
        call("any@0/2")
