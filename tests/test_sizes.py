"""The greatest size of a file, a class, a constructor and a function, and the exceptions.

``FLAT`` lists permanent exceptions: tables of requests or settings, which a division would not make
easier to read, and a few others. ``TO_BE_SPLIT`` lists temporary exceptions: the number of an entry
is its size at the last change of the list, and may only fall. An entry that is not needed any more
fails the test, so that no size grows again. ``python -m tests.test_sizes`` prints all exceptions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LINES_OF_A_FILE = 600
LINES_OF_MOST_FILES = 400
METHODS = 30
ARGUMENTS = 10
LINES_OF_A_FUNCTION = 80
# No method of an object is handed out, or bound in a lambda, by its constructor.

# With the reason.
FLAT = {
    "monarch/frameworks/owner.py::Owner handed out": "its thread starts when all is built",
    "monarch/fuse/datapath.py::Datapath methods": "one method for each function of the extension",
}

TO_BE_SPLIT: Mapping[str, int] = {}

# Flat tables, which do not count for the 90th percentile of the files of monarch/.
TABLES = {
    "config/settings.py": "one field for each setting, with its meaning",
    "telemetry/metric_families.py": "one entry for each metric",
    "telemetry/report.py": "one field for each figure of the status",
}

Sizes = Mapping[str, int]


def sizes_of(path: str, text: str) -> Iterator[tuple[str, int]]:
    """What is larger in a file than it may be, with its size."""
    lines = text.count("\n")
    if lines > LINES_OF_A_FILE:
        yield f"{path} lines", lines
    yield from _sizes_in(f"{path}::", ast.parse(text))


def _sizes_in(prefix: str, parent: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef):
            yield from _sizes_of_class(f"{prefix}{node.name}", node)
            yield from _sizes_in(f"{prefix}{node.name}.", node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LINES_OF_A_FUNCTION:
                yield f"{prefix}{node.name} lines", lines
            yield from _sizes_in(f"{prefix}{node.name}.", node)
        else:
            yield from _sizes_in(prefix, node)


def _sizes_of_class(name: str, node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    methods = {
        part.name: part
        for part in node.body
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if len(methods) > METHODS:
        yield f"{name} methods", len(methods)
    made = methods.get("__init__")
    if made is None:
        return
    arguments = len(made.args.posonlyargs + made.args.args + made.args.kwonlyargs) - 1
    if arguments > ARGUMENTS:
        yield f"{name} arguments", arguments
    handed = set(_handed_out(made, {each for each, part in methods.items() if _is_plain(part)}))
    if handed:
        yield f"{name} handed out", len(handed)


def _is_plain(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its name gives the method itself, and not what a property returns."""
    return not any("property" in ast.unparse(each) for each in method.decorator_list)


def _handed_out(made: ast.AST, methods: set[str]) -> Iterator[str]:
    """The methods of ``self`` that a constructor gives to others, by themselves or in a lambda."""
    at_once = {id(node.func) for node in _outside_lambdas(made) if isinstance(node, ast.Call)}
    for node in ast.walk(made):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and node.attr in methods
            and id(node) not in at_once
        ):
            yield node.attr


def _outside_lambdas(parent: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _outside_lambdas(node)


def complaints(found: Sizes, *, flat: Mapping[str, str], known: Sizes) -> list[str]:
    """What is too large and not excused, has grown, or is excused without need."""
    return [
        *(
            f"{what}: {size}, and {known.get(what, 'none')} is allowed"
            for what, size in found.items()
            if what not in flat and size > known.get(what, 0)
        ),
        *(
            f"{what}: is no longer so large; remove its entry"
            for what in (*flat, *known)
            if what not in found
        ),
    ]


def _found() -> dict[str, int]:
    return {
        what: size
        for package in ("monarch", "scripts")
        for path in sorted((ROOT / package).rglob("*.py"))
        for what, size in sizes_of(str(path.relative_to(ROOT)), path.read_text())
    } | {
        f"{path.relative_to(ROOT)} lines": lines
        for path in sorted((ROOT / "monarch").rglob("*.[ch]"))
        if (lines := path.read_text().count("\n")) > LINES_OF_A_FILE
    }


def test_nothing_is_larger_than_it_may_be() -> None:
    assert complaints(_found(), flat=FLAT, known=TO_BE_SPLIT) == []


def test_most_files_are_short() -> None:
    package = ROOT / "monarch"
    tables = {package / table for table in TABLES}
    files = set(package.rglob("*.py"))
    assert tables <= files
    lines = sorted(path.read_text().count("\n") for path in files - tables)
    assert lines[len(lines) * 9 // 10] < LINES_OF_MOST_FILES


_LONG = "class C:\n    def m(self):\n" + 80 * "        pass\n"
_WIDE = "class C:\n    def __init__(self, a, b, c, d, e, /, f, g, h, i, *, j, k): ...\n"
_MANY = "class C:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(31))
_HALF = """
class C:
    def __init__(self, other):
        self.p = self.q()
        other(self.m)
        other(lambda: self.n())
        other(self.r)
    def m(self): ...
    def n(self): ...
    def q(self): ...
    @property
    def r(self): ...
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1\n" * 601, {"f.py lines": 601}),
        (_LONG, {"f.py::C.m lines": 81}),
        (_WIDE, {"f.py::C arguments": 11}),
        (_MANY, {"f.py::C methods": 31}),
        (_HALF, {"f.py::C handed out": 2}),
        ("x = 1\n" * 600, {}),
    ],
)
def test_an_excess_of_a_limit_is_found(text: str, found: dict[str, int]) -> None:
    assert dict(sizes_of("f.py", text)) == found
    assert len(complaints(found, flat={}, known={})) == len(found)
    assert complaints(found, flat={}, known=found) == []
    assert complaints(found, flat=dict.fromkeys(found, "a table"), known={}) == []


def test_growth_and_needless_exceptions_are_reported() -> None:
    (grown,) = complaints({"a": 32}, flat={}, known={"a": 31})
    assert "32, and 31 is allowed" in grown
    assert len(complaints({}, flat={"a": "a table"}, known={"b": 31})) == 2


if __name__ == "__main__":
    for each, its_size in _found().items():
        if each not in FLAT:
            print(f'    "{each}": {its_size},')
