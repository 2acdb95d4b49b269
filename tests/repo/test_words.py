"""Documentation uses the words of docs/develop/glossary.md: those of its second table, in backticks, occur nowhere."""

import re
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PLACES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs",
    "examples",
    "benchmarks",
    "tp_ext",
    "csrc",
    "tests",
)  # files and folders that are checked
EXCEPTIONS = {  # an argument of an operator's schema; the method of Box and Muller
    "csrc/autograd/coalesced.cpp": {"pieces"},
    "csrc/library.cpp": {"pieces"},
    "tp_ext/_ops/regions.py": {"pieces"},
    "csrc/kernels/random_fill.h": {"box"},
}
GLOSSARY = ROOT / "docs" / "develop" / "glossary.md"
TEXTS = {".md", ".py", ".h", ".cpp", ".cu", ".cuh"}


def retired_words():
    """Words and phrases in backticks in the left column of the table "Retired words"."""
    table = GLOSSARY.read_text().partition("## Retired words")[2]
    rows = re.findall(r"^\| (.*?) \| .* \|$", table, re.M)
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row)]


def pattern(words):
    """Matches any of the words as a whole word, in any case; a phrase may be broken across lines."""
    return re.compile(r"\b(?:" + "|".join(r"\s+".join(map(re.escape, word.split())) for word in words) + r")\b", re.I)


def files():
    for place in PLACES:
        path = ROOT / place
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (file for file in found if file.suffix in TEXTS and file not in (GLOSSARY, Path(__file__)))


def test_the_table_is_read():
    words = retired_words()
    assert len(words) > 20 and {"dealt", "beside", "so many"} <= set(words)
    assert pattern(words).search("It stands BESIDE them") and pattern(words).search("in so\n    many words")
    assert not pattern(words).search("besides, soothsayers misdealt")


@pytest.mark.parametrize("file", list(files()), ids=lambda file: str(file.relative_to(ROOT)))
def test_no_retired_word(file):
    text = file.read_text()
    allowed = EXCEPTIONS.get(str(file.relative_to(ROOT)), ())
    matches = [m for m in pattern(retired_words()).finditer(text) if m[0].lower() not in allowed]
    found = [f"line {text.count(chr(10), 0, m.start()) + 1}: {m[0]!r}" for m in matches]
    assert not found, f"{found}; {GLOSSARY.relative_to(ROOT)} says which word to use"
