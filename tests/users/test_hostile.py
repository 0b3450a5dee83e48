"""Two users attack each other's files at the source and through a mount of root.

``python -m tests.users [--lists] SEED`` plays one history again and prints each call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MonarchCommand
from tests.mount.command import needs_fuse, needs_root
from tests.users.calls import SHARED, Call
from tests.users.history import (
    History,
    Step,
    directory,
    file,
    generated,
    surroundings,
    users_of,
)
from tests.users.lists import packed
from tests.users.runner import play
from tests.users.trees import Entry

pytestmark = [needs_root, needs_fuse]

_SEEDS, _SEEDS_WITH_LISTS = 500, 200
# Findings at the source are logged; a machine under load may let the tier wait. After a kill the
# next mount applies the journal over what other users have made at the source since.
_LOGGED = (
    "writeback.[a-z_]+: source: |the source refuses |(changed at|is gone from) the source"
    "|tier fast is |not drained at the end|the names are those of the last mount"
    "|record [0-9]+ .* does not fit"
)
MODES = ("relay", "passthrough")


@pytest.mark.finding("D1")
@pytest.mark.fault("U7")
@pytest.mark.promise(88)
@pytest.mark.timeout(300)
@pytest.mark.modes("relay", "passthrough")
def test_users_do_to_each_other_only_what_they_could_do_without_the_mount(
    monarch: MonarchCommand, tmp_path: Path, mode: str
) -> None:
    monarch.expects_log(_LOGGED)
    # Half of them in each mode.
    first = MODES.index(mode)
    seeds = range(first, _SEEDS, len(MODES))
    problems = play(monarch, tmp_path, [generated(seed) for seed in seeds], number=first)
    assert problems == [], "\n".join(problems)


@pytest.mark.fault("U7")
@pytest.mark.promise(20, 77)
@pytest.mark.timeout(300)
@pytest.mark.modes("relay", "passthrough")
def test_users_with_lists_do_only_what_they_could_do_without_the_mount(
    monarch: MonarchCommand, tmp_path: Path, mode: str
) -> None:
    """Three users, and the access control lists that they set at the source."""
    monarch.expects_log(_LOGGED)
    first = MODES.index(mode)
    seeds = range(first, _SEEDS_WITH_LISTS, len(MODES))
    histories = [generated(seed, lists=True) for seed in seeds]
    problems = play(monarch, tmp_path, histories, number=first)
    assert problems == [], "\n".join(problems)


@pytest.mark.timeout(0)
@pytest.mark.modes("relay", "passthrough")
def test_users_run_for_the_given_time(
    monarch: MonarchCommand, tmp_path: Path, mode: str, request: pytest.FixtureRequest
) -> None:
    seconds = request.config.getoption("--soak")
    until, seed = time.monotonic() + seconds, int(time.time()) % 10_000 * 1000
    while time.monotonic() < until:
        directory = tmp_path / str(seed)
        directory.mkdir()
        command = MonarchCommand(directory, monarch.case, mode)
        command.expects_log(_LOGGED)
        try:
            histories = [generated(seed + n, lists=n % 4 == 0) for n in range(200)]
            problems = play(command, directory, histories, number=seed // 200)
        finally:
            command.close()
        assert problems == [], "\n".join(problems)
        seed += 200


# -- the ways in which a drain that acts as root is made to act for others -----------------------


# What is behind a pause comes after a drain.
PAUSE = None


def directed() -> list[History]:
    """Takeovers that were found by hand. Each step is one line of the typed commands."""
    stories = (
        _mkdir_takes_a_directory_over,
        _publish_replaces_the_file_of_another,
        _chmod_meets_the_program_of_another,
        _chmod_meets_the_directory_of_another,
        _unlink_meets_the_file_of_another,
        _rename_goes_over_the_file_of_another,
        _write_into_the_program_of_another,
        _append_with_the_mode_of_the_last_open,
        _rename_brings_a_removed_program_back,
        _link_makes_a_program_of_its_user,
        _write_opens_a_program_that_its_owner_has_closed,
        _file_with_a_list_is_made_anew,
    )
    histories = []
    for number, steps in enumerate(stories):
        alice, mallory = users_of(number)
        tree = surroundings(alice, mallory)
        rounds: list[list[Step]] = [[]]
        for step in steps(alice, mallory, tree):
            if step is PAUSE:
                rounds.append([])
            else:
                rounds[-1].append(step)
        histories.append(History(steps.__name__.strip("_"), tree, rounds))
    return histories


Steps = Iterator["Step | None"]


def _mkdir_takes_a_directory_over(alice: int, mallory: int, tree: dict[str, Entry]) -> Steps:
    yield at(alice, "mkdir", "sticky/run", 0o700)
    yield at(alice, "create", "sticky/run/key", 0o644, f"{alice}:secret;")
    yield on(mallory, "mkdir", "sticky/run", 0o755)
    yield on(mallory, "chmod", "sticky/run", 0o755)


def _publish_replaces_the_file_of_another(
    alice: int, mallory: int, tree: dict[str, Entry]
) -> Steps:
    yield at(alice, "create", "sticky/result", 0o644, f"{alice}:result;")
    yield on(mallory, "create", "sticky/result", 0o644, f"{mallory}:result;")


def _chmod_meets_the_program_of_another(alice: int, mallory: int, tree: dict[str, Entry]) -> Steps:
    tree["group/tool"] = file(alice, SHARED, 0o775, f"{alice}:tool;")
    yield on(mallory, "mkfifo", "group/p", 0o644)
    yield PAUSE
    yield on(mallory, "chmod", "group/p", 0o4775)
    yield at(mallory, "unlink", "group/p")
    yield at(mallory, "link", "group/tool", "group/p")


def _chmod_meets_the_directory_of_another(
    alice: int, mallory: int, tree: dict[str, Entry]
) -> Steps:
    tree["open/alice"] = directory(alice, alice, 0o700)
    yield on(mallory, "mkdir", "open/p", 0o777)
    yield PAUSE
    yield on(mallory, "chmod", "open/p", 0o755)
    yield at(mallory, "rmdir", "open/p")
    yield at(mallory, "rename", "open/alice", "open/p")


def _unlink_meets_the_file_of_another(alice: int, mallory: int, tree: dict[str, Entry]) -> Steps:
    tree["sticky/m"] = file(mallory, mallory, 0o644, f"{mallory}:m;")
    yield at(mallory, "rename", "sticky/m", "sticky/n")
    yield at(alice, "create", "sticky/m", 0o600, f"{alice}:kept;")
    yield on(mallory, "unlink", "sticky/m")


def _rename_goes_over_the_file_of_another(
    alice: int, mallory: int, tree: dict[str, Entry]
) -> Steps:
    yield at(alice, "create", "sticky/t", 0o600, f"{alice}:kept;")
    yield on(mallory, "create", "sticky/f", 0o644, f"{mallory}:f;")
    yield on(mallory, "rename", "sticky/f", "sticky/t")


def _write_into_the_program_of_another(alice: int, mallory: int, tree: dict[str, Entry]) -> Steps:
    tree["group/tool"] = file(alice, SHARED, 0o4775, f"{alice}:tool;")
    yield on(mallory, "append", "group/tool", f"{mallory}:1;")
    for name in ("group/new", "group/cut"):
        yield on(alice, "create", name, 0o664, f"{alice}:new;")
        yield on(alice, "chmod", name, 0o4775)
    yield on(mallory, "append", "group/new", f"{mallory}:2;")
    yield on(mallory, "write", "group/cut", f"{mallory}:3;")
    yield on(0, "create", "group/root", 0o4775, "0:new;")
    yield on(mallory, "append", "group/root", f"{mallory}:4;")


def _append_with_the_mode_of_the_last_open(
    alice: int, mallory: int, tree: dict[str, Entry]
) -> Steps:
    for name, mode in (("sticky/shared", 0o660), ("sticky/closed", 0o600)):
        tree[name] = file(alice, SHARED, 0o644, f"{alice}:{name};")
        yield at(alice, "chmod", name, 0o666)
        yield on(alice, "append", name, f"{alice}:{name} 1;")
        # The mount has the mode of the open still. Whether the bytes may come to the source is
        # decided there.
        yield at(alice, "chmod", name, mode)
        yield on(mallory, "append", name, f"{mallory}:{name};")


def _rename_brings_a_removed_program_back(
    alice: int, mallory: int, tree: dict[str, Entry]
) -> Steps:
    tree["open/source"] = file(alice, alice, 0o4775, f"{alice}:source;")
    yield on(alice, "create", "open/tool", 0o775, f"{alice}:tool;")
    yield on(alice, "chmod", "open/tool", 0o4775)
    yield on(0, "create", "open/root", 0o4755, "0:root;")
    yield on(0, "create", "open/over", 0o4755, "0:over;")
    yield PAUSE
    yield at(alice, "unlink", "open/tool")
    yield on(mallory, "rename", "open/tool", "open/new")
    for name in ("root", "over"):
        yield at(0, "unlink", f"open/{name}")
    yield on(mallory, "rename", "open/root", "mallory/new")
    yield on(mallory, "rename", "open/over", "mallory/tool")
    yield on(mallory, "rename", "open/source", "mallory/source")
    yield at(alice, "unlink", "open/source")


def _link_makes_a_program_of_its_user(alice: int, mallory: int, tree: dict[str, Entry]) -> Steps:
    # At the source the user may give the file no link any more. A copy would be the user's own.
    for name, mode in (("tool", 0o4755), ("closed", 0o644)):
        tree[f"group/{name}"] = file(alice, SHARED, 0o664, f"{alice}:{name};")
        yield on(mallory, "link", f"group/{name}", f"mallory/{name} too")
        yield at(alice, "chmod", f"group/{name}", mode)


def _write_opens_a_program_that_its_owner_has_closed(
    alice: int, mallory: int, tree: dict[str, Entry]
) -> Steps:
    for name, call, mode in (
        ("a", "write", 0o4777),
        ("b", "append", 0o4777),
        ("c", "write", 0o2777),
    ):
        tree[f"open/{name}"] = file(alice, alice, mode, f"{alice}:{name};")
        # The write removes the set-ID bits. That is no change of the other bits.
        yield on(mallory, call, f"open/{name}", f"{mallory}:{name};")
        yield at(alice, "chmod", f"open/{name}", 0o700)


def _file_with_a_list_is_made_anew(alice: int, mallory: int, tree: dict[str, Entry]) -> Steps:
    # The group bits of the file are the mask: the group has no right.
    own = packed(6, 0, 6, 0, {mallory: 6}, {})
    wide = packed(7, 7, 7, 7, {}, {SHARED: 7})
    tree["open/d"] = replace(directory(0, 0, 0o777), lists=(b"", wide))
    for name, mode, given in (("listed", 0o660, own), ("plain", 0o662, b"")):
        for path in (f"open/{name}", f"open/d/{name}"):
            of_alice = file(alice, alice, mode, f"{alice}:{path};")
            tree[path] = replace(of_alice, lists=(given, b""))
        yield on(mallory, "rename", f"open/{name}", f"open/d/renamed {name}")
        yield at(alice, "unlink", f"open/{name}")
        yield on(mallory, "append", f"open/d/{name}", f"{mallory}:{name};")
        yield at(alice, "unlink", f"open/d/{name}")
        yield at(alice, "create", f"open/d/{name}", 0o600, f"{alice}:new;")


def at(user: int, name: str, *arguments: Any) -> Step:
    """A call at the source."""
    return Step("source", Call(user, name, arguments))


def on(user: int, name: str, *arguments: Any) -> Step:
    """A call on the mount."""
    return Step("mount", Call(user, name, arguments))


@pytest.mark.finding("D1")
@pytest.mark.fault("U7")
@pytest.mark.promise(88)
@pytest.mark.modes("relay", "passthrough")
def test_takeovers_that_were_found_by_hand_do_not_succeed(
    monarch: MonarchCommand, tmp_path: Path
) -> None:
    monarch.expects_log(_LOGGED)
    problems = play(monarch, tmp_path, directed(), number=len(MODES))
    assert problems == [], "\n".join(problems)
