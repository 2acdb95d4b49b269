"""Bugs of one line in what cuts sequences over a context group and attends to them."""

from tests.mutations.mutation import Mutation

LAYOUT, FUNCTION, LAYER = (
    "test_context_layout.py",
    "nn/attention/test_context_attention.py",
    "nn/attention/test_attention_context.py",
)

CONTEXT_BUGS = [
    Mutation(
        "context_remainder_to_the_first",
        "tp_ext/context_layout.py",
        "by_load = sorted(range(p), key=rank_lengths.__getitem__)",
        "by_load = list(range(p))",
        "The remainders of all sequences go to the first ranks: a thousand short documents are all on rank 0.",
        (f"{LAYOUT}::test_each_token_is_on_one_rank_and_all_have_equally_many",),
    ),
    Mutation(
        "context_unshard_order",
        "tp_ext/context_layout.py",
        ".index_select(dim, inverse_order(order))",
        ".index_select(dim, order)",
        "unshard applies the order of the cut once more.",
        (f"{LAYOUT}::test_sharded_and_put_together_again",),
    ),
    Mutation(
        "context_positions",
        "tp_ext/context_layout.py",
        "self._places(mine, within=True).repeat(copies)",
        "self._places(mine, within=False).repeat(copies)",
        "Positions do not restart at each document.",
        (f"{LAYOUT}::test_each_token_is_on_one_rank_and_all_have_equally_many",),
    ),
    Mutation(
        "context_later_rank",
        "csrc/autograd/context_tiles.h",
        "if (causal && owner > rank) first = 1;",
        "if (causal && owner > rank) first = 0;",
        "The first chunk attends to tokens after it.",
        (f"{FUNCTION}::test_every_length",),
    ),
    Mutation(
        "context_merge",
        "csrc/autograd/attention_tile.cpp",
        "at::logaddexp(a.lse, b.lse)",
        "a.lse",
        "The weight of a merged result is that of its first part.",
        (f"{FUNCTION}::test_every_length",),
    ),
    Mutation(
        "context_gradient_on_its_way",
        "csrc/autograd/context_attention.cpp",
        "if (arriving) sum = sum.add(arriving->wait());",
        "if (arriving) arriving->wait();",
        "The gradient of a block is that of the last rank it has visited, and of its own.",
        (f"{FUNCTION}::test_every_length",),
    ),
    Mutation(
        "context_dropout_index",
        "csrc/autograd/attention_tile.cpp",
        "(head * length + tile.q_start) * length + tile.k_start",
        "(head * length + tile.q_start) * length",
        "All blocks of keys have the dropout masks of the first.",
        (f"{FUNCTION}::test_dropout_masks_are_those_of_one_rank",),
    ),
    Mutation(
        "sum_gradients_missing",
        "tp_ext/parallel/gradient_sum.py",
        "dist.all_reduce(kinds, dist.ReduceOp.MAX, group=pg)",
        "pass",
        "Ranks with different sets of gradients sum different parameters.",
        (f"{LAYER}::test_sum_gradients",),
    ),
    Mutation(
        "gradients_of_other_dtypes",
        "tp_ext/parallel/gradient_sum.py",
        "if least not in (most, _ANY):",
        "if False:",
        "A rank with other gradients than the others waits for them.",
        ("repo/test_errors_on_one_rank.py::test_what_the_ranks_agree_on[main_grad of a rank-simulated]",),
    ),
]
