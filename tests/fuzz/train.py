"""The fuzzer's run of one configuration: five steps of training, on every rank and in the unsharded reference model.

The reference model has no group: for half of the configurations it is plain torch (plain.py), for the others,
which have dropout, it is the library itself at ``group=None``, with the same weights and masks by construction.
"""

import zlib

import torch

import tp_ext
from tests.fuzz.model import make, shape_of
from tp_ext import Sharding


class Record:
    """Named tensors with their shardings, in order."""

    def __init__(self):
        self.tensors, self.shardings = {}, {}

    def add(self, name, tensor, sharding=None):
        self.tensors[name] = tensor.detach().clone()
        self.shardings[name] = sharding

    def whole(self):
        """The tensors of one process, which may have padding, too."""
        pairs = ((name, tensor, self.shardings[name]) for name, tensor in self.tensors.items())
        return {name: tensor if cut is None else cut.unshard([tensor]) for name, tensor, cut in pairs}


def train(config, kit, group):
    """The results to be compared, of one rank or of the reference model."""
    training = Training(config, kit, group)
    for step in range(config["steps"]):
        if step == 2 and config["reload"] and group is not None:
            training.reload()
        training.step(step)
    training.finish()
    return training.record


class Training:
    """A model, its optimizer and a generator of batches; the same for ranks and reference model. ``record`` collects
    results."""

    def __init__(self, config, kit, group):
        self.config, self.kit, self.group, self.record = config, kit, group, Record()
        torch.manual_seed(config["seed"])
        self.make()
        if kit is tp_ext and config["made"] != "meta":
            self.record_params("init")
        self.numbers = torch.Generator().manual_seed(config["seed"])
        self.load_weights()
        torch.manual_seed(config["seed"])  # of the dropout masks

    def make(self):
        config, self.model = self.config, make(self.config, self.kit, self.group)
        self.cuts, self.params = _cuts(self.model), dict(self.model.named_parameters())
        for name, param in self.params.items():
            param.requires_grad_(zlib.crc32(f"{config['seed']} {name}".encode()) % 100 >= config["frozen"])
        if self.model.embedding is not None and not any(param.requires_grad for param in self.params.values()):
            self.model.embedding.weight.requires_grad_()
        self.trainable = [param for param in self.params.values() if param.requires_grad]
        self.optimizer = _optimizer(config["optimizer"], self.trainable, self.kit) if self.trainable else None

    def load_weights(self):
        """Weights that matter everywhere."""
        state, head = {}, self.config["head"]
        for name, param in sorted(self.params.items()):
            shape = list(param.shape)
            if self.cuts[name] is not None:
                shape[self.cuts[name].dim] = self.cuts[name].size
            spread = torch.randn(shape, generator=self.numbers, dtype=torch.float64)
            state[name] = 1 + spread / 4 if "norm.weight" in name else spread / shape[-1] ** 0.5
        if head and head["tied"]:
            state["head.weight"] = state["embedding.weight"]
        if self.kit is tp_ext:
            tp_ext.load_full_state_dict(self.model, state, group=self.group)
        else:
            self.model.load_state_dict(state)

    def reload(self):
        """A new model and optimizer go on from the full states of the old ones."""
        model = tp_ext.full_state_dict(self.model, group=self.group)
        optimizer = self.trainable and tp_ext.full_optimizer_state_dict(self.model, self.optimizer, group=self.group)
        with torch.random.fork_rng():
            self.make()
        tp_ext.load_full_state_dict(self.model, model, group=self.group)
        if optimizer:
            tp_ext.load_full_optimizer_state_dict(self.model, self.optimizer, optimizer, group=self.group)

    def step(self, step):
        config, clip = self.config, self.config["clip"]
        for param in self.trainable:
            param.grad = None
            param.main_grad = torch.zeros_like(param) if config["main_grad"] and self.kit is tp_ext else None
        for micro in range(config["micro"]):
            x, target, weights = _batch(config, self.model, self.numbers)
            y = self.model(x)
            loss = self.model.loss(y, target, weights)
            self.record_output(f"output {step}.{micro}", y)
            if self.model.head is not None or not config["sp"]:  # else each rank has its own tokens' loss
                self.record.add(f"loss {step}.{micro}", loss)
            for left in reversed(range(config["backwards"])):
                loss.backward(retain_graph=left > 0)
            if x.grad is not None:
                self.record.add(f"input {step}.{micro}", x.grad, self.tokens())
        for param in self.trainable:
            if param.main_grad is not None and (param.grad is None or param.main_grad.any()):
                param.grad = param.main_grad if param.grad is None else param.grad + param.main_grad
            param.main_grad = None
        if step == 0:
            self.record_params("grad")
        if self.trainable and clip:
            what, options = self.model.parameters() if clip["bare"] else self.model, {"foreach": clip["foreach"]}
            norm = self.kit.clip_grad_norm_(what, clip["max"], float(clip["type"]), group=self.group, **options)
            self.record.add(f"norm {step}", norm)
        if self.trainable:
            self.optimizer.step()

    def finish(self):
        """The weights after training, the states that would be saved, and what the model makes of a new batch."""
        self.record_params("state")
        if self.config["full_states"]:
            for name, value in tp_ext.full_state_dict(self.model, group=self.group).items():
                self.record.add(f"full {name}", value)
            states = self.trainable and tp_ext.full_optimizer_state_dict(self.model, self.optimizer, group=self.group)
            for name, state in states["state"].items() if states else ():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and key != "step":
                        self.record.add(f"moment {name}.{key}", value)
        self.model.eval()
        with torch.inference_mode(self.config["seed"] % 2 == 0), torch.no_grad():
            x, _, _ = _batch(self.config, self.model, self.numbers)
            self.record_output("evaluated", self.model(x))

    def record_params(self, kind):
        for name, param in self.params.items():
            value = param.grad if kind == "grad" else param
            if value is not None:
                self.record.add(f"{kind} {name}", value, self.cuts[name])

    def record_output(self, name, y):
        """Logits by vocabulary, the rest by tokens under SP."""
        logits = self.model.makes_logits()
        sharding = getattr(self.model.head, "sharding", None) if logits else self.tokens()
        if logits and sharding is not None:
            sharding = Sharding(-1, sharding.parts)
        self.record.add(name, y, sharding)

    def tokens(self):
        return Sharding(0, (self.model.place.total,)) if self.config["sp"] else None


def _cuts(model):
    """The sharding of each parameter over its group of several ranks; experts have another one, of one rank."""
    cuts = dict(tp_ext.shardings(model))
    if model.place.p > 1:
        for name, layout in tp_ext.layouts(model):
            cuts[name] = next((sharding for sharding, axis in layout if axis.size > 1), None)
    return cuts


def _optimizer(options, params, kit):
    how = options["how"] if kit is tp_ext else None
    flags = {} if how is None else {"foreach": False} if how == "for" else {how: True}
    if options["kind"] == "AdamW":
        return torch.optim.AdamW(params, lr=1e-2, eps=1e-3, weight_decay=0.1, amsgrad=options["momentum"], **flags)
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9 * options["momentum"], **flags)


def _batch(config, model, numbers):
    """x of this rank, targets and weights of all tokens."""
    shape, table, head = shape_of(config), config["embedding"], config["head"]
    if table:
        x = torch.randint(table["vocab"], shape, generator=numbers)
    else:
        full = torch.randn(*shape, config["hidden"], generator=numbers, dtype=torch.float64)
        x = model.place.cut(full).clone()
        if config["strided"]:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        if model.training:
            x.requires_grad_(config["input_grad"] or not any(p.requires_grad for p in model.parameters()))
    if not head:
        weights = torch.randn(*shape, config["hidden"], generator=numbers, dtype=torch.float64)
        return x, None, weights / max(weights.shape[0], 1)
    target = torch.randint(head["vocab"], shape, generator=numbers)
    ignored = torch.rand(shape, generator=numbers) < 0.2
    weights = torch.randn(shape, generator=numbers, dtype=torch.float64) / max(target.numel(), 1)
    return x, target.masked_fill(ignored, config["loss"]["ignore_index"]), weights
