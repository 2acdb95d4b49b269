"""Exported models in a program of C++: the ids of Python, and errors of loading on all ranks."""

import json
import shutil

import pytest
import torch

import tp_ext
from tests.cpp.test_cpp import programs, pytestmark, run_ranks  # noqa: F401
from tests.export.test_export import MAX_SEQ, SECONDS, export, prompt
from tests.helpers import small_gpt
from tests.helpers.ranks import run


def export_and_continue(group, folder, prompts, options):
    """Exports the model, and continues each prompt by its Python form."""
    model = small_gpt.make(group).eval()
    export(model, prompt(3), folder, generate=True, max_seq=MAX_SEQ)
    exported = tp_ext.load_exported(folder, group)
    with torch.inference_mode():
        return [exported.generate(ids, **options).tolist() for ids in prompts]


@pytest.mark.parametrize("p", [2, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (1, 3))])
def test_the_program_prints_the_ids_of_python(programs, tmp_path, p):  # noqa: F811
    folder, prompts = tmp_path / "export", [prompt(1), prompt(5)]
    options = {"max_new_tokens": 6, "temperature": 0.8, "seed": 3}
    expected = run(export_and_continue, p, folder, prompts, options, timeout=SECONDS)[0]
    command = [programs / "examples" / "generate", folder, "--backend", "gloo", "--max-new-tokens", "6", "--prompt"]
    for ids, text in zip(prompts, expected, strict=True):
        given = ",".join(map(str, ids[0].tolist()))
        printed = run_ranks(p, *command, given, "--temperature", "0.8", "--seed", "3")
        assert printed[0].strip() == ",".join(map(str, text[0]))
    manifest = json.loads((folder / "manifest.json").read_text())
    for number, (changes, error) in enumerate(
        [
            ({"torch": "2.0.0"}, "must be the version of the export, 2.0.0"),
            ({"isa": ["avx9000"]}, "this processor has no avx9000"),
            ({"p": 9}, "must be the 9 of the export"),
            ({"files": manifest["files"] | {"rank_00000.weights": "0"}}, "another file than the one that was exported"),
        ]
    ):
        other = shutil.copytree(folder, tmp_path / f"changed{number}")
        (other / "manifest.json").write_text(json.dumps(manifest | changes))
        with pytest.raises(AssertionError, match=error):
            run_ranks(p, programs / "examples" / "generate", other, "--backend", "gloo", "--prompt", "1")
