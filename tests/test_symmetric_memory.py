"""Symmetric memory: who gets it and why not, in a stubbed environment; which sizes go which way. No GPU is needed.

Layers made with it, without a GPU: test_symmetric_memory_layers.py; on one: test_symmetric_memory_cuda.py.
"""

import contextlib
import copy
import pickle
import re
from unittest import mock

import pytest
import torch

from tests.helpers import ranks
from tp_ext import symmetric_memory
from tp_ext.group import parallel_group

pytestmark = pytest.mark.core
KEY = "g@1/{p}/256/1024/7/0"


# Which way an all-reduce goes


@pytest.mark.parametrize(
    "p, dtype, numel, chosen",
    [
        (2, torch.float32, 4, "one_shot"),
        (2, torch.float32, 64, "one_shot"),
        (2, torch.float32, 68, "two_shot"),
        (2, torch.float32, 256, "two_shot"),
        (2, torch.float32, 260, "backend"),
        (2, torch.bfloat16, 128, "one_shot"),
        (2, torch.bfloat16, 136, "two_shot"),
        (2, torch.bfloat16, 4, "backend"),  # not a multiple of 16 bytes
        (2, torch.float32, 5, "backend"),
        (2, torch.float32, 0, "backend"),
        (2, torch.float16, 64, "backend"),  # no kernel
        (2, torch.float64, 8, "backend"),
        (2, torch.int32, 8, "backend"),
        (3, torch.float32, 64, "one_shot"),
        (3, torch.float32, 68, "backend"),  # two-shot kernels are for 2, 4 and 8
        (4, torch.float32, 68, "two_shot"),
        (6, torch.float32, 68, "backend"),
        (8, torch.float32, 68, "two_shot"),
    ],
)
def test_algorithm_by_size_dtype_and_ranks(p, dtype, numel, chosen):
    assert symmetric_memory.algorithm(numel, dtype, KEY.format(p=p)) == chosen


@pytest.mark.parametrize("group", [None, "", "g@1/2", "0@0/8", "a@b@1/2"])
def test_algorithm_of_a_plain_group_is_the_backends(group):
    assert symmetric_memory.algorithm(4, torch.float32, group) == "backend"


# The name


def test_a_group_with_memory_is_a_group_like_others():
    group = parallel_group(KEY.format(p=2))
    assert group == (KEY.format(p=2), 2, 1)
    assert group.plain() == ("g@1/2", 2, 1) == group.plain().plain()
    assert parallel_group(None).plain() == ("", 1, 0)
    assert copy.deepcopy(group) is group is copy.copy(group)
    assert pickle.loads(pickle.dumps(group)) == ("g@1/2", 2, 1)


# Who gets it


@contextlib.contextmanager
def stubbed(**changes):
    """A process that could have symmetric memory, but for the changes."""
    functions = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "tp_ext.symmetric_memory.symm_mem.get_backend": lambda device: "CUDA",
        "tp_ext.symmetric_memory._has_kernel": lambda name: True,
        "tp_ext.symmetric_memory._device": lambda: f"GPU-{torch.distributed.get_rank()}",
        "tp_ext.symmetric_memory.socket.gethostname": lambda: "here",
        "tp_ext.symmetric_memory._exchange": lambda tp, max_bytes, buffer: None,
    }
    short = {name.rpartition(".")[2]: name for name in functions}
    functions |= {short[name]: change for name, change in changes.items()}
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch(name, function))
        yield


def enable_stubbed(group, changes, only_rank=None, **options):
    with stubbed(**(changes if only_rank in (None, group.rank()) else {})):
        return tuple(symmetric_memory.enable(group, **options))


def no():
    return False


def yes():
    return True


def nvshmem(device):
    return "NVSHMEM"


def no_fused(name):
    return "fused" not in name


def none(name):
    return False


def elsewhere():
    return f"host{torch.distributed.get_rank()}"


def one_device():
    return "GPU-0"


def refused(tp, max_bytes, buffer):
    return "CUDA driver error: peer access is not supported"


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize(
    "changes, options, reason",
    [
        ({"is_available": no}, {}, "rank 0: there is no CUDA device"),
        ({"_has_kernel": none}, {}, r"rank 0: torch 2.* has no CUDA kernel of symm_mem::one_shot_all_reduce_copy"),
        ({"_has_kernel": no_fused}, {"fused_matmul": True}, "symm_mem::fused_all_gather_matmul"),
        ({"get_backend": nvshmem}, {}, "the backend NVSHMEM, not CUDA"),
        ({"is_current_stream_capturing": yes}, {}, "a CUDA graph is being captured"),
        ({"gethostname": elsewhere}, {}, "the ranks are on . hosts: host0, host1"),
        ({"_device": one_device}, {}, "several ranks are on one device, and TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"),
        ({"_exchange": refused}, {}, "rank 0: CUDA driver error: peer access is not supported"),
    ],
)
def test_why_not(p, changes, options, reason):
    answers = ranks.run(enable_stubbed, p, changes, **options)
    for rank, (name, why_not) in enumerate(answers):
        assert why_not is not None and re.search(reason, why_not)
        assert name == f"0@{rank}/{p}"
    assert len({why_not for _, why_not in answers}) == 1


def share_a_device(group, given, on=(0, 1)):
    with mock.patch.dict("os.environ", dict.fromkeys(given if group.rank() in on else (), "1")):
        return enable_stubbed(group, {"_device": one_device})[1]


def test_ranks_may_share_a_device_with_both_settings():
    both = symmetric_memory.SHARING
    assert ranks.run(share_a_device, 2, both) == [None, None]
    for given, on in (both[:1], (0, 1)), (both[1:], (0, 1)), (both, (0,)):
        answers = ranks.run(share_a_device, 2, given, on)
        assert all("several ranks are on one device" in why_not for why_not in answers)


@pytest.mark.parametrize("changes", [{"is_available": no}, {"_exchange": refused}])
def test_a_feature_missing_on_one_rank_is_off_for_all(changes):
    answers = ranks.run(enable_stubbed, 3, changes, only_rank=1)
    assert {why_not.partition(":")[0] for _, why_not in answers} == {"rank 1"}
    assert [name for name, _ in answers] == [f"0@{rank}/3" for rank in range(3)]


def test_without_stubs_there_is_none_on_a_cpu():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    answers = ranks.run(real_enable, 2)
    assert answers == [(f"0@{rank}/2", "rank 0: there is no CUDA device") for rank in range(2)]


def real_enable(group):
    return tuple(symmetric_memory.enable(group))


@pytest.mark.parametrize("group", [None, ""])
def test_one_rank_needs_none(group):
    assert symmetric_memory.enable(group) == ("", "p = 1 communicates nothing")
    assert ranks.run(real_enable, 1) == [("0@0/1", "p = 1 communicates nothing")]


def test_more_than_eight_ranks():
    with stubbed():
        assert symmetric_memory._unavailable(8, False) is None
        assert symmetric_memory._unavailable(9, False) == "p = 9 is more than 8 ranks"


def test_names_of_operators_are_those_of_this_torch():
    """A build for CUDA has all of them; a build without has none, and says so."""
    found = {symmetric_memory._has_kernel(name) for name in symmetric_memory.OPERATORS}
    assert found == {torch.version.cuda is not None}
    assert not symmetric_memory._has_kernel("no_such_operator")
    assert all(hasattr(torch.ops.symm_mem, name) for name in symmetric_memory.OPERATORS + symmetric_memory.FUSED)


def enable_twice(group):
    with stubbed():
        first = symmetric_memory.enable(group, one_shot_bytes=32, max_bytes=64)
        again = symmetric_memory.enable(first.group, max_bytes=2**20, fused_matmul=True)
    return first.group, first.why_not, again.group


def test_the_result_has_names_sizes_and_its_own_buffer():
    for rank, (first, why_not, again) in enumerate(ranks.run(enable_twice, 2)):
        assert why_not is None
        (*head, buffer, fused), (*head_again, buffer_again, fused_again) = first.split("/"), again.split("/")
        assert (head, fused) == ([f"0@{rank}", "2", "32", "64"], "0")
        assert (head_again, fused_again) == ([f"0@{rank}", "2", "262144", "1048576"], "1")
        assert 0 <= int(buffer) < 2**64 and 0 <= int(buffer_again) < 2**64 and buffer != buffer_again


def enable_differently(group):
    with stubbed():
        symmetric_memory.enable(group, max_bytes=2**20 * (1 + group.rank()))


def test_ranks_must_agree_on_the_sizes():
    ranks.run_raises(
        enable_differently, 2, ValueError, r"\(262144, 1048576, False\), \(262144, 2097152, False\)", in_turns=False
    )


@pytest.mark.parametrize(
    "options, match",
    [
        ({"one_shot_bytes": 100}, "one_shot_bytes: 100 must be a multiple of 16"),
        ({"one_shot_bytes": -16}, "one_shot_bytes: -16 must be"),
        ({"max_bytes": 1e6}, "max_bytes: 1000000.0 must be a multiple of 16"),
        ({"one_shot_bytes": True}, "one_shot_bytes: True must be"),
        ({"max_bytes": 64}, "max_bytes: 64 must be at least 16 and one_shot_bytes = 262144"),
        ({"one_shot_bytes": 0, "max_bytes": 0}, "max_bytes: 0 must be at least 16"),
    ],
)
def test_wrong_sizes_are_refused(options, match):
    ranks.run_raises(enable_stubbed, 2, ValueError, match, {}, in_turns=False, **options)


def test_a_group_that_is_none():
    with pytest.raises(TypeError, match="group: 3 must be"):
        symmetric_memory.enable(3)
    with pytest.raises(ValueError, match="group: 'nobody' must be the name"):
        symmetric_memory.algorithm(4, torch.float32, "nobody")
