"""Each row of faults.md and each promise has tests; the text of each protection exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.protections import Protection, protections

ROOT = Path(__file__).parents[2]

# The faults that users and testers have found and that were mended, by the numbers of the findings.
_MENDED = {
    *(f"B{number}" for number in range(1, 25)),
    *(f"C{number}" for number in range(1, 9)),
    *(f"D{number}" for number in range(1, 16)),
    *(f"F{number}" for number in range(1, 9)),
    *(f"K{number}" for number in range(1, 7)),
    *(f"S{number}" for number in range(1, 10)),
    *(f"W{number}" for number in range(1, 25)),
    "R",
}


def marked(name: str) -> set[object]:
    """The arguments of all marks of that name in the tests."""
    return set(_arguments(name))


def _arguments(name: str) -> Iterator[object]:
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == name
                and ast.unparse(node.func).startswith("pytest.mark.")
            ):
                yield from (ast.literal_eval(argument) for argument in node.args)


def test_every_row_of_the_table_has_tests_and_protections_and_no_other_is_named() -> None:
    table = (ROOT / "docs/faults.md").read_text()
    rows = set(re.findall(r"^\| ([A-Z]\w+) \|", table, re.MULTILINE))
    assert len(rows) >= 34
    assert marked("fault") == rows
    protected = {row for protection in protections() for row in protection.rows}
    assert {row for row in protected if not row.startswith("promise ")} == rows
    assert {int(row[8:]) for row in protected - rows} <= marked("promise")


def test_every_promise_has_a_test_and_no_other_is_named() -> None:
    text = (ROOT / "docs/semantics.md").read_text()
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    # A number is given once and never again, so that old notes keep their meaning.
    assert len(numbers) == len(set(numbers))
    assert len(numbers) >= 76
    assert marked("promise") == set(numbers)


def test_every_finding_that_was_mended_has_a_test() -> None:
    assert marked("finding") == _MENDED


@pytest.mark.parametrize("protection", list(protections()), ids=lambda p: f"{p.area}: {p.what}")
def test_the_text_of_a_protection_is_there_once(protection: Protection) -> None:
    assert (ROOT / protection.file).read_text().count(protection.text) == 1
    assert protection.instead not in ("", protection.text)
    for test in protection.tests:
        path, _, name = test.partition("::")
        function = re.escape(name.partition("[")[0])
        assert re.search(rf"def {function}\(", (ROOT / path).read_text()), test
