"""What the pages say: their Python blocks run on two ranks, the tests and files that they name are there."""

import ast
import contextlib
import io
import re
from functools import cache
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from tests.helpers import ranks, torchrun
from tests.helpers.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [*PAGES, *sorted((ROOT / "examples").glob("*.py"))]
EVERY = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
BLOCK = re.compile(r"^```python(| theirs)\n(.*?)^```$", re.M | re.S)


def blocks(page):
    """(whose, line, code) of each Python block; `theirs` is the code of a peer, for comparison only."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        yield found[1].strip() or "ours", text.count("\n", 0, found.start()) + 2, found[2]


def _run(group, page, folder):
    """Runs the page's blocks one after the other, as a reader would, in a folder that the ranks share.

    The process group is ours, the environment is that of torchrun. Returns what the blocks print."""
    printed, names = io.StringIO(), {"__name__": "__main__"}
    where = torchrun.variables(group.rank(), group.size())
    ours = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    with ours, where, contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for whose, line, code in blocks(page):
            if whose == "ours":  # empty lines above, so that a traceback shows the line of the page
                exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    return printed.getvalue()


@EVERY
def test_every_block_is_python(page):
    text = page.read_text()
    assert len(re.findall(r"^\s*```py", text, re.M)) == len(list(blocks(page))), "a block of another form"
    for _, line, code in blocks(page):
        try:
            ast.parse(code)
        except SyntaxError as error:
            pytest.fail(f"{page.name}, block at line {line}: {error}")


# Tests below, and end_to_end/test_two_hosts.py, run all their blocks on other numbers of ranks
ELSEWHERE = {"first_steps.md", "multi_node.md", "notebook.md", "tutorial.md"}


def _on_two_ranks():
    for page in PAGES[1:]:  # README's run below
        if any(whose == "ours" for whose, *_ in blocks(page)):
            marks = [pytest.mark.exhaustive] if page.name in ELSEWHERE else []
            yield pytest.param(page, marks=marks, id=page.name)


@pytest.mark.parametrize("page", _on_two_ranks())
def test_blocks_run_on_two_ranks(page, tmp_path):
    ranks.run(_run, 2, page, tmp_path, timeout=120)


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_programs_end_with_destroy_process_group(page):
    """Else gloo's threads may abort the process at its end: terminate called without an active exception."""
    text = page.read_text()
    code = text if page.suffix == ".py" else "".join(code for whose, _, code in blocks(page) if whose == "ours")
    calls = re.findall(r"(init_process_group|init_mesh|destroy_process_group)\(", code)
    assert not calls or "destroy_process_group" in calls


def test_the_mesh_of_first_steps_has_two_data_parallel_replicas_on_four_ranks(tmp_path):
    """Under FSDP2 the weights are those of one process only if all replicas draw the same ones: the page asserts it."""
    page = ROOT / "docs" / "guide" / "first_steps.md"
    ranks.run(_run, 4, page, tmp_path, timeout=120)


@pytest.mark.parametrize("name", ["attention.md", "inference.md", "migrating.md"])
def test_head_counts_of_the_examples_run_on_three_ranks(name, tmp_path):
    ranks.run(_run, 3, ROOT / "docs" / "guide" / name, tmp_path, timeout=120)


def test_the_readme_prints_the_same_for_every_p(tmp_path):
    """Ten steps in fp32, whose sums differ by rounding alone; `tensor_split` of 1000 ids at p = 3 is uneven."""
    losses = [
        [float(line.split()[1]) for line in ranks.run(_run, p, PAGES[0], tmp_path)[0].splitlines()] for p in (1, 2, 3)
    ]
    assert len(losses[0]) == 10
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(losses[:1]).expand(3, -1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "cold"])
def test_the_tutorial_prints_its_output_under_torchrun_and_the_same_losses_for_every_p(cold, tmp_path):
    """Its first block is a program. Losses to the digits shown but the last, which depends on the machine."""
    page = ROOT / "docs" / "guide" / "tutorial.md"
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page.read_text(), re.M | re.S)
    (tmp_path / "mine.py").write_text(next(blocks(page))[2])
    words = ["--standalone", "--nproc-per-node", "2", "mine.py"]
    job = torchrun.start(words, tmp_path / "printed.txt", tmp_path, cold=cold)
    assert job.wait(120) == 0, job.output
    three = ranks.run(_run, 3, page, tmp_path)[0].partition("rank 0 holds [22, 8] of [64, 8]")
    assert three[1]
    assert re.sub(r"\d+\.\d+", "", job.output) == re.sub(r"\d+\.\d+", "", shown)
    losses = [[float(loss) for loss in re.findall(r"loss (\S+)", text)] for text in (shown, job.output, three[0])]
    assert len(losses[0]) == 5
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(losses[:1]).expand(3, -1), rtol=1e-3, atol=0)


def test_the_notebook_prints_what_it_shows():
    """In one process, as a notebook does; numbers but for their last digit, which depends on the machine."""
    page, printed = ROOT / "docs" / "guide" / "notebook.md", io.StringIO()
    shown = "".join(re.findall(r"^```text\n(.*?)^```$", page.read_text(), re.M | re.S))
    names = {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed):
        for _, line, code in blocks(page):
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    number = r"\d+\.\d+"
    assert re.sub(number, "", printed.getvalue()) == re.sub(number, "", shown)
    values = [[float(value) for value in re.findall(number, text)] for text in (printed.getvalue(), shown)]
    torch.testing.assert_close(*map(torch.tensor, values), rtol=5e-3, atol=0)


@cache
def _tests_in(file):
    """Names of the test functions in a file."""
    return set(re.findall(r"^def (test_\w+)\(", file.read_text(), re.M))


@cache
def _all_tests():
    return set().union(*(_tests_in(file) for file in (ROOT / "tests").rglob("test_*.py")))


@EVERY
def test_tests_that_are_named_are_there(page):
    """`tests/test_x.py::test_y`, or a test's name alone."""
    text = page.read_text()
    for path, name in re.findall(r"\b(tests/[\w/]+\.py)(?:::(\w+))?", text):
        assert (ROOT / path).exists(), path
        assert not name or name in _tests_in(ROOT / path), f"{path}::{name}"
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named <= _all_tests(), named - _all_tests()


def test_index_leads_to_every_page():
    """By links; pages of the API by those of its own index."""
    reached, front = set(), {ROOT / "docs" / "index.md"}
    while front:
        reached |= front
        targets = ((page, link) for page in front for link in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text()))
        front = {(page.parent / link).resolve() for page, link in targets if page.name == "index.md"} - reached
    assert set(PAGES) - reached == set()


def test_readme_is_short():
    """Words of the rendered page: links without targets, tables without bars, no marks of headings and blocks."""
    text = re.sub(r"\]\([^)]*\)", "]", PAGES[0].read_text())
    assert len(re.sub(r"^[`#-]+|\||---", " ", text, flags=re.M).split()) <= 1100


@EVERY
def test_links_within_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path = target.partition("#")[0]
        assert target.startswith(("https:", "http:")) or not path or (page.parent / path).exists(), target
