"""examples/run_clm.py in bf16, with the options of transformers' own, on one rank and on two."""

import json
import os
import subprocess
import sys

import pytest
import transformers

from tests.helpers.paths import ROOT


def _run(p, out, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={p}"]
    words = "--bf16 --use_cpu --do_train --do_eval --max_steps 4 --save_steps 2 --logging_steps 1 --report_to none"
    run = subprocess.run(
        [*command, str(ROOT / "examples" / "run_clm.py"), "--output_dir", str(out), *words.split(), *options],
        capture_output=True,
        text=True,
        timeout=1700,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = json.loads((out / "trainer_state.json").read_text())["log_history"]
    perplexity = json.loads((out / "eval_results.json").read_text())["perplexity"]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line], perplexity


@pytest.mark.exhaustive  # by default tests/huggingface/test_trainer.py
@pytest.mark.timeout(3600)
def test_losses_norms_and_perplexity_of_two_ranks_are_those_of_one_which_two_can_resume(tmp_path):
    expected, perplexity = _run(1, tmp_path / "one")
    # Two ranks go on in the middle: the last two losses are theirs
    losses, own = _run(2, tmp_path / "two", "--resume", str(tmp_path / "one" / "checkpoint-2"))
    assert len(losses) == 4 and own == pytest.approx(perplexity, rel=1e-3)
    for pair, expected_pair in zip(losses, expected, strict=True):
        assert pair == pytest.approx(expected_pair, rel=5e-3)
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "two").config.vocab_size == 256
