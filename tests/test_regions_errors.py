"""Bad input of the regions: each rank raises on its own, before any communication."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import tp_ext
from tests.helpers import ranks
from tests.helpers.region_maps import NAMES, simple_cases

AT_TWO = [pytest.param(case, id=str(case)) for case in simple_cases(2)]


def _call(group, name, shape, options, what="x", sharded_dim=None):
    shape = list(shape)
    if sharded_dim is not None:
        shape[sharded_dim] = 2 + group.rank()
    x = torch.ones(shape, requires_grad=True)
    others = {"text": "no such group", "number": 3, "list": [0, 1], "type": int}
    if what == "2-D mesh":
        others[what] = init_device_mesh("cpu", (1, 1)) if group.size() == 1 else None
    getattr(tp_ext, name)("x" if what == "no tensor" else x, others.get(what, group), **options)


DIM = ["scatter_to_region", "gather_from_region", "all_gather_region", "reduce_scatter_region"]


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dim", [2, -3])
@pytest.mark.parametrize("name", DIM)
def test_dim_out_of_range(name, dim, p):
    ranks.run_raises(_call, p, IndexError, rf"dim.*{dim}", name, (4, 4), {"dim": dim})
    ranks.run_raises(_call, p, IndexError, "dim", name, (), {"dim": 0})


@pytest.mark.parametrize("options", [{"split_dim": 2, "concat_dim": 0}, {"split_dim": 0, "concat_dim": -3}], ids=str)
def test_all_to_all_dim_out_of_range(options):
    which, dim = next((k, v) for k, v in options.items() if v)
    ranks.run_raises(_call, 2, IndexError, f"{which}.*{dim}", NAMES[-1], (4, 4), options)


@pytest.mark.parametrize("sizes", [[4], [1, 1, 2], [], [3, 2], [1, 2], [5, -1]], ids=str)
@pytest.mark.parametrize("name", ["scatter_to_region", "reduce_scatter_region"])
def test_sizes_that_do_not_cut_the_dim(name, sizes):
    ranks.run_raises(_call, 2, ValueError, "sizes", name, (4, 4), {"dim": 0, "sizes": sizes})
    options = {"split_dim": 0, "concat_dim": 1, "split_sizes": sizes}
    ranks.run_raises(_call, 2, ValueError, "split_sizes", NAMES[-1], (4, 4), options)


@pytest.mark.parametrize("sizes", [[2], [2, 3, 4], [], [3, 2], [-2, -3]], ids=str)
@pytest.mark.parametrize("name", ["gather_from_region", "all_gather_region"])
def test_sizes_that_are_not_those_of_the_shards(name, sizes):
    # rank r holds 2 + r rows
    arguments = (4, 4), {"dim": 0, "sizes": sizes}
    ranks.run_raises(_call, 2, ValueError, "sizes", name, *arguments, sharded_dim=0)
    options = {"split_dim": 1, "concat_dim": 0, "concat_sizes": sizes}
    ranks.run_raises(_call, 2, ValueError, "concat_sizes", NAMES[-1], (4, 4), options, sharded_dim=0)


@pytest.mark.parametrize("name", DIM)
def test_one_rank_wants_one_size_that_fits(name):
    ranks.run_raises(_call, 1, ValueError, "sizes", name, (4, 4), {"dim": 0, "sizes": [3]})
    ranks.run_raises(_call, 1, ValueError, "sizes", name, (4, 4), {"dim": 0, "sizes": [2, 2]})


@pytest.mark.parametrize("case", AT_TWO)
def test_arguments_that_are_no_group(case):
    arguments = case.name, case.shape, case.options
    for what in ("number", "list", "type"):
        ranks.run_raises(_call, 2, TypeError, "group", *arguments, what)
    ranks.run_raises(_call, 1, (TypeError, ValueError), "(?i)mesh", *arguments, "2-D mesh")


@pytest.mark.parametrize("case", AT_TWO)
def test_a_name_that_no_group_has(case):
    arguments = case.name, case.shape, case.options, "text"
    ranks.run_raises(_call, 2, ValueError, "group.*no such group", *arguments)


@pytest.mark.parametrize("case", AT_TWO)
def test_arguments_that_are_no_tensor(case):
    # The dispatcher's own error: argument, value and schema
    ranks.run_raises(_call, 2, RuntimeError, "argument 'x'", case.name, case.shape, case.options, "no tensor")


def _whole_numbers(group, case, xs):
    return case(xs[group.rank()].long(), group)


@pytest.mark.parametrize("case", AT_TWO)
def test_whole_numbers_are_exact_or_refused(case):
    xs = case.inputs(2)
    try:
        ys = ranks.run(_whole_numbers, 2, case, xs)
    except ranks.RankError as e:
        assert (e.type_name, e.ranks) == ("TypeError", [0, 1])
    else:
        for y, want in zip(ys, case.emulate(xs), strict=True):
            assert torch.equal(y, want.long())
