"""The text of a report is one page: verdict, bounds, table, findings."""

from tp_ext.verify import Finding, Report
from tp_ext.verify.report import COLUMNS


def test_the_text_begins_with_the_verdict_and_fits_a_page():
    right = Report("Computed in fp64.", rows={1: {}, 2: {"layouts": "right", "collectives": "4"}})
    lines = str(right).splitlines()
    assert right.ok and lines[0] == "p = 1, 2: right" and lines[1] == "Computed in fp64."
    assert lines[3].split() == ["p", *" ".join(COLUMNS).split()]
    assert lines[5].split() == ["2", "right", "-", "-", "-", "-", "-", "-", "4", "-"]
    findings = [Finding(2, f"layers.{i}", "output", "a partial sum is used as a whole " * 6) for i in range(50)]
    wrong = Report("Computed in fp64.", findings, {2: {}})
    lines = str(wrong).splitlines()
    assert not wrong.ok and lines[0].startswith("WRONG: p = 2, layers.0, output: a partial sum")
    assert "and 42 more, in findings" in lines and len(lines) < 60 and max(map(len, lines[1:])) <= 120
