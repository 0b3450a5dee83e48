"""A real distributed file system as the source, whose servers stop, die and come back."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted, contents
from tests.equipment import distributed
from tests.equipment.distributed import DistributedSource
from tests.mount.observe import (
    PATIENCE_S,
    account,
    accounts_agree,
    epoch,
    read_through,
    resident,
    settled,
    wait_until,
)

SMALL_INLINE = "limits.inline_max=64KiB"
# A client looks for a server that it has lost every few seconds.
RECOVERY_S = 60.0

FIRST = {f"first/{n:02}": contents(f"f{n}", 20_000) for n in range(10)}
SECOND = {f"second/{n:02}": contents(f"s{n}", 20_000) for n in range(10)}
SECOND["second/large"] = contents("large", 1_000_000)


@pytest.fixture
def servers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DistributedSource]:
    """A source of as many servers as the parameter says. Name it before ``monarch``."""
    if reason := distributed.unavailable():
        pytest.skip(reason)
    with DistributedSource(tmp_path / "gluster", tmp_path / "pfs", bricks=request.param) as source:
        for name, data in (FIRST | SECOND).items():
            (source.path / name).parent.mkdir(exist_ok=True)
            (source.path / name).write_bytes(data)
        yield source


def outcome(path: Path) -> bytes | int | None:
    try:
        return read_through(path)
    except OSError as error:
        return error.errno


def served(mounted: Mounted, content: dict[str, bytes]) -> bool:
    return all(outcome(mounted.path / name) == data for name, data in content.items())


def all_is_seen(mounted: Mounted) -> None:
    for directory, content in (("first", FIRST), ("second", SECOND)):
        names = sorted(f"{directory}/{name}" for name in os.listdir(mounted.path / directory))
        assert names == sorted(content)
        assert all((mounted.path / name).stat().st_size == len(content[name]) for name in names)


@pytest.mark.fault("S1", "S2")
@pytest.mark.promise(9, 10, 11)
@pytest.mark.parametrize("servers", [1], indirect=True)
def test_a_server_that_stops_and_dies_in_an_epoch_is_waited_for_and_the_epoch_ends_right(
    servers: DistributedSource, monarch: MonarchCommand
) -> None:
    monarch.expects_log("source: ")
    mounted = monarch.mount(servers.path, options=[SMALL_INLINE])
    epoch(mounted, FIRST)
    settled(mounted)

    servers.stop()
    program = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
    with ExitStack() as stack:
        waiting = {
            name: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program, str(mounted.path / name)],
                    stdout=subprocess.PIPE,
                )
            )
            for name in ("second/00", "second/large")
        }
        # Before their end is waited for, whatever goes wrong here.
        stack.callback(servers.go_on)
        for _ in range(5):
            epoch(mounted, FIRST)
        all_is_seen(mounted)
        assert mounted.status()["state"] == "serving"
        assert [reader.poll() for reader in waiting.values()] == [None, None]
        servers.go_on()
        for name, reader in waiting.items():
            assert reader.communicate(timeout=PATIENCE_S)[0] == SECOND[name]

    servers.kill()
    cold = {name: data for name, data in SECOND.items() if name not in waiting}
    wait_until(
        lambda: {outcome(mounted.path / name) for name in cold} == {errno.ENOTCONN},
        "its death is noticed",
    )
    epoch(mounted, FIRST)
    all_is_seen(mounted)
    assert account(mounted)["health"]["state"] == "failing"
    assert not resident(mounted, cold)

    servers.start()
    wait_until(lambda: served(mounted, SECOND), "it is back", timeout_s=RECOVERY_S)
    epoch(mounted, FIRST | SECOND)
    settled(mounted)
    assert set(resident(mounted, FIRST | SECOND)) == set(FIRST | SECOND)
    accounts_agree(mounted)


@pytest.mark.fault("S2")
@pytest.mark.promise(10)
@pytest.mark.modes("python", "relay", "no_open")
@pytest.mark.parametrize("servers", [2], indirect=True)
def test_a_missing_file_on_a_file_system_that_lost_a_server_is_not_taken_for_removed(
    servers: DistributedSource, monarch: MonarchCommand
) -> None:
    monarch.expects_log("source: ")
    mounted = monarch.mount(servers.path, options=[SMALL_INLINE])
    epoch(mounted, FIRST)
    settled(mounted)
    lost = set(servers.names_on(1)) & set(SECOND)
    assert 0 < len(lost) < len(SECOND)

    servers.kill(1)
    wait_until(lambda: len(os.listdir(servers.path / "second")) < len(SECOND), "names are missing")
    wait_until(lambda: not any(_is_seen(servers.path / name) for name in lost), "files are denied")
    for _ in range(3):
        epoch(mounted, FIRST)
        all_is_seen(mounted)
        for name, data in SECOND.items():
            assert outcome(mounted.path / name) in (
                (errno.EIO, errno.ENOTCONN) if name in lost else (data,)
            ), name
    servers.start(1)
    wait_until(lambda: served(mounted, SECOND), "it is back", timeout_s=RECOVERY_S)
    settled(mounted)
    assert set(resident(mounted, FIRST | SECOND)) == set(FIRST | SECOND)
    accounts_agree(mounted)


def _is_seen(path: Path) -> bool:
    """Not if it is denied; a client that has it in memory says ENOTCONN instead."""
    try:
        path.stat()
    except OSError:
        return False
    return True
