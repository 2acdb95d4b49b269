"""Published bugs of context parallelism with packed sequences, tensor and data parallelism, against attention written
out head by head in one process, in fp64."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import tp_ext
from tests.helpers import oracle, ranks
from tests.helpers.attention_cases import HIDDEN, KNOWN, make
from tests.helpers.oracle import gathered, local_grads
from tests.helpers.right_and_wrong import check

FP64 = {"dtype": torch.float64}
ROTATED = {"num_heads": 4, "num_kv_heads": 2, "rope": {"base": 100.0}}


def dense(options, state, x, dy, lengths):
    """Output and gradients of attention in one process: (y, dx), {name: gradient}."""
    x = x.clone().requires_grad_()
    state = {name: value.clone().requires_grad_() for name, value in state.items()}
    y = oracle.attention(x, state, lengths, **{k: v for k, v in options.items() if k in KNOWN})
    y.backward(dy)
    return [y.detach(), x.grad], {name: value.grad for name, value in state.items()}


def _attention(group, tp, options, state, x, dy, lengths, context):
    """Returns full y and dx, and the gradients of this rank's shards with their shardings; tokens are cut over cp."""
    mesh = tp_ext.init_mesh("cpu", cp=group.size() // tp, tp=tp)
    module = make(options, mesh["tp"], context_group=mesh["cp"], context=context)
    tp_ext.load_full_state_dict(module, state, group=mesh["tp"])
    layout = tp_ext.ContextLayout(lengths, group=mesh["cp"])
    own = layout.shard(x).requires_grad_()
    y = module(own, layout=layout)
    y.backward(layout.shard(dy))
    before = {name: grad.clone() for name, grad in local_grads(module).items()}
    tp_ext.parallel.sum_gradients(module, mesh["cp"])
    full = [layout.unshard(y).detach(), layout.unshard(own.grad)]
    return full, local_grads(module), before, dict(tp_ext.shardings(module))


def inputs(options, tokens):
    torch.manual_seed(6)
    x, dy = torch.randn(2, tokens, HIDDEN, **FP64)
    return oracle.random_state(make(options)), x, dy


@pytest.mark.parametrize("context", ["ring", "all_gather", "ulysses"])
def test_a_packed_sequence_of_seven_tokens(context):
    """On two context-parallel ranks a packed sequence of 7 tokens was computed as one of 7 // 2 * 2 = 6, and the last
    token was ignored: https://github.com/NVIDIA/TransformerEngine/issues/1930."""
    state, x, dy = inputs(ROTATED, 10)
    want, grads = dense(ROTATED, state, x, dy, [7, 3])
    results = ranks.run(_attention, 2, 1, ROTATED, state, x, dy, [7, 3], context)
    kept = torch.tensor([*range(6), 7, 8])
    rounded = [torch.zeros_like(x).index_copy(0, kept, t) for t in dense(ROTATED, state, x[kept], dy[kept], [6, 2])[0]]
    check([([*full, *own.values()], [*rounded, *own.values()]) for full, own, *_ in results], [*want, *grads.values()])


def _packed_table(group, x, table, lengths):
    layout = tp_ext.ContextLayout(lengths, group=tp_ext.init_mesh("cpu", cp=2)["cp"])
    own = layout.shard(x)
    return [layout.unshard(own * rows) for rows in (layout.shard(table), table[layout.positions])]


def test_a_table_of_the_packed_tokens():
    """RoPE of packed sequences took the rows of a table of all packed tokens by the positions within a sequence, so
    that every sequence on a context-parallel rank got the rows of the first one:
    https://github.com/NVIDIA/Megatron-LM/pull/5243."""
    torch.manual_seed(7)
    x, table = torch.randn(2, 8, 3, **FP64)
    check(ranks.run(_packed_table, 2, x, table, [4, 4]), x * table)


def _wrapped_twice(group, q):
    mesh = tp_ext.init_mesh("cpu", cp=2, tp=2)
    heads = DTensor.from_local(q, mesh["tp"], [Shard(2)])
    DTensor.from_local(heads, mesh["cp"], [Shard(1)])


def test_context_and_tensor_parallelism_with_norms_of_queries_and_keys():
    """Qwen3 with tensor parallelism stops with an error once context parallelism is added, which does not expect
    queries and keys that are DTensors already: https://github.com/pytorch/torchtitan/issues/2446."""
    q = torch.ones(1, 2, 2, 3)
    ranks.run_raises(_wrapped_twice, 4, RuntimeError, "only accepts torch.Tensor", q, in_turns=False)
    options = ROTATED | {"qk_norm": True}
    state, x, dy = inputs(options, 9)
    want, grads = dense(options, state, x, dy, [5, 4])
    results = ranks.run(_attention, 4, 2, options, state, x, dy, [5, 4], "ring")
    for row in (results[:2], results[2:]):
        full = gathered([own for _, own, *_ in row], row[0][3])
        torch.testing.assert_close([*row[0][0], full], [*want, grads], rtol=1e-10, atol=1e-11)


def test_gradients_of_sequence_parallel_ranks_are_summed():
    """Ulysses without ZeRO divided the sum of the gradients by all ranks, those of the sequence too, which made them
    smaller by the number of these: https://github.com/deepspeedai/DeepSpeed/pull/5555."""
    state, x, dy = inputs(ROTATED, 6)
    _, grads = dense(ROTATED, state, x, dy, [6])
    results = ranks.run(_attention, 2, 1, ROTATED, state, x, dy, [6], "ulysses")
    mean = {name: sum(before[name] for *_, before, _ in results) / 2 for name in grads}
    check([(own, mean) for _, own, *_ in results], grads)
