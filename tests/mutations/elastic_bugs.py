"""Bugs of one line in data parallelism over replicas that come and go."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("tp_ext/elastic")
KILLED = "elastic/test_elastic_data.py::test_a_rank_is_killed"
JOINS = "elastic/test_elastic_data.py::test_a_replica_joins_from_the_memory_of_another_one"

ELASTIC_BUGS = [
    _bug(
        "elastic_slow_store",
        "pulse.py",
        "since + unknown",
        "since",
        "A store that answers late makes all ranks look dead.",
        "elastic/test_pulse.py",
    ),
    _bug(
        "elastic_sum_of_some",
        "phases.py",
        'elif self._board.count(f"done/{phase}", 1) == everyone:',
        'elif self._board.count(f"done/{phase}", 1):',
        "The first rank that has the sum decides that all have it.",
        f"{KILLED}[between two sums-gloo]",
    ),
    _bug(
        "elastic_gradients_in_place",
        "gradients.py",
        "self._held.append((flat, bucket))",
        "self._held.append((flat, bucket))\n            self.install()",
        "Gradients are overwritten before all ranks have the sum, and are summed again without the lost replica.",
        f"{KILLED}[when all have the sum-tp_shm]",
        f"{KILLED}[between two sums-gloo]",
    ),
    _bug(
        "elastic_without_states",
        "elastic_data.py",
        "few.process_group(), optimizers=pair)",
        "few.process_group())",
        "A replica that joins has no state of the optimizer.",
        f"{JOINS}[it joins]",
    ),
    _bug(
        "elastic_step_of_its_own",
        "elastic_data.py",
        "self.step = view.step",
        "pass",
        "A replica that joins begins with step 0.",
        f"{JOINS}[it joins]",
    ),
    _bug(
        "elastic_without_counts",
        "gradients.py",
        "share = self.count / max(total, 1e-300)",
        "share = 1 / 3 * bool(self.count)",
        "Replicas with few valid tokens count as much as others.",
        f"{KILLED}[in the forward pass-tp_shm]",
    ),
    _bug(
        "elastic_left_is_not_seen",
        "pulse.py",
        "now - since >= self._silence:",
        "False:",
        "A rank that was killed is waited for.",
        f"{KILLED}[in the forward pass-tp_shm]",
    ),
]
