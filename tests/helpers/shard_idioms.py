"""Idioms of training loops and optimizers that touch parameters and gradients by hand, for tests of what is right on
shards and what is not: a model, what each idiom computes, and the function that takes a shard for the whole."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm, parameters_to_vector, vector_to_parameters
from torch.optim import swa_utils

import tp_ext

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4).sin()
TARGETS = torch.tensor([1, 0, 6, 3, 2, 5])


class LM(nn.Module):
    """Unequal shards of columns, rows and a vocabulary, and replicated parameters."""

    def __init__(self, group):
        super().__init__()
        self.up = tp_ext.ColumnParallelLinear(4, 9, group=group)
        self.norm = tp_ext.RMSNorm(4, group=group)
        self.down = tp_ext.RowParallelLinear(9, 4, group=group)
        self.lm_head = tp_ext.VocabParallelLMHead(4, 7, group=group)

    def hidden(self, x):
        return self.norm(self.down(torch.tanh(self.up(x))))

    def forward(self, x):
        return self.lm_head.loss(self.hidden(x), TARGETS)


def make(group):
    tp_ext.manual_seed(3)
    return LM(group).double()


def backward(model):
    model(X).backward()


def gradients(model):
    backward(model)
    return [param.grad for param in model.parameters()]


def full_gradients(model):
    """The full gradients, by the layouts of the weights."""
    other = copy.deepcopy(model)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        mine.data = theirs.grad
    return tp_ext.full_state_dict(other)


def by_hand(update):
    """An optimizer that is a function of parameter, gradient and state, which no guard tries."""

    def train(model):
        states = {}
        for step in range(1, 4):
            model.zero_grad()
            backward(model)
            with torch.no_grad():
                for param in model.parameters():
                    update(param, param.grad, states.setdefault(param, {}), step)

    train.__name__ = update.__name__
    return train


# Optimizers


@by_hand
def lion(p, g, state, step):
    m = state.setdefault("m", torch.zeros_like(p))
    p.mul_(0.99).add_(torch.sign(m * 0.9 + g * 0.1), alpha=-0.01)
    m.lerp_(g, 0.01)


@by_hand
def adan(p, g, state, step):
    m, v, n = (state.setdefault(key, torch.zeros_like(p)) for key in "mvn")
    diff = g - state.get("g", g)
    m.lerp_(g, 0.1), v.lerp_(diff, 0.1)
    n.mul_(0.9).addcmul_(g + diff, g + diff, value=0.1)
    p.sub_((m + 0.9 * v) / (n.sqrt() + 1e-6) * 0.01).div_(1.01)
    state["g"] = g.clone()


@by_hand
def adabelief(p, g, state, step):
    m, s = (state.setdefault(key, torch.zeros_like(p)) for key in "ms")
    m.mul_(0.9).add_(g, alpha=0.1)
    s.mul_(0.99).add_((g - m) ** 2, alpha=0.01)
    p.addcdiv_(m / (1 - 0.9**step), (s / (1 - 0.99**step)).sqrt_().add_(1e-6), value=-0.01)


@by_hand
def sophia(p, g, state, step):
    h = state.setdefault("h", torch.full_like(p, 0.1))
    h.lerp_(g * g, 0.01)
    p.sub_(0.01 * torch.clamp(g / torch.maximum(h, torch.tensor(1e-6)), -1, 1))


@by_hand
def rprop(p, g, state, step):
    size, before = state.setdefault("size", torch.full_like(g, 0.01)), state.setdefault("g", torch.zeros_like(g))
    sign = g.mul(before).sign()
    factor = sign.clone()
    factor[sign.gt(0)], factor[sign.lt(0)], factor[sign.eq(0)] = 1.2, 0.5, 1
    g = g.clone()
    g[sign.eq(-1)] = 0
    p.addcmul_(g.sign(), size.mul_(factor).clamp_(1e-6, 1), value=-1)
    before.copy_(g)


@by_hand
def lars(p, g, state, step):
    p.sub_(g * (0.01 * p.norm() / (g.norm() + 1e-9)))


@by_hand
def lamb(p, g, state, step):
    update = g / (g.abs() + 1e-6) + 0.01 * p
    p.sub_(update, alpha=0.01 * (p.pow(2).sum().sqrt() / update.pow(2).sum().sqrt()).item())


@by_hand
def kron(p, g, state, step):
    """As timm's: preconditions by factors of each dim."""
    if p.dim() == 2:
        q = state.setdefault("q", torch.eye(p.shape[0], dtype=p.dtype))
        g = torch.einsum("ij,jk->ik", q, g)
        q.lerp_(torch.einsum("ij,kj->ik", g, g), 0.1)
    p.sub_(g, alpha=0.01)


@by_hand
def muon(p, g, state, step):
    if p.dim() == 2:
        x = g / 10
        for _ in range(2):
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        g = x
    p.sub_(g, alpha=0.01)


@by_hand
def galore(p, g, state, step):
    if p.dim() == 2:
        u = torch.linalg.svd(g, full_matrices=False).U[:, :1]
        g = u @ (u.t() @ g)
    p.sub_(g, alpha=0.01)


@by_hand
def adafactor(p, g, state, step):
    if p.dim() == 2:
        square = g.square() + 1e-9
        g = g / (square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()).sqrt()
    p.sub_(g, alpha=0.01)


@by_hand
def prodigy(p, g, state, step):
    start = state.setdefault("start", p.clone())
    state["d"] = max(state.get("d", 0.01), float(torch.dot(g.flatten(), (start - p).flatten())))
    p.sub_(g, alpha=state["d"])


def sam(model):
    """Its first step."""
    scale = 0.05 / (torch.stack([grad.norm(p=2) for grad in gradients(model)]).norm(p=2) + 1e-12)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(param.grad * scale)


def changed(change):
    """An idiom that changes each gradient."""

    def idiom(model):
        torch.manual_seed(4)
        for grad in gradients(model):
            change(grad)
        return full_gradients(model)

    return idiom


def of_weights(change):
    """An idiom that changes the model without gradients."""

    def idiom(model):
        torch.manual_seed(4)
        with torch.no_grad():
            change(model)

    return idiom


def hooked(register):
    def idiom(model):
        for param in model.parameters():
            register(param)
        backward(model)
        return full_gradients(model)

    return idiom


def normalise(param):
    param.grad = param.grad / param.grad.max()


def clipped_units(*names):
    """Adaptive clipping, by the norms of rows."""

    def idiom(model):
        backward(model)
        for param in map(model.get_parameter, names):
            norm, limit = (x.norm(dim=tuple(range(1, x.dim())), keepdim=True) for x in (param.grad, param))
            limit = limit.clamp_(min=1e-3) * 0.01
            param.grad.copy_(torch.where(norm > limit, param.grad * (limit / norm.clamp(min=1e-6)), param.grad))
        return full_gradients(model)

    return idiom


def centralized(name):
    def idiom(model):
        backward(model)
        grad = model.get_parameter(name).grad
        grad.sub_(grad.mean(dim=1, keepdim=True))
        return full_gradients(model)

    return idiom


def clipped_each_by_torch(model):
    for param, _ in zip(model.parameters(), gradients(model), strict=True):
        clip_grad_norm_(param, 0.01)
    return full_gradients(model)


descent = by_hand(lambda p, g, *_: p.sub_(g, alpha=0.1))


def average(model):
    mean = {name: value.clone() for name, value in model.state_dict().items()}
    descent(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            mean[name].lerp_(param, 0.1)
            param.copy_(torch.stack([mean[name], param]).mean(0))


def averaged_model(model):
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    descent(model)
    ema.update_parameters(model)
    return tp_ext.full_state_dict(ema.module)


def task_vector(model):
    other = copy.deepcopy(model)
    descent(other)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.add_((theirs * 1.1 - mine) * 0.3)


def vectors(model):
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector * 0.9 + 0.01, model.parameters())


def called_with_others(model):
    params = {name: param.detach() * 1.5 for name, param in model.named_parameters()}
    return torch.func.functional_call(model, params, (X,))


def masked(model):
    model.up.weight[model.up.weight < 0] = 0
    model.down.weight.masked_fill_(model.down.weight.abs() < 0.1, 0)


def layer_of_a_copy(model):
    head = nn.Linear(4, 7, bias=False).double()
    head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return head(model.hidden(X))


def clipped_vector(model):
    flat = nn.Parameter(parameters_to_vector(model.parameters()).detach())
    flat.grad = parameters_to_vector(gradients(model)).detach()
    return clip_grad_norm_([flat], 0.01)


def equal_to_before(model):
    return [torch.equal(param.clone(), param) for param in model.parameters()]


RIGHT = {
    "Lion": lion, "Adan": adan, "AdaBelief": adabelief, "Sophia": sophia, "Rprop": rprop,
    "each clipped by torch": clipped_each_by_torch,
    "rows clipped": clipped_units("up.weight", "lm_head.weight"),
    "rows centralized": centralized("up.weight"),
    "signs": changed(lambda grad: grad.copy_(grad.sign().nan_to_num_().clamp(-1, 1))),
    "hook of single elements": hooked(lambda p: p.register_hook(lambda grad: grad.clamp(-0.01, 0.01).sign())),
    "average": average, "AveragedModel": averaged_model, "task vector": task_vector, "vectors": vectors,
    "names of arguments": of_weights(lambda model: model.up.weight.sub_(torch.zeros_like(input=model.up.weight))),
    "functional_call": called_with_others,
    "one column": of_weights(lambda model: model.up.weight.sub_(model.up.weight[:, :1])),
    "masks": of_weights(masked),
    "transposed copy": of_weights(lambda model: model.up.weight.add_(model.down.weight.t().contiguous())),
}  # fmt: skip
REFUSED = {
    "LARS": (lars, "norm"), "LAMB": (lamb, "sum"), "Kron": (kron, "einsum"), "Muon by hand": (muon, "matmul"),
    "GaLore": (galore, "linalg_svd"), "Adafactor by hand": (adafactor, "mean"), "Prodigy": (prodigy, "dot"),
    "SAM": (sam, "norm"),
    # Losses and heads
    "fused head": (lambda m: F.cross_entropy(F.linear(m.hidden(X), m.lm_head.weight), TARGETS), "linear"),
    "head by hand": (lambda m: torch.logsumexp(m.hidden(X) @ m.lm_head.weight.t(), -1), "matmul"),
    "layer of a copy": (layer_of_a_copy, "linear"),
    "embedding by hand": (lambda m: F.embedding(torch.tensor([1, 5]), m.lm_head.weight), "embedding"),
    "L2 in the loss": (lambda m: m(X) + 0.1 * sum(p.pow(2).sum() for p in m.parameters()), "sum"),
    "L1 in the loss": (
        lambda m: m(X) + sum(torch.linalg.vector_norm(p, 1) for p in m.parameters()), "linalg_vector_norm"
    ),
    "penalty on gradients": (
        lambda m: sum(g.square().sum() for g in torch.autograd.grad(m(X), list(m.parameters()))), "sum"
    ),
    "orthogonality": (lambda m: (m.up.weight @ m.up.weight.T).square().mean(), "matmul"),
    # Gradients
    "logged norms": (lambda m: [float(grad.detach().data.norm(2)) for grad in gradients(m)], "norm"),
    "logged means": (lambda m: [grad.abs().mean() for grad in gradients(m)], "mean"),
    "finite": (lambda m: all(torch.isfinite(grad).all() for grad in gradients(m)), "all"),
    "foreach norm": (lambda m: torch.stack(torch._foreach_norm(gradients(m))).norm(), "_foreach_norm"),
    "norm of copies": (lambda m: get_total_norm([grad.clone() for grad in gradients(m)]), "_foreach_norm"),
    "clipped vector": (clipped_vector, "_foreach_norm"),
    "each clipped by hand": (changed(lambda grad: grad.mul_(min(1.0, 0.01 / grad.norm().item()))), "norm"),
    "normalising hook": (hooked(lambda p: p.register_hook(lambda grad: grad / grad.norm())), "norm"),
    "hook after accumulation": (hooked(lambda p: p.register_post_accumulate_grad_hook(normalise)), "max"),
    "columns clipped": (clipped_units("down.weight"), "norm"),
    "columns centralized": (centralized("down.weight"), "mean"),
    "largest kept": (changed(lambda grad: grad.mul_(grad.abs() >= grad.flatten().topk(2).values[-1])), "topk"),
    "noise": (changed(lambda grad: grad.add_(torch.randn_like(grad))), "randn_like"),
    "dropout of gradients": (changed(lambda grad: grad.copy_(F.dropout(grad, 0.5))), "dropout"),
    "quantised": (changed(lambda grad: grad.div_(grad.abs().max() / 127).round_()), "max"),
    "cosine": (lambda m: F.cosine_similarity(gradients(m)[0].flatten(), m.up.weight.flatten(), 0), "cosine_similarity"),
    # Weights
    "draws": (of_weights(lambda m: [p.data.normal_(0, 0.02) for p in m.parameters()]), "normal_"),
    "perturbed": (of_weights(lambda m: [p.add_(torch.rand_like(p)) for p in m.parameters()]), "rand_like"),
    "norm of a vector": (lambda m: parameters_to_vector(m.parameters()).norm(), "norm"),
    "joined weights": (lambda m: F.linear(X, torch.cat([m.up.weight, m.lm_head.weight])), "linear"),
    "vmap": (lambda m: torch.func.vmap(lambda w: w.norm())(torch.stack([m.up.weight] * 2)), "norm"),
    "func.grad": (lambda m: torch.func.grad(lambda w: w.square().sum().sqrt())(m.up.weight).abs().sum(), "sum"),
    "NumPy": (lambda m: [float(p.detach().numpy().std()) for p in m.parameters()], "numpy"),
    "first rows": (lambda m: m.up.weight[:2].detach().clone(), "__getitem__"),
    "rows of a loop": (lambda m: [row.abs() for row in m.up.weight], "unbind"),
    "a row set": (of_weights(lambda m: m.up.weight.__setitem__(3, 0)), "__setitem__"),
    "pruned by rank": (
        of_weights(lambda m: m.up.weight.mul_(m.up.weight.abs() > m.up.weight.abs().flatten().kthvalue(5).values)),
        "kthvalue",
    ),
    "spectral norm": (lambda m: torch.linalg.matrix_norm(m.up.weight, 2), "linalg_matrix_norm"),
    "standard deviations": (lambda m: [p.std() for p in m.parameters()], "std"),
    "histogram": (lambda m: torch.histc(m.up.weight, 4), "histc"),
    "sorted": (lambda m: torch.sort(m.up.weight, dim=0).values, "sort"),
    "mixed layouts": (
        of_weights(lambda m: m.up.weight.add_(m.down.weight.view_as(m.up.weight))), "add_"
    ),
    "copy by name": (lambda m: torch.clone(input=m.up.weight).norm(), "norm"),
    "indices of a mask": (lambda m: torch.where(m.up.weight > 0)[0].abs(), "where"),
    "dims put in place": (lambda m: m.up.weight.detach().clone().unsqueeze_(-1).amax(0).sum(-1), "amax"),
    "equal to before": (equal_to_before, "equal"),
}  # fmt: skip
