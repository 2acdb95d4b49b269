"""Bugs of one line in programs on a mesh."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("tp_ext")
RANDOM = "mesh_program/test_random_programs.py::test_values_and_gradients"
SPMD = "mesh_program/test_spmd.py"

MESH_PROGRAM_BUGS = [
    _bug(
        "pvary_without_a_sum",
        "mesh_program/varying.py",
        "value = regions.copy_to(value, group)",
        "pass",
        "The gradient of a value that does not vary is that of one rank's uses.",
        RANDOM,
    ),
    _bug(
        "psum_still_varies",
        "lax.py",
        "if varies or name not in groups}",
        "}",
        "The result of a psum counts as varying: its uses are summed, and P() is refused.",
        RANDOM,
    ),
    _bug(
        "failure_of_a_result_is_kept",
        "mesh_program/spmd.py",
        "(failure is not None, len(shapes))",
        "(False, len(shapes))",
        "The other ranks do not learn that a result did not fit on one of them.",
        "repo/test_errors_on_one_rank.py::test_what_the_ranks_agree_on[no dim-simulated]",
    ),
    _bug(
        "false_claim_accepted",
        "mesh_program/spmd.py",
        "if axis in self.groups and axis not in spec.axes:",
        "if False:",
        "A result that differs between ranks is returned as replicated.",
        f"{SPMD}::test_a_result_falsely_claimed_replicated_is_named_with_its_line",
    ),
    _bug(
        "outermost_axis_joined_first",
        "mesh_program/spmd.py",
        "for axis in reversed(axes):\n                group = self.groups[axis]\n                if group.size > 1:",
        "for axis in axes:\n                group = self.groups[axis]\n                if group.size > 1:",
        "A dim sharded over two axes is joined in another order than it was sharded in.",
        RANDOM,
    ),
    _bug(
        "gather_outermost_first",
        "lax.py",
        "reversed(groups) if inner_first else groups",
        "groups",
        "all_gather over two axes has its blocks in another order.",
        f"{SPMD}::test_several_axes",
    ),
    _bug(
        "maximum_not_shared",
        "lax.py",
        "return regions.copy_to(dy, ctx.group.name) * _share_of_saved(ctx), None",
        "return regions.copy_to(dy, ctx.group.name) * (_share_of_saved(ctx) > 0), None",
        "Equal maxima of several ranks each get the whole gradient.",
        RANDOM,
    ),
    _bug(
        "gradients_inside_are_plain",
        "mesh_program/varying.py",
        "return tuple(typed(grad, axes_of(x)) for grad, x in zip(gradients, each, strict=True))",
        "return gradients",
        "A gradient taken inside of a map no longer varies as its input.",
        f"{SPMD}::test_gradients_inside_of_a_map",
    ),
    _bug(
        "recomputed_in_the_latest_map",
        "mesh_program/scope.py",
        "if run.begin <= number and (innermost",
        "if (innermost",
        "A part of a map that is computed again in backward takes the axes of another map.",
        f"{SPMD}::test_checkpointing_inside_and_outside",
    ),
]
