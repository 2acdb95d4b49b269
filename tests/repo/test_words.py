"""Documentation uses the words of docs/develop/glossary.md: those of its second table, in backticks, occur nowhere."""

import re
from pathlib import Path

from tests.helpers.paths import ROOT

PLACES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "Makefile",
    "requirements",
    "docs",
    "examples",
    "benchmarks",
    "tp_ext",
    "csrc",
    "tests",
)  # files and folders that are checked
EXCEPTIONS = {  # the method of Box and Muller
    "csrc/kernels/random_fill.h": {"box"},
    "tests/kernels/test_random_fill.py": {"box"},
}
GLOSSARY = ROOT / "docs" / "develop" / "glossary.md"
TEXTS = {"", ".md", ".py", ".h", ".cpp", ".cu", ".cuh", ".txt"}


def retired_words():
    """Words and phrases in backticks in the left column of the table "Retired words"."""
    table = GLOSSARY.read_text().partition("## Retired words")[2]
    rows = re.findall(r"^\| (.*?) \| .* \|$", table, re.M)
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row)]


def pattern(words):
    """Matches any of the words, whole, in any case, also in an identifier; a phrase may be broken across lines."""
    phrases = (r"[\s_]+".join(map(re.escape, word.split())) for word in words)
    return re.compile(r"(?<![^\W_])(?:" + "|".join(phrases) + r")(?![^\W_])", re.I)


def files():
    for place in PLACES:
        path = ROOT / place
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (
            file for file in found if file.is_file() and file.suffix in TEXTS and file not in (GLOSSARY, Path(__file__))
        )


def test_the_table_is_read():
    words = retired_words()
    assert len(words) > 20 and {"dealt", "beside", "so many"} <= set(words)
    assert pattern(words).search("It stands BESIDE them") and pattern(words).search("in so\n    many words")
    assert pattern(words).search("grad_beside(x)") and pattern(words).search("if_so_many")
    assert not pattern(words).search("besides, soothsayers misdealt")


def test_no_retired_word():
    retired, found = pattern(retired_words()), []
    for file in files():
        text, name = file.read_text(), str(file.relative_to(ROOT))
        matches = [m for m in retired.finditer(text) if m[0].lower() not in EXCEPTIONS.get(name, ())]
        found += [f"{name}, line {text.count(chr(10), 0, m.start()) + 1}: {m[0]!r}" for m in matches]
    assert not found, "\n".join([*found, f"{GLOSSARY.relative_to(ROOT)} says which word to use"])
