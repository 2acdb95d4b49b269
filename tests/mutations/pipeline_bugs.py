"""Bugs of one line in what a model over several stages and the axes of a mesh need."""

from tests.mutations.mutation import mutation_in

_bug = mutation_in("tp_ext")
STATE = "checkpoint/test_pipeline.py::test_a_checkpoint_of_stages_loads_on_any_mesh"

PIPELINE_BUGS = [
    _bug(
        "mesh_without_pipeline",
        "mesh.py",
        "\"mesh['tp']\", pp, ep, DataAxes",
        "\"mesh['tp']\", ALONE, ep, DataAxes",
        "Functions of whole models see one stage.",
        STATE,
    ),
    _bug(
        "mesh_without_data_axes",
        "mesh.py",
        "data = tuple(groups[name] for name in",
        "data = tuple(groups[name] for name in () and",
        "Replicas along dp write the same entries.",
        "test_mesh.py",
    ),
    _bug(
        "tied_original_is_a_copy",
        "model/census.py",
        "originals.pop(id(param), None)  # the original itself",
        "pass",
        "A stage that holds both ends has no original.",
        "model/test_stages.py::test_a_stage_that_holds_both_ends_has_the_original",
    ),
    _bug(
        "tied_copy_is_an_entry",
        "checkpoint/pipeline.py",
        "merged[name] = whole._replace(tied=original.tied)",
        "pass",
        "The copy of a tied weight is a weight of its own in exports and in one process.",
        STATE,
    ),
    _bug(
        "stages_with_one_tensor_twice",
        "model/stages.py",
        "if tensors.setdefault(key, tensor) is not tensor:",
        "if False:",
        "Of two tensors with one name the first is saved.",
        "model/test_stages.py",
    ),
    _bug(
        "stage_checks_its_own_names",
        "checkpoint/save_plan.py",
        "check_unique(name, tuple(sorted(numbers)))",
        "check_unique(name, tuple(sorted(numbers))[:1])",
        "Two stages may have an entry of one name.",
        "checkpoint/test_pipeline.py::test_one_name_in_two_stages_is_an_error",
    ),
    _bug(
        "weights_seeded_as_masks",
        "random.py",
        "generator.manual_seed(self.seeds[1])",
        "generator.manual_seed(self.seeds[0])",
        "Replicas begin with different weights.",
        "test_random.py",
    ),
]
