"""The command line of ``train_gpt.py``. It does not import torch, so that ``--help`` and a mistake answer at once."""

import argparse
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from gpt_config import GPTConfig

MODEL = [field.name for field in fields(GPTConfig)]
MESH = ["pp", "dp", "ep", "cp", "tp"]
SCHEDULES = (
    *("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"),
    *("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
)
# What a resumed run may not change. Everything else may differ: the mesh, --steps, --lr, --batch-size, ..
FIXED = [
    *(
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "ffn_hidden_size",
        "experts",
        "top_k",
        "shared_experts",
    ),
    *("dtype", "param_dtype", "optimizer", "seed", "tp_invariant"),
]


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def number(kind: type, rule: str, valid: Callable[[Any], bool]) -> Callable[[str], Any]:
    """An argparse type: the number, or the error "must <rule>"."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number") from None
        if not valid(value):
            raise argparse.ArgumentTypeError(f"{text} must {rule}")
        return value

    return parse


def weights(text: str) -> list[float]:
    """An argparse type: numbers of at least 0, with commas between."""
    parts = text.split(",")
    if not all(part.replace(".", "", 1).isdigit() for part in parts) or not any(map(float, parts)):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of at least 0, such as 2,1, one of them above 0")
    return [float(part) if "." in part else int(part) for part in parts]


POSITIVE = number(int, "be at least 1", lambda n: n >= 1)
RANKS = number(int, "be at least 1, or -1", lambda n: n >= 1 or n == -1)
COUNT = number(int, "be at least 0", lambda n: n >= 0)
RATE = number(float, "be positive and finite", lambda x: 0 < x < math.inf)
WEIGHT = number(float, "be finite and at least 0", lambda x: 0 <= x < math.inf)
PROBABILITY = number(float, "be at least 0 and less than 1", lambda x: 0 <= x < 1)
SHARE = number(float, "be between 0 and 1", lambda x: 0 <= x <= 1)


def parse_options(description: str) -> argparse.Namespace:
    """The options of this run, checked as far as that is possible without torch."""
    usage = "torchrun --standalone --nproc-per-node RANKS %(prog)s [options]"
    parser = argparse.ArgumentParser(usage=usage, description=description, formatter_class=_Help)
    config = GPTConfig()

    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, help="a file or folder of text; None: Python's standard library")
    data.add_argument("--max-mib", type=POSITIVE, default=16, help="read at most this many MiB")
    data.add_argument("--seq-length", type=POSITIVE, default=128, help="bytes in a sequence")
    data.add_argument("--batch-size", type=POSITIVE, default=16, help="sequences in a step, of all ranks together")

    model = parser.add_argument_group("model")
    model.add_argument("--hidden-size", type=POSITIVE, default=config.hidden_size, help="width of the residual stream")
    model.add_argument("--num-layers", type=POSITIVE, default=config.num_layers, help="number of blocks")
    model.add_argument("--num-heads", type=POSITIVE, default=config.num_heads, help="query heads, at least one a rank")
    model.add_argument(
        "--num-kv-heads",
        type=POSITIVE,
        default=config.num_kv_heads,
        help="key and value heads; fewer than ranks: the number of ranks must be a multiple of them",
    )
    model.add_argument("--ffn-hidden-size", type=POSITIVE, default=config.ffn_hidden_size, help="width of an MLP")
    model.add_argument("--experts", type=COUNT, default=config.experts, help="MLPs of a block; 0: one, without routing")
    model.add_argument("--top-k", type=POSITIVE, default=config.top_k, help="experts of a token")
    model.add_argument("--shared-experts", type=COUNT, default=config.shared_experts, help="experts of all tokens")
    balance = "coefficient of the routers' balance loss; its values are not part of those printed"
    model.add_argument("--balance-loss", type=WEIGHT, default=config.balance_loss, help=balance)
    model.add_argument("--dropout", type=PROBABILITY, default=config.dropout, help="after attention and MLP")
    model.add_argument("--sequence-parallel", action="store_true", help="shard the activations between blocks, too")
    invariant = "logical blocks of the same bits for every --tp; 0: none; needs MKL_CBWR=AVX512,STRICT on CPUs"
    model.add_argument("--tp-invariant", type=COUNT, nargs="?", const=8, default=0, metavar="BLOCKS", help=invariant)
    dtypes = ("float32", "bfloat16", "float64")
    model.add_argument("--dtype", choices=dtypes, default="float32", help="bfloat16: autocast over fp32 parameters")
    pure = "of parameters and optimizer states; bfloat16: no autocast; None: float64 with --dtype float64, else float32"
    model.add_argument("--param-dtype", choices=("float32", "bfloat16"), help=pure)
    eight = "linears multiply in 8-bit floating point, a scale per tensor or per row; not with float64"
    model.add_argument("--float8", choices=("tensor", "row"), help=eight)

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=POSITIVE, default=300, help="number of steps, those before --resume included")
    optimizers = ("adamw", "muon")
    training.add_argument("--optimizer", choices=optimizers, default="adamw", help="muon: for the matrices of blocks")
    training.add_argument("--lr", type=RATE, default=1e-3, help="learning rate after the warmup")
    training.add_argument("--warmup-steps", type=COUNT, default=20, help="steps of linear warmup")
    training.add_argument("--lr-decay-steps", type=POSITIVE, help="where the cosine after it ends; None: at --steps")
    training.add_argument("--min-lr-ratio", type=SHARE, default=0.1, help="last learning rate, as a share of --lr")
    training.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout")

    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder of checkpoint, losses, plot, sample")
    output.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out, on any ranks")
    output.add_argument("--overwrite", action="store_true", help="replace the run that --out holds")
    output.add_argument("--save-every", type=COUNT, default=100, help="steps between checkpoints; 0: only the last one")
    output.add_argument("--eval-every", type=COUNT, default=100, help="steps between evaluations; 0: only at the end")
    output.add_argument("--eval-batches", type=POSITIVE, default=8, help="batches of held-out text in an evaluation")
    output.add_argument("--log-every", type=POSITIVE, default=10, help="steps between lines, where there is no bar")
    output.add_argument("--quiet", action="store_true", help="no progress bar and no lines but the first and the last")
    output.add_argument("--timeline", action="store_true", help="draw the third step of the run: timeline.png")
    plan = "profile the machine for MINUTES, by default 0.5; print the predicted and measured step"
    output.add_argument("--plan", nargs="?", const=0.5, type=RATE, metavar="MINUTES", help=plan)
    output.add_argument("--prompt", default="def ", help="what the text sampled at the end begins with")
    output.add_argument("--sample-bytes", type=COUNT, default=200, help="length of the sampled text; 0: none")

    ranks = parser.add_argument_group("ranks", "pp x dp x ep x cp x tp of them; -1: as many as the others leave")
    ranks.add_argument("--pp", type=RANKS, default=1, help="pipeline-parallel ranks: stages of blocks")
    ranks.add_argument("--dp", type=RANKS, default=1, help="data-parallel ranks: other sequences on each")
    expert = "ranks that share the experts; of all other parameters data-parallel ranks, too"
    ranks.add_argument("--ep", "--expert-parallel", type=RANKS, default=1, help=expert)
    ranks.add_argument("--cp", type=RANKS, default=1, help="context-parallel ranks: tokens of each sequence")
    ranks.add_argument("--tp", type=RANKS, default=-1, help="tensor-parallel ranks: shards of each weight")
    shares = "weights of the ranks of --tp, such as 2,1: shares of heads, features, words and tokens; None: equal"
    ranks.add_argument("--shares", type=weights, help=shares)
    contexts = ("ring", "all_gather", "ulysses")
    ranks.add_argument("--context", choices=contexts, default=config.context, help="how keys reach the ranks of --cp")
    ranks.add_argument("--schedule", choices=SCHEDULES, help="of the pipeline; None: 1F1B")
    ranks.add_argument("--micro-batches", type=POSITIVE, help="slices of each rank's batch; None: as many as --pp")
    ranks.add_argument("--zero", type=int, choices=range(4), default=0, help="stage of ZeRO over data ranks")
    ranks.add_argument("--offload", action="store_true", help="parameters and states in host memory; --zero 2 or 3")
    ranks.add_argument("--recompute", choices=("full", "selective"), help="what backward computes again of each block")
    ranks.add_argument("--compile", action="store_true", help="torch.compile each block")
    ranks.add_argument("--backend", help="of torch.distributed; None: what fits the device and the hosts")
    ranks.add_argument("--timeout", type=POSITIVE, default=300, help="seconds to wait for another rank")

    options = parser.parse_args()
    if options.lr_decay_steps is None:
        options.lr_decay_steps = options.steps
    if options.data is not None and not options.data.exists():
        parser.error(f"argument --data: {options.data} must be an existing file or folder")
    if not options.prompt:
        parser.error("argument --prompt: '' must have at least one character")
    if options.resume and options.overwrite:
        parser.error("argument --overwrite: must not be given with --resume")
    if options.float8 and (options.dtype == "float64" or options.tp_invariant):
        parser.error(f"argument --float8: {options.float8} must not be given with --dtype float64 or --tp-invariant")
    usual = "float64" if options.dtype == "float64" else "float32"
    options.param_dtype = options.param_dtype or usual
    if options.param_dtype not in (usual, options.dtype):
        parser.error(f"argument --param-dtype: {options.param_dtype} must not be given with --dtype {options.dtype}")
    if options.optimizer == "muon" and options.zero == 1:
        parser.error("argument --zero: 1 must not be given with --optimizer muon; take 0, 2 or 3")
    if missing := [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]:
        parser.exit(1, f"{' and '.join(missing)} must be installed: pip install matplotlib tqdm\n")
    if "LOCAL_RANK" not in os.environ:
        parser.exit(1, "launch with torchrun: torchrun --standalone --nproc-per-node 2 examples/train_gpt.py\n")
    check_mesh(parser, options, int(os.environ.get("WORLD_SIZE", "1")))
    check_experts(parser, options)
    return options


def check_mesh(parser: argparse.ArgumentParser, options: argparse.Namespace, ranks: int) -> None:
    """Replaces a size of -1 by the remaining ranks; ends the run if the sizes of mesh and batch do not fit."""
    sizes = {name: getattr(options, name) for name in MESH}
    given = " ".join(f"--{name} {size}" for name, size in sizes.items())
    remaining = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(remaining) > 1:
        parser.error(f"argument --{remaining[1]}: only one of {given} may be -1")
    if ranks % known or (not remaining and ranks != known):
        parser.error(f"argument --{MESH[0]}: {given} must multiply to the {ranks} ranks of this run")
    for name in remaining:
        setattr(options, name, ranks // known)
    if options.shares is not None:
        refused = {"cp": options.cp > 1, "ep": options.ep > 1, "tp-invariant": bool(options.tp_invariant)}
        if name := next((name for name, given in refused.items() if given), None):
            parser.error(f"argument --shares: must not be given with --{name}")
        if len(options.shares) != options.tp:
            parser.error(
                f"argument --shares: {options.shares} must be one weight for each of the {options.tp} tp ranks"
            )
    if options.micro_batches is None:
        options.micro_batches = options.pp
    factors = {"--dp": options.dp, "--ep": options.ep, "--micro-batches": options.micro_batches}
    factors = {name: size for name, size in factors.items() if name != "--ep" or size > 1}
    if options.batch_size % math.prod(factors.values()):
        parser.error(
            f"argument --batch-size: {options.batch_size} must be a multiple of {' x '.join(factors)} = "
            f"{' x '.join(map(str, factors.values()))}"
        )


def check_experts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the run if the options of experts do not fit each other."""
    if options.ep > max(options.experts, 1):
        parser.error(f"argument --ep: {options.ep} must be at most --experts = {options.experts}")
    if options.experts and options.top_k > options.experts:
        parser.error(f"argument --top-k: {options.top_k} must be at most --experts = {options.experts}")
    if options.shared_experts and not options.experts:
        parser.error(f"argument --shared-experts: {options.shared_experts} must be 0 without --experts")
    if options.ep > 1 and options.zero == 1:
        parser.error("argument --zero: 1 must not be given with --ep; take 0, 2 or 3")


def saved_form(options: argparse.Namespace, text_sha256: str) -> dict[str, Any]:
    """The options as plain values, for the checkpoint."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return plain | {"text_sha256": text_sha256}


def difference(now: dict[str, Any], saved: dict[str, Any]) -> str | None:
    """Why a run with the options ``now`` cannot continue one with the options ``saved``; None if it can."""
    for name in FIXED:
        if name in saved and now[name] != saved[name]:
            return f"--{name.replace('_', '-')}: {now[name]} must be {saved[name]}, as in the run to resume"
    if saved.get("text_sha256", now["text_sha256"]) != now["text_sha256"]:
        return f"--data: must be the text of the run to resume, which was read from {saved['data'] or 'the default'}"
    return None
