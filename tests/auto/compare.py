"""Trains a sharded architecture for three steps of AdamW next to the model of one rank, in train mode with dropout, and
that of one rank next to the unsharded model, in eval mode; in fp64. Writes the table of all.

    python -m tests.auto.compare --ranks 2 4 --out docs/reference/architectures.md

One architecture after the other; 177 of them at two numbers of ranks take about 15 minutes on two cores. With
``--kept`` a run that was ended goes on where it was.
"""

import argparse
import contextlib
import copy
import dataclasses
import itertools
import json
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch  # noqa: F401, its table of dtypes must be made before `only_doubles` changes them
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

import tp_ext
from tests.auto.architectures import MORE, build
from tests.helpers import simulated
from tests.helpers.ranks import RankError, run
from tests.helpers.same_values import differences_of_states
from tp_ext import auto
from tp_ext.auto.guard import Guard
from tp_ext.auto.module_state import Baseline
from tp_ext.auto.proof.proven_plan import for_one_rank
from tp_ext.auto.record.record import tensors
from tp_ext.group import parallel_group
from tp_ext.simulation.comparison import EXACT, differences_of_models

STEPS = 3
# Too large for a tiny configuration of theirs, or their class has no forward of its own
NOT_BUILT = {"blt"}


def loss_or_squares(output):
    """The loss of a model's output, or the mean of the squares of its first floating-point tensor."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    first = next(t for _, t in tensors(output) if t.is_floating_point())
    # In fp32: squares overflow in fp16, and their mean is rounded in bf16
    wide = first.float() if first.dtype in (torch.float16, torch.bfloat16) else first
    return first if first.dim() == 0 else wide.pow(2).mean()


@dataclasses.dataclass
class Result:
    """One architecture at one number of ranks."""

    name: str
    p: int
    error: float = 0.0  # the greatest of losses, gradients (relative) and parameters after the steps
    where: str = ""
    cut: float = 0.0  # share of all bytes of parameters that is sharded
    forward: int = 0  # collectives
    backward: int = 0
    patched: str = ""
    whole: str = ""  # why the largest weight stays whole
    refused: str = ""
    seconds: float = 0.0

    @property
    def status(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        if not self.error <= EXACT:
            return f"wrong: {self.where} differs by {self.error:.1e}"
        return "works" if not self.whole else f"works, partly whole: {self.whole}"

    def worse(self, rows: Iterable[tuple[float, str]]) -> None:
        self.error, self.where = max([(self.error, self.where), *rows])


@contextlib.contextmanager
def only_doubles() -> Iterator[None]:
    """fp32 means fp64: models convert to fp32 inside, and an error of 1e-7 would hide a wrong gradient."""
    default, single, float_, method = torch.get_default_dtype(), torch.float32, torch.float, Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64  # type: ignore[misc, assignment]
    Tensor.float = Tensor.double  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        torch.float32, torch.float, Tensor.float = single, float_, method  # type: ignore[misc, assignment, method-assign]


def compare(group: Any, name: str) -> Result:
    """Plans and applies on this rank, trains, and returns what differs."""
    torch.manual_seed(0)
    model, inputs = build(name, train=parallel_group(group).size > 1)
    return compare_model(group, name, model.double(), inputs)


def compare_model(
    group: Any, name: str, model: nn.Module, inputs: dict[str, Tensor], other: nn.Module | None = None, **options: Any
) -> Result:
    """``other``: the unsharded model, where a copy would not be one."""
    own = parallel_group(group)
    result = Result(name, own.size)
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    with torch.no_grad():
        for parameter in model.parameters():  # ones and zeros would hide errors
            parameter.add_(torch.randn_like(parameter) * 0.02)
    reference = copy.deepcopy(model) if other is None else other
    reference.load_state_dict(model.state_dict())
    start = time.perf_counter()
    try:
        plan = auto.plan(model, inputs, own.size, **options)
    except ValueError as error:
        result.refused = str(error)
        return result
    result.seconds = time.perf_counter() - start
    _describe(result, plan, model)
    auto.apply(plan, model, group)
    if model.training:
        auto.apply(for_one_rank(plan, dict(reference.named_modules())), reference, None)
    for module in itertools.chain(model.modules(), reference.modules()):
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None):
            config._experts_implementation = "eager"  # grouped GEMMs have no fp64
    for guard in [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, Guard)]:
        guard.base = Baseline.of(model)  # which would refuse that: it branches on what the router chooses
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (reference, model)]
    forward: list[int] = []
    model.register_forward_hook(lambda *_: forward.append(counts.number))
    for step in range(STEPS):
        with tp_ext.debug.count_collectives() as counts:
            rows = differences_of_models(reference, model, (), inputs, seed=step, input_gradients=False, call=_loss)
        if step == 0:
            result.forward, result.backward = forward[0], counts.number - forward[0]
        result.worse(rows)
        for optimizer in optimizers:
            optimizer.step()
    result.worse(differences_of_states(reference, model))
    return result


def _loss(model: nn.Module, **inputs: Tensor) -> Tensor:
    return loss_or_squares(model(**inputs))


def _describe(result: Result, plan: auto.Plan, model: nn.Module) -> None:
    names = {name: torch.Size(plan.shapes[name]).numel() for name in plan.bytes_of_element}
    total = sum(names.values())
    result.cut = sum(size for name, size in names.items() if name in plan.shardings) / total
    result.patched = " ".join(sorted({type(model.get_submodule(name)).__name__ for name in plan.patches}))
    largest = max((name for name in names if name in plan.whole), key=lambda name: names[name], default=None)
    if largest is not None and names[largest] > 0.02 * total:
        result.whole = plan.why(largest)


def names() -> list[str]:
    """All architectures: causal LMs, then others."""
    return [name for name in dict.fromkeys((*CAUSAL, *MORE)) if name not in NOT_BUILT]


def builds(group: Any, name: str) -> bool:
    """Whether there is a tiny model of an architecture, whose forward runs."""
    try:
        with torch.device("meta"):  # some defaults are those of a large model
            if sum(p.numel() for p in build(name)[0].parameters()) > 20_000_000:
                return False
        model, inputs = build(name)
        loss_or_squares(model(**inputs))
    except Exception:
        return False
    return True


def has_model(name: str, timeout: float) -> bool:
    """The same, in a process of its own."""
    try:
        return bool(run(builds, 1, name, timeout=timeout)[0])
    except RankError:
        return False


def result_of(name: str, p: int) -> Result:
    """The worst result of all ranks."""
    try:
        with only_doubles():
            return max(simulated.run(compare, p, name), key=lambda one: one.error)
    except Exception as error:
        return Result(name, p, float("inf"), f"{type(error).__name__} {str(error).strip().splitlines()[-1][:150]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; default: all")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--out", type=Path, help="write the table here")
    parser.add_argument("--kept", type=Path, help="a file of results, one a line: those in it are not run again")
    options = parser.parse_args()
    lines = options.kept.read_text().splitlines() if options.kept and options.kept.exists() else []
    kept = {(result.name, result.p): result for result in (Result(**json.loads(line)) for line in lines)}
    results: dict[str, list[Result]] = {}
    for name in options.names or names():
        if not options.names and (name, options.ranks[0]) not in kept and not has_model(name, options.timeout):
            print(f"{name}: no tiny model", flush=True)
            continue
        for p in options.ranks:
            result = kept.get((name, p)) or result_of(name, p)
            results.setdefault(name, []).append(result)
            print(f"{name:24} p={p} {result.seconds:5.1f} s, cut {result.cut:4.0%}: {result.status[:160]}", flush=True)
            if options.kept and (name, p) not in kept:
                with options.kept.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(result)) + "\n")
    exact = {
        p: sum(one.error <= EXACT and not one.refused for found in results.values() for one in found if one.p == p)
        for p in options.ranks
    }
    print(f"of {len(results)}: " + ", ".join(f"{number} exact at p = {p}" for p, number in exact.items()))
    if options.out:
        options.out.write_text(table(results, options.ranks, exact))


def table(results: dict[str, list[Result]], ranks: list[int], exact: dict[int, int]) -> str:
    """The page of the documentation."""
    counts = " and ".join(f"{exact[p]} at p = {p}" for p in ranks)
    lines = [
        "# Architectures",
        "",
        f"Tiny random models of transformers {transformers.__version__}, trained for three steps of AdamW in fp64",
        "next to the model of one rank, with dropout, by `python -m tests.auto.compare`. "
        f"Of {len(results)}, {counts} have the same",
        "losses, gradients and parameters within 1e-9. *Sharded* is the share of all bytes of parameters;",
        f"*collectives* are those of forward and backward at p = {ranks[0]}.",
        "",
    ]
    whole, rows = [], []
    for name, found in sorted(results.items()):
        first = found[0]
        states = [one.status.partition(":")[0] for one in found]
        why = next((one.refused or one.whole or (one.where if one.error > EXACT else "") for one in found), "")
        why = why.replace("|", "\\|").replace("_", "\\_").replace("*", "\\*")
        cells = [f"{first.cut:.0%}", f"{first.forward} + {first.backward}"]
        if {*states} == {"works"} and not first.patched and not why:
            whole.append(f"`{name}` {' '.join(cells)}".replace(" ", "\N{NO-BREAK SPACE}"))
        else:
            rows.append(f"| {' | '.join([name, *states, *cells, first.patched, why])} |")
    if whole:
        text = f"These {len(whole)} work as they are, with no large weight left whole (sharded, collectives): "
        lines += [*textwrap.wrap(text + ", ".join(whole) + ".", 130, break_on_hyphens=False), ""]
    titles = [f"p = {p}" for p in ranks]
    titles = ["architecture", *titles, "sharded", "collectives", "integers set", "largest weight left whole"]
    lines += [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
