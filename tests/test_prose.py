"""Checks that the prose of the package is plain: no phrase that leaves a reader guessing.

The checker reads comments, docstrings and all other texts, so it covers messages and help as well.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "monarch"

# All modules but those that are not finished yet, relative to the package.
FINISHED = ("**/*.py",)
UNFINISHED = frozenset[str]()

# A phrase, and what to write instead.
FORBIDDEN = {
    r"\b(no|some|any|every)body\b": "name the process or the user",
    r"\b(he|his|him|himself|she|her)\b": "a process or a user is 'it' or 'the user'",
    r"\bwhoever\b": "name the process or the user",
    r"(^|[.;:,(] |\b(by|for|from|of|than|to|with) )who\b": "name the process or the user",
    r"\btold\b": "'gets', 'is called with', 'is reported'",
    r"\btells? of\b": "'records', 'reports' or 'has'",
    r"(?<!,) of which\b": "'files with', 'files that'; 'of which' only for a part of a number",
    r"\bof what\b": "name the thing",
    r"\bwhat (lies|stands|comes|came)\b": "name the thing",
    r"\bby which\b.*\bknown\b": "say who knows it, and from what",
    r"\b(what|that) is so\b": "say which condition holds",
    r"\b(is|are|has|have) no more\b": "'not any more'",
    r"\b(has|have) not got\b": "'lacks', 'is not at the source'",
    r"(^|\. )(Seconds|Milliseconds|Bytes)\.$": "'..., in seconds'",
    r"\b(hear|hears|heard)\b": "'receives', 'is called with'",
    r"\bas it (was|should be)\b": "say in which state",
    r"\blook(s|ed|ing)? (at|after)\b": "'read', 'check' or 'compare'",
    r"\b(go|goes|going|went) on\b": "'continue'",
    r"\b(come|comes|came|bring|brings|brought) home\b": "'is drained to the source'",
    r"\blets? go of\b": "'close' or 'release'",
    r"^so (many|much|long|often)\b": "say what the number limits",
    r"\bof late\b": "'recently'",
    r"\bbeside the (interpreter|event loop)\b": "'outside'",
}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The line and the words of each comment and each string, without quoted code."""
    comment, begin, last = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1 and comment:
            yield begin, comment
            comment = ""
        begin = begin if comment else token.start[0]
        comment += f" {token.string.lstrip('#')}"
        last = token.start[0]
    if comment:
        yield begin, comment
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def complaints(source: str) -> list[str]:
    """Each forbidden phrase of a module, as ``line: phrase: what to write instead``."""
    found = []
    for line, text in texts(source):
        for sentence in re.split(r"(?<=[.:;])\s+|\n\s*\n", re.sub(r"(`+)[^`]*\1", "CODE", text)):
            words = " ".join(sentence.split())
            for phrase, instead in FORBIDDEN.items():
                if match := re.search(phrase, words, re.IGNORECASE):
                    found.append(f"{line}: {match[0]!r} in {words!r}: {instead}")
    return found


def finished() -> list[Path]:
    found = [path for pattern in FINISHED for path in sorted(PACKAGE.glob(pattern))]
    return [path for path in found if str(path.relative_to(PACKAGE)) not in UNFINISHED]


@pytest.mark.parametrize("path", finished(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_prose_of_a_finished_module_is_plain(path: Path) -> None:
    assert complaints(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "phrase"),
    [
        ('"""What nobody wants."""', "nobody"),
        ("# The process\n# and his files.\nx = 1", "his"),
        ("# Of who has it open.\nx = 1", "Of who"),
        ("# Who waits is cancelled.\nx = 1", "Who"),
        ("raise ValueError(f'{x} is told of')", "told"),
        ("# Objects of which a sync failed.\nx = 1", " of which"),
        ("# The xxh3 of what follows.\nx = 1", "of what"),
        ("# How long it waits. Seconds.\nx = 1", "Seconds."),
        ("# So many files.\nx = 1", "So many"),
        ('"""Leave it as it was."""', "as it was"),
    ],
)
def test_a_phrase_that_is_not_plain_is_found(source: str, phrase: str) -> None:
    assert [line for line in complaints(source) if f"{phrase!r} in" in line]


def test_quoted_code_and_relative_clauses_with_a_noun_are_allowed() -> None:
    source = '"""The user who mounts, by_who, and ``who``."""\n# `nobody` is a name.\nx = "told"'
    assert complaints(source) == []
