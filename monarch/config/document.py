"""A configuration file as a tree of values with their lines, within limits on its size.

Nothing that a file holds raises another exception than ConfigError: mistakes of the YAML are listed
with the others.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from monarch.errors import ConfigError
from monarch.text import KiB, format_bytes, is_encodable

# Limits of a configuration, which has a page or two. A larger file is a mistake or an attack:
# PyYAML takes a second or two for 256 KiB, and aliases can expand to more values than memory holds.
MAX_FILE_BYTES = 256 * KiB
MAX_VALUES = 100_000
MAX_DEPTH = 32
MAX_MOUNTS = 1000

Loc = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the file with the line of its key, or, in a list, its own line."""

    value: Any
    line: int

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def line_of(self, loc: Loc) -> int:
        """The line of the value at ``loc``, or of the nearest value above it."""
        node = self
        for part in loc:
            below: Any = node.value if isinstance(node.value, dict | list) else ()
            try:
                node = below[part]
            except (LookupError, TypeError):
                break
        return node.line

    def over(self, below: Node) -> Node:
        """This value, with ``below`` for the keys that it does not set; mappings are merged."""
        if not isinstance(below.value, dict):
            return self
        if self.value is None:
            return Node(below.value, self.line)
        if not isinstance(self.value, dict):
            return self
        merged = dict(below.value)
        for key, child in self.value.items():
            merged[key] = child.over(merged[key]) if key in merged else child
        return Node(merged, self.line)

    def count(self) -> int:
        """The number of values in this tree."""
        children = self.value.values() if isinstance(self.value, dict) else self.value
        if not isinstance(self.value, dict | list):
            return 1
        return 1 + sum(int(child.count()) for child in children)


def read_document(
    path: Path, problems: list[tuple[int, str]], *, begin: str = "mounts:"
) -> Node | None:
    """The values of a file, which begins with the key ``begin``; None with the reason among
    ``problems``. Raises ConfigError."""
    return _Reader(path, _read(path), problems).top(begin)


def _read(path: Path) -> str:
    """The text of a configuration file. Raises ConfigError if it is none."""

    def refused(what: str, line: int | None = None) -> ConfigError:
        place = f"{path}:{line}" if line else f"{path}"
        return ConfigError([f"{place}: {what}"])

    try:
        # Without O_NONBLOCK the open of a named pipe would wait.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise refused("is not a regular file; name a YAML file")
            content = file.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        raise refused("is a directory; name the YAML file in it") from None
    except FileNotFoundError:
        raise refused("no such file; write it, beginning with 'mounts:'") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise refused(f"cannot be read: {reason}; check its permissions") from None
    if len(content) > MAX_FILE_BYTES:
        limit = format_bytes(MAX_FILE_BYTES)
        raise refused(f"is larger than {limit}, so it is not a configuration; name another file", 1)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise refused(
            f"byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8", line
        ) from None


class _Refused(Exception):
    """The document cannot be read any further: the line, and what is wrong there."""


class _Composer(yaml.SafeLoader):
    """Composes nodes, with lines, to a depth that the stack allows."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth > MAX_DEPTH:
            mark = self.get_mark()
            raise yaml.composer.ComposerError(None, None, f"deeper than {MAX_DEPTH}", mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Reader:
    """One document as a tree of values with lines; mistakes of the YAML go to ``problems``."""

    def __init__(self, path: Path, text: str, problems: list[tuple[int, str]]) -> None:
        self._path = path
        self._text = text
        self._problems = problems
        self._values = 0
        self._open: set[int] = set()

    def top(self, begin: str) -> Node | None:
        if not self._text.strip():
            self._problems.append((1, f"the file is empty; begin it with '{begin}'"))
            return None
        try:
            self._loader = _Composer(self._text)
            node = self._loader.get_single_node()
            if node is None:
                self._problems.append((1, f"the file has no content; begin it with '{begin}'"))
                return None
            return self._tree(node, 1, depth=0)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            self._problems.append((line, f"not YAML: {error.problem}; correct the line"))
        except yaml.reader.ReaderError as error:
            line = self._text.count("\n", 0, error.position) + 1
            what = f"character {error.character!r} is not printable; remove it"
            self._problems.append((line, what))
        except _Refused as error:
            self._problems.append(error.args)
        return None

    def _tree(self, node: yaml.Node, line: int, *, depth: int) -> Node:
        self._values += 1
        own_line = node.start_mark.line + 1
        if self._values > MAX_VALUES:
            what = f"aliases grow into more than {MAX_VALUES} values; write them out"
            raise _Refused(own_line, what)
        if id(node) in self._open or depth > MAX_DEPTH:
            raise _Refused(own_line, "an alias contains itself; write the values out")
        if isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node), line)
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            self._problems.append((own_line, f"tag {node.tag!r} is not allowed; remove it"))
        self._open.add(id(node))
        depth += 1
        value: Any
        if isinstance(node, yaml.SequenceNode):
            value = [self._tree(each, each.start_mark.line + 1, depth=depth) for each in node.value]
        else:
            value = self._mapping(node, depth=depth)
        self._open.remove(id(node))
        return Node(value, line)

    def _mapping(self, node: yaml.Node, *, depth: int) -> dict[str, Node]:
        own: dict[str, Node] = {}
        inherited: list[Node] = []
        for key, value in node.value:
            key_line = key.start_mark.line + 1
            child = self._tree(value, key_line, depth=depth)
            if not isinstance(key, yaml.ScalarNode):
                self._problems.append((key_line, "a key must be a word"))
            elif key.tag == "tag:yaml.org,2002:merge":
                inherited += child.value if isinstance(child.value, list) else [child]
            elif key.value in own:
                what = f"key {key.value!r} is given twice, first in line {own[key.value].line}"
                self._problems.append((key_line, f"{what}; remove one of them"))
            else:
                own[key.value] = child
        for base in inherited:
            if isinstance(base.value, dict):
                own = {**base.value, **own}
            else:
                self._problems.append((base.line, "'<<' takes a mapping or a list of them"))
        return own

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            value = self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError):
            line = node.start_mark.line + 1
            self._problems.append((line, f"{shown(node.value)} is not a value; put it in quotes"))
            return None
        if isinstance(value, str) and not is_encodable(value):
            line = node.start_mark.line + 1
            self._problems.append(
                (line, f"{shown(value)} has an unpaired surrogate; write the whole character")
            )
            return None
        return value


def shown(value: object) -> str:
    # In the notation of YAML, not of Python.
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def dotted(loc: Loc) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")
