"""Bugs of one line in plans of unchanged models: calls by other code than forward, numbers read of parameters."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("tp_ext/auto")
CALLS = "auto/test_direct_calls.py::test_whole_tensors_and_complete_gradients"
REFUSED = "auto/test_direct_calls.py::test_what_cannot_be_converted_is_refused"

AUTO_BUGS = [
    _bug(
        "direct_call_leaves_partial_gradients",
        "search/direct_calls.py",
        "if PARTIAL in self.gradients(tensor, inside=True)]",
        "if False]",
        "A head called by other code leaves the gradient of its argument partial.",
        f"{CALLS}[a head alone-False]",
    ),
    _bug(
        "direct_call_with_complete_gradient",
        "search/direct_calls.py",
        "return PARTIAL in types",
        "return False",
        "A norm before two column layers sums the complete gradients of other code.",
        f"{CALLS}[a norm before two layers-False]",
    ),
    _bug(
        "direct_call_of_gathered_tokens",
        "search/direct_calls.py",
        "if gather is not None and gather.whole is R:",
        "if False:",
        "With all tokens the gradient at a gather of tokens counts as complete.",
        f"{CALLS}[a norm before two layers-auto]",
    ),
    _bug(
        "direct_call_next_to_sizes_of_a_rank",
        "search/direct_calls.py",
        "if name in local:",
        "if False:",
        "A method that reads the heads of a rank gets the features of all ranks.",
        f"{REFUSED}[a method that reads heads of a rank]",
    ),
    _bug(
        "direct_call_in_backward",
        "modules/direct_calls.py",
        "return not in_backward",
        "return True",
        "What backward recomputes converts as a call by other code.",
        "auto/test_direct_calls.py::test_recomputation_inside_of_forward",
    ),
    _bug(
        "number_that_is_branched_on",
        "search/reasons.py",
        "return next(calls) != next(calls)",
        "return False",
        "A plan holds for the values that a parameter had.",
        "auto/test_numbers.py::test_what_follows_of_the_value_is_refused",
    ),
]
