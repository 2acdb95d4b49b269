"""Bugs of one line in the layers whose weights and activations are sharded over two groups."""

from tests.mutations.mutation import Mutation

LAYERS, COMPOSED = "model/test_module_two_axes.py", "model/test_module_two_axes_compose.py"

TWO_AXES_BUGS = [
    Mutation(
        "prefetched_weight_is_old",
        "csrc/autograd/weight_gather.cpp",
        "version == version_of(x);",
        "true;",
        "A weight that was written after its prefetch is used as it was before.",
        ("nn/test_gather_ahead.py::test_a_weight_that_is_written_after_its_prefetch_is_gathered_again",),
    ),
    Mutation(
        "prefetch_of_another_weight",
        "csrc/autograd/weight_gather.cpp",
        "shard.is_same(x) && x.has_storage() && storage.is_alias_of(x.storage()) &&\n         version",
        "version",
        "The weight that was expected is used in place of the one that came.",
        (f"{LAYERS}::test_another_order_of_layers",),
    ),
    Mutation(
        "no_prefetch",
        "csrc/autograd/weight_gather.cpp",
        "now.known.size() <= next) return;",
        "now.known.size() >= next) return;",
        "No weight is gathered under the GEMM before it.",
        (f"{LAYERS}::test_collectives",),
    ),
    Mutation(
        "gathered_again_in_backward",
        "csrc/autograd/linear_2d.cpp",
        "if (!reshard_after_forward) {",
        "if (false) {",
        "reshard_after_forward=False has no effect.",
        (f"{LAYERS}::test_collectives",),
    ),
    Mutation(
        "row_gathers_dy_again",
        "csrc/autograd/linear_2d.cpp",
        "const bool keeps_dy = b.s.activations.cut() && b.wants_x && asked_later(b.ctx, 1);",
        "const bool keeps_dy = false;",
        "The second half of a backward gathers dy of a row linear again.",
        (f"{COMPOSED}::test_a_backward_in_two_halves_gathers_dy_once",),
    ),
    Mutation(
        "sharded_layer_norm_deviations",
        "csrc/autograd/sharded_norm.cpp",
        "Tensor squares = all.select(1, 1).sum(0);",
        "Tensor squares = all.select(1, 1).sum(0).mul(1.01);",
        "The variance of a row over the ranks is not that of the full row.",
        (f"{LAYERS}::test_a_gpt_is_that_of_one_process",),
    ),
    Mutation(
        "copied_bias_before_its_gather",
        "tp_ext/nn/parallel_linear.py",
        'return ("weight",) if skip_bias_add or "bias" in layer._copied else ("weight", "bias")',
        'return ("weight",) if skip_bias_add else ("weight", "bias")',
        "The gradient of a bias of copied KV heads is summed over rows of its shard.",
        (f"{LAYERS}::test_a_gpt_is_that_of_one_process",),
    ),
    Mutation(
        "replicated_and_sharded_again",
        "tp_ext/model/module.py",
        "return len(self.tp_layouts.get(name, ())) == (name in self._gathered)",
        "return len(self.tp_layouts.get(name, ())) == 0",
        "The gradient of a norm weight under sequence parallelism is not summed over the group if it is sharded again.",
        (f"{LAYERS}::test_a_gpt_is_that_of_one_process",),
    ),
]
