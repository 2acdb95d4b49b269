"""Bugs of one line in tp_invariant: each sum replaced by the ordinary one."""

from tests.mutations.mutation import Mutation

BITS = "test_invariance.py::test_the_same_bits_for_every_number_of_ranks_and_threads"
AUTO_BITS = "auto/test_invariant_blocks.py::test_the_same_bits_for_every_number_of_ranks"


def _bug(name: str, file: str, old: str, new: str, bug: str, *tests: str) -> Mutation:
    return Mutation(f"invariant_{name}", file, old, new, bug, tests)


INVARIANCE_BUGS = [
    _bug(
        "block_start",
        "tp_ext/invariance.py",
        "return -(-block * n // blocks)",
        "return block * n // blocks",
        "Blocks begin where those of the C++ side do not.",
        "test_invariance.py::test_heads_in_blocks",
        f"{BITS}[fp32]",
    ),
    _bug(
        "loss",
        "tp_ext/nn/loss.py",
        "        current_blocks() or 0,\n",
        "        0,\n",
        "The statistics of the loss are those of the ranks' columns.",
        f"{BITS}[loss]",
    ),
    _bug(
        "norm",
        "tp_ext/nn/norm.py",
        "        starts = [block_start(total, block, blocks) for block in (*held, held.stop)]",
        "        starts = [0] * (len(held) if rank == 0 else 1) + [local] * (1 if rank == 0 else len(held))",
        "The gradient of a norm is a sum over the ranks' tokens.",
        f"{BITS}[fp32]",
    ),
    _bug(
        "kv_heads",
        "tp_ext/nn/attention/kv_blocks.py",
        "        if self.within_blocks:",
        "        if self.within_blocks or not self.group:",
        "Where ranks share no KV head, its gradient is the sum over the query heads of the rank.",
        f"{BITS}[fp32]",
    ),
    _bug(
        "grad_norm",
        "tp_ext/parallel/grad_norm.py",
        "    if blocks and norm_type == 2:",
        "    if False:",
        "The norm of the gradient is a sum over the ranks.",
        f"{BITS}[fp64]",
    ),
    _bug(
        "muon",
        "tp_ext/optim/muon.py",
        'form = "gather" if self._in_blocks else self._form',
        "form = self._form",
        "Gram matrices are sums over the ranks.",
        f"{BITS}[muon]",
    ),
    _bug(
        "explicit_attention",
        "tp_ext/nn/attention/scaled_dot_product.py",
        "    if by_head:\n        weights",
        "    if False:\n        weights",
        "The backward of softmax depends on the number of threads.",
        f"{BITS}[fp32]",
    ),
    _bug(
        "rows",
        "csrc/autograd/blocks.h",
        "return (n + 15) / 16 * 16;",
        "return n;",
        "A row's bits depend on the number of rows.",
        "test_invariance_rollout.py::test_a_row_of_attention_depends_on_itself",
        "test_invariance_rollout.py::test_a_row_of_a_linear_depends_on_itself",
    ),
    _bug(
        "tiles_of_keys",
        "csrc/autograd/block_attention.cpp",
        "for (int64_t tile = first + skipped;",
        "for (int64_t tile = skipped;",
        "Tiles of keys begin at the padding.",
        "test_invariance_rollout.py::test_a_row_of_attention_depends_on_itself",
    ),
    _bug(
        "attention",
        "tp_ext/nn/attention/scaled_dot_product.py",
        "    if by_head and drop is None and q.is_cpu:",
        "    if False:",
        "A row of attention depends on the other queries.",
        "test_invariance_rollout.py::test_log_probabilities_of_generated_ids_are_those_of_training[fp32]",
    ),
    _bug(
        "threads",
        "csrc/autograd/blocks.cpp",
        "MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0",
        "0",
        "Products are computed on several threads.",
        f"{BITS}[fp64]",
    ),
    _bug(
        "row_bias",
        "csrc/autograd/block_linear.cpp",
        ": comm::Blocks{s.number, 0, s.number};",
        ": comm::Blocks{1, 0, 1};",
        "The gradient of a row's bias is one sum without sequence parallelism.",
        f"{BITS}[fp32]",
    ),
    _bug(
        "tree",
        "csrc/comm/tree_sum.cpp",
        "    } else if (node.index == 0 ||",
        "    } else if (node.index >= 0 ||",
        "An odd last node does not move up.",
        "test_invariance.py::test_the_tree",
    ),
    _bug(
        "sharded_gradients",
        "tp_ext/parallel/microbatch_tree.py",
        "            module.set_custom_reduce_scatter(cast(Any, self))",
        "            pass",
        "FSDP2 sums the gradients of the ranks.",
        "parallel/test_microbatch_tree.py::test_the_same_bits_for_every_number_of_data_ranks[fp32]",
    ),
    _bug(
        "sharded_norm",
        "tp_ext/parallel/block_norm.py",
        "grad = grad.full_tensor()",
        "grad = grad.to_local()",
        "The norm counts this rank's shards of FSDP2 alone.",
        "parallel/test_microbatch_tree.py::test_the_same_bits_for_every_number_of_data_ranks[fp32]",
    ),
    _bug(
        "joins",
        "csrc/cpu/tree_total.cpp",
        "left = joins[k]; left > 0;",
        "left = top; left > 0;",
        "Nodes are added in their order.",
        "kernels/test_tree_total.py::test_additions_are_those_of_the_tree",
    ),
    _bug(
        "auto_column",
        "tp_ext/auto/execute.py",
        "own_input = own_input or self.plan.invariant_blocks is not None",
        "own_input = own_input or self.plan.invariant_blocks == 0",
        "Layers that share an input leave its gradient to sums that a plan in blocks does not have.",
        f"{AUTO_BITS}[fp32]",
    ),
    _bug(
        "auto_loss",
        "tp_ext/auto/modules/logits.py",
        "    with using_blocks(cls.blocks):\n        return vocab_parallel_cross_entropy(",
        "    with using_blocks(None):\n        return vocab_parallel_cross_entropy(",
        "The statistics of an unchanged model's loss are those of the ranks' columns.",
        f"{AUTO_BITS}[fp32]",
    ),
    _bug(
        "auto_silu",
        "tp_ext/auto/search/in_blocks.py",
        '    "silu": {F.silu},\n',
        '    "silu": set(),\n',
        "torch's SiLU, whose last elements have other bits, is not replaced, and refused.",
        f"{AUTO_BITS}[fp32]",
    ),
]
