"""Published bugs of pipelines: gradients over several microbatches, with data parallelism, of tied weights, and initial
weights of the stages; against the model in one process, in fp64."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers import ranks
from tests.helpers.models import GPT
from tests.helpers.on_ranks import on_ranks
from tests.helpers.right_and_wrong import check_on_rank

VOCAB, HIDDEN, BATCH, SEQ = 7, 4, 4, 3
FP64 = {"dtype": torch.float64}


class Residual(tp_ext.ParallelMLP):
    def forward(self, x):
        return x + super().forward(x)


def gpt(group=None):
    """Embedding, blocks and a head that is tied to the embedding."""
    options = {"group": group, **FP64}
    return GPT(VOCAB, HIDDEN, lambda: Residual(HIDDEN, 6, **options), 4, norm=None, **options)


def loss(logits, target):
    return nn.functional.cross_entropy(logits, target.flatten())


def batch(step=0, data=0):
    ids, target = torch.randint(VOCAB, (2, BATCH, SEQ), generator=torch.Generator().manual_seed(10 * step + data))
    return ids, target


def prepared(sizes, **options):
    mesh = tp_ext.init_mesh("cpu", **sizes)
    with torch.device("meta"):
        model = gpt(mesh["tp"])
    return mesh, tp_ext.parallelize(model, mesh, loss=loss, **{"seed": 5, "microbatches": 2} | options)


def full_gradients(run, mesh):
    """By name, as if they were weights."""
    for stage in run.state if isinstance(run.state, list) else [run.state]:
        for param in stage.parameters():
            param.data = param.grad
    return dict(tp_ext.full_state_dict(run.state, mesh=mesh))


def one_process(batches=()):
    tp_ext.manual_seed(5)
    model = gpt()
    tp_ext.name_modules(model)
    tp_ext.reset_parameters(model)
    for ids, target in batches:
        loss(model(ids), target).backward()
    values = {name: param.grad if batches else param.detach() for name, param in model.named_parameters()}
    return values | {"head.weight": values["embedding.weight"]}


@on_ranks(2, backend="gloo", timeout=120)
def test_gradients_are_divided_by_the_number_of_microbatches_once(group):
    """Each stage of a pipeline divided the gradients by the number of accumulation steps again:
    https://github.com/deepspeedai/DeepSpeed/pull/8154."""
    mesh, run = prepared({"pp": 2})
    state = dict(tp_ext.full_state_dict(run.state, mesh=mesh))
    ids, target = batch()
    run.step(ids, target)
    ours = full_gradients(run, mesh)
    model = gpt()
    model.load_state_dict(state)
    for one, goal in zip(ids.chunk(2), target.chunk(2), strict=True):
        x = model.embedding(one.flatten())
        for block in model.blocks[:2]:
            x = block(x)
        x.register_hook(lambda grad: grad / 2)  # of the output of each stage
        for block in model.blocks[2:]:
            x = block(x)
        y = model.head(x)
        y.register_hook(lambda grad: grad / 2)
        loss(y, goal).backward()
    published = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    check_on_rank(group, (ours, {name: published[name] for name in ours}), one_process([batch()]))


def _full_of_fsdp(run, mesh):
    with torch.no_grad():
        for stage in run.state:
            for param in stage.parameters():
                param.copy_(param.grad)
    return dict(tp_ext.full_state_dict(run.state, mesh=mesh))


@on_ranks(2)
def test_gradients_of_earlier_steps_are_kept(group):
    """Stages that were initialised again for another sequence length lost the gradients accumulated so far, so that
    only the last microbatch trained: https://github.com/NVIDIA-NeMo/Automodel/pull/3530."""
    want = one_process([batch(0), batch(1)])
    mesh, run = prepared({"pp": 2}, zero=2)
    for step in range(2):
        run.step(*batch(step))
    stage = fully_shard(nn.Linear(2, 2), mesh=mesh["dp"])
    made = pipelining.PipelineStage(stage, group.rank(), 2, torch.device("cpu"), group=mesh["pp"].get_group())
    for param in stage.parameters():
        param.grad = torch.ones_like(param)  # of the steps before
    made._post_metadata_inference_cleanup()  # as at the end of the initialisation for other shapes
    lost = [param.grad is None for param in stage.parameters()]
    ours = _full_of_fsdp(run, mesh)
    torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-12)
    assert lost == [True, True]


def _in_halves(group):
    """The gradient of a weight on two ranks with other data, by the two halves of a zero-bubble backward under DDP."""
    torch.manual_seed(1)
    layer = DistributedDataParallel(nn.Linear(3, 2, bias=False))
    x = torch.full((1, 3), group.rank() + 1.0, requires_grad=True)
    y = layer(x)
    _, groups = stage_backward_input((y,), [torch.ones_like(y)], [x], layer.parameters())
    stage_backward_weight(layer.parameters(), groups)
    return layer.module.weight.grad


def _zero_bubble(group):
    mesh, run = prepared({"pp": 2, "dp": 2}, microbatches=4, zero=0, schedule="ZBVZeroBubble")
    run.step(*batch(0, run.data_rank))
    return full_gradients(run, mesh)


def test_data_parallelism_under_a_schedule_that_splits_the_backward():
    """Zero-bubble schedules compute the gradients of weights without the hooks by which DDP averages them:
    https://github.com/pytorch/pytorch/issues/144530."""
    published = ranks.run(_in_halves, 2)
    assert not published[0].equal(published[1])  # with DDP, both were 1.5
    ids, target = (torch.cat(both) for both in zip(batch(0, 0), batch(0, 1), strict=True))
    want = one_process([(ids, target)])
    for ours in ranks.run(_zero_bubble, 4, timeout=120):
        torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-12)


@on_ranks(1, 2)
def test_weights_that_are_tied_on_meta(group):
    """A head that was tied to the embedding before the model got memory was a weight of its own afterwards:
    https://github.com/pytorch/torchtitan/issues/2252."""
    want = one_process([batch()])
    mesh, run = prepared({"pp": group.size()})
    run.step(*batch())
    ours = full_gradients(run, mesh)
    with torch.device("meta"):
        model = gpt()
    model.to_empty(device="cpu")
    tied = model.head.weight is model.embedding.weight
    tp_ext.name_modules(model)
    tp_ext.reset_parameters(model)
    loss(model(batch()[0]), batch()[1]).backward()
    published = model.embedding.weight.grad
    torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-12)
    assert not tied and not torch.allclose(published, want["embedding.weight"])


def _initialised(group):
    mesh, run = prepared({"pp": 2})
    ours = dict(tp_ext.full_state_dict(run.state, mesh=mesh))
    torch.manual_seed(5)  # on the rank of each stage
    return ours, Residual(HIDDEN, 6, group=None, **FP64).up.weight


def test_stages_begin_with_different_weights():
    """Each stage of a pipeline begins with the same state of the generator, so that their layers have the same weights:
    https://github.com/pytorch/pytorch/issues/139304."""
    results = ranks.run(_initialised, 2, timeout=120)
    want = one_process()
    for ours, _ in results:
        torch.testing.assert_close(ours, want, rtol=0, atol=0)
    assert not want["blocks.0.up.weight"].equal(want["blocks.2.up.weight"])
    assert results[0][1].equal(results[1][1])


def _saved(group, path):
    mesh, run = prepared({})
    tp_ext.save_checkpoint(path / "ours", run.state, mesh=mesh)
    dcp.save(run.state.blocks.state_dict(), checkpoint_id=path / "published")


def _loaded(group, path):
    mesh, run = prepared({"pp": 2}, seed=6)
    tp_ext.load_checkpoint(path / "ours", run.state, mesh=mesh)
    stage = nn.ModuleList(Residual(HIDDEN, 6, group=None, **FP64) for _ in range(2))  # its names begin at 0
    dcp.load(stage.state_dict(), checkpoint_id=path / "published")
    return dict(tp_ext.full_state_dict(run.state, mesh=mesh)), stage[0].up.weight


def test_layers_of_a_stage_have_their_names_in_the_whole_model(tmp_path):
    """A checkpoint named layers by their place in the stage, and at another number of stages each loaded those of the
    first one: https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 12."""
    ranks.run(_saved, 1, tmp_path, timeout=120)
    want = one_process()
    results = ranks.run(_loaded, 2, tmp_path, timeout=120)
    for ours, _ in results:
        torch.testing.assert_close(ours, want, rtol=0, atol=0)
    published = results[1][1]  # of layer 2
    assert published.equal(want["blocks.0.up.weight"]) and not published.equal(want["blocks.2.up.weight"])
