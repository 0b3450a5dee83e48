"""Verbs for changes that the source refuses: try them again, set them aside, or discard them.

A discarded change is not drained to the source, and neither are the changes that depend on it. An
entry that it has created is removed from the mount as well. A file of the source that it has
changed is shown again as it is at the source.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from monarch.errors import BusyError, UsageError
from monarch.namespace.overlay import Node
from monarch.posix.credentials import ROOT
from monarch.types import ROOT_INO, WRITTEN_INO, Ino, KernelCaches
from monarch.writeback.drain import Drain
from monarch.writeback.front import WriteFront
from monarch.writeback.op import Op, is_within
from monarch.writeback.queue_entry import Refusal
from monarch.writeback.wakeups import Cause

# Why no change is refused alone, by the part that has failed, and what to do.
_STOPPED: dict[Cause, tuple[str, str]] = {
    "source": (
        "the source accepts no changes now",
        "repair the source first; a file that is removed on the mount is not drained",
    ),
    "room": (
        "the source is full: it accepts only removals",
        "free space at the source, or remove files on the mount: removals are drained first",
    ),
    "tier": ("the tier's disk fails", "repair the disk of the tier first"),
    "daemon": (
        "the daemon lacks descriptors or memory to drain",
        "raise the limits of the daemon, or free memory",
    ),
}


class _Plan:
    """What happens to the files and directories of discarded changes.

    ``removed``: removed from the mount. ``anew``: recorded anew for the source. ``back``: shown
    again as they are at the source; ``shown``: the same for files whose attributes alone were
    changed. ``names`` are removed, but their files have other names, which
    stay. ``put_back``: directories that get the name again that they have at the source.
    """

    def __init__(self) -> None:
        self.removed: dict[Ino, Node] = {}
        self.anew: dict[Ino, Node] = {}
        self.back: dict[Ino, Node] = {}
        self.shown: dict[Ino, Node] = {}
        self.names: dict[bytes, None] = {}
        self.put_back: dict[Ino, bytes] = {}


class Refusals:
    """Belongs to the event loop. Paths are relative to the mount."""

    def __init__(self, front: WriteFront, drain: Drain, kernel: KernelCaches) -> None:
        self._front = front
        self._names = front.names
        self._drain = drain
        self._kernel = kernel

    def list(self, path: bytes = b"") -> Sequence[Refusal]:
        """The changes at, above and beneath a path that the source refuses, in their order."""
        return [
            refusal
            for refusal in self._drain.queue.refusals()
            if is_within(refusal.path, path) or is_within(path, refusal.path)
        ]

    def stopped(self) -> str:
        """Why changes of all users wait; empty if the source accepts changes."""
        reason = self._drain.stopped
        return f"{_STOPPED[self._drain.cause][0]}: {reason}" if reason else ""

    async def set_aside(self, path: bytes) -> None:
        """Sets aside the refused changes at, above and beneath a path: other changes of the same
        users are drained before them. Raises UsageError if no change is refused there."""
        self._drain.queue.set_aside({refusal.seq for refusal in self._about(path)})
        await self._drain.progress.retry()

    async def retry(self) -> None:
        """Tries all refused changes again, and waits for the results."""
        await self._drain.progress.retry()

    async def discard(self, path: bytes) -> Sequence[bytes]:
        """Discards the changes that wait at and beneath a refused path; returns the paths that were
        removed from the mount. Raises UsageError if no change can be discarded there, BusyError if
        a file is open."""
        await self._drain.progress.come_to_hold()
        self._about(path)
        ops = [it.op for it in self._drain.queue.entries() if _is_about(it.op, path)]
        if not ops:
            raise UsageError(
                f"nothing waits at {os.fsdecode(path)!r}", hint="name the path that is refused"
            )
        plan = self._plan(path, ops)
        objects = {op.object for op in ops} - {0}
        mine = plan.removed.keys() | plan.anew.keys()
        seqs = self._drain.give_up(
            lambda op: (
                (_is_about(op, path) or op.object in objects)
                and not (_is_name_elsewhere(op, path) and op.ino not in mine)
            ),
            {node.object for node in plan.removed.values()} - {0},
        )
        removed = list(self._remove(plan))
        # The source has never had these names from this mount: a file there is one of others.
        seqs += self._drain.give_up(lambda op: op.kind == "unlink" and op.path in plan.names, ())
        for ino, to in plan.put_back.items():
            self._put_back(ino, to)
        for seq in seqs:
            await self._drain.progress.wait(seq)
        for node in plan.anew.values():
            if node.names and node.object:
                self._drain.state.forget(node.object)
                self._front.recorder.record_anew(node)
        for node in plan.back.values():
            if node.names and node.object:
                await self._front.source.give_back(node)
                self._kernel.invalidate_attributes(node.ino)
        for node in plan.shown.values():
            if await self._front.source.show_again(node):
                self._kernel.invalidate_attributes(node.ino)
        return removed

    def _about(self, path: bytes) -> Sequence[Refusal]:
        """As ``list``. Raises UsageError if no change is refused there."""
        found = self.list(path)
        if not found and (reason := self._drain.stopped):
            what, hint = _STOPPED[self._drain.cause]
            raise UsageError(
                f"{what}; the source does not refuse {os.fsdecode(path)!r} alone: {reason}",
                hint=hint,
            )
        if not found:
            raise UsageError(
                f"the source refuses nothing at {os.fsdecode(path)!r}",
                hint="`monarch ckpt set-aside MOUNTPOINT` lists what it refuses",
            )
        return found

    def _plan(self, path: bytes, ops: Sequence[Op]) -> _Plan:
        """Plans what ``discard`` does with ``ops``; changes nothing. Raises UsageError,
        BusyError."""
        plan, table = _Plan(), self._front.object_table
        for op in ops:
            node = table.node(op.object) if op.object else self._without_object(op)
            if op.kind in ("unlink", "rmdir") or node is None or not node.names:
                continue
            names = list(self._names.visible_paths(node.ino))
            inside = [name for name in names if is_within(name, path)]
            if node.ino >= WRITTEN_INO and self._drain.state.has_nothing_of(op):
                if inside == names:
                    plan.removed[node.ino] = node
                elif op.object:
                    plan.anew[node.ino] = node
                    plan.names |= dict.fromkeys(inside)
                else:
                    raise UsageError(
                        f"{self._text(node)} was moved and may contain files of the source;"
                        " nothing was given up",
                        hint="move it back first, or remove it",
                    )
            elif op.kind == "rename" and not op.object:
                self._require_free(op.path, node)
                plan.put_back.setdefault(node.ino, op.path)
            elif op.kind == "link" and op.to in inside:
                plan.names[op.to] = None
            elif op.kind == "rename":
                plan.anew[node.ino] = node
            elif op.kind == "content":
                plan.back[node.ino] = node
            elif op.file:
                plan.shown[node.ino] = node
        for ino in plan.anew:
            plan.back.pop(ino, None)
        for node in plan.back.values():
            if self._front.files.is_open(node.ino):
                raise BusyError(
                    f"{self._text(node)} is open; nothing was given up", hint="close it first"
                )
        for node in plan.removed.values():
            if node.is_dir:
                for _, name, attributes in self._names.list_from(node.ino, 0):
                    below = self._names.path_of(node.ino, name)
                    if attributes.ino not in plan.removed and below not in plan.names:
                        raise UsageError(
                            f"{os.fsdecode(below)!r} is at the source, under another name;"
                            " nothing was given up",
                            hint="move it elsewhere first",
                        )
        return plan

    def _without_object(self, op: Op) -> Node | None:
        ino: int | None = op.ino
        if op.file and op.ino < 0:
            # A change of an earlier mount, with another snapshot.
            ino = self._names.resolve(op.path)
        return None if ino is None else self._names.node(Ino(ino))

    def _require_free(self, path: bytes, node: Node) -> None:
        """Raises UsageError if a directory cannot get its earlier name ``path`` again."""
        directory, _, name = path.rpartition(b"/")
        parent = self._names.resolve(directory)
        if parent is not None and self._names.lookup(parent, name) in (None, node.ino):
            return
        raise UsageError(
            f"{self._text(node)} cannot be {os.fsdecode(path)!r} again, as at the source: that"
            " name is taken, or its directory is gone; nothing was given up",
            hint=f"make {os.fsdecode(path)!r} free first",
        )

    def _put_back(self, ino: Ino, path: bytes) -> None:
        directory, _, name = path.rpartition(b"/")
        parent = self._names.resolve(directory)
        if parent is None:
            return
        before = self._names.attributes(ino).parent
        self._front.operations.put_back(ino, parent, name, by=ROOT)
        for changed in {before, parent}:
            self._kernel.invalidate_listing(changed)
        self._kernel.invalidate_attributes(ino)

    def _text(self, node: Node) -> str:
        return self._names.path_text(node.ino, is_visible=True)

    def _remove(self, plan: _Plan) -> Iterator[bytes]:
        """Removes the entries of ``plan`` from the mount, the deepest first; yields their paths."""
        paths = [
            path for node in plan.removed.values() for path in self._names.visible_paths(node.ino)
        ]
        for path in sorted({*paths, *plan.names}, key=lambda path: path.count(b"/"), reverse=True):
            directory, _, name = path.rpartition(b"/")
            parent = self._names.resolve(directory) or ROOT_INO
            ino = self._front.operations.take_away(parent, name, by=ROOT)
            self._kernel.invalidate_listing(parent)
            self._kernel.invalidate_attributes(ino)
            yield path


def _is_about(op: Op, path: bytes) -> bool:
    return op.names() != (b"",) and any(is_within(name, path) for name in op.names())


def _is_name_elsewhere(op: Op, path: bytes) -> bool:
    """Whether a change adds or removes a name of a file, and that name is not within ``path``."""
    name = {"link": op.to, "unlink": op.path}.get(op.kind, path)
    return not is_within(name, path)
