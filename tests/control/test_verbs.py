"""`monarch status`, `warm` and `evict` with a real socket, and with dead daemons."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import trio

from monarch.cli import evict, status, warm
from monarch.cli.daemon_call import last_state, mount_of
from monarch.control import registry
from monarch.control.registry import MountRecord, Registry, process_started
from monarch.control.server import Send, Server, Verb
from monarch.errors import MonarchError, NotMountedError, SnapshotError, UsageError
from monarch.posix.mounts import MONARCH_TYPE, MountedFileSystem
from monarch.telemetry.health import health_of
from monarch.telemetry.report import (
    EvictReport,
    Handles,
    Mode,
    Residency,
    Saved,
    SourceTotals,
    Traffic,
    WarmProgress,
    WarmReport,
)
from tests.reports import a_problem, a_report


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of a user on a node that has no other mounts, though this machine may have some."""
    monkeypatch.setattr(registry, "mount_table", lambda: [])
    monkeypatch.setenv("MONARCH_STATE_ROOT", str(tmp_path))
    return tmp_path


def a_record(state: Path, mountpoint: str = "/mnt/data", *, pid: int | None = None) -> MountRecord:
    daemon = os.getpid() if pid is None else pid
    return MountRecord(
        mountpoint=mountpoint,
        source="/pfs/imagenet",
        pid=daemon,
        pid_started=process_started(daemon) or 0,
        socket=str(state / "control.sock"),
        state=str(state),
        log=str(state / "daemon.log"),
        started_ns=time.time_ns(),
    )


class Daemon:
    """The verbs of a daemon with a fixed answer; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.report = a_report(started_ns=time.time_ns())
        self.warmed = WarmReport(files=100, bytes=1 << 20, refused=10)

    async def status(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        return self.report.to_dict()

    async def warm(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        self.asked.append(params)
        if params["wait"]:
            for done in (0, 50, 90):
                await send(WarmProgress(done, 100, done * 1000, 100_000, 0).to_dict())
        return self.warmed.to_dict()

    async def evict(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        self.asked.append(params)
        return EvictReport(3, 3 << 20).to_dict()

    def verbs(self) -> dict[str, Verb]:
        return {"status": self.status, "warm": self.warm, "evict": self.evict}


@asynccontextmanager
async def serving(state: Path, verbs: dict[str, Verb]) -> AsyncIterator[None]:
    Registry(state).add(a_record(state))
    async with trio.open_nursery() as nursery:
        await nursery.start(Server(state / "control.sock", verbs).serve)
        yield
        nursery.cancel_scope.cancel()


async def run(command: click.Command, *args: str) -> int:
    def invoke() -> int:
        result = command.main(list(args), prog_name=command.name, standalone_mode=False)
        return result if isinstance(result, int) else 0

    return await trio.to_thread.run_sync(invoke)


async def test_the_overview_shows_what_a_mount_holds(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(state, Daemon().verbs()):
        assert await run(status.status) == 0
    shown = capsys.readouterr().out
    for words in ("/mnt/data", "/pfs/imagenet", "1,000", "40%", "21.4%", "4 running, 40 queued"):
        assert words in shown
    assert "/mnt/data: tier nvme is out of service: Input/output error" in shown


async def test_the_details_show_tiers_epochs_errors_and_the_log(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(state, Daemon().verbs()):
        assert await run(status.status, "/mnt/data/train") == 0
    shown = capsys.readouterr().out
    for words in (
        "out: Input/output error",
        "75%",
        "tier:nvme:EIO",
        str(state / "daemon.log"),
        "relay (the data set, 150 MiB, does not fit into the tiers)",
        "≤ 50 us",
        "> 10 s",
        "100 opens and 9 MiB by copies",
        "at least 300 opens, 60 MiB not served by the source",
    ):
        assert words in shown


async def test_one_of_a_kind_is_shown_in_the_singular(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon()
    one, copied = Traffic(1, 1, 9000), Traffic(0, 0, 0)
    daemon.report = dataclasses.replace(
        daemon.report,
        snapshot=dataclasses.replace(
            daemon.report.snapshot, entries=1, files=1, bytes=9000, checks=1
        ),
        source_totals=SourceTotals(1, 1, 9000, one, copied),
        residency=Residency(0, 0, 1, 0.0, 0.0),
        warming=[WarmProgress(0, 1, 0, 9000, 0)],
    )
    async with serving(state, daemon.verbs()):
        await run(status.status, "/mnt/data")
    details = capsys.readouterr().out
    for words in (
        "0 of 1 file, 0 B of 8.79 KiB; 1 wanted",
        "0 of 1 file, 0 B of 8.79 KiB, 0 did not fit or failed",
        "1 open and 8.79 KiB by readers, 0 opens and 0 B by copies",
        "1 file, 8.79 KiB, 1 entry;",
        "1 check)",
    ):
        assert words in details


@pytest.mark.promise(42)
@pytest.mark.finding("B4")
async def test_values_that_are_not_counted_are_shown_as_not_counted(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon()
    report = daemon.report
    latency = dataclasses.replace(report.latency, open=None)
    tiers = [dataclasses.replace(tier, opens=None) for tier in report.tiers]
    daemon.report = dataclasses.replace(
        report,
        mode=Mode("relay", "none", "small files"),
        tiers=tiers,
        epochs=None,
        opens=None,
        opens_not_counted="the kernel has lost reports of opens",
        hit_ratio=None,
        saved=Saved(None, 9000),
        latency=latency,
        handles=Handles(None, 0),
    )
    async with serving(state, daemon.verbs()):
        await run(status.status, "/mnt/data")
        details = capsys.readouterr().out
        await run(status.status)
        overview = capsys.readouterr().out
    assert "opens and hits not counted (the kernel serves them; the kernel has lost" in details
    assert "1,500 reads, 200 MiB answered by the daemon" in details
    assert "at least 8.79 KiB not served by the source" in details
    assert "epoch  " not in details
    assert "not counted" in overview and "%" in overview
    assert "0% hits" not in details


@pytest.mark.finding("R")
@pytest.mark.promise(113)
async def test_json_of_a_mount_is_its_report_however_it_is_asked_for(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon()
    async with serving(state, daemon.verbs()):
        await run(status.status, "/mnt/data", "--json")
        mount = json.loads(capsys.readouterr().out)
        await run(status.status, "--json")
        assert json.loads(capsys.readouterr().out) == {"mounts": [mount]}
        await run(status.status, "--check", "--json")
        assert json.loads(capsys.readouterr().out) == {"mounts": [mount]}
    assert mount["log"] == str(state / "daemon.log")
    assert {**mount, **daemon.report.to_dict()} == mount


async def test_a_hostile_name_cannot_speak_to_the_terminal(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon()
    name = os.fsdecode(b"/pfs/\x1b[31m[bold]\xff\n")
    health = health_of([a_problem(what=name)])
    daemon.report = dataclasses.replace(daemon.report, source=name, health=health)
    async with serving(state, daemon.verbs()):
        await run(status.status)
        await run(status.status, "/mnt/data")
    assert capsys.readouterr().out.count("/pfs/\\x1b[31m[bold]\\xff\\n") == 4


async def test_dead_daemons_are_shown_with_what_to_do(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    Registry(state).add(a_record(state, pid=child.pid))
    assert await run(status.status) == 0
    assert "`monarch umount /mnt/data` to forget it" in capsys.readouterr().out
    with pytest.raises(NotMountedError, match="is dead"):
        await run(status.status, "/mnt/data")
    with pytest.raises(NotMountedError, match="is dead"):
        await run(warm.warm, "/mnt/data")


async def test_a_daemon_that_does_not_listen_is_shown_as_such(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Registry(state).add(a_record(state))
    assert await run(status.status) == 0
    shown = capsys.readouterr().out
    assert "not answering" in shown
    assert "no daemon listens at" in shown


async def test_a_daemon_of_another_version_is_recognized(state: Path) -> None:
    async def other(params: dict[str, Any], send: Send) -> dict[str, Any]:
        return {"version": "9"}

    async with serving(state, {"status": other, "evict": other}):
        with pytest.raises(MonarchError, match="of another version"):
            await run(status.status, "/mnt/data")
        with pytest.raises(MonarchError, match="of another version"):
            await run(evict.evict, "/mnt/data")


@pytest.mark.parametrize("command", [status.status, warm.warm])
@pytest.mark.fault("I2")
async def test_a_path_that_is_not_a_mount_is_exit_code_9(
    state: Path, command: click.Command
) -> None:
    with pytest.raises(NotMountedError, match="is not in a Monarch mount") as caught:
        await run(command, "/somewhere")
    assert caught.value.exit_code == 9


def test_a_place_in_a_mount_of_another_user_is_named_as_one(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [MountedFileSystem(Path("/mnt/of another"), MONARCH_TYPE)]
    monkeypatch.setattr(registry, "mount_table", lambda: there)
    for ask in (mount_of, last_state):
        for place in ("/mnt/of another", "/mnt/of another/train"):
            with pytest.raises(NotMountedError, match="is in a mount of another user"):
                ask(Path(place))
        with pytest.raises(NotMountedError, match=r"Monarch mount.*`monarch status` lists the"):
            ask(Path("/mnt/of"))


async def test_without_mounts_status_says_how_to_make_one(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run(status.status)
    assert "no Monarch mounts" in capsys.readouterr().out


async def test_watch_and_json_exclude_each_other(state: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        await run(status.status, "--watch", "--json")


async def test_warm_names_paths_from_the_mounts_root(state: Path) -> None:
    daemon = Daemon()
    paths = ["train", "/mnt/data/val/../val/x", "/mnt/data", os.fsdecode(b"caf\xe9")]
    async with serving(state, daemon.verbs()):
        assert await run(warm.warm, "/mnt/data", *paths) == 0
        assert await run(warm.warm, "/mnt/data") == 0
    assert daemon.asked == [
        {"paths": ["train", "val/x", "", "caf\udce9"], "wait": False},
        {"paths": [""], "wait": False},
    ]


@pytest.mark.parametrize("path", ["..", "../other", "/mnt/data2/x", "/etc", "train/../../x"])
async def test_paths_outside_the_mount_are_refused(state: Path, path: str) -> None:
    daemon = Daemon()
    async with serving(state, daemon.verbs()):
        for command in (warm.warm, evict.evict):
            with pytest.raises(UsageError, match="outside the mount /mnt/data"):
                await run(command, "/mnt/data", "train", path)
    assert daemon.asked == []


async def test_warm_waits_and_says_what_did_not_fit(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(state, Daemon().verbs()):
        assert await run(warm.warm, "/mnt/data", "--wait") == 1
    output = capsys.readouterr()
    assert "100 files, 1 MiB: 90 resident; 10 are not: the tiers are full" in output.out
    assert "warming, 90 of 100 files: 87.9 KiB of 97.7 KiB" in output.err


async def test_warm_speaks_json(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = Daemon()
    async with serving(state, daemon.verbs()):
        assert await run(warm.warm, "/mnt/data", "--json") == 0
    assert WarmReport.from_dict(json.loads(capsys.readouterr().out)) == daemon.warmed


async def test_an_error_of_the_daemon_is_the_verbs_own(state: Path) -> None:
    async def refuse(params: dict[str, Any], send: Send) -> dict[str, Any]:
        raise SnapshotError("no such entry", hint="look with ls")

    async with serving(state, {"warm": refuse}):
        with pytest.raises(SnapshotError, match="no such entry; look with ls"):
            await run(warm.warm, "/mnt/data", "--wait")


async def test_ctrl_c_ends_the_waiting_and_hangs_up(state: Path) -> None:
    waiting, hung_up = trio.Event(), trio.Event()

    async def forever(params: dict[str, Any], send: Send) -> dict[str, Any]:
        waiting.set()
        try:
            await trio.sleep_forever()
        finally:
            hung_up.set()

    code = (
        "import pathlib, sys\n"
        "from monarch.cli import daemon_call, warm\n"
        "daemon_call.state_root = lambda: pathlib.Path(sys.argv[1])\n"
        "sys.exit(warm.warm.main(['/mnt/data', '--wait'], standalone_mode=False))"
    )
    async with serving(state, {"warm": forever}):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(state)], stderr=subprocess.PIPE, text=True
        )
        with trio.fail_after(60):
            await waiting.wait()
            child.send_signal(signal.SIGINT)
            await hung_up.wait()
            _, output = await trio.to_thread.run_sync(child.communicate)
    assert child.returncode == 130
    assert "the copies continue" in output and "monarch warm /mnt/data --cancel" in output


@pytest.mark.finding("F3")
async def test_warm_takes_paths_from_a_file_in_requests_that_are_not_too_long(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon()
    names = [f"class{number}/{'x' * 100}" for number in range(3000)]
    listed = tmp_path / "listed"
    listed.write_text("\n".join(names))
    async with serving(state, daemon.verbs()):
        assert await run(warm.warm, "/mnt/data", "--files-from", str(listed), "--json") == 0
    assert [path for asked in daemon.asked for path in asked["paths"]] == names
    assert len(daemon.asked) == 3
    assert json.loads(capsys.readouterr().out)["files"] == 3 * daemon.warmed.files
    listed.write_text("\n")
    with pytest.raises(UsageError, match="--files-from names no file"):
        await run(warm.warm, "/mnt/data", "--files-from", str(listed))
    with pytest.raises(UsageError, match="--cancel stops all requests"):
        await run(warm.warm, "/mnt/data", "train", "--cancel")


async def test_evict_says_what_it_dropped_and_without_paths_means_everything(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon()
    async with serving(state, daemon.verbs()):
        assert await run(evict.evict, "/mnt/data", "train") == 0
        assert "3 copies dropped, 3 MiB freed" in capsys.readouterr().out
        assert await run(evict.evict, "/mnt/data", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"files": 3, "bytes": 3 << 20}
    assert daemon.asked == [{"paths": ["train"]}, {"paths": [""]}]
