"""A hook of MkDocs: pages may link to files outside docs/, with the paths that they have in the repository.

Markdown files become pages, Python files become pages with their source, images are copied. Links from them back into
docs/ are rewritten, too, so that the same text works on a code host and on the site.
"""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
MOVED = {"README.md": "readme.md", "CONTRIBUTING.md": "develop/contributing.md", "CHANGELOG.md": "develop/changelog.md"}
COPIED = {".png", ".svg"}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def place_on_site(path):
    """Path on the site of a file of the repository: None if it is not there."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in MOVED:
        return MOVED[path]
    if path.startswith("examples/") and path.endswith(".py"):
        return path + ".md"
    return path if Path(path).suffix in COPIED else None


def place_in_repository(page):
    """The inverse, for a page."""
    moved = {there: here for here, there in MOVED.items()}
    return moved.get(page) or (page.removesuffix(".md") if page.endswith(".py.md") else f"docs/{page}")


def rewritten(text, page):
    """The Markdown of a page of the site, its links to files of the repository replaced by links within the site."""
    source = os.path.dirname(place_in_repository(page))

    def replace(link):
        begin, target, anchor, end = link.groups(default="")
        path = os.path.normpath(os.path.join(source, target))
        there = None if ":" in target else place_on_site(path)
        if there is None or not (ROOT / path).exists():
            return link[0]  # MkDocs reports the links that lead nowhere
        return f"{begin}{os.path.relpath(there, os.path.dirname(page) or '.')}{anchor}{end}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)  # code is left alone
    return "".join(part if i % 2 else LINK.sub(replace, part) for i, part in enumerate(parts))


def on_files(files, config):
    for here, there in MOVED.items():
        files.append(File.generated(config, there, content=(ROOT / here).read_text()))
    for file in sorted((ROOT / "examples").glob("*.py")):
        text = f"# {file.name}\n\n```python\n{file.read_text()}```\n"
        files.append(File.generated(config, f"examples/{file.name}.md", content=text))
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, str(file.relative_to(ROOT)), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown, page, config, files):
    return rewritten(markdown, page.file.src_uri)
