"""Every row of the table of faults has tests, and each protection is where it is said to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.protections import Protection, protections

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("protection", protections(), ids=lambda p: f"{p.area}: {p.what}")
def test_the_text_of_a_protection_is_there_once(protection: Protection) -> None:
    assert (ROOT / protection.file).read_text().count(protection.text) == 1
    assert protection.instead not in ("", protection.text)
    for test in protection.tests:
        path, _, name = test.partition("::")
        function = re.escape(name.partition("[")[0])
        assert re.search(rf"def {function}\(", (ROOT / path).read_text()), test
