"""Bugs of one line in the kernels of decoding."""

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
]
