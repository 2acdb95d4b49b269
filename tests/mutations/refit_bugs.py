"""Bugs of one line in moves of weights between layouts."""

from tests.mutations.mutation import mutation_in

_bug, _in_cpp = mutation_in("tp_ext/refit"), mutation_in("csrc")
CHANGED = "refit/test_refit_plan_errors.py::test_run_refuses_what_has_changed"
ROUTES = "refit/test_routes.py::test_"

REFIT_BUGS = [
    _bug(
        "refit_receives_what_it_holds",
        "routes.py",
        "sender = rank if rank in holders else self._sender(rank, holders)",
        "sender = self._sender(rank, holders)",
        "A rank gets elements from another that its own source holds.",
        f"{ROUTES}what_a_rank_holds_it_copies",
    ),
    _bug(
        "refit_from_any_host",
        "routes.py",
        "return min(near or holders,",
        "return min(holders,",
        "A holder on another host sends, although there is one on the same host.",
        f"{ROUTES}the_holder_on_the_same_host_sends",
    ),
    _bug(
        "refit_from_the_lowest_rank",
        "routes.py",
        "key=lambda rank: (self._sent[rank], rank))",
        "key=lambda rank: rank)",
        "Of several holders the lowest rank sends everything.",
        f"{ROUTES}of_several_the_one_sends_that_has_sent_least_then_the_lowest_rank",
    ),
    _bug(
        "refit_tied_weight_twice",
        "routes.py",
        "rest = remaining(rest, again)",
        "pass",
        "A tied weight moves twice for a target that has it twice.",
        "refit/test_refit_plan_names.py::test_a_tied_weight_moves_once",
    ),
    _bug(
        "refit_into_a_replaced_parameter",
        "contents.py",
        "if self.parameters.get(name) is not param:",
        "if False:",
        "A parameter that was replaced since the plan gets weights.",
        f"{CHANGED}[replaced-0-True-True]",
    ),
    _bug(
        "refit_into_memory_of_before",
        "contents.py",
        "id(tensor), address, ",
        "id(tensor), ",
        "A run reads and writes the memory that a parameter had at the run before.",
        "refit/test_refit_plan.py::test_memory_that_was_exchanged",
    ),
    _bug(
        "refit_without_the_dtype_between",
        "buckets.py",
        "for dtype in way[1:-1]:",
        "for dtype in ():",
        "What a rank copies itself is not rounded to dtype=.",
        "refit/test_refit_plan_names.py::test_dtypes[source2-dtype2-target2-wire2]",
    ),
    _bug(
        "refit_overfull_bucket",
        "routes.py",
        "while index < len(free) and min(free[index][0][ends[0]], free[index][1][ends[1]]) < size:",
        "while index < len(free) and free[index][0][ends[0]] < size:",
        "A rank receives more than a bucket in a round.",
        f"{ROUTES}no_rank_sends_or_receives_more_than_a_bucket_in_a_round[64]",
    ),
    _bug(
        "refit_two_rectangles_for_a_rank",
        "buckets.py",
        "for move in moves}) == len(moves)",
        "for move in moves}) <= len(moves)",
        "Of two rectangles for one rank in a round, one is not sent over tp_shm.",
        "refit/test_refit_plan.py::test_random_pairs_over_shared_memory",
    ),
    _in_cpp(
        "copy_without_the_last_bytes",
        "cpu/copy_rows.cpp",
        "if (i < n) std::memcpy(to + i, from + i, n - i);",
        "",
        "The last bytes of a long row are not copied past the caches.",
        "kernels/test_multi_tensor_copy.py::test_more_than_a_cache_keeps",
    ),
    _in_cpp(
        "copy_of_dims_that_do_not_meet",
        "cpu/multi_tensor_copy.cpp",
        "&& dim.from_step == inner.size * inner.from_step",
        "",
        "Rows of the copied tensor that are apart are taken for contiguous ones.",
        "kernels/test_multi_tensor_copy.py::test_values_and_neighbours",
    ),
    _in_cpp(
        "shm_rows_without_a_step",
        "shm/core/rows.h",
        "at + begin / row * step + first",
        "at + begin / row * row + first",
        "An exchange of rows that are apart takes what is between them.",
        "shm/test_gathers.py::test_all_to_all[2]",
    ),
]
