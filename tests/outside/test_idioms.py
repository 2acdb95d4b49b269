"""Idioms of training loops that touch parameters, gradients or states from outside, on two ranks of unequal shards:
right, refused, or, where nothing can see them, right by the call that docs/guide/training_loop.md names.

Clipping, scalers, initialisers, parametrizations, pruning, state dicts, torch's optimizers: the other files here.
"""

import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import load_model, save_file, save_model
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import swa_utils

import tp_ext

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4).sin()


def _model(group):
    torch.manual_seed(3)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 4), nn.Linear(4, 3)).double()
    if group is not None:
        model[1] = tp_ext.ColumnParallelLinear.from_linear(model[1], group=group)
        model[3] = tp_ext.RowParallelLinear.from_linear(model[3], group=group)
    return model


def _loss(model, x=X):
    return model(x).square().mean()


def _train(model, optimizer, steps=3, loss=_loss):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def _adam(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.05, **options)


class Lookahead(torch.optim.Optimizer):
    """Slow weights of another optimizer's."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param].setdefault("slow", param.clone())
        self.inner.step()
        for param in (p for group in self.param_groups for p in group["params"]):
            param.copy_(self.state[param]["slow"].lerp_(param, 0.5))


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: gradients at y, between the iterates z and their mean x."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for y in group["params"]:
                state = self.state[y]
                if not state:
                    state["z"], state["x"] = y.clone(), y.clone()
                state["z"].sub_(y.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1 / group["k"])
                y.copy_(state["z"].lerp(state["x"], group["beta"]))
            group["k"] += 1


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: a step up along the gradient, by its norm, and one down from there."""

    def __init__(self, params, norm):
        self.norm = norm
        super().__init__(params, {"lr": 0.1, "rho": 0.05})

    @torch.no_grad()
    def step(self, closure):
        params = [param for group in self.param_groups for param in group["params"]]
        with torch.enable_grad():
            closure()
        up = [param.grad * (0.05 / (self.norm(params) + 1e-12)) for param in params]
        torch._foreach_add_(params, up)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(params, up)
        torch._foreach_add_(params, [param.grad for param in params], alpha=-0.1)


def _sam(model, norm, accept=False):
    optimizer = SAM(model.parameters(), norm)
    if accept:
        tp_ext.optim.accept(optimizer)

    def closure():
        optimizer.zero_grad()
        _loss(model).backward()

    for _ in range(2):
        optimizer.step(closure)


def functional_call(model):
    params = {name: param * 1.5 for name, param in model.named_parameters()}
    out = torch.func.functional_call(model, params, (X,))
    out.sum().backward()
    return out


def ensemble(model):
    model.eval()
    params, buffers = torch.func.stack_module_state([model, copy.deepcopy(model).double()])
    made = []
    for i in range(2):
        tensors = {name: value[i] for name, value in (*params.items(), *buffers.items())}
        made.append(torch.func.functional_call(model, tensors, (X,)))
    return torch.stack(made)


def averaged_model(model):
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = _adam(model)
    for _ in range(3):
        _train(model, optimizer, 1)
        ema.update_parameters(model)
    return tp_ext.full_state_dict(ema.module)


def swa(model):
    averaged, optimizer = swa_utils.AveragedModel(model), _adam(model)
    schedule = swa_utils.SWALR(optimizer, 0.01, 2)
    for _ in range(3):
        _train(model, optimizer, 1)
        averaged.update_parameters(model)
        schedule.step()
    swa_utils.update_bn([X, X / 2], averaged)
    return tp_ext.full_state_dict(averaged.module)


def ema_by_hand(model):
    ema = copy.deepcopy(model).requires_grad_(False)
    _train(model, _adam(model))
    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
        mine.mul_(0.9).add_(theirs, alpha=0.1)
    torch._foreach_lerp_(list(ema.parameters()), [param.detach() for param in model.parameters()], 0.5)
    return tp_ext.full_state_dict(ema)


def averaged_states(model):
    other = copy.deepcopy(model)
    _train(other, _adam(other))
    before, trained = model.state_dict(), other.state_dict()
    model.load_state_dict({name: (value + trained[name]) / 2 for name, value in before.items()})


def stochastic_depth(model):
    torch.manual_seed(1)
    optimizer = _adam(model)
    for _ in range(4):
        optimizer.zero_grad()
        model[4](model[:4](X) + X if torch.rand(()) < 0.5 else X).square().mean().backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        optimizer.step()


def accumulation(model):
    optimizer = _adam(model)
    for part in X.chunk(3):
        (_loss(model, part) / 3).backward()
    optimizer.step()


def compiled_step(model):
    optimizer = _adam(model, capturable=False)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        optimizer.zero_grad()
        _loss(model).backward()
        step()


def step_in_backward(model):
    optimizers = {param: torch.optim.SGD([param], 0.1) for param in model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        _loss(model).backward()


def gradient_hooks(model):
    for param in model.parameters():
        param.register_hook(lambda grad: grad.clamp(-0.01, 0.01).sign() * grad.abs().sqrt())
    _loss(model).backward()
    return gradients_of(model)


def gradients_of(model):
    """The full gradients: those of shards in the place of the weights."""
    other = copy.deepcopy(model)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        mine.data = theirs.grad
    return tp_ext.full_state_dict(other)


def decay_groups(model):
    decayed = [param for name, param in model.named_parameters() if param.ndim > 1 and not name.endswith("bias")]
    biases = [param for param in model.parameters() if all(param is not weight for weight in decayed)]
    _train(model, torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0}]))


def squares_in_the_loss(model):
    _train(model, _adam(model), loss=lambda model: _loss(model) + sum(p.square().sum() for p in model.parameters()))


def input_gradient_penalty(model):
    def loss(model):
        x = X.clone().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + (grad.norm(dim=1) - 1).square().mean()

    _train(model.eval(), _adam(model), loss=loss)


def recomputed(model):
    def loss(model):
        x = X.clone().requires_grad_()
        hidden = torch.utils.checkpoint.checkpoint(model[:3], x, use_reentrant=False)
        return torch.utils.checkpoint.checkpoint_sequential(model[3:], 2, hidden, use_reentrant=False).square().mean()

    _train(model.eval(), _adam(model), loss=loss)


def flat_master_weights(model):
    """As DeepSpeed keeps them."""
    params = list(model.parameters())
    flat = nn.Parameter(_flatten_dense_tensors([param.detach() for param in params]))
    optimizer = torch.optim.AdamW([flat], lr=0.05)
    for _ in range(3):
        model.zero_grad()
        _loss(model).backward()
        flat.grad = _flatten_dense_tensors([param.grad for param in params])
        optimizer.step()
        for param, made in zip(params, _unflatten_dense_tensors(flat.detach(), params), strict=True):
            param.data.copy_(made)


def vectors(model):
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector * 1.5 - 0.1, model.parameters())


def clipped_values(model):
    _loss(model).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return gradients_of(model)


def deep_copy(model):
    other = copy.deepcopy(model)
    _loss(other).backward()
    norm = nn.utils.clip_grad_norm_(other.parameters(), 0.01)
    _adam(other).step()
    return norm, tp_ext.full_state_dict(other)


def pickled(model):
    return deep_copy(pickle.loads(pickle.dumps(model)))


def saved_whole(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return deep_copy(torch.load(io.BytesIO(buffer.getvalue()), weights_only=False))


def other_dtypes(model):
    model.half().float()
    model.to(torch.bfloat16).double()
    _loss(model).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    _train(model, _adam(model))
    return norm


def new_parameters_by_conversion(model):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.float().double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    return deep_copy(model)


def lookahead(model):
    _train(model, Lookahead(_adam(model)))


def schedule_free(model):
    _train(model, ScheduleFree(model.parameters()))


def extragradient(model):
    """SAM's two gradients, without a norm: of single elements."""
    _sam(model, lambda params: 1.0)


def exported(model):
    model.eval()
    return torch.export.export(model, (X,)).module()(X)


def sam_with_torchs_norm(model):
    _sam(model, lambda params: nn.utils.get_total_norm([param.grad for param in params]), accept=True)


def counted(model):
    params = dict(model.named_parameters())
    return torch.tensor(sum(layout.full_shape(params[name].shape).numel() for name, layout in tp_ext.layouts(model)))


def weight_norms(model):
    return {name: value.double().norm() for name, value in tp_ext.full_state_dict(model).items()}


def gradient_norms(model):
    _loss(model).backward()
    return tp_ext.grad_norm(model), nn.utils.get_total_norm(model[1].weight.grad), tp_ext.grad_norm(model, norm_type=1)


def noise(model):
    _loss(model).backward()
    torch.manual_seed(4)
    params = dict(model.named_parameters())
    for name, layout in tp_ext.layouts(model):
        grad = params[name].grad
        grad.add_(layout.shard(torch.randn(layout.full_shape(grad.shape), dtype=grad.dtype)))
    return gradients_of(model)


RIGHT = [
    functional_call,
    ensemble,
    averaged_model,
    swa,
    ema_by_hand,
    averaged_states,
    stochastic_depth,
    accumulation,
    compiled_step,
    step_in_backward,
    gradient_hooks,
    decay_groups,
    squares_in_the_loss,
    input_gradient_penalty,
    recomputed,
    flat_master_weights,
    vectors,
    clipped_values,
    deep_copy,
    pickled,
    saved_whole,
    other_dtypes,
    new_parameters_by_conversion,
    lookahead,
    schedule_free,
    extragradient,
    exported,
]
# Where the shard's own numbers come out, and nothing can see it: by the calls of the guide
BY_OUR_CALL = [sam_with_torchs_norm, counted, weight_norms, gradient_norms, noise]


def _run(rank, group, idiom):
    model = _model(group)
    return idiom(model), tp_ext.full_state_dict(model)


@pytest.mark.parametrize("idiom", [*RIGHT, *BY_OUR_CALL], ids=lambda idiom: idiom.__name__)
def test_results_are_those_of_the_unsharded_model(idiom):
    want = _run(0, None, idiom)
    for got in tp_ext.debug.simulate(_run, 2, idiom):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def _save_model(model, path):
    save_model(model, path)


def _load_model(model, path):
    save_file({name: value.contiguous() for name, value in _model(None).state_dict().items()}, path)
    load_model(model, path)


REFUSED = {
    "safetensors.save_model": (_save_model, RuntimeError, "is a shard of .*: take tp_ext.save_safetensors"),
    "safetensors.load_model": (
        _load_model,
        RuntimeError,
        "that of the unsharded model, .*: take tp_ext.load_full",
    ),
    "SAM by its own norm": (
        lambda model, _: _sam(model, lambda params: torch.stack([p.grad.norm() for p in params]).norm()),
        ValueError,
        "SAM must not update a parameter of shape .*, which is sharded over 2 ranks",
    ),
}


def _refused(rank, group, name, path):
    call, kind, match = REFUSED[name]
    model = _model(group)
    with pytest.raises(kind, match=match):
        call(model, f"{path}/{rank}.safetensors")
    return tp_ext.full_state_dict(model)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_changed(name, tmp_path):
    for state in tp_ext.debug.simulate(_refused, 2, name, str(tmp_path)):
        torch.testing.assert_close(state, _model(None).state_dict(), rtol=0, atol=0)
