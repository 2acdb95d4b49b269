"""A hook of MkDocs: writes the page guide/notebook.md once more as a Jupyter notebook, for download.

Each Python block becomes a cell, the block of text after it the cell's output, all else cells of Markdown.
"""

import json
import re
from pathlib import Path

from mkdocs.structure.files import File

PAGE = Path(__file__).resolve().parents[1] / "guide" / "notebook.md"
BLOCK = re.compile(r"^```python\n(.*?)\n```$(?:\n\n^```text\n(.*?)^```$)?", re.M | re.S)


def notebook(text):
    """Returns the notebook (nbformat 4.4) of a page's Markdown."""
    cells = []

    def add_text(part):
        if part.strip():
            # links lead to other pages, which a downloaded file lacks
            part = re.sub(r"\[([^]]+)\]\((?!http)[^)]+\)", r"\1", part)
            cells.append({"cell_type": "markdown", "metadata": {}, "source": part.strip()})

    end = 0
    for block in BLOCK.finditer(text):
        add_text(text[end : block.start()])
        outputs = [{"output_type": "stream", "name": "stdout", "text": block[2]}] if block[2] else []
        code = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": outputs, "source": block[1]}
        cells.append(code)
        end = block.end()
    add_text(text[end:])
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 4, "metadata": {"kernelspec": kernel}, "cells": cells}


def on_page_markdown(markdown, page, config, files):
    if page.file.abs_src_path == str(PAGE):  # the file exists on the site only, so the page cannot link to it
        title, _, rest = markdown.partition("\n")
        return f"{title}\n\n[Download as a notebook](notebook.ipynb)\n{rest}"
    return markdown


def on_files(files, config):
    content = json.dumps(notebook(PAGE.read_text()), indent=1)
    files.append(File.generated(config, "guide/notebook.ipynb", content=content))
    return files
