"""A hook of MkDocs: a page that nav does not list is appended to the section of its folder."""

import os


def pages(entries):
    """Paths of all pages of a part of nav."""
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from pages(value) if isinstance(value, list) else [value]


def on_files(files, config):
    listed = set(pages(config.nav))
    unlisted = sorted(file.src_uri for file in files.documentation_pages() if file.src_uri not in listed)
    for section in config.nav:
        (entries,) = section.values()
        if isinstance(entries, list):
            folder = os.path.dirname(next(pages(entries)))  # the first may be a heading with pages of its own
            entries += [path for path in unlisted if os.path.dirname(path) == folder]
    return files
