"""examples/finetune_hf.py on two ranks and on one; its result is read by transformers alone."""

import pytest
import torch
import transformers
import transformers.trainer  # the server of forks has it then, too

from tests.helpers import torchrun
from tests.helpers.paths import ROOT


def _run(p, out, *options):
    words = ["--standalone", f"--nproc-per-node={p}", str(ROOT / "examples" / "finetune_hf.py")]
    words += ["--out", str(out), "--steps", "4", *options]
    job = torchrun.start(words, out.with_suffix(".txt"), out.parent, HF_HUB_OFFLINE="1")
    assert job.wait(280) == 0, job.output[-3000:]
    assert "written:" in job.output


def test_the_example_trains_alike_on_one_rank_and_on_two_and_goes_on_from_one(tmp_path):
    _run(1, tmp_path / "one")
    _run(2, tmp_path / "two")
    checkpoint = str(tmp_path / "two" / "checkpoint-2")
    _run(1, tmp_path / "resumed", "--resume", checkpoint)
    one, two, resumed = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / name / "final") for name in ("one", "two", "resumed")
    )
    for expected, trained, again in zip(one.parameters(), two.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(trained, expected, rtol=1e-3, atol=3e-4)
        torch.testing.assert_close(again, expected, rtol=1e-3, atol=3e-4)
    start = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "one" / "model")
    assert (start.lm_head.weight - one.lm_head.weight).abs().max().item() == pytest.approx(4 * 3e-3, rel=0.9)


@pytest.mark.exhaustive
def test_a_loop_of_accelerate_writes_a_model_of_transformers(tmp_path):
    """That it trains as one process: tests/huggingface/test_trainer.py."""
    out = tmp_path / "looped"
    _run(2, out, "--accelerate")
    start, end = (transformers.LlamaForCausalLM.from_pretrained(out / name) for name in ("model", "final"))
    assert (start.lm_head.weight - end.lm_head.weight).abs().max() > 3e-3
