"""ParallelMoE against the plain loop over experts in fp64: outputs, losses, every gradient, dropped tokens."""

import random

import torch
import torch.distributed as dist

import tp_ext
from tests.helpers import ranks
from tests.helpers.dense_moe import DenseMoE
from tests.helpers.meshes import mesh_of
from tp_ext import ParallelMoE, RouterConfig

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
NAMES = ("dp", "ep", "tp")
SIZES = {1: [(1, 1, 1)], 2: [(1, 2, 1), (1, 1, 2), (2, 1, 1)], 3: [(1, 3, 1), (1, 1, 3)]}
SIZES[4] = [(1, 2, 2), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2)]


def drawn(seed):
    """A random layer, the mesh and the batch."""
    r = random.Random(seed)
    sizes = r.choice(SIZES[r.choice([1, 2, 2, 3, 4, 4, 4])])
    groups = r.choice([1, 1, 2, 3])
    experts = groups * r.randint(1, 16 // groups)
    experts = max(experts, groups * -(-sizes[1] // groups))
    top_groups = r.randint(1, groups)
    top_k = r.randint(1, min(4, experts // groups * top_groups))
    sequences = r.choice([1, 2])
    config = RouterConfig(
        scores=r.choice(["softmax", "sigmoid"]),
        normalize=r.random() < 0.6,
        scaling=r.choice([1.0, 2.5]),
        num_groups=groups,
        top_groups=top_groups,
        correction_bias=r.random() < 0.4,
        balance_loss=r.choice([0.0, 0.7]),
        z_loss=r.choice([0.0, 0.3]),
        balance_over=r.choice(["batch", "sequence"]),
    )
    layer = {
        "activation": r.choice(["swiglu", "geglu", "gelu", "relu"]),
        "bias": r.random() < 0.5,
        "router": config,
        "capacity": r.choice([None, None, 0.5, 1.0, 1.3]),
        "drop_order": r.choice(["token", "weight"]),
        "shared_experts": r.choice([0, 0, 1, 2]),
    }
    return {
        "seed": seed,
        "sizes": sizes,
        "shape": (r.choice([3, 6]), r.choice([4, 7, 9]), experts, top_k),
        "layer": layer,
        "tokens": sequences * r.choice([1, 3, 4, 6]),  # of a rank
        "sequences": sequences,
        "sequence_parallel": r.random() < 0.5,
        "attach": r.random() < 0.3,
        "dim": r.choice([2, 3]),
    }


def make(group, shape, mesh=None, **options):
    """The layer with the weights of seed 0 and a correction bias that changes choices."""
    torch.manual_seed(0)
    ep = mesh["ep"] if mesh is not None else None
    dp = [mesh["dp"]] if mesh is not None else None
    layer = ParallelMoE(*shape, group=group, expert_group=ep, data_groups=dp, dtype=torch.float64, **options)
    if layer.router.e_score_correction_bias is not None:
        layer.router.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.3, shape[2]).flip(0))
    return layer


def batch_of(case):
    data = case["sizes"][0] * case["sizes"][1]
    generator = torch.Generator().manual_seed(case["seed"])
    x, dy = torch.randn(2, data, case["tokens"], case["shape"][0], dtype=torch.float64, generator=generator)
    return x * 2, dy


def reference(case):
    layer = make(None, case["shape"], **case["layer"])
    options = {name: case["layer"][name] for name in ("activation", "capacity", "drop_order")}
    return DenseMoE(layer.state_dict(), top_k=case["shape"][3], config=case["layer"]["router"], **options)


def trained(group, case):
    """Output, loss, gradients and kept slots of this rank."""
    mesh = mesh_of(*case["sizes"], names=NAMES)
    dp, ep, tp = (mesh[name] for name in NAMES)
    sp = case["sequence_parallel"]
    layer = make(tp, case["shape"], mesh, sequence_parallel=sp, **case["layer"])
    layer.attach_loss = 1.0 if case["attach"] else None
    data = dp.get_local_rank() * ep.size() + ep.get_local_rank()
    x, dy = (t[data] for t in batch_of(case))
    options = {}
    if sp:
        x, dy = (t.tensor_split(tp.size())[tp.get_local_rank()] for t in (x, dy))
        options["total_tokens"] = case["tokens"]
    if sp or case["dim"] == 2:
        options["batch_size"] = case["sequences"]
    else:
        x, dy = (t.unflatten(0, (case["sequences"], -1)) for t in (x, dy))
    x = x.clone().requires_grad_()
    y = layer(x, **options)
    losses = layer.losses
    # the mean over data ranks of what each rank differentiates is to be the loss of the whole batch
    value = (y * dy).sum() * dp.size() * ep.size()
    if losses is not None and not case["attach"]:
        value = value + losses.total
    value.backward()
    gradients = {}
    for name, param in layer.named_parameters():
        grad = param.grad.clone()
        over = [dp] if name.startswith("experts") else [dp, ep]
        for axis in over:
            dist.all_reduce(grad, group=axis.get_group())
            grad /= axis.size()
        layout = dict(tp_ext.layouts(layer))[name]
        for sharding, axis in reversed(layout):
            sizes = sharding.local_sizes(axis.size)
            joined = tp_ext.gather_from_region(grad, axis.name or None, sharding.dim, sizes)
            grad = sharding.unshard(joined.split(sizes, sharding.dim))
        gradients[name] = grad
    loss = None if losses is None else losses.total.detach()
    place = tp.get_local_rank()
    dx = x.grad / (dp.size() * ep.size())
    return data, place, y.detach().flatten(0, -2), dx.flatten(0, -2), loss, gradients


def assert_as_dense(case):
    dense = reference(case)
    x, dy = batch_of(case)
    data = x.shape[0]
    x = x.flatten(0, 1).clone().requires_grad_()
    y, loss, _ = dense(x, data * case["sequences"])
    ((y * dy.flatten(0, 1)).sum() + loss).backward()
    results = ranks.run(trained, torch.Size(case["sizes"]).numel(), case)
    for what, mine, want in (("y", 2, y.detach()), ("dx", 3, x.grad)):
        per_data = want.unflatten(0, (data, -1))
        for d in range(data):
            locals_ = [one[mine] for one in results if one[0] == d]
            full = [torch.cat(locals_)] if case["sequence_parallel"] else locals_
            for one in full:
                torch.testing.assert_close(one, per_data[d], **CLOSE, msg=lambda m, what=what: f"{what}: {m}")
    want = dense.gradients()
    has_loss = case["layer"]["router"].balance_loss or case["layer"]["router"].z_loss
    for _, _, _, _, got, gradients in results:
        assert (got is not None) == bool(has_loss)
        if has_loss:
            torch.testing.assert_close(got, loss.detach(), **CLOSE)
        assert gradients.keys() == want.keys()
        for name, grad in gradients.items():
            wanted = torch.zeros_like(grad) if want[name] is None else want[name]
            torch.testing.assert_close(grad, wanted, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(300 if metafunc.config.getoption("--exhaustive") else 48))


def test_random_layers(seed):
    assert_as_dense(drawn(seed))
