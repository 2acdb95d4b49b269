"""accelerate around sharded layers: losses, norms and rows are those of one process; states fit any number of ranks."""

import contextlib
import types
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import nn
from torch.distributed import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset

import tp_ext
from tests.helpers import torchrun
from tests.helpers.ranks import run, run_raises
from tp_ext.huggingface import prepare


@contextlib.contextmanager
def accelerator(group, **options):
    """A new accelerator, in the environment of torchrun."""
    states = PartialState, AcceleratorState, GradientState
    for state in states:
        state._reset_state()
    where = contextlib.nullcontext() if group is None else torchrun.variables(group.rank(), group.size())
    try:
        with where:
            yield Accelerator(cpu=True, **options)
    finally:
        for state in states:
            state._reset_state()


def build(group, tp, hidden=9):
    mesh = None
    if group is not None:
        ranks = torch.arange(group.size()).view(-1, tp)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))["tp"]
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6),
        tp_ext.ColumnParallelLinear(6, hidden, group=mesh),
        nn.Tanh(),
        tp_ext.RowParallelLinear(hidden, 4, group=mesh),
    )


def train(group, tp=1, *, folder=None, load=None, epochs=1, shuffle=False, count=32, **options):
    """Returns what a run shows: losses of the batches, norms, learning rates, the rows of the last epoch, weights."""
    with accelerator(group, **{"gradient_accumulation_steps": 2, **options}) as own:
        model = build(group, tp)
        generator = torch.Generator().manual_seed(1)
        rows = [(torch.randn(4, generator=generator), torch.randn(4, generator=generator)) for _ in range(count)]
        data_size = 1 if group is None else group.size() // tp
        loader = DataLoader(rows, batch_size=8 // data_size, shuffle=shuffle)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        model, optimizer, loader, schedule = prepare(own, model, optimizer, loader, schedule)
        if load is not None:
            own.load_state(load)
        seen = {"losses": [], "norms": [], "rates": [], "rows": []}
        for _ in range(epochs):
            seen["rows"] = []
            for inputs, target in loader:
                with own.accumulate(model):
                    output = model(inputs)
                    loss = F.mse_loss(output, target)
                    own.backward(loss)
                    if own.sync_gradients:
                        seen["norms"].append(own.clip_grad_norm_(model.parameters(), 0.1).item())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                seen["losses"].append(own.reduce(loss.detach(), "mean").item())
                seen["rates"].append(schedule.get_last_lr()[0])
                seen["rows"].append(own.gather_for_metrics(inputs))
        seen["rows"] = torch.cat(seen["rows"]).sort(0).values
        seen["weights"] = own.get_state_dict(model)
        if folder is not None:
            own.save_state(folder or None)
        if folder:
            own.save_model(model, f"{folder}_model")
    return seen


def assert_same(got, want, tolerance=1e-5):
    for one in got:
        for name in ("losses", "norms", "rates"):
            assert one[name] == pytest.approx(want[name][-len(one[name]) :], abs=tolerance), name
        torch.testing.assert_close(one["rows"], want["rows"], atol=0, rtol=0)
        torch.testing.assert_close(one["weights"], want["weights"], atol=tolerance, rtol=0)


@pytest.mark.parametrize("p, tp", [pytest.param(2, 2, marks=pytest.mark.exhaustive), (3, 3), (4, 2), (2, 1)])
def test_runs_are_those_of_one_process(p, tp, tmp_path):
    want = train(None)
    got = run(train, p, tp, folder=str(tmp_path / "state"))
    assert_same(got, want)
    saved = load_file(tmp_path / "state_model" / "model.safetensors")
    torch.testing.assert_close(saved, {k: v.detach() for k, v in want["weights"].items()}, atol=1e-5, rtol=0)


def test_mixed_precision():
    got, want = run(train, 4, 2, mixed_precision="bf16"), train(None, mixed_precision="bf16")
    for one in got:
        assert one["losses"] == got[0]["losses"] == pytest.approx(want["losses"], abs=2e-2)
        assert one["norms"] == got[0]["norms"] == pytest.approx(want["norms"], rel=2e-2)
        torch.testing.assert_close(one["weights"], got[0]["weights"], atol=0, rtol=0)


def test_shuffled_rows_are_those_of_an_epoch():
    """Also where accelerate fills the last batch: of 26 rows, 2 are left for 2 ranks with batches of 4."""
    want = train(None, count=26)["rows"]
    for one in run(train, 4, 2, shuffle=True, count=26):
        torch.testing.assert_close(one["rows"], want, atol=0, rtol=0)


class Stream(IterableDataset):
    """Rows without a length, or with one."""

    def __init__(self, count, sized=False):
        self.count, self.sized = count, sized

    def __len__(self):
        return len(range(self.count)) if self.sized else len(None)

    def __iter__(self):
        yield from torch.arange(float(self.count))


STREAMS = [(count, sized, split, last) for count in (3, 8, 9, 10) for sized in (False, True) for split in (False, True)
           for last in (False, True)]  # fmt: skip


def stream_rows(group):
    """The rows of two passes over each stream, as they are gathered."""
    results = []
    for count, sized, split, drop_last in STREAMS:
        with accelerator(group, split_batches=split) as own:
            size = 4 if group is None or split else 2
            loader = DataLoader(Stream(count, sized), size, drop_last=drop_last)
            _, loader = prepare(own, build(group, 2), loader)
            results.append(
                [row for _ in range(2) for batch in loader for row in own.gather_for_metrics(batch).tolist()]
            )
    return results


def test_rows_of_streams_are_gathered_once():
    """The last batch, which accelerate fills up, has the rows of the stream alone; without it, none of them."""
    whole = [[*map(float, range(count - (count % 4 if last else 0)))] * 2 for count, _, _, last in STREAMS]
    assert run(stream_rows, 4) == [whole] * 4


@pytest.mark.parametrize(
    "first, second", [pytest.param((2, 2), (4, 2), marks=pytest.mark.exhaustive), ((4, 2), (3, 3))]
)
def test_states_fit_any_ranks(first, second, tmp_path):
    want = train(None, epochs=2)
    path = str(tmp_path / "state")
    run(train, *first, folder=path)
    assert_same(run(train, *second, load=path), want)


def test_named_checkpoints(tmp_path):
    want = train(None, epochs=2)
    named = {"project_config": ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)}
    run(train, 2, 2, folder="", **named)
    assert (tmp_path / "checkpoints" / "checkpoint_0" / "tp_ext_0").is_dir()
    assert_same(run(train, 2, 2, load=str(tmp_path / "checkpoints" / "checkpoint_0")), want)


def test_objects_are_gathered():
    """Rows that are no tensors are gathered, too. In the last batch a list of objects is cut, not tensors in it."""
    for names, tensors in run(gather_objects, 4):
        assert names == ["rank 0", "rank 1"] and tensors == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]


def gather_objects(group):
    with accelerator(group) as own:
        prepare(own, build(group, 2))
        data_rank = group.rank() // 2
        names = own.gather_for_metrics([f"rank {data_rank}"])
        state = types.SimpleNamespace(end_of_dataloader=True, remainder=3)
        with mock.patch.object(own, "gradient_state", state):
            tensors = own.gather_for_metrics([torch.full((3,), data_rank)] * 2, use_gather_object=True)
        return names, [tensor.tolist() for tensor in tensors]


def triggers_and_splits(group):
    """Triggers that one process has set alone, as seen by all; what the process gets of five inputs."""
    with accelerator(group) as own:
        prepare(own, build(group, 2))
        seen = []
        for rank in range(4):
            if group.rank() == rank:
                own.set_trigger()
            seen += [own.check_trigger(), own.check_trigger()]
        with (
            own.split_between_processes(list("abcde")) as inputs,
            own.split_between_processes(list("abc"), True) as rest,
        ):
            return seen, inputs, rest


def test_a_trigger_of_one_process_and_inputs_that_are_split():
    for rank, (seen, inputs, rest) in enumerate(run(triggers_and_splits, 4)):
        assert seen == [True, False] * 4
        assert inputs == list("abcde")[3 * (rank // 2) :][:3] and rest == [["a", "b"], ["c", "c"]][rank // 2]


@pytest.mark.parametrize(
    "case, match",
    [
        ("dense", "model: is sharded over the groups of ranks"),
        ("weights", r"'3.bias' must be the same .* ranks whose weights differ from rank [02]'s are \[[13]\]: call"),
        ("prepared", "must not have prepared anything"),
        ("optimizer", "others: SGD must be an optimizer of parameters of the model"),
        ("sizes", "dp_replicate_size = 1 and tp_size = 4, and the model is sharded over 2 of 4 ranks"),
        ("meta", "model: its parameters must be on one device, and are on several: '1.bias' on cpu, '3.bias' on meta"),
        ("folder", "has no 'tp_ext_0'"),
    ],
)
def test_wrong_arguments(case, match, tmp_path):
    run_raises(prepare_wrongly, 4, ValueError, match, case, tmp_path, in_turns=False)


def prepare_wrongly(group, case, folder):
    with accelerator(group) as own:
        model = nn.Linear(4, 4) if case == "dense" else build(group, 2)
        others = []
        if case == "prepared":
            own.prepare(torch.optim.SGD(model.parameters()))
        if case == "optimizer":
            others = [torch.optim.SGD(nn.Linear(2, 2).parameters())]
        if case == "sizes":
            own.state.parallelism_config = types.SimpleNamespace(dp_replicate_size=1, tp_size=4)
        if case == "weights":
            with torch.no_grad():
                model[3].bias += group.rank()
        if case == "meta":
            model[3].to("meta")
        prepare(own, model, *others)
        own.load_state(str(folder))


def test_accelerate_without_it_is_refused(tmp_path):
    match = "hold different shards; pass DDP the data axis"
    run_raises(plain, 2, ValueError, match, False, str(tmp_path), in_turns=False)
    for _, message in run(plain, 2, True, str(tmp_path)):
        assert message is None or "take tp_ext.save_safetensors, or with accelerate" in message
    assert not list(tmp_path.glob("*.safetensors"))


def plain(group, evaluation, folder):
    with accelerator(group) as own:
        model = build(group, 2)
        if not evaluation:
            own.prepare(model)
        own.prepare_model(model, evaluation_mode=True)
        try:
            own.save_state(folder)
        except RuntimeError as error:
            return group.rank(), str(error)
        assert group.rank() != 0, "the process that writes is refused"
        return group.rank(), None


def loaders(group):
    """A loader that is prepared alone, and one with the model."""
    batches = DataLoader(range(8), batch_size=2)
    with accelerator(group) as accelerate:
        model = build(group, 2)
        with pytest.warns(UserWarning, match="other batches .* tp_ext.huggingface.prepare"):
            alone = accelerate.prepare(batches)
        assert accelerate.prepare(alone) is alone
    with accelerator(group) as accelerate, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*batches")
        return [batch.tolist() for batch in alone], [batch.tolist() for batch in prepare(accelerate, model, batches)[1]]


def test_a_loader_that_is_prepared_alone():
    (first, same), (second, again) = run(loaders, 2)
    assert first != second and same == again == [[0, 1], [2, 3], [4, 5], [6, 7]]
