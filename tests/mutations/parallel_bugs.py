"""Bugs of one line in training over all axes, its random numbers, and asynchronous checkpoints."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("tp_ext")
RUN = "parallel/test_run.py::test_training_is_that_of_one_process"
RUN_EXPERTS = "parallel/test_run_experts.py::test_training_with_experts_is_that_of_one_process"
STAGES = "parallel/pipeline/test_stages.py"

PARALLEL_BUGS = [
    _bug(
        "replicas_with_the_same_masks",
        "parallel/step_inputs.py",
        "row, layout = self._data_rank * self._microbatches + microbatch",
        "row, layout = microbatch",
        "Data-parallel ranks drop the same elements of other sequences.",
        f"{RUN}[zero 0]",
    ),
    _bug(
        "gradients_of_a_pipeline_not_summed",
        "parallel/run.py",
        "if replicas.exist and not sharding:\n                self._schedule",
        "if False:\n                self._schedule",
        "Without ZeRO each replica of a pipeline trains on its own batch.",
        f"{RUN}[pipeline and zero 0]",
    ),
    _bug(
        "gradients_of_earlier_steps_summed_again",
        "parallel/gradient_sum.py",
        "grad.div_(size)",
        "pass",
        "Gradients of a pipeline are the sum over replicas, those of an earlier step once more.",
        "parallel/test_run.py::test_steps_accumulate",
    ),
    _bug(
        "zero_1_keeps_all_states",
        "parallel/run.py",
        "if self._zero == 1 and self._replicas.exist:",
        "if False:",
        "Each rank keeps the states of all parameters.",
        RUN,
    ),
    _bug(
        "evaluation_leaves_gathered_parameters",
        "parallel/run.py",
        "reshard(modules)",
        "pass",
        "The step after an evaluation computes with the parameters of the step before.",
        "parallel/test_run.py::test_evaluation_is_that_of_one_process_and_changes_nothing",
    ),
    _bug(
        "mean_of_means",
        "parallel/step_loss.py",
        "scaled = value * (self._ranks / self.total).to(value.dtype)",
        "scaled = value / len(value.reshape(-1)) / self._microbatches",
        "Losses are weighted by microbatch, not by token.",
        RUN,
    ),
    _bug(
        "tied_gradient_of_one_stage",
        "parallel/pipeline/tied.py",
        "total += sums[rank]",
        "pass",
        "A weight tied over two stages has the gradient of the first alone.",
        f"{STAGES}::test_tied_head",
    ),
    _bug(
        "backward_in_halves_behind_a_frozen_stage",
        "parallel/pipeline/clock.py",
        "if not any(one.requires_grad for one in inputs):",
        "if False:",
        "The second half finds no gradients of weights behind an input that needs none.",
        "parallel/pipeline/test_steps.py::test_a_first_stage_without_gradients",
    ),
    _bug(
        "one_mask_for_all_modules",
        "random_scope.py",
        'return number_of("mask", self._mask, key, call)',
        'return number_of("mask", self._mask, 0, call)',
        "All modules draw the mask of the first.",
        "test_random_scope.py",
    ),
    _bug(
        "one_mask_for_all_steps",
        "random_scope.py",
        "self.step = (seed, step)",
        "self.step = (seed, 0)",
        "Each step repeats the masks of the first.",
        "test_random_scope.py",
    ),
    _bug(
        "a_save_goes_on_over_a_destroyed_group",
        "_object_collectives.py",
        "if process_group is not None:\n        raise",
        "if False:\n        raise",
        "A save in the background takes itself for the only rank.",
        "checkpoint/test_background.py",
    ),
    _bug(
        "a_call_ends_with_its_operator",
        "debug/timeline.py",
        "end if work is None else max(end, work[1])",
        "end",
        "A timeline shows no communication in the background.",
        "debug/test_timeline.py",
    ),
    _bug(
        "inputs_of_a_step_are_kept",
        "parallel/run.py",
        "del self._inputs  # they may be large",
        "pass",
        "A run keeps the inputs of its last step.",
        "parallel/test_run.py::test_steps_accumulate",
    ),
    _bug(
        "experts_not_averaged_over_data",
        "parallel/replicas.py",
        "average_over(_expert_parameters([model]), self.experts)",
        "pass",
        "Under DDP the replicas of experts train on their own sequences.",
        f"{RUN_EXPERTS}[data and experts]",
    ),
    _bug(
        "router_losses_of_microbatches_added",
        "parallel/run.py",
        "layer.attach_loss = 1 / microbatches",
        "layer.attach_loss = 1.0",
        "The losses of routers grow with the number of microbatches.",
        f"{RUN_EXPERTS}[experts]",
    ),
    _bug(
        "muon_counts_the_expert_group_twice",
        "optim/parameters.py",
        "if len(members_of_axis) > 1 and not any(members_of_axis < other for other in members)",
        "if len(members_of_axis) > 1",
        "Muon takes the expert group and FSDP2's axis that spans it for two axes.",
        "end_to_end/test_training_experts.py::test_one_training_moves_over_all_layouts[muon]",
    ),
]
