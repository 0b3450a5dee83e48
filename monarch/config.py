"""The configuration file and the options of the command line, read into settings.

A mistake never comes alone: everything wrong with a file or a command line is reported at once,
one line each, in one :class:`~monarch.errors.ConfigError`. Nothing here creates or changes a file.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from monarch.errors import ConfigError, MonarchError
from monarch.places import default_tier, state_directory, state_root
from monarch.settings import (
    LimitSettings,
    LogSettings,
    MetricsSettings,
    MountSettings,
    PlacementSettings,
    Section,
    SnapshotSettings,
    TierSettings,
    expand,
    parse_tier,
)
from monarch.text import plain_name
from monarch.units import KiB, format_bytes

__all__ = [
    "Configuration",
    "load",
    "from_options",
    "with_options",
    "MountSettings",
    "TierSettings",
    "SnapshotSettings",
    "PlacementSettings",
    "LimitSettings",
    "MetricsSettings",
    "LogSettings",
    "default_tier",
    "state_directory",
    "state_root",
]

# How long a network file system may take to say where one of its directories is. Seconds.
_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration file: its path and the mounts it describes, by name."""

    path: Path
    mounts: Mapping[str, MountSettings]


# --- The file -------------------------------------------------------------------------------------

# A configuration is a page or two. Beyond these the file is not one, or is meant to do harm: PyYAML
# takes a second or two for 256 KiB, and aliases grow into more values than memory holds.
MAX_FILE_BYTES = 256 * KiB
MAX_VALUES = 100_000
MAX_DEPTH = 32
MAX_MOUNTS = 1000

_Loc = tuple[int | str, ...]


def load(path: Path) -> Configuration:
    """The mounts of a configuration file, ``defaults`` merged under each.

    Resolves symbolic links of the directories named, so that a conflict between two is seen by any
    of their names. Raises ConfigError with every mistake, one line each: ``file:line: what; what to
    do``.
    """
    problems: list[tuple[int, str]] = []
    top = _Reader(path, _read(path), problems).top()
    mounts: dict[str, MountSettings] = {}
    trees: dict[str, _Node] = {}
    if top is not None:
        trees = _mount_trees(top, problems)
    for name, tree in trees.items():
        mount, mistakes = _validated({**tree.plain(), "name": name})
        if mount is not None:
            mounts[name] = mount
        problems += [(tree.line_of(loc), text) for loc, text in mistakes]
    conflicts = [
        *((name, *conflict) for name, mount in mounts.items() for conflict in _conflicts(mount)),
        *_conflicts_between(mounts),
    ]
    problems += [(trees[name].line_of(loc), text) for name, loc, text in conflicts]
    if problems:
        # A mistake under `defaults` is found once for each mount.
        raise ConfigError([f"{path}:{line}: {text}" for line, text in sorted(set(problems))])
    return Configuration(path, mounts)


@dataclass(frozen=True, slots=True)
class _Node:
    """A value of the file with the line of its key, or of itself in a list."""

    value: Any
    line: int

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def line_of(self, loc: _Loc) -> int:
        """The line of the value at ``loc``, or of what is nearest above it."""
        node = self
        for part in loc:
            below: Any = node.value if isinstance(node.value, dict | list) else ()
            try:
                node = below[part]
            except (LookupError, TypeError):
                break
        return node.line

    def over(self, below: _Node) -> _Node:
        """This value where it says something, ``below`` where it does not; mappings key by key."""
        if not isinstance(below.value, dict):
            return self
        if self.value is None:
            return _Node(below.value, self.line)
        if not isinstance(self.value, dict):
            return self
        merged = dict(below.value)
        for key, child in self.value.items():
            merged[key] = child.over(merged[key]) if key in merged else child
        return _Node(merged, self.line)

    def count(self) -> int:
        """How many values this is."""
        children = self.value.values() if isinstance(self.value, dict) else self.value
        if not isinstance(self.value, dict | list):
            return 1
        return 1 + sum(int(child.count()) for child in children)


def _mount_trees(top: _Node, problems: list[tuple[int, str]]) -> dict[str, _Node]:
    """The mapping of each mount over the defaults, what is not a mapping reported and left out."""
    sections = {"mounts": "the mounts by name", "defaults": "what holds for every mount"}
    if not isinstance(top.value, dict):
        problems.append((top.line, "the file must be a mapping; begin it with 'mounts:'"))
        return {}
    for key, node in top.value.items():
        if key not in sections:
            problems.append((node.line, _unknown_key(key, list(sections))))
    defaults = top.value.get("defaults", _Node({}, 1))
    if not isinstance(defaults.value, dict | None):
        problems.append((defaults.line, "defaults must be a mapping of keys to values"))
        defaults = _Node({}, 1)
    for key in ("name", "source", "mountpoint"):
        if isinstance(defaults.value, dict) and key in defaults.value:
            line = defaults.value[key].line
            problems.append((line, f"{key!r} cannot be a default; give it to each mount"))
    mounts = top.value.get("mounts", _Node(None, top.line))
    if not mounts.value or not isinstance(mounts.value, dict):
        problems.append(
            (
                mounts.line,
                "there are no mounts; add 'mounts: {NAME: {source: ..., mountpoint: ...}}'",
            )
        )
        return {}
    if len(mounts.value) > MAX_MOUNTS or len(mounts.value) * defaults.count() > MAX_VALUES:
        what = f"too many mounts (more than {MAX_MOUNTS}, or with too much under 'defaults')"
        problems.append((mounts.line, f"{what}; split the file"))
        return {}
    trees = {}
    for name, node in mounts.value.items():
        if not isinstance(node.value, dict):
            problems.append((node.line, f"mount {name!r} must be a mapping; add its source"))
            continue
        keys = dict(node.value)
        if "name" in keys:
            line = keys.pop("name").line
            problems.append((line, f"unknown key 'name'; the mount is named by its key {name!r}"))
        trees[name] = _Node(keys, node.line).over(defaults)
    return trees


def _read(path: Path) -> str:
    """The text of a configuration file. ConfigError when it is no such file."""

    def refused(what: str, line: int | None = None) -> ConfigError:
        place = f"{path}:{line}" if line else f"{path}"
        return ConfigError([f"{place}: {what}"])

    try:
        # Without O_NONBLOCK a named pipe would hold us here.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            mode = os.fstat(fd).st_mode
            if stat.S_ISDIR(mode):
                raise refused("is a directory; name the YAML file in it")
            if not stat.S_ISREG(mode):
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
        raise refused(f"is larger than {limit}, so it is no configuration; name another", 1)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise refused(
            f"byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8", line
        ) from None


class _Refused(Exception):
    """The document cannot be taken apart any further; the reason is among the problems."""


class _Composer(yaml.SafeLoader):
    """Composes nodes, with lines, down to a depth at which the stack is safe."""

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

    def top(self) -> _Node | None:
        if not self._text.strip():
            self._problems.append((1, "the file is empty; begin it with 'mounts:'"))
            return None
        try:
            self._loader = _Composer(self._text)
            node = self._loader.get_single_node()
            if node is None:
                self._problems.append((1, "the file says nothing; begin it with 'mounts:'"))
                return None
            return self._tree(node, 1, depth=0)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            self._problems.append((line, f"not YAML: {error.problem}; correct the line"))
        except yaml.reader.ReaderError as error:
            line = self._text.count("\n", 0, error.position) + 1
            self._problems.append((line, f"character {error.character!r} is not text; remove it"))
        except _Refused:
            pass
        return None

    def _refuse(self, line: int, what: str) -> _Refused:
        self._problems.append((line, what))
        return _Refused()

    def _tree(self, node: yaml.Node, line: int, *, depth: int) -> _Node:
        self._values += 1
        own_line = node.start_mark.line + 1
        if self._values > MAX_VALUES:
            raise self._refuse(
                own_line, f"aliases grow into more than {MAX_VALUES} values; write them out"
            )
        if id(node) in self._open or depth > MAX_DEPTH:
            raise self._refuse(own_line, "aliases lead into themselves; write the values out")
        if isinstance(node, yaml.ScalarNode):
            return _Node(self._scalar(node), line)
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            self._problems.append((own_line, f"tag {node.tag!r} is not allowed; remove it"))
        self._open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            children = [
                self._tree(child, child.start_mark.line + 1, depth=depth + 1)
                for child in node.value
            ]
            tree = _Node(children, line)
        else:
            tree = self._mapping(node, line, depth=depth + 1)
        self._open.remove(id(node))
        return tree

    def _mapping(self, node: yaml.Node, line: int, *, depth: int) -> _Node:
        own: dict[str, _Node] = {}
        inherited: list[_Node] = []
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
        return _Node(own, line)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError):
            line = node.start_mark.line + 1
            self._problems.append((line, f"{_shown(node.value)} is no value; put it in quotes"))
            return None


# --- Mistakes -------------------------------------------------------------------------------------

# More than these on a line are of no help.
_SHOWN_KEYS = 12

_WANTED = {
    "model_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "string_type": "text",
    "string_pattern_mismatch": "letters, digits, '.', '_' or '-', at most 64, the first no mark",
}


def _shown(value: object) -> str:
    # As the file has it, not as Python writes it.
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _dotted(loc: _Loc) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")


def _section(key: str) -> type[Section] | None:
    """The section of a mount that is called ``key``; None when it is no section."""
    annotation: Any = MountSettings.model_fields[key].annotation
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation if is_section else None


def _keys_at(loc: _Loc) -> list[str]:
    """The keys that are valid in the mapping at ``loc`` of a mount."""
    if loc[:1] == ("tiers",):
        return list(TierSettings.model_fields)
    if loc:
        section = _section(str(loc[0]))
        return list(section.model_fields) if section else []
    return [key for key in MountSettings.model_fields if key != "name"]


def option_keys() -> dict[str, bool]:
    """The dotted keys of what ``-o`` can set, all but arguments and tiers: whether it is a flag."""
    keys = {}
    for key, field in MountSettings.model_fields.items():
        section = _section(key)
        if section is not None:
            for inner, inner_field in section.model_fields.items():
                keys[f"{key}.{inner}"] = inner_field.annotation is bool
        elif key not in ("name", "source", "mountpoint", "tiers"):
            keys[key] = field.annotation is bool
    return keys


def _unknown_key(key: str, valid: list[str], *, where: str = "") -> str:
    place = f" in {where}" if where else ""
    by_last_part = {dotted.rpartition(".")[2]: dotted for dotted in reversed(valid)}
    near = difflib.get_close_matches(key, valid, 1) or [
        by_last_part[last] for last in difflib.get_close_matches(key, list(by_last_part), 1)
    ]
    few = len(valid) <= _SHOWN_KEYS
    others = f"valid are {', '.join(valid)}" if few else "conf/monarch.yaml lists every key"
    advice = f"did you mean {near[0]!r}?" if near else others
    return f"unknown key {_shown(key)}{place}; {advice}"


def _described(error: ErrorDetails) -> str:
    """What pydantic found, in our words: what is wrong, and what to write instead."""
    loc, kind, context = error["loc"], error["type"], error.get("ctx", {})
    key, value = _dotted(loc), _shown(error["input"])
    if kind == "extra_forbidden":
        valid = _keys_at(loc[:-1])
        if len(loc) == 1:
            # What belongs in a section is often written beside it.
            valid += [dotted for dotted in option_keys() if "." in dotted]
        return _unknown_key(str(loc[-1]), valid, where=_dotted(loc[:-1]))
    if kind == "missing":
        return f"{key} is missing; add '{loc[-1]}: ...'"
    if kind == "value_error":
        return f"{key}: {context['error']}"
    if kind == "literal_error":
        near = difflib.get_close_matches(
            str(error["input"]), re.findall(r"'(\w+)'", context["expected"]), 1
        )
        advice = f"; did you mean {near[0]!r}?" if near else ""
        if isinstance(error["input"], bool):
            advice = "; YAML reads yes, no, on and off as true and false"
        return f"{key} is {value}; it must be {context['expected']}{advice}"
    if loc == ("name",):
        return f"mount name {value} must be {_WANTED[kind]}; rename the mount"
    if kind == "greater_than_equal":
        return f"{key} is {value}; it must be at least {context['ge']}"
    if kind == "less_than_equal":
        return f"{key} is {value}; it must be at most {context['le']}"
    if kind == "too_long":
        return f"{key}: more than {context['max_length']} of them; leave some out"
    return (
        f"{key} is {value}; it must be {_WANTED[kind]}"
        if kind in _WANTED
        else f"{key}: {error['msg']}"
    )


def _validated(fields: dict[str, Any]) -> tuple[MountSettings | None, list[tuple[_Loc, str]]]:
    try:
        return MountSettings.model_validate(fields), []
    except ValidationError as invalid:
        errors = [e for e in invalid.errors() if e["type"] != "default_factory_not_called"]
        return None, [(error["loc"], _described(error)) for error in errors]


# --- Conflicts ------------------------------------------------------------------------------------


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _resolved_remote(path: Path) -> Path:
    """As ``_resolved``; as written if its file system hangs: other mounts of the file need it not.

    Then the thread that asked is left behind.
    """
    found: list[Path] = []
    asking = threading.Thread(target=lambda: found.append(_resolved(path)), daemon=True)
    try:
        asking.start()
    except RuntimeError:
        raise MonarchError(
            "no thread can be started: this user has as many processes as the limit allows",
            hint="end some, or raise the limit (`ulimit -u`)",
        ) from None
    asking.join(_PATIENCE_S)
    return found[0] if found else Path(os.path.normpath(path))


def _resolved_mountpoint(path: Path) -> Path:
    # Its last component is not looked at: a daemon that hangs there would hang `umount`, too.
    return _resolved(path.parent) / path.name


def _places(mount: MountSettings) -> list[tuple[_Loc, str, Path]]:
    """The directories of a mount: where they are set, what they are, where they really are."""
    return [
        (("source",), "source", _resolved_remote(mount.source)),
        (("mountpoint",), "mount point", _resolved_mountpoint(mount.mountpoint)),
        *((("tiers", i), "tier", _resolved(t.path)) for i, t in enumerate(mount.tiers)),
        (("state",), "state directory", _resolved(state_directory(mount))),
    ]


def _conflicts(mount: MountSettings) -> Iterator[tuple[_Loc, str]]:
    """Directories of one mount that would destroy or hide one another."""
    places = _places(mount)
    for (_, first, one), (loc, second, other) in combinations(places, 2):
        if one == other and first == second:
            yield loc, f"{second} {other} is given twice; leave one of them out"
        elif one == other:
            yield loc, f"{second} {other} is the {first} as well; give it a directory of its own"
        elif other.is_relative_to(one):
            yield loc, f"{second} {other} is inside the {first} {one}; move it out"
        elif one.is_relative_to(other) and (first, second) != ("tier", "state directory"):
            yield loc, f"{second} {other} has the {first} {one} inside; move one of them"
    files: list[tuple[_Loc, Path | None]] = [
        (("snapshot", "file"), mount.snapshot.file),
        (("log", "file"), mount.log.file),
    ]
    mountpoint = _resolved_mountpoint(mount.mountpoint)
    for loc, file in files:
        if file is not None and _resolved_remote(file).is_relative_to(mountpoint):
            yield loc, f"{_dotted(loc)} {file} is inside the mount point; move it out"


def _conflicts_between(mounts: Mapping[str, MountSettings]) -> Iterator[tuple[str, _Loc, str]]:
    """Directories that a mount has in common with one before it, or inside another's."""
    # The first mount to name a directory owns it; the parents of each path are looked up here, so
    # that the work grows with the mounts and not with their pairs.
    owners: dict[tuple[str, Path], str] = {}
    places = [(name, *place) for name, mount in mounts.items() for place in _places(mount)]
    for name, loc, kind, path in places:
        owner = owners.setdefault((kind, path), name)
        # A tier keeps the copies of each mount in a directory of its own.
        if owner != name and kind not in ("source", "tier"):
            key = ", with `state: DIR`" if kind == "state directory" else ""
            yield name, loc, f"{kind} {path} is that of mount {owner!r}; give each its own{key}"
    pages: dict[str, str] = {}
    for name, mount in mounts.items():
        address = mount.metrics.address
        # Port 0 takes a free one.
        if mount.metrics.enabled and not address.endswith(":0"):
            owner = pages.setdefault(address, name)
            if owner != name:
                text = f"metrics.address {address} is that of mount {owner!r}; give each its own"
                yield name, ("metrics", "address"), text
    for name, loc, kind, path in places:
        if kind != "tier":
            continue
        for outer, parent in (
            (o, p) for p in path.parents for o in ("source", "mount point", "tier")
        ):
            owner = owners.get((outer, parent), name)
            if owner != name:
                yield name, loc, f"tier {path} is inside the {outer} of {owner!r}; move it out"


# --- The command line -----------------------------------------------------------------------------


def from_options(
    source: Path,
    mountpoint: Path,
    *,
    tiers: Sequence[str] = (),
    snapshot: Path | None = None,
    state: Path | None = None,
    options: Sequence[str] = (),
) -> MountSettings:
    """The settings of ``monarch mount SOURCE MOUNTPOINT --tier ... -o key=value,...``.

    Paths may be relative. Raises ConfigError with every mistake.
    """
    problems: list[str] = []
    fields: dict[str, Any] = {
        "name": plain_name(source),
        "source": _absolute(source),
        "mountpoint": _absolute(mountpoint),
        "tiers": _tier_options(tiers, problems),
    }
    if snapshot is not None:
        fields["snapshot"] = {"file": _absolute(snapshot)}
    if state is not None:
        fields["state"] = _absolute(state)
    _apply(options, fields, problems)
    return _settled(fields, problems)


def with_options(settings: MountSettings, options: Sequence[str]) -> MountSettings:
    """The settings of a mount of a file with ``-o key=value,...`` over them. Raises ConfigError."""
    problems: list[str] = []
    # Only what was set, so that a default is still known to be one.
    fields = settings.model_dump(exclude_unset=True)
    _apply(options, fields, problems)
    return _settled(fields, problems)


def _settled(fields: dict[str, Any], problems: list[str]) -> MountSettings:
    mount, mistakes = _validated(fields)
    if mount is not None:
        mistakes = list(_conflicts(mount))
    problems += [text for _, text in mistakes]
    if mount is None or problems:
        raise ConfigError(problems)
    return mount


def _absolute(path: Path) -> Path:
    if path.is_absolute():
        return path
    path = Path.cwd() / path
    # Dropping `a/..` from the text would be wrong where `a` is a symbolic link.
    return _resolved(path) if ".." in path.parts else path


def _tier_options(texts: Sequence[str], problems: list[str]) -> list[dict[str, Any]]:
    tiers = []
    for text in texts:
        try:
            fields = parse_tier(text)
            tiers.append({**fields, "path": _absolute(expand(fields["path"]))})
        except ValueError as error:
            problems.append(f"--tier {text}: {error}")
    return tiers


# Options of mount(8) that ask for what every mount is, or what concerns others: taken, without
# effect. A file system table and habit bring them.
_MOUNT_OPTIONS = frozenset(
    ("defaults", "noatime", "nodiratime", "relatime", "nodev", "nosuid", "_netdev", "nofail")
)
_REFUSED_OPTIONS = {
    "rw": "name what can be written: absorb=PATTERN, or write=absorb for everything",
    "suid": "a mount is always nosuid",
    "dev": "a mount is always nodev",
    "noexec": "is not supported",
    "remount": "a running mount keeps its settings: `monarch umount`, then mount with new ones; the"
    " tiers keep their copies",
}


def _apply(options: Sequence[str], fields: dict[str, Any], problems: list[str]) -> None:
    """Puts ``-o`` options into ``fields``; the last of two for the same key holds.

    But ``absorb``, of which each names one more pattern.
    """
    patterns: list[str] = []
    read_only = False
    valid = option_keys()
    for option in (part for text in options for part in text.split(",") if part):
        key, equals, value = option.partition("=")
        if option == "ro":
            read_only = True
            continue
        if option in _MOUNT_OPTIONS:
            continue
        if option in _REFUSED_OPTIONS:
            problems.append(f"-o {option}: {_REFUSED_OPTIONS[option]}")
            continue
        if key not in valid:
            problems.append(f"-o {option}: {_unknown_key(key, list(valid))}")
            continue
        if not equals and not valid[key]:
            problems.append(f"-o {option}: needs a value; write {key}=VALUE")
            continue
        if key == "absorb":
            patterns.append(value)
            fields[key] = patterns
            continue
        section, _, inner = key.rpartition(".")
        target = fields.setdefault(section, {}) if section else fields
        target[inner] = value if equals else "true"
    if read_only and (fields.get("absorb") or fields.get("write") == "absorb"):
        problems.append("-o ro: excludes `write` and `absorb`; leave one of them out")
