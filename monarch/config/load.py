"""The configuration file and the options of the command line, read into settings.

All mistakes of a file or a command line are reported at once, one line each, in one
:class:`~monarch.errors.ConfigError`. Nothing here creates or changes a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from monarch.config.conflicts import conflicts, conflicts_between, resolved
from monarch.config.document import MAX_MOUNTS, MAX_VALUES, Loc, Node, dotted, read_document, shown
from monarch.config.quotas import QuotaSettings
from monarch.config.settings import (
    MountSettings,
    RuleSettings,
    TierSettings,
    parse_tier,
)
from monarch.config.values import Section, expand
from monarch.errors import ConfigError
from monarch.text import plain_name

# --- The file -------------------------------------------------------------------------------------


def load(path: Path) -> dict[str, MountSettings]:
    """The mounts of a configuration file by name, ``defaults`` merged under each. Raises
    ConfigError with every mistake, one line each: ``file:line: what; what to do``."""
    problems: list[tuple[int, str]] = []
    top = read_document(path, problems)
    mounts: dict[str, MountSettings] = {}
    trees = {} if top is None else _mount_trees(top, problems)
    for name, tree in trees.items():
        mount, mistakes = _validated({**tree.plain(), "name": name})
        if mount is not None:
            mounts[name] = mount
        problems += [(tree.line_of(loc), text) for loc, text in mistakes]
    found = [
        *((name, *conflict) for name, mount in mounts.items() for conflict in conflicts(mount)),
        *conflicts_between(mounts),
    ]
    problems += [(trees[name].line_of(loc), text) for name, loc, text in found]
    if problems:
        # A mistake under `defaults` is found once for each mount, and reported once.
        raise ConfigError([f"{path}:{line}: {text}" for line, text in sorted(set(problems))])
    return mounts


def _mount_trees(top: Node, problems: list[tuple[int, str]]) -> dict[str, Node]:
    """Each mount merged over the defaults; a value that is not a mapping is reported and left
    out."""
    sections = {"mounts": "the mounts by name", "defaults": "the settings of every mount"}
    if not isinstance(top.value, dict):
        problems.append((top.line, "the file must be a mapping; begin it with 'mounts:'"))
        return {}
    for key, node in top.value.items():
        if key not in sections:
            problems.append((node.line, _unknown_key(key, list(sections))))
    defaults = top.value.get("defaults", Node({}, 1))
    if not isinstance(defaults.value, dict | None):
        problems.append((defaults.line, "defaults must be a mapping of keys to values"))
        defaults = Node({}, 1)
    for key in ("name", "source", "mountpoint"):
        if isinstance(defaults.value, dict) and key in defaults.value:
            line = defaults.value[key].line
            problems.append((line, f"{key!r} cannot be a default; give it to each mount"))
    mounts = top.value.get("mounts", Node(None, top.line))
    if not mounts.value or not isinstance(mounts.value, dict):
        example = "mounts: {NAME: {source: ..., mountpoint: ...}}"
        problems.append((mounts.line, f"there are no mounts; add '{example}'"))
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
        trees[name] = Node(keys, node.line).over(defaults)
    return trees


# --- Mistakes -------------------------------------------------------------------------------------

# A message lists at most this many keys.
_SHOWN_KEYS = 12

_WANTED = {
    "model_type": "a mapping of keys to values",
    "tuple_type": "a list",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    "string_type": "text",
    "string_pattern_mismatch": "letters, digits, '.', '_' or '-', at most 64, the first a letter"
    " or digit",
}


def _section(key: str) -> type[Section] | None:
    """The section of a mount named ``key``; None if there is no such section."""
    annotation: Any = MountSettings.model_fields[key].annotation
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation if is_section else None


def _keys_at(loc: Loc) -> list[str]:
    """The keys that are valid in the mapping at ``loc`` of a mount."""
    if loc[:1] == ("tiers",):
        return list(TierSettings.model_fields)
    if loc[:1] == ("rules",):
        return list(RuleSettings.model_fields)
    if loc[:1] == ("quotas",):
        return list(QuotaSettings.model_fields)
    if loc:
        section = _section(str(loc[0]))
        return list(section.model_fields) if section else []
    return [key for key in MountSettings.model_fields if key != "name"]


def option_keys() -> dict[str, bool]:
    """The dotted keys that ``-o`` can set, which are not arguments or lists, and whether
    each is a flag."""
    keys = {}
    for key, field in MountSettings.model_fields.items():
        section = _section(key)
        if section is not None:
            for inner, inner_field in section.model_fields.items():
                keys[f"{key}.{inner}"] = inner_field.annotation is bool
        elif key not in ("name", "source", "mountpoint", "tiers", *_ONLY_IN_A_FILE):
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
    return f"unknown key {shown(key)}{place}; {advice}"


def _described(error: ErrorDetails) -> str:
    """The message for an error of pydantic: the mistake, and its correction."""
    loc, kind, context = error["loc"], error["type"], error.get("ctx", {})
    key, value = dotted(loc), shown(error["input"])
    if kind == "extra_forbidden":
        valid = _keys_at(loc[:-1])
        if len(loc) == 1:
            # A key of a section is often written beside the section by mistake.
            valid += [dotted for dotted in option_keys() if "." in dotted]
        return _unknown_key(str(loc[-1]), valid, where=dotted(loc[:-1]))
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
    if kind in _WANTED:
        return f"{key} is {value}; it must be {_WANTED[kind]}"
    return f"{key}: {error['msg']}"


def _validated(fields: dict[str, Any]) -> tuple[MountSettings | None, list[tuple[Loc, str]]]:
    try:
        return MountSettings.model_validate(fields), []
    except ValidationError as invalid:
        errors = [e for e in invalid.errors() if e["type"] != "default_factory_not_called"]
        return None, [(error["loc"], _described(error)) for error in errors]


# --- The command line -----------------------------------------------------------------------------


def from_options(
    source: Path,
    mountpoint: Path,
    *,
    tiers: Sequence[str] = (),
    snapshot: Path | None = None,
    state: Path | None = None,
    peers: str | None = None,
    options: Sequence[str] = (),
) -> MountSettings:
    """The settings of ``monarch mount SOURCE MOUNTPOINT --tier ... -o key=value,...``. Paths may be
    relative. Raises ConfigError with every mistake."""
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
    _put_members(peers, fields)
    _apply(options, fields, problems)
    return _settled(fields, problems)


def with_options(
    settings: MountSettings, options: Sequence[str], *, peers: str | None = None
) -> MountSettings:
    """The settings of a mount of a file with ``--peers`` and ``-o key=value,...`` over them. Raises
    ConfigError."""
    problems: list[str] = []
    # Only the keys that were set, so that defaults can still be recognised.
    fields = settings.model_dump(exclude_unset=True)
    _put_members(peers, fields)
    _apply(options, fields, problems)
    return _settled(fields, problems)


def _put_members(peers: str | None, fields: dict[str, Any]) -> None:
    if peers is not None:
        fields.setdefault("peers", {})["members"] = peers


def _settled(fields: dict[str, Any], problems: list[str]) -> MountSettings:
    mount, mistakes = _validated(fields)
    if mount is not None:
        mistakes = list(conflicts(mount))
    problems += [text for _, text in mistakes]
    if mount is None or problems:
        raise ConfigError(problems)
    return mount


def _absolute(path: Path) -> Path:
    if path.is_absolute():
        return path
    path = Path.cwd() / path
    # Removing `a/..` from the text would be wrong if `a` is a symbolic link.
    return resolved(path) if ".." in path.parts else path


def _tier_options(texts: Sequence[str], problems: list[str]) -> list[dict[str, Any]]:
    tiers = []
    for text in texts:
        try:
            fields = parse_tier(text)
            tiers.append({**fields, "path": _absolute(expand(fields["path"]))})
        except ValueError as error:
            problems.append(f"--tier {text}: {error}")
    return tiers


# Options of mount(8), usual in a file system table, that ask for what every mount has or that
# concern other tools: they are accepted without effect.
_MOUNT_OPTIONS = frozenset(
    ("defaults", "noatime", "nodiratime", "relatime", "nodev", "nosuid", "_netdev", "nofail")
)
_REFUSED_OPTIONS = {
    "rw": "name the paths that can be written: absorb=PATTERN, or write=absorb for all",
    "suid": "a mount is always nosuid",
    "dev": "a mount is always nodev",
    "noexec": "is not supported",
    "remount": "a running mount keeps its settings: `monarch umount`, then mount with new ones; the"
    " tiers keep their copies",
}
_ONLY_IN_A_FILE = ("rules", "quotas")
_IN_A_FILE = "{} are written in a configuration file: `monarch mount -c FILE NAME`"


def _only_in_a_file(key: str) -> str | None:
    """The list that a key is of, if it is one that only a configuration file may have."""
    name = key.rpartition(".")[2].partition("[")[0]
    return name if name in _ONLY_IN_A_FILE else None


def _single(options: Sequence[str]) -> Iterator[str]:
    """The options, which commas separate. A rule or a quota may contain commas itself: its text is
    not divided."""
    for text in options:
        while text:
            is_whole = _only_in_a_file(text.partition("=")[0])
            option, _, text = (text, "", "") if is_whole else text.partition(",")
            if option:
                yield option


def _apply(options: Sequence[str], fields: dict[str, Any], problems: list[str]) -> None:
    """Puts ``-o`` options into ``fields``; of two for one key the last is used, but each ``absorb``
    adds a pattern."""
    patterns: list[str] = []
    read_only = False
    valid = option_keys()
    for option in _single(options):
        key, equals, value = option.partition("=")
        if option == "ro":
            read_only = True
            continue
        if option in _MOUNT_OPTIONS:
            continue
        if option in _REFUSED_OPTIONS:
            problems.append(f"-o {option}: {_REFUSED_OPTIONS[option]}")
            continue
        if name := _only_in_a_file(key):
            problems.append(f"-o {option}: {_IN_A_FILE.format(name)}")
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
