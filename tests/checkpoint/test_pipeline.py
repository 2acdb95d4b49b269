"""State of stages over a mesh: full states, checkpoints and exports have the entries of all stages, load at any other
mesh, and training goes on as in one process.
"""

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.models import assert_same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.stages import dense, optimizer_of, stages, step

pytestmark = pytest.mark.core
MESHES = [  # pp, dp, cp, tp; whether the first rank holds both ends
    ((2, 1, 1, 2), False),
    ((2, 2, 1, 1), False),
    ((2, 1, 1, 1), True),
    ((1, 1, 1, 3), False),
    ((1, 1, 1, 1), False),
]


def flat(states):
    return {f"{name}.{key}": value for name, entry in states["state"].items() for key, value in entry.items()}


def close_states(made, optimizer, model, its_optimizer, mesh):
    """The full states of the stages are those of the unsharded model; returns them."""
    state, states = (
        tp_ext.full_state_dict(made, mesh=mesh),
        tp_ext.full_optimizer_state_dict(made, optimizer, mesh=mesh),
    )
    want = tp_ext.full_optimizer_state_dict(model, its_optimizer)
    assert "mlp.up.weight.exp_avg" in flat(want)
    assert_same(state, dict(model.state_dict()), exact=False)
    assert_same(flat(states), flat(want), exact=False)
    for got, group in zip(states["param_groups"], want["param_groups"], strict=True):
        assert sorted(got.pop("params")) == sorted(group.pop("params")) and got == group
    return state, states


def _save(group, sizes, both_ends, tied, path):
    mesh = mesh_of(*sizes)
    made, optimizer = stages(mesh, both_ends=both_ends, tied=tied)
    model, its_optimizer = dense(tied=tied)
    for _ in range(2):
        step(made, optimizer, model, its_optimizer, mesh)
    tp_ext.debug.check(made, mesh=mesh, optimizer=optimizer)
    state, states = close_states(made, optimizer, model, its_optimizer, mesh)
    first = tp_ext.full_state_dict(made, mesh=mesh, rank0_only=True)
    first_states = tp_ext.full_optimizer_state_dict(made, optimizer, mesh=mesh, rank0_only=True)
    assert (first, first_states) == ({}, {}) if group.rank() else not assert_same(first, state)
    saving = tp_ext.save_checkpoint(path / "saved", made, optimizer, mesh=mesh, asynchronous=both_ends)
    tp_ext.save_safetensors(path / "export", made, mesh=mesh, max_shard_size=2000)
    if saving is not None:
        step(made, optimizer, model, its_optimizer, mesh)
        saving.result()
    if group.rank() == 0:
        assert_same(flat(first_states), flat(states))
        torch.save((first, first_states), path / "full.pt")


def _load(group, sizes, both_ends, tied, path):
    mesh = mesh_of(*sizes)
    want, want_states = torch.load(path / "full.pt")
    for how in ("checkpoint", "full", "broadcast", "export"):
        made, optimizer = stages(mesh, both_ends=both_ends, tied=tied, seed=8)
        if how == "checkpoint":
            tp_ext.load_checkpoint(path / "saved", made, optimizer, mesh=mesh)
        elif how == "export":
            tp_ext.load_safetensors(path / "export", made, mesh=mesh)
        else:
            state, states = ({}, {}) if how == "broadcast" and group.rank() else (want, want_states)
            on_first = {"mesh": mesh, "broadcast_from_rank0": how == "broadcast"}
            tp_ext.load_full_state_dict(made, state, **on_first)
            tp_ext.load_full_optimizer_state_dict(made, optimizer, states, **on_first)
        assert_same(tp_ext.full_state_dict(made, mesh=mesh), want)
        if how == "export":
            continue
        assert_same(flat(tp_ext.full_optimizer_state_dict(made, optimizer, mesh=mesh)), flat(want_states))
        model, its_optimizer = dense(tied=tied)
        model.load_state_dict(want)
        tp_ext.load_full_optimizer_state_dict(model, its_optimizer, want_states)
        step(made, optimizer, model, its_optimizer, mesh)
        close_states(made, optimizer, model, its_optimizer, mesh)
        tp_ext.debug.check(made, mesh=mesh)  # copies of tied weights are still equal


def _saved_and_loaded(number, others, tied, tmp_path):
    sizes, both_ends = MESHES[number]
    ranks.run(_save, torch.Size(sizes).numel(), sizes, both_ends, tied, tmp_path)
    for other, ends in (MESHES[i] for i in others):
        ranks.run(_load, torch.Size(other).numel(), other, ends, tied, tmp_path)
    names = set(torch.load(tmp_path / "full.pt")[0]) - ({"head.weight"} if tied else set())
    files = [load_file(file) for file in (tmp_path / "export").glob("*.safetensors")]
    assert len(files) > 3 and names == {name for file in files for name in file}


@pytest.mark.parametrize(
    ("number", "others", "tied"),
    [(0, [3], False), (1, [4], True), (2, [0], True)],
    ids=["(2, 1, 1, 2)", "(2, 2, 1, 1)-tied", "both ends-tied"],
)
def test_a_checkpoint_of_stages_loads_on_any_mesh(number, others, tied, tmp_path):
    """Tied: the head's weight on the last stage is a copy of the embedding on the first; in one process, the same."""
    _saved_and_loaded(number, others, tied, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("number", range(3), ids=lambda number: str(MESHES[number][0]))
def test_a_checkpoint_of_stages_loads_on_every_mesh(number, tied, tmp_path):
    _saved_and_loaded(number, [i for i in range(len(MESHES)) if i != number], tied, tmp_path)


def _load_plain(group, path):
    """An export of another program, which has the tied weight once and does not name the other."""
    mesh = mesh_of(2, 1, 1, 1)
    made, _ = stages(mesh, tied=True, seed=8)
    tp_ext.load_safetensors(path / "plain.safetensors", made, mesh=mesh)
    state = tp_ext.full_state_dict(made, mesh=mesh)
    assert state["head.weight"] is state["embedding.weight"]
    return state


@pytest.mark.parametrize("loaders", [MESHES[2:3], pytest.param(MESHES[:2], marks=pytest.mark.exhaustive)])
def test_a_checkpoint_of_one_process_loads_in_stages(loaders, tmp_path):
    ranks.run(_save, 1, (1, 1, 1, 1), False, True, tmp_path)
    want = torch.load(tmp_path / "full.pt")[0]
    save_file({name: value for name, value in want.items() if name != "head.weight"}, tmp_path / "plain.safetensors")
    for state in ranks.run(_load_plain, 2, tmp_path):
        assert_same(state, want)
    for sizes, both_ends in loaders:
        ranks.run(_load, torch.Size(sizes).numel(), sizes, both_ends, True, tmp_path)


def _copies(group, path, pad):
    """A weight that has one name in the whole model, and a copy of it under this name on the last stage."""
    mesh = mesh_of(2, 1, 1, 2)
    last = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    options = {"pad_to_multiple_of": 4} if last and pad else {}  # then 4 and 2 rows, not 3 and 3
    stage = nn.ModuleDict({"embedding": tp_ext.VocabParallelEmbedding(6, 4, group=mesh["tp"], **options)})
    optimizer = torch.optim.SGD(stage.parameters(), 0.1, momentum=0.9)
    stage["embedding"].weight.grad = torch.ones_like(stage["embedding"].weight)
    if last:
        tp_ext.declare_tied(stage, {"embedding.weight": "embedding.weight"})
    optimizer.step()
    norm = tp_ext.grad_norm(stage, mesh=mesh)
    tp_ext.save_checkpoint(path / "saved", stage, optimizer, mesh=mesh)
    tp_ext.save_safetensors(path / "export", stage, mesh=mesh)
    state = tp_ext.full_state_dict(stage, mesh=mesh)
    same = tp_ext.debug.findings(stage, mesh=mesh)
    with torch.no_grad():
        stage["embedding"].weight.add_(1 + last)
    drifted = tp_ext.debug.findings(stage, mesh=mesh)
    tp_ext.load_checkpoint(path / "saved", stage, optimizer, mesh=mesh)
    assert_same(tp_ext.full_state_dict(stage), state)  # of this stage alone
    tp_ext.load_full_state_dict(stage, state, mesh=mesh, broadcast_from_rank0=True)
    tp_ext.load_safetensors(path / "export", stage, mesh=mesh)
    assert_same(tp_ext.full_state_dict(stage), state)
    lost = nn.ModuleDict({str(last): nn.Linear(2, 2)})
    if last:
        tp_ext.declare_tied(lost, {"1.weight": "elsewhere"})
    with pytest.raises(ValueError, match=r"'1.weight' is a copy of 'elsewhere', which must be in a stage"):
        tp_ext.full_state_dict(lost, mesh=mesh)
    return norm, [*state], same, drifted


@pytest.mark.parametrize("pad", [False, True], ids=["", "padded"])
def test_a_copy_without_a_name_of_its_own(pad, tmp_path):
    """Padded: the copy is sharded in another way, and local tensors cannot be compared."""
    for norm, names, same, drifted in ranks.run(_copies, 4, tmp_path, pad):
        assert names == ["embedding.weight"] and same == [] and norm == 24**0.5
        sentence = "embedding.weight: in stage 1 must be equal to embedding.weight in stage 0"
        assert [one.partition(", of which")[0] for one in drifted] == ([] if pad else [sentence])
    found = tp_ext.CheckpointReader(tmp_path / "saved").read_metadata().state_dict_metadata
    for name in ("model.embedding.weight", "optimizer.state.embedding.weight.momentum_buffer"):
        assert [tuple(chunk.offsets) for chunk in found[name].chunks] == [(0, 0), (3, 0)]


def _misses(group, path, keys, match):
    mesh = mesh_of(2, 1, 1, 1)
    made, _ = stages(mesh)
    state = torch.load(path / "full.pt")
    for name in keys:
        state = (
            {key: value for key, value in state.items() if key != name}
            if name in state
            else {**state, name: torch.zeros(2)}
        )
    with pytest.raises(KeyError, match=match):
        tp_ext.load_full_state_dict(made, state, mesh=mesh)
    with pytest.raises(KeyError, match=match):
        tp_ext.load_full_state_dict(made, state, mesh=mesh, broadcast_from_rank0=True)
    if group.rank() == 0:
        save_file(state, path / "other.safetensors")
    dist.barrier()
    with pytest.raises(KeyError, match=match):
        tp_ext.load_safetensors(path / "other.safetensors", made, mesh=mesh)
    tp_ext.load_safetensors(path / "other.safetensors", made, mesh=mesh, strict=False)


def test_strict_loads_see_all_stages(tmp_path):
    """A missing key of either stage, and a key that no stage takes, is an error on both."""
    torch.save(dict(dense()[0].state_dict()), tmp_path / "full.pt")
    for keys, match in [
        (["mlp.up.weight", "norm1.bias"], r"missing keys \['mlp.up.weight', 'norm1.bias'\], unexpected keys \[\]"),
        (["other"], r"missing keys \[\], unexpected keys \['other'\]"),
    ]:
        ranks.run(_misses, 2, tmp_path, keys, match)


@on_ranks(2)
def test_one_name_in_two_stages_is_an_error(group, tmp_path):
    mesh = mesh_of(2, 1, 1, 1)
    stage = nn.ModuleDict({"norm": tp_ext.RMSNorm(4, group=mesh["tp"])})
    words = r"'norm.weight' is in the stages \[0, 1\] of the pipeline"
    for call in (
        lambda: tp_ext.full_state_dict(stage, mesh=mesh),
        lambda: tp_ext.save_checkpoint(tmp_path / "saved", stage, mesh=mesh),
        lambda: tp_ext.save_safetensors(tmp_path / "export", stage, mesh=mesh),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert not (tmp_path / "saved").exists() and not (tmp_path / "export").exists()
    found = tp_ext.debug.findings(stage, mesh=mesh)
    assert len(found) == 1 and "norm.weight: is in the stages [0, 1] of the pipeline and must be in one" in found[0]


def _groups_differ(group, option):
    mesh = mesh_of(2, 1, 1, 1)
    made, _ = stages(mesh)
    params = list(made[0].parameters())
    if option == "lr":
        optimizer = torch.optim.AdamW(params, lr=0.1 * (1 + group.rank()))
    else:
        optimizer = torch.optim.AdamW(params) if group.rank() else optimizer_of(params)
    tp_ext.full_optimizer_state_dict(made, optimizer, mesh=mesh)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ("lr", "option 'lr' of its parameter group 0 must be the same in all stages, and is 0.1 in the first, 0.2 in"),
        ("number", r"the stages must have the same number of parameter groups, and have \[2, 1\]"),
    ],
)
def test_optimizers_of_stages_that_make_no_whole_are_refused(option, match):
    ranks.run_raises(_groups_differ, 2, ValueError, match, option, in_turns=False)


def _without_mesh(group, path):
    made, _ = stages(mesh_of(2, 1, 1, 1))
    for turn in range(2):
        if group.rank() == turn == 0:
            tp_ext.save_safetensors(path, made)
        elif group.rank() == turn:
            with pytest.raises(OSError, match="could not be written") as error:
                tp_ext.save_safetensors(path, made)
            assert "rank 0 of this job has exported other tensors there" in str(error.value.__cause__)
        dist.barrier()


def test_stages_do_not_replace_each_others_exports(tmp_path):
    """Without a mesh each stage would be a model of its own."""
    ranks.run(_without_mesh, 2, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "embedding.weight" in file.keys()  # noqa: SIM118
