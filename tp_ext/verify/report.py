"""The report of a verification: its verdict, the findings and their causes, as text of one page."""

import textwrap
from dataclasses import dataclass, field

COLUMNS = ("layouts", "weights", "outputs", "loss", "gradients", "3 steps", "state", "collectives", "types")
_SHOWN = 8  # findings, so that the text is one page


@dataclass(frozen=True)
class Finding:
    """One difference between p ranks and one process.

    Attributes:
        p: the number of ranks.
        module: the innermost module whose inputs are right; its name in the model, "" for the model itself.
        tensor: a parameter or buffer, an input of forward, ``output``, ``loss``, or what happened on which rank.
        cause: a sentence.
    """

    p: int
    module: str
    tensor: str
    cause: str

    def __str__(self) -> str:
        return f"p = {self.p}, {self.module or 'the model itself'}, {self.tensor}: {self.cause}"


@dataclass
class Report:
    """The result of :func:`tp_ext.verify`; ``print`` it.

    Attributes:
        findings: what is wrong, the first wrong thing first; empty if the model is right.
        rows: number of ranks -> what was compared -> its verdict.
        bounds: a sentence with the precision and the bounds of the comparisons.
        notes: remarks that are no findings.
        seconds: the time that it took.
    """

    bounds: str = ""
    findings: list[Finding] = field(default_factory=list)
    rows: dict[int, dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.findings

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.rows))
        verdict = "right" if self.ok else f"WRONG: {self.findings[0]}"
        lines = [f"p = {numbers}: {verdict}" if self.ok else verdict, self.bounds, ""]
        table: list[tuple[str, ...]] = [("p", *COLUMNS)]
        table += [(str(p), *(row.get(column, "-") for column in COLUMNS)) for p, row in self.rows.items()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
        for finding in self.findings[:_SHOWN]:
            lines += ["", f"p = {finding.p}   {finding.module or '(the model itself)'}: {finding.tensor}"]
            lines += textwrap.wrap(finding.cause, 110, initial_indent="        ", subsequent_indent="        ")
        if len(self.findings) > _SHOWN:
            lines += ["", f"and {len(self.findings) - _SHOWN} more, in findings"]
        lines += ["", *self.notes] if self.notes else []
        return "\n".join(line.rstrip() for line in lines)
