"""A static KVCache makes every decode step the same code: compiled once, captured once."""

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.attention_cases import CASES, HIDDEN, make

pytestmark = pytest.mark.core


def _steps(module, step, x, padding, **options):
    """The prefill of 3 tokens in eager mode, then token by token by `step`."""
    cache = module.new_cache(len(x), 8, **options).reset(padding=padding)
    prefill = module(x[:, :3], cache=cache)
    cache.static = True
    rest = [step(x[:, i : i + 1].contiguous(), cache=cache) for i in range(3, x.shape[1])]
    return torch.cat([prefill, *rest], 1), cache


def _compiled(group, padded):
    torch._dynamo.reset()
    torch._dynamo.config.automatic_dynamic_shapes = False  # or a recompilation would hide behind a symbol
    module = make(CASES["all"], group).eval()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, backend=backend)
    x = torch.randn(2, 8, HIDDEN, dtype=torch.float64)
    padding = torch.tensor([0, 2]) if padded else None
    with torch.no_grad():
        want, _ = _steps(module, module, x, padding)
        got, cache = _steps(module, compiled, x, padding)
        once = len(graphs)
        again, _ = _steps(module, compiled, x.flip(0), padding)  # another cache, other values
        try:
            compiled(x[:, :1].contiguous(), cache=cache)
            message = "nothing"
        except RuntimeError as error:
            message = str(error)
    torch._dynamo.config.automatic_dynamic_shapes = True
    return (got - want).abs().max() / want.abs().max(), once, len(graphs), message, again.isfinite().all()


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_a_decode_step_is_compiled_once_for_all_positions(padded):
    for error, once, count, message, finite in ranks.run(_compiled, 2, padded, timeout=120):
        assert error <= 1e-12 and finite
        assert once == count == 1
        assert "cache: 1 more tokens must not exceed max_seq = 8" in message


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_captured_decode_step_replays_at_every_position(dtype):
    module = make(CASES["all"], dtype=dtype, device="cuda").eval()
    x = torch.randn(2, 8, HIDDEN, dtype=dtype, device="cuda")
    with torch.inference_mode():
        cache = module.new_cache(2, 8)
        module(x[:, :3], cache=cache)
        cache.static = True
        token = x[:, 3:4].clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm up, before capture
            module(token, cache=cache)
        torch.cuda.current_stream().wait_stream(stream)
        cache.truncate(3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(token, cache=cache)
        steps = []
        for i in range(3, 8):
            token.copy_(x[:, i : i + 1])
            graph.replay()
            steps.append(y.clone())
        want = module(x)[:, 3:]
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    assert (torch.cat(steps, 1) - want).abs().max() <= bound * want.abs().max()
    assert cache.length == 8


def test_position_and_padding_move_with_the_module():
    cache = tp_ext.KVCache(2, 4, 1, 2, dtype=torch.float32).to("meta")
    assert cache.k.is_meta and cache.padding.is_meta and cache.position.dtype == torch.int64
