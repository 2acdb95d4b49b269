"""`check_shards` over idioms of training loops that the project's other tables do not have: on two ranks each is right,
or refused at its line before it has run, with one text on all ranks; ordinary loops run with the same bits."""

import contextlib
import copy
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import swa_utils

import tp_ext
from tests.auto.architectures import build
from tests.helpers import data_parallel, ranks
from tests.helpers.dtypes import default_dtype
from tests.helpers.shard_idioms import REFUSED, RIGHT, TARGETS, X, backward, make
from tp_ext import huggingface
from tp_ext.debug import check_shards, simulate


def _run(rank, group, idiom, checked=True):
    model = make(group)
    with check_shards(model) if checked else contextlib.nullcontext():
        result = idiom(model)
    return result, tp_ext.full_state_dict(model)


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    want = _run(0, None, RIGHT[name])
    for got in simulate(_run, 2, RIGHT[name]):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def _refusal(rank, group, idiom):
    with pytest.raises(RuntimeError, match="check_shards") as caught:
        _run(rank, group, idiom)
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_text(name):
    """At five ranks shards are of two rows, of one, and empty."""
    idiom, function = REFUSED[name]
    first, *others = simulate(_refusal, 5, idiom)
    assert first.startswith(f"check_shards: {function} must not take '") and others == 4 * [first]
    assert "tp_ext." in first


def _loop(optimizer_of):
    def loop(model):
        optimizer = optimizer_of([param for param in model.parameters() if param.dim() == 2])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(3):
            optimizer.zero_grad()
            for part in X, X / 2:
                scaler.scale(model(part) / 2).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5), nn.utils.clip_grad_value_(model.parameters(), 0.1)
            scaler.step(optimizer), scaler.update(), schedule.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()

    return loop


def states_and_checkpoints(model):
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    optimizer.step()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    tp_ext.load_full_state_dict(model, tp_ext.full_state_dict(model))
    nn.init.normal_(model.up.weight)
    tp_ext.debug.check(model, optimizer=optimizer)
    assert "RMSNorm" in repr(model) and "tensor" in repr(model.up.weight)
    return (
        tp_ext.full_optimizer_state_dict(model, optimizer)["state"],
        tp_ext.clip_grad_norm_(model, 0.1),
        model.norm.weight.norm(),
    )


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model.up)
    nn.utils.prune.identity(model.down, "weight")
    _loop(torch.optim.SGD)(model)


def averages(model):
    average = swa_utils.AveragedModel(model)
    _loop(torch.optim.SGD)(model)
    average.update_parameters(model)
    hidden = torch.utils.checkpoint.checkpoint(model.hidden, X.clone().requires_grad_(), use_reentrant=False)
    (model.lm_head.loss(hidden, TARGETS) + average(X)).backward()
    return tp_ext.full_state_dict(average.module)


def declared(model):
    """A layer of torch with a shard, whose forward knows it."""
    layer = nn.Linear(4, model.up.weight.shape[0], bias=False)
    layer.weight = nn.Parameter(model.up.weight.detach().clone())
    tp_ext.declare_layouts(layer, {"weight": model.up.tp_layouts["weight"]})
    outer = nn.Sequential(layer)
    outer.float().double()
    outer(X).square().mean().backward()
    average = copy.deepcopy(outer)
    torch.optim.SGD(outer.parameters(), 0.1).step()
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(outer.parameters()), 0.1)
    outer.zero_grad(set_to_none=False)
    return tp_ext.full_state_dict(average)


def _optimizers():
    for kind in ["Adam", "AdamW", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Rprop", "Adagrad", "RMSprop", "SGD"]:
        for option in ("foreach", "fused", ""):
            if option != "fused" or kind in ("Adam", "AdamW", "Adagrad", "SGD"):
                options = {option: True} if option else {"foreach": False}
                yield (
                    f"{kind} {option}",
                    _loop(lambda params, k=kind, o=options: getattr(torch.optim, k)(params, 0.01, **o)),
                )
    yield "momentum", _loop(lambda params: torch.optim.SGD(params, 0.01, momentum=0.9, nesterov=True))
    yield "amsgrad", _loop(lambda params: torch.optim.Adam(params, 0.01, amsgrad=True, maximize=True, weight_decay=0.1))
    yield "Muon of tp_ext", _loop(lambda params: tp_ext.optim.Muon(params, 0.01))


ORDINARY = dict(_optimizers()) | {
    loop.__name__: loop for loop in (states_and_checkpoints, parametrized, averages, declared)
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_loops_have_the_same_bits(name):
    want = simulate(_run, 2, ORDINARY[name], False)
    torch.testing.assert_close(simulate(_run, 2, ORDINARY[name], True), want, rtol=0, atol=0)


def _data_parallel(group, how, checked):
    with default_dtype(torch.float64):
        axes = data_parallel.mesh(2, 2)
        model = data_parallel.wrap(data_parallel.make("rich", axes["tp"], True), how, axes["dp"])
        optimizer, losses = data_parallel.optimizer_of(model), []
        with check_shards(model, optimizer=optimizer) if checked else contextlib.nullcontext():
            for step in range(2):
                optimizer.zero_grad()
                loss = data_parallel.loss_of(model, axes["tp"], step, axes["dp"].get_local_rank())
                loss.backward()
                losses += [loss.item(), float(clip_grad_norm_(model.parameters(), 1.0))]
                optimizer.step()
            model.load_state_dict(model.state_dict())
        return losses


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_data_parallel_loops(how):
    want = ranks.run(_data_parallel, 4, how, False, timeout=120)
    assert ranks.run(_data_parallel, 4, how, True, timeout=120) == want


def _of_transformers(rank, group, folder):
    model = huggingface.from_pretrained(folder, group=group).train()
    optimizer, losses = torch.optim.AdamW(model.parameters(), 0.01), []
    ids = torch.randint(4, 100, (4, 7), generator=torch.Generator().manual_seed(1))
    for checked in (True, False):
        with check_shards(model, optimizer=optimizer) if checked else contextlib.nullcontext():
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
        losses.append(loss.item())

    def head(self, input_ids):  # as Liger replaces it
        return F.linear(self.model(input_ids=input_ids).last_hidden_state, self.lm_head.weight)

    model.forward = types.MethodType(head, model)
    with (
        pytest.raises(RuntimeError, match=r"check_shards: linear must not take 'lm_head\.weight'"),
        check_shards(model),
    ):
        model(input_ids=ids)
    return losses


def test_forwards_of_others_know_their_shards(tmp_path):
    """The forward of a planned model knows its shards; a function put in its place does not."""
    torch.manual_seed(0)
    build("llama")[0].double().save_pretrained(tmp_path)
    for losses in simulate(_of_transformers, 2, str(tmp_path)):
        assert losses[1] < losses[0]


class Own(tp_ext.ParallelModule):
    """Knows its shard, in a helper, too."""

    def __init__(self, group):
        super().__init__(group)
        self.add_parameter("weight", (8, 4), tp_ext.random.Constant(1.0), sharding=tp_ext.Sharding(0, [8]))

    def forward(self, x):
        return product(x, self.parameter("weight"))


def product(x, weight):
    return x @ weight.t() / weight.norm()


class Normalised(torch.optim.SGD):
    def step(self, closure=None):
        for param in (param for group in self.param_groups for param in group["params"]):
            param.data.sub_(param.grad / param.grad.norm())


def _asked(rank, group):
    """A block that warns has a sentence for each call that it checks, and none for the others."""
    model, own = make(group), Own(group).double()
    backward(model)
    accepted = tp_ext.optim.accept(Normalised(model.parameters(), 0.1))
    kept = torch.optim.Adam(model.parameters())
    kept.step()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    hook = model.up.weight.register_hook(lambda grad: grad / grad.std())
    functions = dict(model.up.weight._backward_hooks)
    with warnings.catch_warnings(record=True) as caught, check_shards(model, optimizer=kept, action="warn") as found:
        warnings.simplefilter("always")
        own(torch.ones(1, 4).double())
        accepted.step()
        for _ in range(3):
            kept.state[model.up.weight]["exp_avg"].norm()
        gradients["up.weight"].amax()
        handle = model.down.register_forward_hook(lambda module, *_: print(module.weight.var()))
        model(X)
        handle.remove()
        backward(model)
        model.up.weight.register_hook(lambda grad: grad / grad.prod())
        backward(model)
        copy.deepcopy(own).weight.sum()
        torch.compile(lambda w: w.mean(), backend="eager")(model.up.weight)
    assert dict(list(model.up.weight._backward_hooks.items())[:1]) == functions
    hook.remove()
    model.up.weight.norm()
    assert [warning.filename for warning in caught] == len(found) * [__file__]
    before = copy.deepcopy(model.up.weight)
    with check_shards(model), torch.no_grad():
        model.norm.weight.norm()
        with pytest.raises(RuntimeError, match=r"normal_ must not take 'up\.weight'"):
            model.up.weight.normal_()
    assert torch.equal(model.up.weight, before)
    return [sentence.partition(f"{__file__}:")[2].split()[2] for sentence in found]


def test_what_is_asked():
    assert simulate(_asked, 2) == 2 * [["norm", "amax", "var", "std", "prod", "sum", "mean"]]


def test_arguments():
    model = make(None)
    with pytest.raises(ValueError, match="action: 'log' must be one of raise, warn"), check_shards(model, action="log"):
        pass
    with pytest.raises(TypeError, match="module: 3 must be a module"), check_shards(3):
        pass
    with check_shards(model):  # of one rank
        assert model.up.weight.norm() > 0
