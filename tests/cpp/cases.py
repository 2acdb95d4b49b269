"""The cases of cases.cpp, by the functions and layers of Python."""

import torch
from torch.optim import Optimizer

import tp_ext
from tp_ext.nn.sampling import vocab_parallel_argmax, vocab_parallel_sample


class AdamWOfCpp(Optimizer):
    """The formula of ``torch::optim::AdamW``, whose moments are multiplied and added."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            lr, state = self.param_groups[0]["lr"], self.state[param]
            if not state:
                state |= {"step": 0, "mean": torch.zeros_like(param), "square": torch.zeros_like(param)}
            state["step"] += 1
            # aten's overloads for numbers, which C++ calls: they round a number to a half type, Python's do not
            scale, divide = torch.ops.aten.mul_.Scalar, torch.ops.aten.div.Scalar
            scale(param, 1 - lr * 1e-2)
            scale(state["mean"], 0.9).add_(param.grad, alpha=1 - 0.9)
            scale(state["square"], 0.999).addcmul_(param.grad, param.grad, value=1 - 0.999)
            root = divide(state["square"].sqrt(), (1 - 0.999 ** state["step"]) ** 0.5).add_(1e-8)
            param.addcdiv_(state["mean"], root, value=-(lr / (1 - 0.9 ** state["step"])))


def numbers(shape, seed, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Cases:
    """The results of a rank: name -> tensor."""

    def __init__(self, group):
        self.group, self.results = group, {}
        self.rank, self.size = (group.rank(), group.size()) if group is not None else (0, 1)

    def add(self, name, value):
        self.results[name.replace(".", "/")] = value.detach().clone().contiguous()

    def run(self, name, module, inputs, forward):
        for key, param in module.named_parameters():
            self.add(f"{name}/weight/{key}", param)
        optimizer = AdamWOfCpp(module.parameters(), 0.01)
        for step in range(5):
            inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
            optimizer.zero_grad()
            y = forward(*inputs)
            (y * numbers(y.shape, 7, y.dtype)).sum().backward()
            self.add(f"{name}/{step}/y", y)
            for i, x in enumerate(inputs):
                if x.is_floating_point():
                    self.add(f"{name}/{step}/dx{i}", x.grad)
            for key, param in module.named_parameters():
                if param.grad is not None:
                    self.add(f"{name}/{step}/grad/{key}", param.grad)
            optimizer.step()
        self.add(f"{name}/norm", tp_ext.clip_grad_norm_(module, 0.05))
        for key, param in module.named_parameters():
            if param.grad is not None:
                self.add(f"{name}/clipped/{key}", param.grad)

    def modules(self, prefix, dtype, sp):
        options = {"group": self.group, "sequence_parallel": sp}
        typed = options | {"dtype": dtype}
        whole = numbers((8, 12), 3, dtype)
        x = whole.tensor_split(self.size)[self.rank] if sp else whole

        tp_ext.manual_seed(1)
        column = tp_ext.ColumnParallelLinear(12, 7, **typed)
        self.run(f"{prefix}column", column, [x], lambda x: column(x, 8))
        tp_ext.manual_seed(2)
        init = tp_ext.random.Normal(0.0, 0.02)
        gathered = tp_ext.ColumnParallelLinear(12, 14, bias=False, gather_output=True, parts=(7, 7), init=init, **typed)
        truncated = tp_ext.random.TruncatedNormal(0.1, 0.5, -0.4, 0.3)
        self.add(f"{prefix}truncated", tp_ext.ColumnParallelLinear(12, 7, group=self.group, init=truncated).weight)
        self.run(f"{prefix}gathered", gathered, [x], lambda x: gathered(x, 8))
        tp_ext.manual_seed(3)
        row = tp_ext.RowParallelLinear(7, 12, **typed)
        part = numbers((8, 7), 4, dtype).tensor_split(self.size, -1)[self.rank].contiguous()
        self.run(f"{prefix}row", row, [part], lambda x: row(x, 8))
        for activation in ("gelu", "swiglu"):
            tp_ext.manual_seed(4)
            mlp = tp_ext.ParallelMLP(12, 10, activation=activation, **typed)
            self.run(f"{prefix}mlp_{activation}", mlp, [x], lambda x, mlp=mlp: mlp(x, 8))
        for kv_heads in (1, 6):
            tp_ext.manual_seed(5)
            attention = tp_ext.ParallelAttention(
                12, 6, num_kv_heads=kv_heads, rope=10000.0, causal=kv_heads == 1, **typed
            )
            self.run(
                f"{prefix}attention_{kv_heads}",
                attention,
                [x],
                lambda x, attention=attention: attention(x, batch_size=2, total_tokens=8),
            )
        tp_ext.manual_seed(6)
        rms, layer = tp_ext.RMSNorm(12, **typed), tp_ext.LayerNorm(12, **typed)
        self.run(f"{prefix}rms_norm", rms, [x, x * 2], lambda x, residual: torch.add(*rms(x, residual)))
        self.run(f"{prefix}layer_norm", layer, [x], layer)

        ids = torch.arange(8).mul(3).remainder(11)
        tp_ext.manual_seed(7)
        embedding = tp_ext.VocabParallelEmbedding(11, 12, padding_idx=3, **typed)
        self.run(f"{prefix}embedding", embedding, [ids], embedding)
        head = tp_ext.VocabParallelLMHead(12, 11, bias=True, **typed)
        self.run(f"{prefix}head", head, [x], lambda x: head.loss(x, ids, 8, label_smoothing=0.1, z_loss=1e-3))
        self.add(f"{prefix}head/logits", head(x, 8))
        self.add(f"{prefix}head/argmax", head.argmax(x, 8))
        tp_ext.manual_seed(9)
        self.add(f"{prefix}head/sample", head.sample(x, 8, top_k=5, top_p=0.9))

        tp_ext.manual_seed(8)
        dropout = tp_ext.Dropout(0.3, **options)
        leaf = x.detach().requires_grad_()
        y = dropout(leaf, x * 3, 8)
        y.sum().backward()
        self.add(f"{prefix}dropout/y", y)
        self.add(f"{prefix}dropout/dx", leaf.grad)
        self.add(f"{prefix}dropout/again", dropout(leaf, total_tokens=8))
        dropout.eval()
        self.add(f"{prefix}dropout/eval", dropout(leaf, x, 8))

    def functions(self, prefix, dtype):
        group, rank = self.group, self.rank
        x, own = numbers((6, 6), 10, dtype), numbers((6, 6), 20 + rank, dtype)

        def record(name, value, region):
            leaf = value.detach().requires_grad_()
            y = region(leaf)
            (y * numbers(y.shape, 30 + rank, dtype)).sum().backward()
            self.add(f"{prefix}{name}/y", y)
            self.add(f"{prefix}{name}/dx", leaf.grad)

        for name in ("copy_to", "reduce_from", "scatter_to", "gather_from", "all_gather", "reduce_scatter"):
            region = getattr(tp_ext, f"{name}_region")
            value = x if name in ("copy_to", "scatter_to") else own
            short = name.removesuffix("_to").removesuffix("_from")
            record(short, value, lambda t, region=region: region(t, group) * 1)
        record("all_to_all", own, lambda t: tp_ext.all_to_all_region(t, group, 0, 1) * 1)
        seven, part = numbers((7, 7), 12, dtype), numbers((7, 7), 40 + rank, dtype)
        sizes = [len(rows) for rows in seven.tensor_split(self.size)]
        mine = seven.tensor_split(self.size)[rank].contiguous()
        record("scatter_uneven", seven, lambda t: tp_ext.scatter_to_region(t, group) * 1)
        record("gather_uneven", mine, lambda t: tp_ext.gather_from_region(t, group, 0, sizes) * 1)
        record("all_gather_uneven", mine, lambda t: tp_ext.all_gather_region(t, group, 0, sizes) * 1)
        record("reduce_scatter_uneven", part, lambda t: tp_ext.reduce_scatter_region(t, group, 0, sizes) * 1)
        record("all_to_all_uneven", mine, lambda t: tp_ext.all_to_all_region(t, group, 1, 0, sizes, sizes) * 1)
        logits = numbers((5, 11), 11, dtype).tensor_split(self.size, -1)[rank].contiguous()
        for reduction in ("mean", "sum", "none"):
            record(
                f"loss_{reduction}",
                logits,
                lambda t, reduction=reduction: tp_ext.vocab_parallel_cross_entropy(
                    t, torch.arange(5), group, vocab_size=11, ignore_index=2, reduction=reduction
                ),
            )
        of_vocabulary = {"group": group, "vocab_size": 11}
        self.add(f"{prefix}argmax", vocab_parallel_argmax(logits, **of_vocabulary))
        tp_ext.manual_seed(3)
        sample = vocab_parallel_sample
        self.add(f"{prefix}sample", sample(logits, **of_vocabulary))
        self.add(f"{prefix}sample_k", sample(logits, temperature=0.7, top_k=3, **of_vocabulary))
        self.add(f"{prefix}sample_p", sample(logits, top_p=0.8, **of_vocabulary))

    def files(self, folder):
        def make():
            return tp_ext.ParallelAttention(12, 6, num_kv_heads=1, group=self.group)

        tp_ext.manual_seed(1)
        first = make()
        loaded = make()
        tp_ext.load_safetensors(folder / "attention", loaded)
        for key, param in loaded.named_parameters():
            self.add(f"loaded/{key}", param)
            self.add(f"archive/{key}", param)
        make()
        first(numbers((2, 4, 12), 3, torch.float32)).pow(2).sum().backward()
        self.add("norm", tp_ext.clip_grad_norm_(first, 0.5))
        for key, param in first.named_parameters():
            self.add(f"clipped/{key}", param.grad)
