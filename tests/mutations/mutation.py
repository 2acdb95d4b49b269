"""The form of an entry of the lists of mutations."""

from collections.abc import Callable
from typing import NamedTuple


class Mutation(NamedTuple):
    """A bug of one line, and the tests that must fail with it.

    Attributes:
        name: its name on the command line and in the table.
        file: the source, from the root of the repository.
        old: text that occurs exactly once in the file.
        new: its replacement.
        bug: what is wrong with the mutated program, in one sentence.
        tests: ids of tests, from the folder tests; at least one of them must fail.
    """

    name: str
    file: str
    old: str
    new: str
    bug: str
    tests: tuple[str, ...]

    @property
    def compiled(self) -> bool:
        """True if the extension must be rebuilt. Tests of the emulation compile the kernels themselves."""
        return self.file.startswith("csrc/") and not all(test.startswith("emulation/") for test in self.tests)


def mutation_in(folder: str) -> Callable[..., Mutation]:
    """Returns a constructor of mutations of the files in a folder: name, file, old, new, bug, tests."""

    def make(name: str, file: str, old: str, new: str, bug: str, *tests: str) -> Mutation:
        return Mutation(name, f"{folder}/{file}", old, new, bug, tests)

    return make
