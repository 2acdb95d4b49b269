"""Names of modules through any wrappers, and weights by name: those of one process for layers built alone, on meta, in
a stage, under FSDP2, in any order."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of

pytestmark = pytest.mark.core


class Model(nn.Module):
    """Ours and torch's layers, a tied weight, initialisers of both kinds, a module with two names."""

    def __init__(self, group=None, device=None):
        super().__init__()
        o = {"group": group, "device": device, "dtype": torch.float64}
        theirs = {"device": device, "dtype": torch.float64}
        self.embedding = tp_ext.VocabParallelEmbedding(12, 6, **o)
        self.blocks = nn.ModuleDict({name: tp_ext.ParallelMLP(6, 8, **o) for name in ("0", "1")})
        self.row = tp_ext.RowParallelLinear(6, 6, init=nn.init.xavier_uniform_, **o)
        self.norm = tp_ext.RMSNorm(6, **o)
        self.attend = nn.MultiheadAttention(6, 2, **theirs)
        self.linear = nn.Linear(6, 4, **theirs)
        self.again = self.linear
        self.head = tp_ext.VocabParallelLMHead(6, 12, **o)
        self.head.weight = self.embedding.weight


def expected():
    tp_ext.manual_seed(3)
    model = Model()
    tp_ext.reset_parameters(model)
    return model.state_dict()


def assert_equal(state, want):
    for name, value in state.items():
        assert torch.equal(value, want[name]), name


def test_names_are_those_without_wrappers():
    model = Model()
    tp_ext.name_modules(model)
    assert all(module.tp_name == name for name, module in model.named_modules())
    assert model.again.tp_name == "linear"
    other = Model()
    other.blocks["1"] = torch.compile(checkpoint_wrapper(other.blocks["1"]), backend="eager")
    tp_ext.name_modules(other)
    assert {module.tp_name for module in other.modules()} == {module.tp_name for module in model.modules()}
    part = copy.deepcopy(model.blocks["1"].up)
    tp_ext.name_modules(part)
    assert part.tp_name == "blocks.1.up", "a part keeps its name"
    model.blocks["2"] = copy.deepcopy(model.blocks["1"])
    tp_ext.name_modules(model)
    assert model.blocks["2"].up.tp_name == "blocks.2.up", "but a copy in the same model does not"
    assert model.blocks["1"].up.tp_name == "blocks.1.up"
    tp_ext.name_modules(part, prefix="other")
    assert part.tp_name == "other"


def test_two_modules_have_no_name_in_common():
    tp_ext.manual_seed(3)
    model = Model()
    tp_ext.name_modules(model)
    model.blocks = nn.ModuleDict({"0": model.blocks["1"], "1": tp_ext.ParallelMLP(6, 8)})
    with pytest.raises(ValueError, match=r"two modules would have the name 'blocks\.1'.*rename=True"):
        tp_ext.reset_parameters(model)
    tp_ext.name_modules(model, rename=True)
    assert all(module.tp_name == name for name, module in model.named_modules())
    tp_ext.add_lora(model, targets=["row"], r=2, alpha=4)
    assert (model.row.tp_name, model.row.base_layer.tp_name) == ("row", "row.base_layer")
    tp_ext.merge_lora(model)
    assert model.row.tp_name == "row"


def test_a_parameter_without_an_initialiser_is_refused():
    tp_ext.manual_seed(3)
    layer = tp_ext.RMSNorm(4)
    layer.extra = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"'norm\.extra' has no initialiser"):
        tp_ext.reset_parameters(nn.ModuleDict({"norm": layer}))
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    tp_ext.reset_parameters(linear)


def _under_ddp(group):
    model = Model()
    tp_ext.name_modules(DistributedDataParallel(model))
    return [module.tp_name for _, module in model.named_modules()]


def test_names_under_ddp():
    assert ranks.run(_under_ddp, 2)[0] == [name for name, _ in Model().named_modules()]


def test_weights_do_not_depend_on_where_or_when_a_layer_is_built():
    want = expected()
    state = torch.get_rng_state()
    for local, layer in Model().named_children():
        tp_ext.name_modules(layer, prefix=local)
        if local not in ("head", "again"):  # tied: the weight of the embedding
            tp_ext.reset_parameters(layer)
            assert_equal({f"{local}.{name}": value for name, value in layer.state_dict().items()}, want)
    meta = Model(device="meta")
    meta.to_empty(device="cpu")
    meta.head.weight = meta.embedding.weight
    tp_ext.reset_parameters(meta)
    assert_equal(meta.state_dict(), want)
    model, stages = Model(), [nn.Module(), nn.Module()]
    for stage, names in zip(stages, (("row", "norm"), ("linear", "attend")), strict=True):
        for name in names:
            setattr(stage, name, getattr(model, name))
    tp_ext.reset_parameters(stages)
    assert_equal(stages[0].state_dict() | stages[1].state_dict(), want)
    tp_ext.manual_seed(4)
    tp_ext.reset_parameters(model)
    assert not torch.equal(model.state_dict()["linear.weight"], want["linear.weight"])
    torch.set_rng_state(state)
    tp_ext.reset_parameters(model)
    assert torch.equal(torch.get_rng_state(), state), "the generators go on as before"


def _on_a_mesh(group, shape, fsdp):
    mesh = mesh_of(*shape, names=("dp", "tp"))
    tp_ext.manual_seed(3, mesh)
    model = Model(mesh["tp"])
    if fsdp:
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    tp_ext.reset_parameters(model)
    return tp_ext.full_state_dict(model)


@pytest.mark.parametrize("shape, fsdp", [((1, 3), False), ((2, 1), False), ((2, 1), True), ((2, 2), True)], ids=str)
def test_weights_are_those_of_one_process_on_every_mesh(shape, fsdp):
    want = expected()
    for state in ranks.run(_on_a_mesh, shape[0] * shape[1], shape, fsdp):
        assert state.keys() == want.keys()
        assert_equal(state, want)


def test_a_declared_copy_has_the_seed_of_the_original():
    init = tp_ext.random.Normal(std=0.5)
    tp_ext.manual_seed(3)
    first = nn.ModuleDict({"embedding": tp_ext.VocabParallelEmbedding(12, 6, init=init)})
    last = nn.ModuleDict({"head": tp_ext.VocabParallelLMHead(6, 12, init=init)})
    tp_ext.declare_tied(last, {"head.weight": "embedding.weight"})
    tp_ext.reset_parameters(first)
    tp_ext.reset_parameters(last)
    assert torch.equal(first["embedding"].weight, last["head"].weight)
