"""A hook of MkDocs: a line `<!-- header: nn.h -->` of a page becomes the declarations of a header of C++, each with the
comment of three slashes before it."""

import re
from pathlib import Path

HEADERS = Path(__file__).resolve().parents[2] / "tp_ext" / "include" / "tp_ext"
LINE = re.compile(r"^<!-- header: (\S+) -->$", re.M)
# A comment, and what it describes: a class up to its closing brace, or a function; options need no comment
DECLARED = re.compile(
    r"^(?P<text>(?:///[^\n]*\n)*)(?P<code>(?:class|struct) (?P<type>(?:TP_EXT_API )?\w+)[^;{]*\{.*?^\};\n"
    r"|(?:using|TP_EXT_API)[^;{]*?(?P<name>\w+)(?: =|\()[^;]*;\n)",
    re.M | re.S,
)


def declarations(header):
    """(name, comment, code) of each declaration of a header that has a comment, and of each type."""
    for found in DECLARED.finditer((HEADERS / header).read_text()):
        text = re.sub(r"^/// ?", "", found["text"], flags=re.M).strip()
        name = (found["type"] or found["name"]).removeprefix("TP_EXT_API ").removesuffix("Impl")
        code = found["code"].replace("TP_EXT_API ", "")
        code = re.sub(r"^ private:\n.*?(?=^\};)", "", code, flags=re.M | re.S)
        yield name, text, code


def as_markdown(header):
    parts = [f"## `{name}`\n\n{text}\n\n```cpp\n{code}```\n" for name, text, code in declarations(header)]
    return "\n".join(parts)


def on_page_markdown(markdown, page, config, files):
    return LINE.sub(lambda line: as_markdown(line[1]), markdown)
