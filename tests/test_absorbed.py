"""Which paths of a mount may be written."""

from __future__ import annotations

import pytest

from monarch.config.path_pattern import check_pattern
from monarch.config.write_patterns import WritePatterns


@pytest.mark.parametrize(
    ("pattern", "covered", "not_covered"),
    [
        ("ckpt/**", [b"ckpt", b"ckpt/a", b"ckpt/a/b"], [b"", b"ckp", b"ckpt2", b"x/ckpt"]),
        ("ckpt", [b"ckpt", b"ckpt/a", b"ckpt/a/b"], [b"", b"ckpt2", b"x/ckpt"]),
        ("**", [b"", b"a", b"a/b/c"], []),
        ("runs/*/logs", [b"runs/1/logs", b"runs/1/logs/x"], [b"runs", b"runs/1", b"runs/1/data"]),
        ("**/*.pt", [b"a.pt", b"x/a.pt", b"x/y/a.pt"], [b"a.txt", b"x", b"x/a.ptx"]),
        ("a/**/z", [b"a/z", b"a/b/z", b"a/b/c/z", b"a/z/q"], [b"a", b"a/b", b"z"]),
        ("caf\udcc3\udca9/**", [b"caf\xc3\xa9/x"], [b"cafe/x"]),
        ("caf?", [b"caf\xc3\xa9/x", b"caf\xff", b"cafe"], [b"caf", b"caf\xc3\xa9s"]),
        ("[\u00e4\u00f6]*", [b"\xc3\xa4b", b"\xc3\xb6"], [b"\xc3\xbcb", b"\xa4b", b"a"]),
        ("[!a]", [b"\xc3\xa9", b"b"], [b"a", b"bc"]),
        ("new\nline", [b"new\nline/a"], [b"new"]),
    ],
)
def test_a_pattern_covers_what_it_names_and_everything_beneath(
    pattern: str, covered: list[bytes], not_covered: list[bytes]
) -> None:
    found = WritePatterns([pattern])
    assert [path for path in covered if not found.covers(path)] == []
    assert [path for path in not_covered if found.covers(path)] == []


def test_the_directories_that_lead_to_a_pattern_are_known() -> None:
    found = WritePatterns(["runs/*/logs", "ckpt/**"])
    assert all(found.leads_to(path) for path in (b"", b"runs", b"runs/7", b"ckpt", b"ckpt/x"))
    assert not any(found.leads_to(path) for path in (b"data", b"data/runs"))


def test_without_patterns_nothing_is_covered() -> None:
    assert not WritePatterns([])
    assert not WritePatterns([]).covers(b"")
    assert not WritePatterns([]).covers(b"a")


@pytest.mark.parametrize("pattern", ["", "/ckpt", "../x", "a//b", "a/./b", "a\0b"])
def test_a_pattern_that_leaves_the_mount_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"ckpt|NUL"):
        check_pattern(pattern)
