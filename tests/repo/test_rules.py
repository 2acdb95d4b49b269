"""docs/develop/rules.md is true: every public name is in a row, and each cell that a CPU can show is executed."""

import inspect
import os
import re
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import jvp, vmap

import tp_ext
from tests.helpers import ranks, registry
from tests.helpers.paths import ROOT
from tests.helpers.registry import SUBJECTS
from tests.helpers.registry.entries import HIDDEN
from tests.helpers.registry.rules import key as group_key

PAGE = ROOT / "docs" / "develop" / "rules.md"
COLUMNS = ["forward", "vmap", "fork", "streams", "again", "dtype", "shape"]
VERDICTS = {"works", "refuses", "not detectable", "—"}


@cache
def table() -> dict[str, dict[str, str]]:
    """name -> column -> verdict."""
    text = PAGE.read_text().split("<!-- rules -->")[1].split("<!-- /rules -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()[2:]]
    cut = [(name, [cell.split("[")[0] for cell in row[1:]]) for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert len(dict(cut)) == len(cut), "a name has two rows"
    return {name: dict(zip(COLUMNS, cells, strict=True)) for name, cells in cut}


def names(column: str, verdict: str) -> list[str]:
    return [name for name, cells in table().items() if cells[column] == verdict]


def test_every_public_name_has_a_row():
    modules = {name for name in tp_ext.__all__ if inspect.ismodule(getattr(tp_ext, name))}
    assert set(table()) == set(tp_ext.__all__) - modules


def test_every_public_module_has_an_entry():
    """In tests/helpers/registry: how it is made and called, its bytes; test_errors.py asks for its ERRORS."""
    public = {name: getattr(tp_ext, name) for name in tp_ext.__all__}
    modules = {name for name, each in public.items() if inspect.isclass(each) and issubclass(each, nn.Module)}
    modules -= {"ParallelModule"}  # the base class of the others
    assert modules <= set(SUBJECTS)
    assert modules <= {row.name for row in registry.SENT.values()}
    # Caches are used without gradients; what experts save depends on the choices of the router
    modules -= {"KVCache", "LatentKVCache", "ParallelMoE"}
    assert modules <= {row.name for row in registry.SAVED.values()}


def test_every_cell_is_a_verdict_and_undetectable_ones_are_explained():
    text = PAGE.read_text()
    for name, cells in table().items():
        assert set(cells.values()) <= VERDICTS, name
    assert not re.search(r"not detectable *\|", text)
    notes = set(re.findall(r"\[\^(\w+)\](?!:)", text))
    assert notes == set(re.findall(r"^\[\^(\w+)\]:", text, re.M))


# Every function that computes, as f(x) on a rank and on one process


def _shard(t: Tensor | None, dim: int | None, group: Any) -> Tensor | None:
    return t if dim is None or t is None else t.tensor_split(group.size(), dim)[group.rank()]


def _input(name: str, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SUBJECTS[name].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def _pair(group: Any, name: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """f on this rank, and the unsharded f."""
    subject = SUBJECTS[name]
    plain, times = subject.make(None), group.size() if subject.times_p else 1
    return subject.make(group), lambda x: plain(x * times)


def _works_forward(group, some):
    for name in some:
        subject, x, v = SUBJECTS[name], _input(name, 1), _input(name, 2)
        f, plain = _pair(group, name)
        x_own, v_own = _shard(x, subject.x_dim, group), _shard(v, subject.x_dim, group)
        for how in ("dual", "jvp"):
            if how == "jvp" and not plain(x).is_floating_point():
                continue  # jvp asks for a floating point result
            if how == "jvp":
                want, got = jvp(plain, (x,), (v,)), jvp(f, (x_own,), (v_own,))
            else:
                with forward_ad.dual_level():
                    want = forward_ad.unpack_dual(plain(forward_ad.make_dual(x, v)))
                    got = forward_ad.unpack_dual(f(forward_ad.make_dual(x_own, v_own)))
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, _shard(b, subject.y_dim, group), msg=lambda m, name=name: f"{name}: {m}")


def test_forward_mode_works():
    ranks.run(_works_forward, 2, names("forward", "works"))


def _dual(group, name):
    subject = SUBJECTS[name]
    x, v = (_shard(_input(name, seed), subject.x_dim, group) for seed in (1, 2))
    f = subject.make(group)
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, v))


@pytest.mark.parametrize("name", names("forward", "refuses"))
def test_forward_mode_refuses(name):
    words = "^tp_ext: .* has no forward-mode derivative|_scaled_dot_product.* does not support it"
    ranks.run_raises(_dual, 2, NotImplementedError, words, name)


def _works_batched(group, some):
    for name in some:
        subject = SUBJECTS[name]
        f, plain = _pair(group, name)
        xs = [_input(name, seed) for seed in (1, 2, 3)]
        got = vmap(f)(torch.stack([_shard(x, subject.x_dim, group) for x in xs]))
        want = torch.stack([_shard(plain(x), subject.y_dim, group) for x in xs])
        torch.testing.assert_close(got, want, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_works():
    ranks.run(_works_batched, 2, names("vmap", "works"))


def _batched(group, name):
    x = _shard(_input(name), SUBJECTS[name].x_dim, group)
    vmap(SUBJECTS[name].make(group))(torch.stack([x, x]))


@pytest.mark.parametrize("name", names("vmap", "refuses"))
def test_vmap_refuses(name):
    ranks.run_raises(_batched, 2, (RuntimeError, NotImplementedError), "^vmap: called random|^tp_ext: ", name)


def _in_child(some):
    """Results of f(x) in a child that was forked after torch and tp_ext have been in use."""
    for name in some:
        x, f = _input(name), SUBJECTS[name].make(None)
        want = f(x)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(f(x), want) else 3)
        assert os.waitpid(child, 0)[1] == 0, name


def test_a_forked_child_works():
    ranks.run_fresh(_in_child, [name for name in names("fork", "works") if name in SUBJECTS])


# A group created again, with its ranks swapped


def _state_calls(group: Any, folder: str) -> dict[str, Callable[[], Any]]:
    """Every function over named tensors, as called after the group was made again; what it reads was made before."""
    module = tp_ext.ColumnParallelLinear(HIDDEN, HIDDEN, group=group)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, HIDDEN)).sum().backward()
    optimizer.step()
    key = {"group": group_key(group)}
    full = tp_ext.full_state_dict(module, **key)
    moments = tp_ext.full_optimizer_state_dict(module, optimizer, **key)
    tp_ext.save_checkpoint(f"{folder}/checkpoint", module, optimizer, **key)
    tp_ext.save_safetensors(f"{folder}/safe", module, **key)
    reader = tp_ext.CheckpointReader(f"{folder}/checkpoint")
    return {
        "full_state_dict": lambda: tp_ext.full_state_dict(module, **key),
        "load_full_state_dict": lambda: tp_ext.load_full_state_dict(module, full, **key, broadcast_from_rank0=True),
        "full_optimizer_state_dict": lambda: tp_ext.full_optimizer_state_dict(module, optimizer, **key),
        "load_full_optimizer_state_dict": lambda: tp_ext.load_full_optimizer_state_dict(
            module, optimizer, moments, **key, broadcast_from_rank0=True
        ),
        "sharded_state_dict": lambda: tp_ext.sharded_state_dict(module, optimizer, **key),
        "load_sharded_state_dict": lambda: tp_ext.load_sharded_state_dict(module, storage_reader=reader, **key),
        "save_checkpoint": lambda: tp_ext.save_checkpoint(f"{folder}/again", module, **key),
        "load_checkpoint": lambda: tp_ext.load_checkpoint(f"{folder}/checkpoint", module, optimizer, **key),
        "save_safetensors": lambda: tp_ext.save_safetensors(f"{folder}/safe", module, **key),
        "load_safetensors": lambda: tp_ext.load_safetensors(f"{folder}/safe", module, **key),
    }


def _again(folder, refusing, working):
    rank = dist.FileStore(f"{folder}/numbers", -1).add("processes", 1) - 1
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/1", 2), rank=rank, world_size=2)
    group = dist.group.WORLD
    calls = _state_calls(group, folder)
    for name, subject in SUBJECTS.items():
        # Functions are given the name with rank and size, which modules hold; a ProcessGroup would be the new one
        built = (
            group if name[0].isupper() or not name.endswith("_region") else tp_ext.ParallelModule(group).tp_group.name
        )
        f, x = subject.make(built), _shard(_input(name), subject.x_dim, group)

        def call(f=f, x=x):
            x = x.clone().requires_grad_()
            y = f(x)
            if y.requires_grad:
                y.sum().backward()
            return y.detach()

        calls[name] = call
    before = {name: calls[name]() for name in working if name in SUBJECTS}
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/2", 2), rank=1 - rank, world_size=2)
    passed = []
    for name in refusing:
        try:
            calls[name]()
            passed.append(name)
        except ValueError as error:
            assert "the process group was created again" in str(error), name
    assert not passed, passed
    for name, want in before.items():
        assert torch.equal(calls[name](), want), name
    dist.destroy_process_group()


def test_a_group_created_again(tmp_path):
    ranks.run_apart(_again, 2, str(tmp_path), names("again", "refuses"), names("again", "works"))


# One rank with another dtype, or with one row more


def _differing(group, what, refusing, working):
    for name in refusing + working:
        tp = dist.new_group(backend="tp_shm", timeout=timedelta(seconds=20)) if name in refusing else group
        subject, odd = SUBJECTS[name], group.rank() == 1
        f, x = subject.make(tp), _shard(_input(name), subject.x_dim, tp)
        if odd and what == "dtype":
            x = x.float()
        if odd and what == "shape":
            x = torch.cat([x, x])

        def call(f=f, x=x):
            x = x.detach().requires_grad_()
            y = f(x)
            if y.requires_grad:
                y.sum().backward()

        if name in working:
            call()
            continue
        with pytest.raises((RuntimeError, ValueError), match=r"(?s)rank \d|the ranks' shards"):
            pytest.fail(f"{name}: {call()}")
        dist.barrier(group)


@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_a_rank_that_differs(what):
    working = [name for name in names(what, "works") if name in SUBJECTS]
    ranks.run(_differing, 2, what, names(what, "refuses"), working)
