"""An extension of griffe: docstrings' reStructuredText (roles, ``::``, simple tables) as the Markdown of the site."""

import re

import griffe

ROLE = re.compile(r":(?:mod|class|func|meth|attr|exc):`([\w.]+)`")
PAGE = re.compile(r"\bdocs/([\w/]+)\.md\b")
TABLE = re.compile(r"^(=+(?: +=+)+)\n(.*)\n\1\n(.*?)\n\1$", re.M | re.S)


def target(name, place):
    """Path of the object that a role names in the docstring of ``place``, looked up there and in all that holds it."""
    owner = place
    while owner is not None:
        path = name.removeprefix("tp_ext.") if owner.parent is None else name
        try:
            return owner[path].canonical_path
        except (KeyError, griffe.AliasResolutionError):
            owner = owner.parent
    raise LookupError(f"{place.path}: the docstring refers to {name}, which is not there")


def table(found):
    """A simple table of reStructuredText as one of Markdown."""
    spans = [span.span() for span in re.finditer("=+", found[1])]
    rows = [[line[a : None if b == spans[-1][1] else b].strip() for a, b in spans] for line in found[3].split("\n")]
    head = [found[2][a : None if b == spans[-1][1] else b].strip() for a, b in spans]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(spans), *rows])


def markdown(text, place):
    def link(role):
        path = target(role[1], place)
        shown = f"`{role[1]}`"
        return f'<autoref identifier="{path}" optional>{shown}</autoref>'

    text = ROLE.sub(link, text)
    text = PAGE.sub(r"[\1.md](../../\1.md)", text)  # the pages of the API are in docs/reference/api
    text = re.sub(r"\b(Shapes|Communicates):", r"**\1:**", text)
    text = TABLE.sub(table, text)
    return re.sub(r"^( *)::\n\n", r"\n", text, flags=re.M)


class RestDocstrings(griffe.Extension):
    def on_package(self, *, pkg, loader, **kwargs):
        if pkg.path == "tp_ext":
            self._convert(pkg)

    def _convert(self, place):
        if place.docstring:
            place.docstring.value = markdown(place.docstring.value, place)
        for member in place.members.values():
            if not member.is_alias:
                self._convert(member)
