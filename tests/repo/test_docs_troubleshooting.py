"""docs/guide/troubleshooting.md quotes messages; each must still be in the sources, or a search finds nothing."""

import ast
import mmap
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "guide" / "troubleshooting.md"
# A heading is a message in backticks, ` .. ` standing for values; (torch) after it: the message is torch's
MESSAGES = re.findall(r"^### `(.+)`( \(torch\))?$", PAGE.read_text(), re.M)
# Of a section with a table, its first column
TABLE = PAGE.read_text().partition("\n## Torch's functions and trainers\n")[2].partition("\n## ")[0]
CELLS = re.findall(r"^\| (`.+?) \|", TABLE, re.M)
MESSAGES += [(message, "") for cell in CELLS for message in re.findall(r"`([^`]+)`", cell)]


def _joined(node):
    """The text of a Python string, a newline in place of each value of an f-string; None if it is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_joined(part) or "\n" for part in node.values)
    return None


@cache
def messages_of_python():
    """All strings of the package and of setup.py, docstrings excepted; implicit concatenation is one string."""
    texts = []
    for file in (*sorted((ROOT / "tp_ext").rglob("*.py")), ROOT / "setup.py"):
        tree = ast.parse(file.read_text())
        expressions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        nodes = [node for node in ast.walk(tree) if id(node) not in expressions]
        texts += [text for text in map(_joined, nodes) if text]
    return texts


@cache
def messages_of_cpp():
    """The string literals of each C++ statement, with a newline in place of what is between them, values as a rule."""
    texts = []
    for file in sorted((ROOT / "csrc").rglob("*")):
        if file.suffix in (".cpp", ".h", ".cu", ".cuh"):
            code = re.sub(r"//[^\n]*", "", file.read_text())
            for statement in re.split(r";\n", code):
                literals = re.sub(r'"\s+"', "", statement)  # adjacent ones are one
                texts.append("\n".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', literals)))
    return texts


@cache
def torch_contains(text):
    """Returns whether the text occurs in torch's distributed Python code or in its CPU library."""
    package = Path(torch.__file__).parent
    if any(text in file.read_text() for file in (package / "distributed").glob("*.py")):
        return True
    library = (package / "lib" / "libtorch_cpu.so").open("rb")
    with library, mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text.encode()) >= 0


def is_quoted_from_sources(message, texts):
    """Returns whether a string contains all fragments of the message, in order, with any values between them."""
    pattern = re.compile(".*?".join(map(re.escape, message.split(" .. "))), re.S)
    return any(map(pattern.search, texts))


def test_the_page_has_messages():
    assert len(MESSAGES) >= 20 and len({message for message, _ in MESSAGES}) == len(MESSAGES)


@pytest.mark.parametrize(("message", "origin"), MESSAGES, ids=lambda value: value[:40])
def test_a_quoted_message_is_in_the_sources(message, origin):
    if origin:
        assert all(map(torch_contains, message.split(" .. "))), "torch has another message now"
    else:
        texts = messages_of_python() + messages_of_cpp()
        assert is_quoted_from_sources(message, texts), "the sources have another message now"


def test_a_message_that_is_not_there_is_noticed():
    assert is_quoted_from_sources("a bare parameter of shape .. must carry tp_sharding", messages_of_python())
    assert is_quoted_from_sources("on rank .. must be .. its share of vocab_size", messages_of_python())
    assert is_quoted_from_sources("calls .. where rank .. calls", messages_of_cpp())
    for wrong in ("must carry tp_sharding .. a bare parameter of shape", "a bare parameter of form"):
        assert not is_quoted_from_sources(wrong, messages_of_python() + messages_of_cpp())
    assert not torch_contains("a message that torch does not have")
