"""Which call makes a change at the source, by what there is of its file; no call is made."""

from __future__ import annotations

import stat
from functools import partial
from typing import Any, cast

import pytest

from monarch.posix.credentials import Credentials
from monarch.types import Identity
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.op import Kind, Op
from monarch.writeback.queue_entry import Entry
from monarch.writeback.source_contents import Place
from monarch.writeback.source_state import SourceState
from monarch.writeback.source_writer import SourceWriter
from monarch.writeback.steps import Steps, with_rights_to_read
from tests.writeback.files_in_use import FilesInUse

OLD = Identity(3, 30, 0, 7)
PROGRAM = stat.S_ISUID | 0o755


class NamedCalls:
    """A writer, and each of its rooms, of which each call is its name."""

    def __getattr__(self, name: str) -> Any:
        if name in ("entries", "publishing", "staged"):
            return self
        return partial(lambda name: None, name)


class Rig:
    """Changes of object 1 at ``a``, and the calls that make them."""

    def __init__(self) -> None:
        self.state, self.files = SourceState(), FilesInUse()
        self.order = ContentOrder(self.state, self.files)
        self.steps = Steps(cast(SourceWriter, NamedCalls()), self.state, self.order, self.files)
        self._seq = 0

    def put(self, kind: Kind, *, mode: int | None = None, object: int = 1) -> Entry:
        self._seq += 1
        op = Op(kind=kind, path=b"a", to=b"b", paths=(b"a",), object=object, ino=70, mode=mode)
        self.order.expect(self._seq, op)
        return Entry(self._seq, op, 0, 0, was_tried=False)

    def call(self, entry: Entry) -> str | None:
        """The name of the call that makes a change; None if there is none."""
        step = self.steps.of(entry)
        if step is None:
            return None
        assert isinstance(step, partial)
        return cast(str, step.args[0])

    def is_there(self) -> None:
        self.state.note(Op(kind="content", path=b"a", object=1), OLD)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_names_of_a_file_that_the_source_does_not_have_come_with_its_content(rig: Rig) -> None:
    assert rig.call(rig.put("create")) is None
    assert rig.call(rig.put("link")) is None
    assert rig.call(rig.put("attr")) is None
    # What the source has under the new name is replaced by the content only.
    assert rig.call(rig.put("rename")) == "unlink"
    rig.order.lost[1] = b"a"
    assert rig.call(rig.put("rename")) is None


def test_names_and_attributes_of_a_file_that_the_source_has_are_changed_there(rig: Rig) -> None:
    rig.state.foresee(Op(kind="take", path=b"a", object=1))
    assert rig.call(rig.put("take")) is None
    assert rig.call(rig.put("rename")) == "rename"
    assert rig.call(rig.put("link")) == "link"
    assert rig.call(rig.put("unlink")) == "unlink"


def test_attributes_of_an_older_version_are_changed(rig: Rig) -> None:
    rig.is_there()
    rig.state.note(Op(kind="content", path=b"a", object=1), None)
    assert rig.call(rig.put("attr")) == "change_attributes"


@pytest.mark.parametrize("was_tried", [False, True])
def test_of_a_content_that_is_left_out_the_staged_file_is_removed(
    rig: Rig, was_tried: bool
) -> None:
    entry = rig.put("content")
    entry.skipped, entry.was_tried = True, was_tried
    assert rig.call(entry) == ("discard" if was_tried else None)


def test_a_content_is_published_or_found_there(rig: Rig) -> None:
    entry = rig.put("content")
    entry.published = True
    assert rig.call(entry) == "look_at_same"
    entry.is_grown = True
    assert rig.call(entry) == "grown"
    entry.staged, entry.place = OLD, Place()
    assert rig.call(entry) == "publish"


def test_of_what_is_given_up_only_a_staged_file_is_removed(rig: Rig) -> None:
    rig.is_there()
    rig.state.give_up([], [1])
    assert rig.call(rig.put("unlink")) is None
    content = rig.put("content")
    content.is_moot = content.was_tried = True
    assert rig.call(content) == "discard"


def test_a_program_does_not_get_the_bits_that_a_later_change_takes(rig: Rig) -> None:
    rig.is_there()

    def given(entry: Entry) -> int | None:
        step = rig.steps.of(entry)
        assert isinstance(step, partial)
        return cast(Op, step.keywords["op"]).mode

    entry = rig.put("attr", mode=PROGRAM)
    assert given(entry) == PROGRAM
    rig.files.written.add(1)
    assert given(entry) == 0o755
    rig.files.written.clear()
    rig.put("content", mode=0o755)
    assert given(entry) == 0o755


def test_a_rename_that_is_made_again_has_not_forgotten_the_file_that_it_has_replaced(
    rig: Rig,
) -> None:
    """Its directory could not be synced at the first time."""
    rig.state.foresee(Op(kind="take", path=b"a", object=1))
    rig.call(rig.put("take"))
    entry = rig.put("rename")
    rig.steps.of(entry)
    assert entry.place is not None
    entry.place.replaced.add(7)
    rig.steps.of(entry)
    assert entry.place.replaced == {7}


def test_newer_bytes_than_the_recorded_ones_do_not_get_the_bits_either(rig: Rig) -> None:
    entry = rig.put("content", mode=PROGRAM)
    entry.place = Place()
    apply = rig.steps.applying(entry, Identity(4, 40, 0, 0))
    assert isinstance(apply, partial)
    op = cast(Op, apply.keywords["op"])
    assert (op.mode, op.mtime_ns) == (0o755, 40)


@pytest.mark.parametrize("why", ["", "moot", "given up", "lost", "a content waits", "written"])
def test_a_file_that_others_have_removed_is_published_again_under_its_new_name(
    rig: Rig, why: str
) -> None:
    entry = rig.put("rename")
    step = rig.steps.of(entry)
    match why:
        case "moot":
            entry.is_moot = True
        case "given up":
            rig.state.give_up([], [1])
        case "lost":
            rig.order.lost[1] = b"a"
        case "a content waits":
            rig.put("content")
        case "written":
            rig.files.written.add(1)
    assert rig.steps.lacks_its_file(entry, step) is (why == "")
    assert not rig.steps.lacks_its_file(rig.put("attr"), step)


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize(("by", "reader"), [(0, 0), (5, 5), (6, 5)])
def test_bytes_are_given_only_to_users_who_may_read_them(
    by: int, reader: int, is_lost: bool
) -> None:
    user = Credentials(by, by)
    content = Op(kind="content", path=b"a", object=1, mode=PROGRAM, uid=5, gid=5, by=user)
    allowed = with_rights_to_read(content, is_lost=is_lost)
    assert allowed.by is not None
    assert allowed.by.uid == reader
    assert (allowed.mode == PROGRAM) is not (is_lost and by == 6)
