"""Random models with experts over two groups, ep x tp, against plain torch on the batch of all ranks.

A model is drawn as in config.py; those without experts are passed over. The ranks of ``ep`` have other tokens of one
batch, and their gradients are averaged, as the experts' by ``average_gradients``. The plain model computes the whole
batch. Compared are output, losses, gradients of inputs and of all parameters, after one forward and backward.
"""

import random

import torch

import tp_ext
from tests.fuzz import config as configs
from tests.fuzz import plain
from tests.fuzz.model import make, shape_of
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tp_ext.nn.moe.experts import ParallelExperts
from tp_ext.parallel import average_gradients

SIZES = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (2, 2), (1, 4)]  # ep, tp
BOUND = 1e-12  # of the largest number of a tensor, at least of 1


def draw(seed):
    """A configuration of config.py with ``ep``."""
    r = random.Random(f"experts {seed}")
    ep, tp = SIZES[seed % len(SIZES)]
    while True:
        config = configs._draw(r, 2 * r.randrange(10**6), (tp,))  # even: without dropout
        experts = [block["moe"] for block in config["blocks"] if block.get("moe")]
        if experts and min(one["experts"] for one in experts) >= ep and configs.valid(config):
            break
    if config["head"]:
        config["loss"] |= {"reduction": "sum", "by_head": None}  # logits are compared, too
    return config | {"ep": ep, "frozen": 0}


def whole(config):
    """The configuration of one process with the batch of all ranks."""
    layout = dict(config["layout"])
    lengths, ep = layout["lengths"], config["ep"]
    layout["lengths"] = [lengths[0] * ep, *lengths[1:]] if layout["how"] == "wide" else lengths * ep
    return config | {"layout": layout}


def batch_of(config):
    """Inputs, targets and weights of the loss, of all ranks."""
    numbers = torch.Generator().manual_seed(config["seed"])
    shape, table, head, hidden = shape_of(whole(config)), config["embedding"], config["head"], config["hidden"]
    x = torch.randn(*shape, hidden, generator=numbers, dtype=torch.float64)
    weights = torch.randn(*shape, hidden, generator=numbers, dtype=torch.float64) / max(shape[0], 1)
    if table:
        x = torch.randint(table["vocab"], shape, generator=numbers)
    target = torch.randint(head["vocab"], shape, generator=numbers) if head else None
    return x, target, weights


def load(model, config):
    """Weights that matter everywhere."""
    numbers, state = torch.Generator().manual_seed(config["seed"]), {}
    reference = make(whole(config) | {"made": None}, plain, None)
    for name, param in sorted(reference.named_parameters()):
        spread = torch.randn(param.shape, generator=numbers, dtype=torch.float64)
        state[name] = 1 + spread / 4 if "norm.weight" in name else spread / param.shape[-1] ** 0.5
    if config["head"] and config["head"]["tied"]:
        state["head.weight"] = state["embedding.weight"]
    if model.place.kit is tp_ext:
        tp_ext.load_full_state_dict(model, state)
    else:
        model.load_state_dict(state)


def step(model, x, target, weights, scale):
    """Forward and backward; ``scale``: of a loss that is a sum over tokens, not a mean. Returns y and the losses."""
    y = model(x)
    found = y.detach().clone()  # before a loss that computes its gradient in place
    losses = model.place.kit.router_loss(model)
    loss = model.own_loss(y, target, weights)
    (loss * (1 if model.head is not None else scale) + losses).backward()
    return found, torch.as_tensor(losses).detach().double()


def on_rank(group, config):
    """This rank's place, y, losses, dx, full gradients, and whether some rank had no row for its experts."""
    mesh = mesh_of(config["ep"], config["p"], names=("ep", "tp"))
    ep, tp = mesh["ep"], mesh["tp"].get_group()
    model = make(config, tp_ext, tp, {"expert_group": ep.get_group().group_name})
    load(model, config)
    rows = []
    for module in model.modules():
        if isinstance(module, ParallelExperts):
            module.register_forward_pre_hook(lambda module, given: rows.append(sum(given[1])))
    x, target, weights = (
        None if full is None else full.chunk(config["ep"])[ep.get_local_rank()] if full.shape[0] else full
        for full in batch_of(config)
    )
    x = x if config["embedding"] else model.place.cut(x).clone().requires_grad_()
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param) if config["main_grad"] else None
    y, losses = step(model, x, target, weights, config["ep"])
    for param in model.parameters():
        if param.main_grad is not None and (param.grad is None or param.main_grad.any()):
            param.grad = param.main_grad if param.grad is None else param.grad + param.main_grad
        param.main_grad = None
    average_gradients(model, ep)
    layouts = dict(tp_ext.layouts(model))
    gradients = {name: _full(param.grad, layouts[name]) for name, param in model.named_parameters()}
    dx = None if x.grad is None else x.grad / config["ep"]
    return ep.get_local_rank(), y, losses, dx, gradients, 0 in rows


def _full(grad, layout):
    for sharding, axis in reversed(layout or ()):
        sizes = sharding.local_sizes(axis.size)
        joined = tp_ext.gather_from_region(grad, axis.name or None, sharding.dim, sizes)
        grad = sharding.unshard(joined.split(sizes, sharding.dim))
    return grad


def check(config):
    """Returns the largest error as its share of the bound and whether a rank had no row; raises above the bound."""
    results = ranks.run(on_rank, config["ep"] * config["p"], config, timeout=120)
    model = make(whole(config), plain, None)
    load(model, config)
    x, target, weights = batch_of(config)
    x = x if config["embedding"] else x.requires_grad_()
    y, losses = step(model, x, target, weights, 1)
    want = {name: param.grad for name, param in model.named_parameters()}
    worst, head = 0.0, config["head"]
    for data in range(config["ep"]):
        own = [one for one in results if one[0] == data]
        for what, at, full in (("y", 1, y), ("dx", 3, x.grad)):
            if full is None or not full.shape[0]:
                continue
            part = full.chunk(config["ep"])[data]
            if what == "y" and head:
                shards = [torch.cat([one[at] for one in own], -1)[..., : head["vocab"]]]
                if head["pad"]:
                    continue  # padding columns are between those of ranks; the loss has them
            else:
                shards = [torch.cat([one[at] for one in own])] if config["sp"] else [one[at] for one in own]
            worst = max([worst, *(_share(shard, part, what) for shard in shards)])
    for _, _, got, _, gradients, _ in results:
        worst = max(worst, _share(got, losses, "losses"))
        assert gradients.keys() == want.keys()
        for name, grad in gradients.items():
            wanted = torch.zeros_like(grad) if want[name] is None else want[name]
            grad = torch.zeros_like(wanted) if grad is None else grad
            worst = max(worst, _share(grad, wanted, name))
    return worst, any(one[5] for one in results)


def _share(got, want, what):
    assert got.shape == want.shape, f"{what}: {got.shape}, not {want.shape}"
    if not want.numel():
        return 0.0
    scale = max(1.0, float(want.abs().amax()))
    share = float((got - want).abs().amax()) / (BOUND * scale)
    assert share <= 1, f"{what}: off by {share:.3g} times the bound of {BOUND} * {scale:.3g}"
    return share
