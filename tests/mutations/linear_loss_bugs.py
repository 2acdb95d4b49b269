"""Bugs of one line in the loss without logits."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("csrc")

LINEAR_LOSS_BUGS = [
    _bug(
        "linear_cross_entropy_saved_gradient",
        "autograd/linear_cross_entropy_mean.cpp",
        "return cast(as_saved ? from : from.mul(scale), dtype);",
        "return cast(as_saved ? from : from.mul_(scale), dtype);",
        "Backward of the loss without logits scales its saved gradients in place.",
        "nn/test_linear_cross_entropy.py::test_every_option_with_even_uneven_and_padded_vocabularies",
    ),
    _bug(
        "linear_cross_entropy_dx_not_summed",
        "autograd/linear_cross_entropy_grads.h",
        ": comm::all_reduce_async(part, call_.group));",
        ': comm::all_reduce_async(part, ""));',
        "The gradient of the hidden states is that of this rank's columns.",
        "nn/test_linear_cross_entropy.py::test_every_option_with_even_uneven_and_padded_vocabularies",
    ),
    _bug(
        "few_rows_last_columns",
        "cpu/few_rows_gemm.cpp",
        "const int64_t depth = std::min(deep, vocab - v);",
        "const int64_t depth = std::min(deep, vocab - v) / 4 * 4;",
        "The gradient of the hidden states leaves out the last columns of a vocabulary that 4 does not divide.",
        "kernels/test_vocab_chunk.py::test_products",
    ),
]
