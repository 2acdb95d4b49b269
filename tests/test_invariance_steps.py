"""Steps of training in tp_invariant: every optimizer of torch and ours, and norms of every order by every function that
clips, have the same bits for every number of ranks, or are refused on one rank, too."""

import math
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import tp_ext
from tests.helpers.ranks import run_fresh
from tp_ext.low_precision import compress_gradients, float8, quantize_
from tp_ext.optim import Muon, split_parameters

RANKS = (1, 2, 3, 8)
FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
HALVES, ALL = {BF16, FP16}, {FP64, FP32, BF16, FP16}
OPTIM = torch.optim


def _muon(model, **options):
    matrices, others = split_parameters(model)
    return Muon(matrices, lr=0.02, adamw_params=others, adamw_eps=1e-4, model=model, **options)


class Alpha(OPTIM.Optimizer):
    """A user's SGD, by torch's addition of a multiple, or by a multiplication and an addition."""

    def __init__(self, params, alpha):
        super().__init__(params, {"lr": 0.1})
        self.alpha = alpha

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if self.alpha:
                param.add_(param.grad, alpha=-0.1)
            else:
                param.sub_(0.1 * param.grad)


class Unknown(Alpha):
    """Cannot be run over other parameters."""

    def __init__(self, model):
        super().__init__(model.parameters(), False)
        self.model, self.number = model, len([*model.parameters()])

    def step(self, closure=None):
        assert len(self.param_groups[0]["params"]) == self.number
        super().step()


def _of(kind, *, only=None, **options):
    """How an optimizer of torch is made; its eps is one that fp16 has."""

    def make(model):
        if kind in (OPTIM.Adam, OPTIM.AdamW, OPTIM.NAdam, OPTIM.RAdam, OPTIM.Adamax, OPTIM.Adagrad, OPTIM.RMSprop):
            options.setdefault("eps", 1e-4)
        return kind([param for param in model.parameters() if only is None or param.dim() == only], **options)

    return make


# name -> how it is made, and the dtypes in which it is refused
OPTIMIZERS = {
    "SGD": (_of(OPTIM.SGD, lr=0.1), HALVES),
    "SGD, momentum": (_of(OPTIM.SGD, lr=0.1, momentum=0.9), HALVES),
    "SGD, nesterov": (_of(OPTIM.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), HALVES),
    "SGD, foreach": (_of(OPTIM.SGD, lr=0.1, foreach=True), HALVES),
    "SGD, fused": (_of(OPTIM.SGD, lr=0.1, momentum=0.9, fused=True), ALL),
    "Adam": (_of(OPTIM.Adam, lr=0.01), set()),
    "Adam, foreach": (_of(OPTIM.Adam, lr=0.01, foreach=True), set()),
    "Adam, fused": (_of(OPTIM.Adam, lr=0.01, fused=True), ALL),
    "Adam, weight_decay": (_of(OPTIM.Adam, lr=0.01, weight_decay=0.1), HALVES),
    "Adam, amsgrad": (_of(OPTIM.Adam, lr=0.01, amsgrad=True), set()),
    "AdamW": (_of(OPTIM.AdamW, lr=0.01), set()),
    "AdamW, a tensor as lr": (_of(OPTIM.AdamW, lr=torch.tensor(0.01)), set()),
    "AdamW, foreach": (_of(OPTIM.AdamW, lr=0.01, foreach=True), set()),
    "AdamW, fused": (_of(OPTIM.AdamW, lr=0.01, fused=True), ALL),
    "AdamW, amsgrad": (_of(OPTIM.AdamW, lr=0.01, amsgrad=True), set()),
    "NAdam": (_of(OPTIM.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True), set()),
    "RAdam": (_of(OPTIM.RAdam, lr=0.01), set()),
    "Adamax": (_of(OPTIM.Adamax, lr=0.01), set()),
    "Adagrad": (_of(OPTIM.Adagrad, lr=0.01), set()),
    "Adagrad, fused": (_of(OPTIM.Adagrad, lr=0.01, fused=True), ALL),
    "Adadelta": (_of(OPTIM.Adadelta, lr=0.1), HALVES),
    "RMSprop": (_of(OPTIM.RMSprop, lr=0.01), set()),
    "RMSprop, centered": (_of(OPTIM.RMSprop, lr=0.01, centered=True, momentum=0.9), HALVES),
    "ASGD": (_of(OPTIM.ASGD, lr=0.1), HALVES),
    "Rprop": (_of(OPTIM.Rprop, lr=0.01), set()),
    "Adafactor": (_of(OPTIM.Adafactor, lr=0.01), ALL),
    "LBFGS": (_of(OPTIM.LBFGS, lr=0.1), ALL),
    "SparseAdam": (_of(OPTIM.SparseAdam, lr=0.1), ALL),
    "Muon of torch": (_of(OPTIM.Muon, only=2, lr=0.1), ALL),
    "Muon": (lambda model: _muon(model, weight_decay=0.1), set()),
    "Muon, fp32 inside": (lambda model: _muon(model, weight_decay=0.1, ns_dtype=FP32, nesterov=False), set()),
    "by alpha": (lambda model: Alpha(model.parameters(), True), HALVES),
    "by mul and sub": (lambda model: Alpha(model.parameters(), False), set()),
    "cannot be run": (Unknown, ALL),
}


def _model(group, dtype):
    tp_ext.manual_seed(0)
    with tp_ext.tp_invariant():
        return nn.Sequential(tp_ext.ParallelMLP(23, 37, activation="swiglu", group=group, dtype=dtype))


def _backward(model, dtype, step):
    x = torch.randn(5, 23, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss


def _stepped(rank, group, name, dtype):
    """A digest after two steps, and the averages of weights that torch makes; or the error, and whether it came
    before anything had changed."""
    model = _model(group, dtype)
    start, step = tp_ext.debug.sha256(model), 0
    try:
        optimizer = OPTIMIZERS[name][0](model)
        average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        for step in range(2):
            optimizer.zero_grad()
            _backward(model, dtype, step)
            optimizer.step(*([lambda: _backward(model, dtype, 0)] if name == "LBFGS" else []))
            average.update_parameters(model)
    except ValueError as error:
        return f"refused: {error}" if tp_ext.debug.sha256(model) == start else f"too late, in step {step}: {error}"
    assert all(param.isfinite().all() for param in model.parameters())  # bits of NaN are no number's
    return tp_ext.debug.sha256(model, optimizer), tp_ext.debug.sha256(average.module)


def _all_steps(names):
    wrong = {}
    for name in names:
        for dtype in (FP64, FP32, BF16, FP16):
            some = RANKS if dtype is FP32 else RANKS[:-1]  # a dtype decides which operations have bits of an element
            results = [tp_ext.debug.simulate(_stepped, p, name, dtype)[0] for p in some]
            refused = [isinstance(result, str) and "optimizer: " in result for result in results]
            if refused != [dtype in OPTIMIZERS[name][1]] * len(some) or (not any(refused) and len({*results}) > 1):
                wrong[name, dtype] = results
    assert not wrong, wrong


@pytest.mark.parametrize("part", range(3))
def test_optimizers_have_the_same_bits_or_are_refused(part):
    run_fresh(_all_steps, [*OPTIMIZERS][part::3])


def _sentences(rank, group):
    for dtype, message in (
        (BF16, r"SGD\(nesterov=True\) must not update torch.bfloat16 parameters of a model built in"),
    ):
        model = _model(group, dtype)
        optimizer = OPTIMIZERS["SGD, nesterov"][0](model)
        _backward(model, dtype, 0)
        with pytest.raises(RuntimeError, match=message):
            tp_ext.debug.check(model, optimizer=optimizer)
        tp_ext.outside.optimizers.accept(optimizer)
        optimizer.step()
    model = _model(group, FP32)
    optimizer = OPTIM.AdamW(model.parameters())
    _backward(model, FP32, 0)
    with pytest.raises(NotImplementedError, match="optimizer: its step must not be compiled"):
        torch.compile(optimizer.step, backend="eager")()


def _check_sentences():
    tp_ext.debug.simulate(_sentences, 1)
    # Outside of the context nothing is refused
    plain = tp_ext.ParallelMLP(8, 8, group=None, dtype=BF16)
    plain(torch.ones(2, 8, dtype=BF16)).sum().backward()
    OPTIM.SGD(plain.parameters(), lr=0.1, fused=True).step()


def test_what_is_refused_is_named():
    run_fresh(_check_sentences)


def _changed_outside(rank, group):
    """Every change, outside of the context, of a layer that was built inside."""
    parametrize = nn.utils.parametrize.register_parametrization
    changes = {
        "0.up: a layer built in tp_invariant must not get an adapter": lambda m: tp_ext.add_lora(
            m, targets="up", r=2, alpha=1.0
        ),
        "base: a layer built in tp_invariant must not get": lambda m: tp_ext.LoRALinear(m[0].down, 2, alpha=1.0),
        "0.up.weight: .* built in tp_invariant, must not be quantised": lambda m: quantize_(m, "int8"),
        "0.up: float8: must not be combined with tp_invariant": float8,
        "0.up.weight: its gradient must not be compressed": lambda m: compress_gradients(m, "int8", group=group),
        "module: must not have layers built in tp_invariant": tp_ext.coalesce_gradients,
        "weight: of a layer built in tp_invariant must": lambda m: parametrize(m[0].up, "weight", nn.Tanh()),
        "weight: of a layer built .*": lambda m: nn.utils.parametrizations.weight_norm(m[0].down, dim=0),
        "weight: of a layer .*": lambda m: nn.utils.parametrizations.spectral_norm(m[0].up),
        "weight: of a .*": lambda m: nn.utils.weight_norm(m[0].up),
    }
    for message, change in changes.items():
        model = _model(group, FP32)
        before = repr(model), [param.requires_grad for param in model.parameters()]
        with pytest.raises(ValueError, match=message):
            change(model)
        assert (repr(model), [param.requires_grad for param in model.parameters()]) == before, message


def _check_changes():
    for p in (1, 2):
        tp_ext.debug.simulate(_changed_outside, p)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_changes_of_layers_built_inside_are_refused():
    run_fresh(_check_changes)


def _by_norm_and_scale(params, order, foreach):
    norm = nn.utils.get_total_norm([param.grad.detach() for param in params], order, foreach=foreach)
    nn.utils.clip_grads_with_norm_(params, 0.1, norm, foreach=foreach)
    return norm


CLIPS = {
    "ours": lambda model, order, foreach: tp_ext.clip_grad_norm_(model, 0.1, order, foreach=foreach),
    "ours, of parameters": lambda m, order, foreach: tp_ext.clip_grad_norm_(
        m.parameters(), 0.1, order, foreach=foreach
    ),
    "torch's": lambda model, order, foreach: nn.utils.clip_grad_norm_(model.parameters(), 0.1, order, foreach=foreach),
    "torch's, of one": lambda model, order, foreach: nn.utils.clip_grad_norm_(
        model[0].down.weight, 0.1, order, foreach=foreach
    ),
    "torch's in two calls": lambda model, order, foreach: _by_norm_and_scale([*model.parameters()], order, foreach),
}
ORDERS = (1.0, 2.0, 3.0, 0.5, math.inf, 0.0, -1.0)


def _clipped(rank, group, dtype, foreach):
    found = {}
    for name, clip in CLIPS.items():
        for order in ORDERS:
            model = _model(group, dtype)
            _backward(model, dtype, 0)
            counted = [model[0].down.weight] if name == "torch's, of one" else [*model.parameters()]
            terms = torch.cat([param.grad.flatten().double() for param in counted])  # on one rank they are whole
            norm = clip(model, order, foreach)
            if group.size() == 1:
                want = torch.linalg.vector_norm(terms, order)
                if order == 0:  # as torch: of the gradients' own norms
                    want = torch.tensor(float(sum(bool(param.grad.any()) for param in counted)), dtype=terms.dtype)
                torch.testing.assert_close(norm.double(), want, rtol=1e-2 if dtype == BF16 else 1e-6, atol=0)
            optimizer = OPTIM.AdamW(model.parameters(), lr=0.01)
            optimizer.step()
            found[name, order] = float(norm).hex(), tp_ext.debug.sha256(model, optimizer)
    assert len(found) == len(CLIPS) * len(ORDERS)
    return found


def _norms(dtype, foreach):
    results = [tp_ext.debug.simulate(_clipped, p, dtype, foreach)[0] for p in RANKS]
    wrong = defaultdict(list)
    for key in results[0]:
        if len({result[key] for result in results}) > 1:
            wrong[key] = [result[key] for result in results]
    assert not wrong, dict(wrong)


@pytest.mark.parametrize("dtype, foreach", [(FP32, None), (FP32, False), (BF16, True)])
def test_norms_of_every_order_have_the_same_bits(dtype, foreach):
    run_fresh(_norms, dtype, foreach)
