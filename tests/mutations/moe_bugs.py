"""Bugs of one line in the operators of a mixture of experts."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("csrc")

MOE_BUGS = [
    _bug(
        "moe_rows_not_cleared",
        "cpu/moe_permute.cpp",
        "if (!used[r]) std::memset(to + r * row_bytes, 0, row_bytes);",
        "if (!used[r]) std::memset(to + r * row_bytes, 1, row_bytes);",
        "Rows without a slot are not zeros.",
        "kernels/test_moe_permute.py::test_values_and_gradients",
    ),
    _bug(
        "moe_sort_by_the_last_expert",
        "cpu/moe_sort.cpp",
        "next[e] = next[e - 1] + count[e - 1];",
        "next[e] = next[e - 1] + count[e];",
        "An expert's rows start at the wrong place.",
        "kernels/test_moe_permute.py::test_sort_is_stable",
    ),
    _bug(
        "moe_gradient_without_weights",
        "autograd/moe_permute.cpp",
        "result[0] = moe_unpermute(dy, saved[0], optional(saved[1]));",
        "result[0] = moe_unpermute(dy, saved[0], std::nullopt);",
        "The gradient of the tokens misses the weights.",
        "kernels/test_moe_permute.py::test_values_and_gradients",
    ),
    _bug(
        "cuda_moe_unused_rows",
        "kernels/moe_permute.cuh",
        "slot_of[first + lane] < 0;",
        "slot_of[first + lane] < -1;",
        "Rows without a slot are not written.",
        "emulation/test_emulation.py::test_kernels[experts]",
    ),
]
