"""Directories and addresses that mounts may not have in common, or one inside another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product
from pathlib import Path
from typing import TypeVar

from monarch.config.defaults import state_directory
from monarch.config.document import Loc, dotted
from monarch.config.settings import MountSettings
from monarch.errors import MonarchError, Unanswered
from monarch.posix.bounded_calls import PATIENCE_S, call_within

T = TypeVar("T")


def resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _resolved_remote(path: Path) -> Path:
    """As ``resolved``, but as written if the file system hangs: other mounts may not need it."""
    return _bounded(resolved, path) or Path(os.path.normpath(path))


def _resolved_states(mount: MountSettings) -> Iterator[Path]:
    """The state directory, which has a name by the real path of the source; none if that hangs."""
    state = _bounded(lambda mount: resolved(state_directory(mount)), mount)
    if state is not None:
        yield state


def _bounded(resolve: Callable[[T], Path], it: T) -> Path | None:
    """``resolve(it)``, None if a file system hangs."""
    try:
        return call_within(PATIENCE_S, resolve, it)
    except Unanswered:
        return None
    except RuntimeError:
        raise MonarchError(
            "no thread can be started: this user has as many processes as the limit allows",
            hint="end some, or raise the limit (`ulimit -u`)",
        ) from None


def _resolved_mountpoint(path: Path) -> Path:
    # The last component is not resolved: a daemon that hangs there would make `umount` hang, too.
    return resolved(path.parent) / path.name


def _places(mount: MountSettings) -> list[tuple[Loc, str, Path]]:
    """The directories of a mount: the key that sets each, its kind, and its real path."""
    return [
        (("source",), "source", _resolved_remote(mount.source)),
        (("mountpoint",), "mount point", _resolved_mountpoint(mount.mountpoint)),
        *((("tiers", i), "tier", resolved(t.path)) for i, t in enumerate(mount.tiers)),
        *((("state",), "state directory", state) for state in _resolved_states(mount)),
    ]


def conflicts(mount: MountSettings) -> Iterator[tuple[Loc, str]]:
    """Conflicts between directories of one mount: one would destroy or hide another."""
    places = _places(mount)
    for (_, first, one), (loc, second, other) in combinations(places, 2):
        if one == other and first == second:
            yield loc, f"{second} {other} is given twice; leave one of them out"
        elif one == other:
            yield loc, f"{second} {other} is also the {first}; give it a directory of its own"
        elif other.is_relative_to(one):
            yield loc, f"{second} {other} is inside the {first} {one}; move it out"
        elif one.is_relative_to(other) and (first, second) != ("tier", "state directory"):
            yield loc, f"{second} {other} contains the {first} {one}; move one of them"
    files: list[tuple[Loc, Path | None]] = [
        (("snapshot", "file"), mount.snapshot.file),
        (("log", "file"), mount.log.file),
    ]
    mountpoint = _resolved_mountpoint(mount.mountpoint)
    for loc, file in files:
        if file is not None and _resolved_remote(file).is_relative_to(mountpoint):
            yield loc, f"{dotted(loc)} {file} is inside the mount point; move it out"


def conflicts_between(mounts: Mapping[str, MountSettings]) -> Iterator[tuple[str, Loc, str]]:
    """Directories that a mount shares with an earlier mount, or has inside those of another."""
    # The first mount that names a directory owns it. The parents of each path are looked up here,
    # so that the work grows with the number of mounts and not of pairs.
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
        # Port 0 means any free port.
        if mount.metrics.enabled and not address.endswith(":0"):
            owner = pages.setdefault(address, name)
            if owner != name:
                text = f"metrics.address {address} is that of mount {owner!r}; give each its own"
                yield name, ("metrics", "address"), text
    tiers = [(name, loc, path) for name, loc, kind, path in places if kind == "tier"]
    for name, loc, path in tiers:
        for parent, outer in product(path.parents, ("source", "mount point", "tier")):
            owner = owners.get((outer, parent), name)
            if owner != name:
                yield name, loc, f"tier {path} is inside the {outer} of {owner!r}; move it out"
