"""Bugs of one line in the kernels of decoding, and in the choice of tokens."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("csrc")

DECODING_BUGS = [
    _bug(
        "attention_of_the_last_values_lost",
        "cpu/query_attention.cpp",
        "for (; j < p.keys; ++j) add_values<T, 1>(p, j);",
        "",
        "Values after the last four are not added.",
        "nn/attention/test_scaled_dot_product.py::test_few_queries",
    ),
    _bug(
        "skinny_linear_of_the_last_outputs_lost",
        "cpu/skinny_linear.cpp",
        "for (; n < end; ++n) block<T, 1, kX>(p, n, 0);",
        "",
        "A linear of a few rows leaves out the last outputs, if 6 does not divide their number.",
        "kernels/test_skinny_linear.py::test_values",
    ),
    _bug(
        "skinny_linear_adds_the_bias_of_each_rank",
        "autograd/linear.cpp",
        "comm::all_reduce_fresh(skinny_linear_cpu(x, weight, std::nullopt), group),",
        "comm::all_reduce_fresh(skinny_linear_cpu(x, weight, bias), group),",
        "In decoding a row linear adds its bias once on each rank, and once more.",
        "kernels/test_skinny_linear.py::test_layers",
    ),
    _bug(
        "argmax_local_id",
        "autograd/vocab_sampling.cpp",
        "index.flatten() + columns.start",
        "index.flatten()",
        "The argmax is an index in the rank's columns instead of an id.",
        "nn/test_sampling.py::test_argmax_is_that_of_torch_of_equal_logits_the_first",
    ),
    _bug(
        "sampling_noise_offset",
        "autograd/vocab_sampling.cpp",
        "columns.full, columns.start);",
        "columns.full, 0);",
        "All ranks add the same noise to different columns.",
        "nn/test_sampling.py::test_tokens_are_the_same_for_every_p_and_every_cut",
    ),
    _bug(
        "sampling_ties",
        "autograd/vocab_sampling.cpp",
        "if (ties.defined()) total = ",
        "if (false) total = ",
        "The mass of top_p leaves out ids that are as likely as the k-th.",
        "nn/test_sampling.py",
    ),
]
