"""What the drain knows of the source, without a source: what each change leaves known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from monarch.types import Identity
from monarch.writeback import source_state
from monarch.writeback.journal import Known, Replay
from monarch.writeback.op import Op
from monarch.writeback.source_state import SourceState

OLD, NEW, OTHER = Identity(3, 30, 0, 7), Identity(5, 50, 0, 8), Identity(4, 40, 0, 9)


def content(number: int, *, size: int = 5, intact: int = 0) -> Op:
    return Op(
        kind="content", path=b"a", paths=(b"a",), object=number, size=size, intact=intact,
        mtime_ns=50, strict=True,
    )  # fmt: skip


def replay(
    *ops: tuple[int, Op],
    done: dict[int, Identity | None] | None = None,
    known: Known | None = None,
    staged: dict[int, frozenset[Identity]] | None = None,
) -> Replay:
    return Replay(ops, done or {}, 9, 99, (), {}, known=known, staged=staged or {})


@pytest.fixture
def state() -> SourceState:
    return SourceState()


def test_a_taken_file_is_known_with_the_identity_that_the_mount_had_read(
    state: SourceState,
) -> None:
    take = Op(kind="take", path=b"a", object=1, ino=70, was=OLD)
    state.foresee(take)
    assert state.expected(1, content(1)).was_there
    state.note(take, None)
    assert (state.is_present(1), state.identity(1), state.has_older(1)) == (True, OLD, True)


def test_a_taken_file_is_known_as_a_change_of_its_attributes_has_left_it(
    state: SourceState,
) -> None:
    state.note(Op(kind="attr", path=b"a", ino=70, was=OLD, mode=0o600), NEW)
    state.note(Op(kind="take", path=b"a", object=1, ino=70, was=OLD), None)
    assert state.identity(1) == NEW


@pytest.mark.parametrize("ctime_ns", [OLD.ctime_ns, 31])
def test_a_taken_file_is_known_as_a_change_under_an_older_number_leaves_it_later(
    state: SourceState, ctime_ns: int
) -> None:
    """A mount over another snapshot knows the same file under another number, and perhaps after it
    has lost another name."""
    read = replace(OLD, ctime_ns=ctime_ns)
    state.note(Op(kind="take", path=b"a", object=1, ino=70, was=read), None)
    state.note(Op(kind="take", path=b"b", object=2, ino=71, was=OTHER), None)
    state.note(Op(kind="attr", path=b"a", ino=-7, was=OLD, mtime_ns=50, file=True), NEW)
    assert (state.identity(1), state.identity(2)) == (NEW, OTHER)


def test_a_change_under_an_older_number_looks_at_the_objects_of_that_file_only(
    state: SourceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be as many objects as a tier keeps, and as many changes."""
    for number in range(1, 100):
        state.note(content(number), replace(OLD, source_ino=1000 + number))
    older = Op(kind="attr", path=b"a", ino=-7, was=replace(OLD, source_ino=1050), mode=0o600)
    state.note(replace(older, was=replace(OLD, source_ino=1)), replace(NEW, source_ino=1))
    looked_at: list[Identity] = []
    version = source_state._version

    def counted(identity: Identity) -> tuple[int, int, int]:
        looked_at.append(identity)
        return version(identity)

    # Of objects that have left the file, or came to it, meanwhile.
    state.forget(50)
    state.note(content(51), replace(OLD, source_ino=1050))
    state.note(content(52), replace(OLD, source_ino=9000))
    state.note(content(200), replace(OLD, source_ino=1050))
    monkeypatch.setattr(source_state, "_version", counted)
    now = replace(NEW, source_ino=1050)
    state.note(replace(older, ino=-8), now)
    assert len(looked_at) <= 8
    assert state.identity(50) is None
    assert state.identity(51) == state.identity(200) == now
    assert state.identity(53) == replace(OLD, source_ino=1053)


def test_a_content_that_is_left_out_leaves_the_older_version_known(state: SourceState) -> None:
    state.note(content(1), OLD)
    state.note_version(1, OLD)
    state.note(content(1), None)
    assert (state.is_present(1), state.identity(1), state.version(1)) == (False, OLD, None)


def test_a_staged_file_is_monarchs_until_its_content_is_recorded_as_published(
    state: SourceState,
) -> None:
    state.note_staged(1, NEW)
    assert state.expected(3, content(1)).ours == {NEW}
    assert state.unmarked(1)
    state.note(content(1), NEW)
    assert state.expected(4, content(1)).ours == frozenset()


def test_the_file_that_a_rename_replaces_is_known_until_the_new_file_has_content(
    state: SourceState,
) -> None:
    state.note(content(2), OTHER)
    rename = Op(kind="rename", path=b"b", to=b"a", object=1, over_object=2, over=OLD)
    state.note(rename, None)
    assert set(state.expected(5, content(1)).over) == {OTHER, OLD}
    assert not state.has_older(1)
    # Its mode was changed by its other name.
    changed = Identity(4, 40, 1, 9)
    state.note(Op(kind="attr", path=b"c", object=2, mode=0o600), changed)
    assert set(state.expected(6, content(1)).over) == {changed, OLD}
    state.note(content(1), NEW)
    assert state.expected(7, content(1)).over == ()


def test_bytes_of_others_stay_unknown_when_only_the_name_of_a_file_was_changed(
    state: SourceState,
) -> None:
    state.note(content(1), OLD)
    state.note(Op(kind="rename", path=b"a", to=b"b", object=1), Identity(9, 90, 5, OLD.source_ino))
    assert state.identity(1) == Identity(OLD.size, OLD.mtime_ns, 5, OLD.source_ino)


def test_a_file_grows_from_what_the_source_has_unless_bytes_before_that_were_changed(
    state: SourceState,
) -> None:
    assert state.grows_from(content(1)) is None
    state.note(content(1), OLD)
    state.rebase(content(1), OLD)
    assert state.grows_from(content(1, size=8, intact=5)) == 3
    assert state.grows_from(content(1, size=8, intact=2)) is None
    # A content that was left out has changed the second byte.
    state.rebase(content(1, size=6, intact=1), None)
    assert state.grows_from(content(1, size=8, intact=6)) is None
    state.rebase(content(1), NEW)
    assert state.grows_from(content(1, size=8, intact=6)) == 5
    state.stop_growth(1)
    assert state.grows_from(content(1, size=8, intact=6)) is None


def test_a_source_needs_no_removal_of_what_it_never_got(state: SourceState) -> None:
    def is_needless(op: Op) -> bool:
        return state.is_needless(op, lambda ino: ino == 71)

    state.foresee(Op(kind="create", path=b"a", object=1))
    unlink = Op(kind="unlink", path=b"a", object=1)
    assert is_needless(unlink)
    state.note_staged(1, NEW)
    assert not is_needless(unlink)
    rmdir = Op(kind="rmdir", path=b"d", ino=71, strict=True)
    assert is_needless(rmdir)
    state.note(Op(kind="mkdir", path=b"d", ino=71), OTHER)
    assert not is_needless(rmdir)
    assert is_needless(Op(kind="attr", path=b"d", ino=71))
    assert not is_needless(Op(kind="attr", path=b"d", ino=72))


def test_the_name_of_a_directory_that_belongs_to_others_is_given_up(state: SourceState) -> None:
    state.note(Op(kind="mkdir", path=b"d", ino=71, strict=True), None)
    assert state.is_given_up(Op(kind="attr", path=b"d", ino=71))
    state.give_up([], [5])
    assert state.is_given_up(content(5))
    assert not state.is_given_up(content(6))


def test_known_states_survive_a_compaction_of_the_journal(state: SourceState) -> None:
    state.foresee(Op(kind="create", path=b"b", object=2))
    state.note(content(1), OLD)
    state.note_staged(2, NEW)
    state.note(Op(kind="mkdir", path=b"d", ino=71), OTHER)
    ops = [(8, content(1)), (9, content(2)), (10, Op(kind="attr", path=b"d", ino=71))]
    again = SourceState()
    again.load(replay(*ops, known=state.known_of(ops, lambda seq: False)))
    for seq, op in ops:
        assert again.expected(seq, op).known == state.expected(seq, op).known
    assert again.expected(9, content(2)).ours >= {NEW}
    assert again.expected(9, content(2)).is_made
    # Contents that say which bytes were changed may be missing.
    assert again.grows_from(content(1, size=8, intact=5)) is None


def test_a_time_that_may_have_been_set_without_a_mark_is_expected() -> None:
    state = SourceState()
    done, waiting = content(1), Op(kind="attr", path=b"a", object=1, mtime_ns=77)
    state.load(replay((1, done), (2, waiting), done={1: OLD}))
    assert state.expected(2, waiting).as_set == (Identity(OLD.size, 77, 0, OLD.source_ino),)


def test_a_file_staged_for_one_that_a_rename_has_replaced_since_is_expected() -> None:
    state = SourceState()
    rename = Op(kind="rename", path=b"b", to=b"a", object=1, over_object=2)
    state.load(replay((1, rename), done={1: None}, staged={2: frozenset({NEW})}))
    assert state.expected(2, content(1)).ours == {NEW}
