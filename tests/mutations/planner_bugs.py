"""Bugs of one line in the planner."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("tp_ext/planner")
SIZES = "planner/test_trace.py::test_a_model_has_the_operators_of_its_sizes"

PLANNER_BUGS = [
    _bug(
        "calibrate_squares",
        "calibrate.py",
        "_HUBER = 1.345 ",
        "_HUBER = 1e9 ",
        "A row that no constants explain spoils the others.",
        "planner/test_calibrate.py::test_a_row_that_lost_time_elsewhere_does_not_spoil_the_others",
    ),
    _bug(
        "trace_row_is_replicated",
        "operators.py",
        '            return "row"\n',
        '            return "replicated"\n',
        "A linear of sharded inputs counts as one that every rank computes.",
        f"{SIZES}[plain]",
    ),
    _bug(
        "trace_attention_saved_twice",
        "operators.py",
        "for value in (*node.reads, *node.makes)}",
        "for value in node.reads}",
        "The result of attention counts as saved by attention and by the linear after it.",
        f"{SIZES}[plain]",
        "planner/test_trace.py::test_saved_bytes_are_those_that_autograd_saves",
    ),
    _bug(
        "trace_slice_reads_all",
        "graph.py",
        "part = tensor if tensor.numel() < root.numel() else part",
        "part = root",
        "A kernel that reads a slice counts the bytes of the whole tensor.",
        f"{SIZES}[phi3]",
    ),
    _bug(
        "trace_stand_in_of_another_call",
        "trace.py",
        "fits.append(stands_for in calls and calls[stands_for][0] == _kinds((args, kwargs)))",
        "fits.append(stands_for in calls)",
        "A block that is called with other arguments counts as the one before it.",
        "planner/test_trace.py::test_blocks_that_are_called_in_other_ways_run",
    ),
]
