"""A hook of MkDocs: after the build, every link, image and anchor of the finished pages must lead somewhere, and no
page may load a script or a style from another host.

MkDocs itself checks the Markdown. This sees the pages made from docstrings, too. Links to other sites are checked by
their syntax only, since the build needs no network.
"""

import logging
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

log = logging.getLogger("mkdocs.hooks.links")  # a warning ends the build


class Page(HTMLParser):
    """The addresses that a page refers to, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.anchors, self.loaded = set(), {""}, set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        self.addresses |= {attributes[name] for name in ("href", "src") if attributes.get(name)}
        if tag == "script" or (tag == "link" and attributes.get("rel") == "stylesheet"):
            self.loaded |= {attributes[name] for name in ("href", "src") if attributes.get(name)}


def problems(site):
    """(page, address) of every link that leads nowhere, and of what is loaded from another host."""
    pages = {path.resolve(): Page(path.read_text()) for path in sorted(Path(site).rglob("*.html"))}
    for path, page in pages.items():
        for address in sorted(page.addresses):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                is_web = parts.scheme in ("http", "https") and "." in parts.netloc and address not in page.loaded
                if not is_web and parts.scheme != "mailto":
                    yield path, address
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else None
            if not target.exists() or (
                parts.fragment and anchors is not None and unquote(parts.fragment) not in anchors
            ):
                yield path, address


def on_post_build(config):
    for path, address in problems(config.site_dir):
        if path.name != "404.html":  # its links are absolute: it is shown at any address
            log.warning(
                "%s links to %s, which is not there", path.relative_to(Path(config.site_dir).resolve()), address
            )
