"""Checks that the prose of the code is plain: no phrase that leaves a reader guessing.

The checker reads comments, docstrings and all other texts, so it covers messages and help as well.
It also reads the names in tests and scripts, and the comments of shell scripts and configurations.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.protections import protections

ROOT = Path(__file__).parents[1]

# The modules that have forbidden phrases as their data.
_LINTS = (ROOT / "tests/test_documents.py", Path(__file__))
_SOURCES = [
    path
    for top in ("monarch", "scripts", "tests")
    for path in sorted((ROOT / top).rglob("*.py"))
    if path not in _LINTS
]
_OTHERS = [
    *(
        ROOT / name
        for name in ("Dockerfile", "pyproject.toml", ".pre-commit-config.yaml", ".ci/run")
    ),
    *(
        path
        for top in ("conf", "scripts", ".github", "tests/equipment")
        for path in sorted((ROOT / top).rglob("*"))
        if path.is_file() and path.suffix in ("", ".sh", ".yml", ".yaml", ".service", ".c")
    ),
]

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


# Words that do not name what a variable, a function or a class is, and an identifier with one.
_IDENTIFIER = re.compile(
    r"(^|_)(told|(?<!user_)(?<!users_)who|whom|whoever|nobody|somebody|anybody|everybody|his|him|himself|he|anothers)(_|$)"
    r"|^test_(what|who|those|whatever)_"
)


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
    return [
        f"{line}: {complaint}"
        for line, text in texts(source)
        for complaint in complaints_about_text(text)
    ]


def complaints_about_text(text: str) -> Iterator[str]:
    """Each forbidden phrase of a text, as ``phrase: what to write instead``."""
    for sentence in re.split(r"(?<=[.:;])\s+|\n\s*\n", re.sub(r"(`+)[^`]*\1", "CODE", text)):
        words = " ".join(sentence.split())
        for phrase, instead in FORBIDDEN.items():
            if match := re.search(phrase, words, re.IGNORECASE):
                yield f"{match[0]!r} in {words!r}: {instead}"


def comments(text: str) -> Iterator[str]:
    """The comments of a file that is not Python: ``#`` to the end of a line, and C comments."""
    for block in re.findall(r"(?:^[ \t]*#(?!include|define)[^\n]*\n)+", text, re.MULTILINE):
        yield re.sub(r"^[ \t]*#", " ", block, flags=re.MULTILINE)
    yield from re.findall(r"\S[ \t]+# ([^\n]*)", text)
    for block in re.findall(r"/\*(.*?)\*/", text, re.DOTALL):
        yield re.sub(r"^\s*\*", " ", block, flags=re.MULTILINE)


def identifiers(source: str) -> Iterator[str]:
    """Each name that a module defines: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def unclear_names(source: str) -> set[str]:
    return {
        name
        for name in identifiers(source)
        if _IDENTIFIER.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    }


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", _SOURCES, ids=_name)
def test_the_prose_of_a_module_is_plain(path: Path) -> None:
    assert complaints(path.read_text()) == []


@pytest.mark.parametrize(
    "path",
    [path for path in _SOURCES if path.relative_to(ROOT).parts[0] != "monarch"],
    ids=_name,
)
def test_the_names_of_a_test_or_script_say_what_they_are(path: Path) -> None:
    assert unclear_names(path.read_text()) == set()


@pytest.mark.parametrize("path", _OTHERS, ids=_name)
def test_the_comments_of_scripts_and_configurations_are_plain(path: Path) -> None:
    found = [c for comment in comments(path.read_text()) for c in complaints_about_text(comment)]
    assert found == []


def test_the_descriptions_of_the_protections_are_plain() -> None:
    found = {each.what: [*complaints_about_text(each.what)] for each in protections()}
    assert {what: words for what, words in found.items() if words} == {}


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


@pytest.mark.parametrize(
    "source",
    [
        "def test_what_is_kept(): ...",
        "def test_a_loss_is_told(): ...",
        "told = 1",
        "class Nobody: ...",
        "def f(who): ...",
        "self.told = 1",
    ],
)
def test_a_name_that_says_nothing_is_found(source: str) -> None:
    assert unclear_names(source) != set()


def test_other_names_are_not_found() -> None:
    assert unclear_names("def test_a_whole_file(whose, other): shown = history = 1") == set()


@pytest.mark.parametrize(
    "text",
    [
        "set -u\n# Whoever is\n# told waits.\n",
        "x: 1  # nobody reads it\n",
        "/* The process\n * that nobody ended. */\nint x;\n",
    ],
)
def test_a_comment_that_is_not_plain_is_found(text: str) -> None:
    assert [c for comment in comments(text) for c in complaints_about_text(comment)] != []


def test_quoted_code_and_relative_clauses_with_a_noun_are_allowed() -> None:
    source = '"""The user who mounts, by_who, and ``who``."""\n# `nobody` is a name.\nx = "told"'
    assert complaints(source) == []
