"""The site of ``make docs``: every public name has its place among the pages, and its checks see what is wrong."""

import importlib.util
import inspect
import re
from types import SimpleNamespace

import pytest

import tp_ext
from tests.helpers.paths import ROOT

API = ROOT / "docs" / "reference" / "api"
MODULES = (
    "group",
    "sharding",
    "random",
    "regions",
    "shm",
    "megatron",
    "debug",
    "lax",
    "low_precision",
    "auto",
    "huggingface",
    "lightning",
    "optim",
    "planner",
    "refit",
    "elastic",  # whose names are offered by tp_ext.parallel
)


def hook(name):
    """A module of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_on_one_page_of_the_api():
    """By itself, as `::: tp_ext.name`, or with its public module."""
    listed = [name for page in sorted(API.glob("*.md")) for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]
    assert len(listed) == len(set(listed))
    assert {f"tp_ext.{name}" for name in MODULES} <= set(listed)
    for name in set(tp_ext.__all__) - {"__version__"} - set(MODULES):
        value = getattr(tp_ext, name)
        homes = {f"tp_ext.{name}", getattr(inspect.getmodule(value), "__name__", "")}  # a string has no module
        assert len(homes & set(listed)) == 1, f"{name}: one of {homes} must be in docs/reference/api"
    parallel = {f"tp_ext.parallel.{name}" for name in tp_ext.parallel.__all__}
    defined_below = {"tp_ext.random_scope.at"}  # a function of tp_ext.random
    defined_below.add("tp_ext.export.ExportedModel")  # the class of what load_exported returns
    most = parallel | defined_below | {f"tp_ext.{name}" for name in (*tp_ext.__all__, *MODULES)}
    assert parallel | defined_below <= set(listed) <= most


def test_every_declaration_of_the_headers_is_on_the_page_of_cpp():
    headers, declared = hook("cpp_headers"), set()
    page = (API / "cpp.md").read_text()
    for file in sorted(headers.HEADERS.glob("*.h")):
        text = file.read_text()
        names = set(re.findall(r"^TP_EXT_API [^;(]*?(\w+)\(", text, re.M))
        names |= {
            name.removesuffix("Impl") for name in re.findall(r"^(?:class|struct) (?:TP_EXT_API )?(\w+) ", text, re.M)
        }
        found = {name for name, _, code in headers.declarations(file.name)}
        assert names <= found, f"{file.name}: {names - found}"
        assert not names or f"<!-- header: {file.name} -->" in page
        declared |= names
    assert {"Group", "init_group", "copy_to_region", "ColumnParallelLinear", "load_safetensors"} <= declared


def test_an_unlisted_page_is_appended_to_the_section_of_its_folder():
    guide = [{"Begin": ["guide/b.md"]}, "guide/a.md"]
    nav = [{"Home": "index.md"}, {"Guide": guide}, {"Development": ["develop/z.md"]}]
    pages = ["develop/new.md", "develop/z.md", "guide/a.md", "guide/b.md", "index.md", "other/page.md"]
    files = SimpleNamespace(documentation_pages=lambda: [SimpleNamespace(src_uri=page) for page in pages])
    hook("folders").on_files(files, SimpleNamespace(nav=nav))
    assert nav[1:] == [{"Guide": guide}, {"Development": ["develop/z.md", "develop/new.md"]}]


@pytest.mark.parametrize(
    ("address", "right"),
    [
        ("b.html#there", True),
        ("b.html#missing", False),
        ("#here", True),
        ("#missing", False),
        ("c.html", False),
        ("picture.png", True),
        ("https://example.org/x", True),
        ("https://", False),
        ("htps://example.org", False),
    ],
)
def test_a_link_that_leads_nowhere_is_found(address, right, tmp_path):
    (tmp_path / "picture.png").touch()
    (tmp_path / "a.html").write_text(f'<h1 id="here">a</h1><a href="{address}">x</a>')
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    found = list(hook("links").problems(tmp_path))
    assert found == ([] if right else [((tmp_path / "a.html").resolve(), address)])


@pytest.mark.parametrize("tag", ['<script src="{}"></script>', '<link rel="stylesheet" href="{}">'])
def test_what_a_page_loads_from_another_host_is_found(tag, tmp_path):
    (tmp_path / "own.js").touch()
    page = (tmp_path / "a.html").resolve()
    for address, right in (("own.js", True), ("https://example.org/x.js", False)):
        page.write_text(tag.format(address))
        assert list(hook("links").problems(tmp_path)) == ([] if right else [(page, address)])
