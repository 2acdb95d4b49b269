"""GRPO by TRL, tensor-parallel: a tiny model learns by a reward of a rule, the share of vowels in what it writes.

``torchrun --standalone --nproc-per-node 2 examples/grpo.py``: a minute or two on two cores; ``--plot FILE`` draws
the reward of each step. The sharded model writes the completions itself, the same on all ranks; one rank calls the
reward function. Needs ``pip install 'tp_ext[trl]'``.
"""

import argparse
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import trl
from transformers import AutoTokenizer
from trl_model import write_tiny_model

import tp_ext.huggingface


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a pretrained model; default: a tiny one is made")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--plot", type=Path, help="a file for a plot of the reward")
    return parser.parse_args()


def vowels(completions: list[str], **others: Any) -> list[float]:
    """Returns the share of vowels in each text."""
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def plot(rewards: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3))
    axes.plot(range(1, len(rewards) + 1), rewards)
    axes.set(xlabel="step", ylabel="reward: share of vowels", ylim=(0, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    args = options()
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    path = args.model or args.out / "model"
    if args.model is None:
        write_tiny_model(path, hidden=64)
    model = tp_ext.huggingface.from_pretrained(path, group=dist.group.WORLD)
    words = "a word: ", "letters: ", "write: ", "say something: "
    config = trl.GRPOConfig(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=12,
        learning_rate=args.lr,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = tp_ext.huggingface.trainer_for(trl.GRPOTrainer)(
        model,
        reward_funcs=vowels,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": [*words] * 100}),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    if dist.get_rank() == 0:
        few = max(len(rewards) // 10, 1)
        first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
        print(f"reward of the first {few} steps {first:.3f}, of the last {last:.3f}", flush=True)
        if args.plot:
            plot(rewards, args.plot)
    trainer.save_model(str(args.out / "final"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
