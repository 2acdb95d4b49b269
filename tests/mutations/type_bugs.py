"""Bugs of one line in the types of operators for ``spmd_types``."""

from tests.mutations.mutation import Mutation

TESTS = "debug/test_type_check.py"

TYPE_BUGS = [
    Mutation(
        "type_of_a_copied_value",
        "tp_ext/debug/type_rules.py",
        "return converted(x, group, Type.I, Type.R)",
        "return x",
        "A replicated value stays invariant where each rank computes another part with it.",
        (f"{TESTS}::test_every_collective_of_a_layer_is_needed",),
    ),
    Mutation(
        "bias_of_tokens_is_not_copied",
        "tp_ext/debug/type_rules.py",
        'activations == "tokens" and sum_bias_grad:',
        'activations == "other" and sum_bias_grad:',
        "The bias of a row linear under sequence parallelism has no region in front.",
        (f"{TESTS}::test_every_collective_of_a_layer_is_needed",),
    ),
    Mutation(
        "types_of_replicated_parameters",
        "tp_ext/debug/type_check.py",
        "spmd.I if axis in own and",
        "spmd.I if axis not in own and",
        "Replicated parameters are R along the axis of tensor parallelism.",
        (f"{TESTS}::test_every_collective_of_a_layer_is_needed", f"{TESTS}::test_programs"),
    ),
    Mutation(
        "any_type_as_input_of_a_column_linear",
        "tp_ext/debug/type_rules.py",
        "return spmd_types.assert_type(x, {process_group(group): R}) if group else x",
        "return x",
        "A column linear takes shards for all tokens, of local types.",
        (f"{TESTS}::test_every_collective_of_a_layer_is_needed",),
    ),
    Mutation(
        "returned_argument_gets_another_type",
        "tp_ext/debug/type_check.py",
        "return y.view_as(y) if any(y is argument for argument in arguments) else y",
        "return y",
        "An operator that returns its argument changes the type of the argument.",
        (f"{TESTS}::test_programs",),
    ),
    Mutation(
        "integers_without_a_type",
        "tp_ext/debug/type_check.py",
        "if isinstance(one, Tensor) and not (one.is_floating_point() or one.is_complex()):",
        "if isinstance(one, Tensor) and False:",
        "Positions and lengths need types of the user's.",
        (f"{TESTS}::test_programs",),
    ),
]
