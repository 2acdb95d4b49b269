"""TensorParallelStrategy: losses and metrics are those of the same module without ranks; checkpoints fit any sizes."""

import lightning.fabric.strategies as fabric
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed import DeviceMesh

import tp_ext
from tests.helpers.ranks import run, run_raises
from tests.lightning.modules import Module, fit

OPTIONS = {"gradient_clip_val": 0.2, "accumulate_grad_batches": 2}
NEW = pytest.mark.skipif(
    not hasattr(torch.distributed.checkpoint, "CheckpointableTensor"),
    reason="needs torch 2.15",
)


def assert_same(got, want, tolerance=1e-5):
    for losses, metrics, _ in got:
        assert losses == pytest.approx(want[0], abs=tolerance)
        assert metrics == pytest.approx(want[1], abs=tolerance)


@pytest.mark.parametrize(
    "sizes, options",
    [
        ((1, 2), {}),
        ((1, 3), {"gradient_clip_algorithm": "value"}),
        ((2, 2), {}),
        ((2, 2), {"fsdp": True}),
        ((2, 1), {"accumulate_grad_batches": 1}),
    ],
    ids=lambda one: str(one),
)
def test_losses_are_those_of_one_process(sizes, options, tmp_path):
    options = OPTIONS | options
    dense = {name: value for name, value in options.items() if name != "fsdp"}
    want = fit(None, None, tmp_path / "dense", **dense)
    assert want[1]["rows"] == 32
    assert_same(run(fit, sizes[0] * sizes[1], sizes, tmp_path / "ranks", save=False, **options), want)


@pytest.mark.parametrize("save", [pytest.param(True, marks=NEW), False])
@pytest.mark.parametrize("sizes", [pytest.param((1, 2), marks=pytest.mark.exhaustive), (2, 2)])
def test_the_best_checkpoint_is_that_of_one_process(sizes, save, tmp_path):
    """Three epochs, each better than the one before. All ranks must agree on the best checkpoint."""
    want = fit(None, None, tmp_path / "dense", epochs=3, monitor="val")[2]
    assert want.endswith("step=12.ckpt")
    for _, _, path in run(fit, sizes[0] * sizes[1], sizes, tmp_path / "x", save=save, epochs=3, monitor="val"):
        assert path == str(tmp_path / "x" / "step=12.ckpt")
        assert len([*(tmp_path / "x").glob("*.ckpt")]) == 1


def test_mixed_precision(tmp_path):
    want = fit(None, None, tmp_path / "dense", precision="bf16-mixed", **OPTIONS)
    got = run(fit, 4, (2, 2), tmp_path / "ranks", save=False, precision="bf16-mixed", **OPTIONS)
    assert_same(got, want, 1e-2)
    assert len({tuple(losses) for losses, _, _ in got}) == 1


def test_weights_on_meta(tmp_path):
    """They depend on the seed, not on the sizes."""
    one, other = (run(fit, 2, sizes, tmp_path, save=False, meta=True)[0] for sizes in ((1, 2), (2, 1)))
    assert one[0] == pytest.approx(other[0], abs=1e-5)


@pytest.mark.parametrize("save", [pytest.param(True, marks=NEW), False])
@pytest.mark.parametrize(
    "first, second", [pytest.param((1, 2), (2, 2), marks=pytest.mark.exhaustive), ((2, 2), (1, 3)), ((2, 1), (1, 2))]
)
def test_resumed_runs_go_on_as_uninterrupted_ones(save, first, second, tmp_path):
    want = fit(None, None, tmp_path / "dense", epochs=3, **OPTIONS)
    got = run(fit, first[0] * first[1], first, tmp_path / "first", save=save, epochs=1, **OPTIONS)
    path = got[0][2]
    got = run(fit, second[0] * second[1], second, tmp_path / "second", save=save, ckpt=path, epochs=3, **OPTIONS)
    assert_same(got, (want[0][-len(got[0][0]) :], want[1]))
    assert len(got[0][0]) == 8
    if not save:  # the dense module reads the file, and the sharded one its files
        assert_same([fit(None, None, tmp_path / "x", ckpt=path, epochs=3, **OPTIONS)], (want[0][4:], want[1]))
        path = fit(None, None, tmp_path / "y", epochs=1, **OPTIONS)[2]
        got = run(fit, 2, (1, 2), tmp_path / "z", save=save, ckpt=path, epochs=3, **OPTIONS)
        assert_same(got, (want[0][4:], want[1]))


@pytest.mark.parametrize(
    "sizes, match",
    [
        ((2, 2), "data_parallel_size: 2 times tensor_parallel_size = 2 must be the 2 ranks"),
        ((0, 2), "data_parallel_size: 0 must be an integer of at least 1"),
        (("all", 2), "data_parallel_size: 'all' must be"),
    ],
)
def test_wrong_sizes(sizes, match, tmp_path):
    run_raises(fit, 2, ValueError, match, sizes, tmp_path, in_turns=False)


def test_layers_of_another_group(tmp_path):
    match = "Module has no parameter that is sharded over the tensor-parallel ranks"
    run_raises(fit, 4, ValueError, match, (2, 2), tmp_path, axis="data_parallel", in_turns=False)
    match = r"'model.1.weight' is sharded over ranks \[0, 1\] and must be over the tensor-parallel ranks \[\d\]"
    run_raises(fit, 2, ValueError, match, (2, 1), tmp_path, axis="data_parallel", in_turns=False)
    run_raises(dense_model, 2, ValueError, "Module has no parameter that is sharded", tmp_path, in_turns=False)


def dense_model(group, root):
    made = Module.configure_model
    try:
        Module.configure_model = lambda self: setattr(self, "model", nn.Linear(4, 4))
        fit(group, (1, 2), root)
    finally:
        Module.configure_model = made


@pytest.mark.parametrize("save", [pytest.param(True, marks=NEW), False])
def test_wrong_checkpoints(save, tmp_path):
    path = run(fit, 2, (1, 2), tmp_path / "first", save=save, epochs=1)[0][2]
    match = r"model.1.(weight|bias)' has shape \(9.* and must have \(11"
    args = (1, 2), tmp_path / "second"
    run_raises(fit, 2, ValueError, match, *args, save=save, ckpt=path, hidden=11, in_turns=False)
    run_raises(fit, 2, ValueError, "must be an existing file or folder", *args, ckpt=f"{path}x", in_turns=False)
    if save:
        (tmp_path / "first" / "last.ckpt" / "meta.pt").unlink()
        run_raises(fit, 2, ValueError, "was not written to its end", *args, ckpt=path, in_turns=False)


def _replicas(data_size, tensor_size, **options):
    return DDPStrategy()


@pytest.mark.parametrize(
    "sizes, options", [pytest.param((1, 2), {}, marks=pytest.mark.exhaustive), ((2, 2), {"fsdp": True})], ids=str
)
def test_lightnings_own_strategy_is_right(sizes, options, tmp_path):
    want = fit(None, None, tmp_path / "dense", **OPTIONS)
    got = run(fit, sizes[0] * sizes[1], sizes, tmp_path / "x", strategy=ModelParallelStrategy, **OPTIONS, **options)
    for losses, metrics, _ in got:  # it takes the mean over all ranks, and sums each row for each of them
        assert metrics["val"] == pytest.approx(want[1]["val"], abs=1e-5)
        assert losses == pytest.approx(want[0], abs=1e-5)


@pytest.mark.parametrize(
    "strategy, sizes, options, match",
    [
        (ModelParallelStrategy, (2, 2), {}, "averages no gradients over .* = 2, and 'model.0.weight' is not under"),
        (ModelParallelStrategy, (1, 2), {"seed": None}, "'model.0.weight' must be the same on the tensor-parallel"),
        (ModelParallelStrategy, (2, 1), {"axis": "data_parallel"}, "is sharded over ranks .* must be over the tensor"),
        (_replicas, (1, 2), {}, "DDPStrategy takes each process for a data-parallel rank, and 'model.1.weight' is"),
    ],
    ids=["gradients", "weights", "group", "DDP"],
)
def test_lightnings_own_strategies_are_refused(strategy, sizes, options, match, tmp_path):
    run_raises(
        fit, sizes[0] * sizes[1], ValueError, match, sizes, tmp_path, strategy=strategy, in_turns=False, **options
    )


def _fabric(group):
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    kind = type("OnCPU", (fabric.ModelParallelStrategy,), {"root_device": torch.device("cpu")})
    strategy = kind(lambda model, mesh: model)
    strategy._device_mesh = mesh
    layer = tp_ext.ColumnParallelLinear(4, 4, group=mesh["tensor_parallel"])
    dense = nn.Linear(4, 4)
    assert strategy.setup_module(dense) is dense
    strategy.setup_module(layer)


def test_fabric_is_refused():
    match = "averages no gradients over .* 'weight' is not under fully_shard: call fully_shard"
    run_raises(_fabric, 4, ValueError, match, in_turns=False)
