"""Written files as ``ckpt`` and ``status`` show them, and as ``umount`` waits for them."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from monarch.cli import checkpoints, written_files
from monarch.cli.main import main
from monarch.frameworks import store
from monarch.frameworks.checkpoint import Checkpointer
from monarch.writeback.journal import Journal
from tests.conftest import MonarchCommand, Mounted, Tree, contents, mounts
from tests.equipment import disks, slowfs
from tests.equipment.processes import stop
from tests.equipment.slowfs import SlowSource
from tests.mount.command import needs_fuse, needs_root, start, wait_until
from tests.mount.observe import account, ended, objects_in

# How reads are served has nothing to do with it.
pytestmark = [needs_fuse, pytest.mark.modes("auto")]

WRITES = ("absorb=ckpt/**", "snapshot.freshness=never")
REFUSES = ("err create ENOSPC /ckpt/", "err write ENOSPC .")


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    out: str
    err: str


Run = Callable[..., Answer]


@pytest.fixture
def run(
    monarch: MonarchCommand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """``monarch VERB ...`` in this process, which takes a tenth of the time."""
    for name in ("MONARCH_STATE_ROOT", "COLUMNS"):
        monkeypatch.setenv(name, monarch.environment()[name])

    def call(*arguments: str | Path) -> Answer:
        monkeypatch.setattr("sys.argv", ["monarch", *map(str, arguments)])
        capsys.readouterr()
        code = main()
        output = capsys.readouterr()
        return Answer(code, output.out, output.err)

    return call


@dataclass(frozen=True, slots=True)
class WritableMount:
    """What a person can ask about one mount."""

    run: Run
    mounted: Mounted

    def ckpt(self, verb: str, *arguments: str, code: int = 0) -> Any:
        """The answer in JSON."""
        report = self.run("ckpt", verb, self.mounted.path, *arguments, "--json")
        assert report.code == code, report
        return json.loads(report.out)

    def files(self, *arguments: str) -> dict[str, dict[str, Any]]:
        return {row["path"]: row for row in self.ckpt("ls", *arguments)["files"]}

    def status(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.run("status", self.mounted.path, "--json").out)
        return report

    def alarm(self) -> list[str]:
        return [problem["kind"] for problem in self.status()["health"]["problems"]]


Absorb = Callable[[Path], WritableMount]


@pytest.fixture
def absorb(monarch: MonarchCommand, run: Run) -> Absorb:
    """Mounts a source so that ``ckpt`` there can be written; again, if it was before."""

    def make(source: Path) -> WritableMount:
        (source / "ckpt").mkdir(exist_ok=True)
        return WritableMount(run, monarch.mount(source, tiers={"fast": "64MiB"}, options=WRITES))

    return make


@pytest.fixture
def refusing(
    slow: SlowSource, monarch: MonarchCommand, absorb: Absorb
) -> Iterator[tuple[WritableMount, SlowSource]]:
    """A mount whose source takes nothing, and a file of 3,000 bytes that waits for it."""
    monarch.expects_log("the source refuses content")
    mount = absorb(slow.path)
    slow.rules(*REFUSES)
    (mount.mounted.path / "ckpt/a").write_bytes(contents("a", 3000))
    refused = "the source refuses content"
    wait_until(lambda: refused in mount.mounted.log_text, "nothing is refused")
    yield mount, slow
    slow.rules()


def test_wait_comes_back_when_what_was_closed_is_at_the_source(absorb: Absorb, tree: Tree) -> None:
    source = tree({"data": 10, "ckpt/old": 10})
    mount = absorb(source)
    for number in range(20):
        (mount.mounted.path / f"ckpt/{number}").write_bytes(contents(str(number), 100_000))
    report = mount.ckpt("wait")
    assert {n: (source / f"ckpt/{n}").read_bytes() for n in range(20)} == {
        n: contents(str(n), 100_000) for n in range(20)
    }
    assert (report["drained"], report["files"], report["trouble"]) == (True, 0, "")
    listed = mount.files()
    assert {row["durable"] for row in listed.values()} == {"source"}
    assert listed.keys() == {f"ckpt/{n}" for n in range(20)}
    # A path may be named in either way.
    assert mount.files("ckpt/7").keys() == {"ckpt/7"}
    shown = mount.run("ckpt", "ls", mount.mounted.path / "ckpt/7").out
    assert "97.7 KiB" in shown and "ckpt/8" not in shown
    missing = mount.run("ckpt", "wait", mount.mounted.path, "none")
    assert missing.code == 2 and "no such file in the mount" in missing.err
    assert mount.run("ckpt", "lost", mount.mounted.path).out == "nothing is lost\n"


def test_a_file_that_is_open_and_written_without_a_pause_does_not_delay_waiting_processes(
    absorb: Absorb, source: Path
) -> None:
    mount = absorb(source)
    ended = threading.Event()

    def log_lines() -> None:
        with open(mount.mounted.path / "ckpt/log", "ab", buffering=0) as file:
            while not ended.wait(0.005):
                file.write(b"line\n")

    writer = threading.Thread(target=log_lines)
    writer.start()
    try:
        (mount.mounted.path / "ckpt/a").write_bytes(b"content")
        mount.ckpt("wait", "--timeout", "30s")
        assert (source / "ckpt/a").read_bytes() == b"content"
    finally:
        ended.set()
        writer.join()


def test_checkpoints_are_listed_verified_and_thinned_out_by_their_manifest(
    absorb: Absorb, source: Path
) -> None:
    mount = absorb(source)
    at = mount.mounted.path
    names = []
    with Checkpointer(at / "ckpt/run", keep_last=9) as checkpointer:
        for step in range(4):
            checkpointer.step = step
            saved = checkpointer.save({"weights": np.arange(1000) + step})
            names.append(f"ckpt/run/{saved.name}")
    (at / "ckpt/notes").write_bytes(b"plain")
    mount.ckpt("wait", "--newest")
    assert all((source / name).exists() for name in names)
    listed = mount.files()
    # Not what the checkpointer keeps beside them.
    assert listed.keys() == {*names, "ckpt/notes"}
    newest = listed[names[3]]
    assert (newest["complete"], newest["step"], newest["durable"]) == (True, 3, "source")
    assert listed["ckpt/notes"]["complete"] is None
    mount.ckpt("wait")

    report = mount.ckpt("verify")
    assert {row["verdict"] for row in report["files"]} == {"same"} and len(report["files"]) == 5
    # Another program changes one at the source, and removes one.
    with (source / names[1]).open("r+b") as file:
        file.seek(5000)
        file.write(b"?")
    (source / "ckpt/notes").unlink()
    report = mount.ckpt("verify", code=1)
    wrong = {r["path"]: r["verdict"] for r in report["files"] if r["verdict"] != "same"}
    assert wrong == {names[1]: "different", "ckpt/notes": "missing"}

    # The newest in the mount is not what was saved: it is none of those that count.
    with (at / names[3]).open("r+b") as file:
        file.seek(5000)
        file.write(b"?")
    report = mount.ckpt("verify", "ckpt/run", code=1)
    assert {r["path"]: r["verdict"] for r in report["files"]}[names[3]] == "damaged"
    report = mount.ckpt("gc", "--keep-last", "1", "--durable", "local", "--dry-run")
    assert [row["path"] for row in report["files"]] == names[:2] and not report["removed"]
    assert len(list((at / "ckpt/run").glob("*.ckpt"))) == 4
    mount.mounted.cli.expects_log("was changed there by others, and stays")
    mount.ckpt("gc", "--keep-last", "1", "--durable", "local")
    assert sorted((at / "ckpt/run").glob("*.ckpt")) == [at / name for name in names[2:]]
    mount.ckpt("wait")
    # What was changed at the source is not removed there.
    assert [(source / name).exists() for name in names] == [False, True, True, True]


def saved(directory: Path, count: int = 3) -> dict[str, bytes]:
    """A directory of checkpoints, with its files."""
    with Checkpointer(directory, keep_last=9) as checkpointer:
        for step in range(count):
            checkpointer.step = step
            checkpointer.save({"weights": np.arange(10) + step})
    return files_of(directory)


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.fault("Security")
@pytest.mark.parametrize("when", ["it is listed", "it is opened"])
def test_gc_follows_no_link_that_a_user_puts_in_place_of_a_directory_after(
    absorb: Absorb, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    mount = absorb(source)
    run, moved = mount.mounted.path / "ckpt/run", mount.mounted.path / "ckpt/moved"
    saved(run)
    victim = saved(tmp_path / "victim")
    module: Any = checkpoints if when == "it is listed" else store
    name = "written_of" if when == "it is listed" else "_read_manifest"
    call = getattr(module, name)

    def swapped(*arguments: Any) -> Any:
        found = call(*arguments)
        if not run.is_symlink():
            run.rename(moved)
            run.symlink_to(tmp_path / "victim")
        return found

    monkeypatch.setattr(module, name, swapped)
    thin = "ckpt/run", "--keep-last", "1", "--durable", "local"
    done = mount.run("ckpt", "gc", mount.mounted.path, *thin)
    assert run.is_symlink() and files_of(tmp_path / "victim") == victim
    if when == "it is listed":
        assert (done.code, f"{run} leads through a symbolic link" in done.err) == (2, True), done
    left = 3 if when == "it is listed" else 1
    assert len(list(moved.glob("*.ckpt"))) == left, done


def test_gc_thins_out_what_it_is_asked_to_and_names_the_directory_of_a_trainer(
    absorb: Absorb, source: Path
) -> None:
    mount = absorb(source)
    at = mount.mounted.path
    above = saved(at / "ckpt")
    saved(at / "ckpt/run")
    thin = "ckpt/run", "--keep-last", "1", "--durable", "local"
    assert len(mount.ckpt("gc", *thin)["files"]) == 2
    assert files_of(at / "ckpt") == above
    with Checkpointer(at / "ckpt/run"):
        refused = mount.run("ckpt", "gc", at, *thin)
    assert refused.code == 7 and f"'{at}/ckpt/run' is in use by another trainer" in refused.err


def test_a_source_that_refuses_is_reported_everywhere_and_nothing_is_given_up(
    refusing: tuple[WritableMount, SlowSource],
) -> None:
    mount, slow = refusing
    at = mount.mounted.path
    report = mount.ckpt("wait", "--timeout", "500ms", code=13)
    assert (report["drained"], report["files"], report["bytes"]) == (False, 1, 3000)
    assert "(ENOSPC)" in report["trouble"]
    line = mount.run("ckpt", "wait", at, "--timeout", "10ms").err.splitlines()[-1]
    assert "1 file, 2.93 KiB, the oldest written " in line and "(ENOSPC)" in line
    status = mount.status()
    writing = status["writing"]
    assert (writing["files"], writing["bytes"], writing["drained_files"]) == (1, 3000, 0)
    assert writing["errors"] > 0 and "(ENOSPC)" in writing["trouble"]
    assert status["health"]["state"] == "degraded" and mount.alarm() == ["drain-refused"]
    assert mount.run("status", at, "--check").code == 11
    shown = mount.run("status", at).out
    assert "1 file, 2.93 KiB not at the source yet" in shown and "it waits because: " in shown
    assert [row["verdict"] for row in mount.ckpt("verify")["files"]] == ["waiting"]
    slow.rules()
    mount.ckpt("wait", "--timeout", "30s")
    assert (slow.root / "ckpt/a").read_bytes() == contents("a", 3000)
    assert mount.alarm() == []


@pytest.mark.promise(143)
def test_a_path_is_waited_for_until_the_source_has_it_under_that_name(
    slow: SlowSource, monarch: MonarchCommand, absorb: Absorb
) -> None:
    monarch.expects_log("rename")
    mount = absorb(slow.path)
    at = mount.mounted.path / "ckpt"
    (at / "tmp-1").mkdir()
    for name in ("tmp-1/weights", "latest.tmp"):
        (at / name).write_bytes(b"1")
    mount.ckpt("wait", "--timeout", "30s")
    slow.rules("err rename EIO /ckpt/")
    (at / "tmp-1").rename(at / "step-1")
    (at / "latest.tmp").rename(at / "latest")
    (at / "empty").mkdir()
    for path in ("ckpt/step-1", "ckpt/step-1/weights", "ckpt/latest", "ckpt/empty"):
        assert not mount.ckpt("wait", path, "--timeout", "200ms", code=13)["drained"], path
    mount.ckpt("wait", "--newest", "--timeout", "200ms", code=13)
    verdicts = [row["verdict"] for row in mount.ckpt("verify")["files"]]
    assert verdicts == ["waiting", "waiting"]
    slow.rules()
    mount.ckpt("wait", "ckpt/step-1/weights", "--timeout", "30s")
    assert (slow.root / "ckpt/step-1/weights").read_bytes() == b"1"
    mount.ckpt("wait", "ckpt/latest", "--timeout", "30s")
    assert (slow.root / "ckpt/latest").read_bytes() == b"1"
    mount.ckpt("wait", "ckpt/empty", "--timeout", "30s")
    assert (slow.root / "ckpt/empty").is_dir()
    assert [row["verdict"] for row in mount.ckpt("verify")["files"]] == ["same", "same"]


def test_a_loss_is_reported_until_a_person_acknowledges_it(
    refusing: tuple[WritableMount, SlowSource], absorb: Absorb
) -> None:
    mount, slow = refusing
    mount.mounted.cli.expects_log("lost|gone|bytes")
    mount.ckpt("wait", "--timeout", "100ms", code=13)
    (held,) = objects_in(mount.mounted.tiers["fast"])
    held.unlink()
    slow.rules()
    mount.ckpt("wait", "--timeout", "30s")
    assert not (slow.root / "ckpt/a").exists()
    assert mount.alarm() == ["written-lost"]
    mount.mounted.umount()
    mount = absorb(slow.path)
    assert mount.alarm() == ["written-lost"]
    assert mount.ckpt("lost", code=1)["files"] == ["ckpt/a"]
    mount.ckpt("lost", "--acknowledge")
    assert mount.alarm() == []
    mount.mounted.umount()
    assert absorb(slow.path).alarm() == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowSource]:
    """A disk that fails by the given rules, below the tier ``fast``. Name it before ``absorb``."""
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    (tmp_path / "disk").mkdir()
    with SlowSource(tmp_path / "disk", tmp_path / "tiers" / "fast") as slowed:
        yield slowed


def test_a_tier_that_refuses_what_is_written_is_failing(
    disk: SlowSource, absorb: Absorb, source: Path
) -> None:
    mount = absorb(source)
    disk.rules("err write EIO /absorbed-[0-9a-f]+/[0-9a-f][0-9a-f]/")
    fd = os.open(mount.mounted.path / "ckpt/a", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError) as raised:
        os.write(fd, b"x") and os.fsync(fd)
    os.close(fd)
    assert raised.value.errno == errno.EIO
    (problem,) = mount.status()["health"]["problems"]
    assert problem["kind"] == "writes-refused"
    assert problem["what"] == "writes are refused: Input/output error (EIO)"
    assert mount.run("status", mount.mounted.path, "--check").code == 12
    disk.rules()
    (mount.mounted.path / "ckpt/b").write_bytes(b"content")
    mount.ckpt("wait", "--timeout", "30s")
    assert (source / "ckpt/b").read_bytes() == b"content"


def asks(pid: int) -> bool:
    """Whether a command has a connection to a daemon."""
    with suppress(FileNotFoundError):
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        return any(link.startswith("socket:") for link in links)
    return False


# -- umount ----------------------------------------------------------------------------------------


@pytest.mark.promise(72)
def test_umount_drains_first_and_what_is_written_meanwhile_as_well(
    slow: SlowSource, monarch: MonarchCommand, absorb: Absorb
) -> None:
    at = absorb(slow.path).mounted.path
    slow.rules("lat fsync 400 .")
    (at / "ckpt/first").write_bytes(contents("first", 200_000))
    ending = start(monarch, "umount", str(at))
    wait_until(lambda: slow.counters()["fsync"] > 0, "nothing is drained")
    (at / "ckpt/second").write_bytes(contents("second", 200_000))
    _, output = ending.communicate(timeout=100)
    assert ending.returncode == 0, output
    assert f"{at} is unmounted" in output and "stay in" not in output
    assert (slow.root / "ckpt/first").read_bytes() == contents("first", 200_000)
    assert (slow.root / "ckpt/second").read_bytes() == contents("second", 200_000)


@pytest.mark.promise(72)
def test_umount_refuses_to_forget_what_is_not_drained_unless_it_is_abandoned(
    refusing: tuple[WritableMount, SlowSource], absorb: Absorb
) -> None:
    mount, slow = refusing
    at = mount.mounted.path
    refused = mount.run("umount", at, "--timeout", "500ms")
    assert refused.code == 13
    line = refused.err.splitlines()[-1]
    assert "stays mounted: after 0.5 s, 1 file, 2.93 KiB, the oldest written" in line
    assert "(ENOSPC)" in line and "--abandon" in line
    assert (at / "ckpt/a").read_bytes() == contents("a", 3000)

    interrupted = start(mount.mounted.cli, "umount", str(at))
    wait_until(lambda: asks(interrupted.pid), "it does not ask its daemon")
    interrupted.send_signal(signal.SIGINT)
    _, output = interrupted.communicate(timeout=100)
    assert interrupted.returncode == 130 and "stays mounted and continues to drain" in output
    assert (at / "ckpt/a").read_bytes() == contents("a", 3000)

    left = mount.run("umount", at, "--abandon").err.splitlines()
    (directory,) = mount.mounted.tiers["fast"].glob("monarch/absorbed-*")
    assert left == [
        f"monarch: {at} is unmounted; its figures: monarch report {mount.mounted.state}",
        f"monarch: 1 file, 2.93 KiB, not at the source yet, stays in {directory}: mount again to"
        " continue draining",
    ]
    assert not (slow.root / "ckpt/a").exists()
    slow.rules()
    absorb(slow.path).ckpt("wait", "--timeout", "30s")
    assert (slow.root / "ckpt/a").read_bytes() == contents("a", 3000)


@pytest.mark.promise(72)
def test_a_daemon_that_waits_for_the_source_at_its_end_is_shown_and_can_be_ended(
    slow: SlowSource, absorb: Absorb
) -> None:
    mount = absorb(slow.path)
    at, pid = mount.mounted.path, mount.mounted.pid
    slow.rules("hang * .")
    (at / "ckpt/a").write_bytes(contents("a", 3000))
    # The kernel sends a release after the close.
    wait_until(lambda: not account(mount.mounted)["handles"]["open_files"], "the file is closed")
    os.kill(pid, signal.SIGTERM)
    said = "not at the source yet: 1 file, 2.93 KiB; the end waits for the source"
    wait_until(lambda: said in mount.mounted.log_text, "it does not report what it waits for")
    status = mount.status()
    assert status["state"] == "stopping" and status["writing"]["files"] == 1
    # Nothing is served any more: that is no fault of the tiers, the source or the mount.
    assert set(mount.alarm()) <= {"drain-refused"}
    impatient = mount.run("umount", at, "--timeout", "100ms")
    assert impatient.code == 13 and "its daemon continues to drain" in impatient.err
    assert not ended(pid)
    left = mount.run("umount", at, "--abandon")
    assert left.code == 0 and "1 file, 2.93 KiB, not at the source yet, stays in" in left.err
    assert ended(pid)
    slow.rules()
    absorb(slow.path).ckpt("wait", "--timeout", "30s")
    assert (slow.root / "ckpt/a").read_bytes() == contents("a", 3000)


@pytest.mark.finding("W3")
@pytest.mark.promise(136)
def test_files_that_were_never_fsynced_survive_a_reboot_after_a_clean_end(
    refusing: tuple[WritableMount, SlowSource],
) -> None:
    mount, _ = refusing
    # The drain does not even read it.
    (mount.mounted.path / "ckpt/b").write_bytes(b"never fsynced")
    (mount.mounted.path / "ckpt/empty").touch()
    assert mount.run("umount", mount.mounted.path, "--abandon").code == 0
    (directory,) = mount.mounted.tiers["fast"].glob("monarch/absorbed-*")
    source = os.fsencode(mount.mounted.source)
    with closing(Journal.open(directory, source=source, boot="another")) as journal:
        assert journal.replay().lost == ()


def of_another_start(journal: Path) -> None:
    """As if the machine had started again since the journal was written."""
    lines = []
    for line in journal.read_bytes().splitlines():
        record = json.loads(line[17:])
        if "boot" in record:
            content = b'{"boot":"another"}'
            line = xxhash.xxh3_64_hexdigest(content).encode() + b" " + content
        lines.append(line)
    journal.write_bytes(b"".join(line + b"\n" for line in lines))


@pytest.mark.finding("W3")
@pytest.mark.promise(137)
def test_a_file_that_a_power_cut_may_have_damaged_can_be_recovered_or_given_up(
    monarch: MonarchCommand, run: Run, slow: SlowSource, tmp_path: Path
) -> None:
    monarch.expects_log(
        "was never synced, and the machine or the tier's file system has stopped since"
    )
    refused = "the source refuses content"
    monarch.expects_log(refused)
    (slow.path / "ckpt").mkdir()
    tiers, options = {"fast": "64MiB"}, (*WRITES, "writeback.commit=0")
    mount = WritableMount(run, monarch.mount(slow.path, tiers=tiers, options=options))
    slow.rules(*REFUSES)
    (mount.mounted.path / "ckpt/first").write_bytes(b"tried")
    wait_until(lambda: refused in mount.mounted.log_text, "nothing is tried")
    assert mount.alarm() == ["drain-refused"]
    for name in ("a", "b"):
        (mount.mounted.path / "ckpt" / name).write_bytes(contents(name, 9 << 20))
    mount.mounted.kill()
    (directory,) = mount.mounted.tiers["fast"].glob("monarch/absorbed-*")
    of_another_start(directory / "journal")
    slow.rules()
    mount = WritableMount(run, monarch.mount(slow.path, tiers=tiers, options=options))
    assert mount.alarm() == ["written-lost"]
    report = mount.ckpt("lost", code=1)
    assert report["files"] == [kept["path"] for kept in report["kept"]] == ["ckpt/a", "ckpt/b"]
    assert mount.status()["writing"]["held"] >= 18 << 20
    assert not (mount.mounted.path / "ckpt/a").exists()

    at = mount.mounted.path
    to = tmp_path / "recovered"
    assert run("ckpt", "lost", at, "--recover", "ckpt/a", "--to", to).code == 1
    assert to.read_bytes() == contents("a", 9 << 20)
    again = run("ckpt", "lost", at, "--recover", "ckpt/a", "--to", to)
    assert again.code == 2 and "File exists" in again.err
    unknown = run("ckpt", "lost", at, "--discard", "ckpt/c")
    assert unknown.code == 2 and "nothing is kept of ckpt/c" in unknown.err
    left = mount.ckpt("lost", "--discard", "ckpt/a", "--acknowledge")["kept"]
    assert [kept["path"] for kept in left] == ["ckpt/b"]
    assert "ckpt/b  9 MiB, written" in run("ckpt", "lost", at).out
    assert mount.ckpt("lost", "--discard-all")["kept"] == []
    assert not list((directory / "doubtful").iterdir())


@pytest.mark.modes("relay")
@pytest.mark.promise(137)
def test_each_of_thousands_of_damaged_files_is_listed_and_can_be_recovered_or_given_up(
    absorb: Absorb, source: Path, tmp_path: Path
) -> None:
    mount = absorb(source)
    (mount.mounted.path / "ckpt/a").write_bytes(b"a")
    mount.mounted.umount()
    (directory,) = mount.mounted.tiers["fast"].glob("monarch/absorbed-*")
    kept = directory / "doubtful"
    names = [f"ckpt/{'long' * 50}-{number}" for number in range(5000)]
    keep(kept, {name: b"%d" % number for number, name in enumerate(names, 1000)})
    mount = absorb(source)
    assert [each["path"] for each in mount.ckpt("lost")["kept"]] == names
    to = tmp_path / "recovered"
    mount.run("ckpt", "lost", mount.mounted.path, "--recover", names[-1], "--to", to)
    assert to.read_bytes() == b"5999"
    assert mount.ckpt("lost", "--discard", names[-2])["kept"][-2:][0]["path"] == names[-3]
    assert mount.ckpt("lost", "--discard-all")["kept"] == []
    assert not list(kept.iterdir())


@pytest.mark.modes("relay")
@pytest.mark.promise(137)
def test_the_number_of_a_kept_file_is_not_taken_for_the_path_of_another(
    absorb: Absorb, source: Path, tmp_path: Path
) -> None:
    mount = absorb(source)
    (mount.mounted.path / "ckpt/a").write_bytes(b"a")
    mount.mounted.umount()
    (directory,) = mount.mounted.tiers["fast"].glob("monarch/absorbed-*")
    # Their numbers are 1000 to 1002. The name of the last one is not known.
    keep(directory / "doubtful", {"1001": b"path", "ckpt/b": b"number", "": b"no name"})
    mount = absorb(source)
    at, to = mount.mounted.path, tmp_path / "recovered"
    for name in ("1001", ".", at):
        for arguments in (["--discard", name], ["--recover", name, "--to", to]):
            assert mount.run("ckpt", "lost", at, *arguments).code == 2
    assert "is the path of one kept file and the number of another" in (
        mount.run("ckpt", "lost", at, "--discard", "1001").err
    )
    assert not to.exists()
    kept = mount.ckpt("lost")["kept"]
    assert [each["path"] for each in kept] == ["1001", "ckpt/b", ""]
    for name, left in (("./1001", ["ckpt/b", ""]), ("1001", [""]), ("1002", [])):
        kept = mount.ckpt("lost", "--discard", name)["kept"]
        assert [each["path"] for each in kept] == left


def keep(directory: Path, files: Mapping[str, bytes]) -> None:
    """Bytes that a power cut may have damaged, as the mount after it has kept them."""
    directory.mkdir(mode=0o700)
    for number, (name, content) in enumerate(files.items(), 1000):
        (directory / f"{number}.bytes").write_bytes(content)
        note = {"path": name, "size": len(content), "written_ns": 1, "found_ns": number}
        (directory / f"{number}.json").write_text(json.dumps(note))


@pytest.mark.promise(137)
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        pytest.param(None, 0, "3 MiB of ckpt/a are in", id="none"),
        pytest.param(None, 2, "No space left", id="full", marks=needs_root),
        pytest.param(OSError(errno.EIO, "damaged"), 2, "to/a is not made: damaged", id="damaged"),
        pytest.param(KeyboardInterrupt(), 130, "nothing was written to", id="interrupted"),
    ],
)
def test_a_file_that_is_not_recovered_whole_is_not_there(
    absorb: Absorb,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException | None,
    code: int,
    words: str,
) -> None:
    mount = absorb(source)
    (mount.mounted.path / "ckpt/a").write_bytes(b"a")
    mount.mounted.umount()
    (directory,) = mount.mounted.tiers["fast"].glob("monarch/absorbed-*")
    keep(directory / "doubtful", {"ckpt/a": contents("a", 3 << 20)})
    mount = absorb(source)
    if fault is not None:
        copy_data = written_files.copy_data

        def broken(from_fd: int, to_fd: int, size: int) -> int:
            copy_data(from_fd, to_fd, size // 2)
            raise fault

        monkeypatch.setattr(written_files, "copy_data", broken)
    with disks.in_memory(tmp_path / "to", 1) if code == 2 and fault is None else nullcontext():
        to = tmp_path / "to/a"
        to.parent.mkdir(exist_ok=True)
        done = mount.run("ckpt", "lost", mount.mounted.path, "--recover", "ckpt/a", "--to", to)
        made = list(to.parent.iterdir())
    said = " ".join((done.out + done.err).split())
    assert (done.code, words in said, said.count("monarch: ")) == (code, True, code > 0), done
    assert made == ([] if code else [to])
    assert code or stat.S_IMODE(to.stat().st_mode) == 0o600


def test_umount_of_a_dead_mount_says_what_waits_for_the_next(
    refusing: tuple[WritableMount, SlowSource], absorb: Absorb
) -> None:
    mount, slow = refusing
    mount.ckpt("wait", "--timeout", "10ms", code=13)
    mount.mounted.kill()
    report = mount.run("umount", mount.mounted.path)
    assert "1 file, 2.93 KiB, not at the source yet, stays in " in report.err
    assert str(mount.mounted.path) not in mounts()
    slow.rules()
    absorb(slow.path).ckpt("wait", "--timeout", "30s")
    assert (slow.root / "ckpt/a").read_bytes() == contents("a", 3000)


def test_a_busy_mount_is_refused_and_after_a_lazy_unmount_all_is_drained_at_the_last_close(
    absorb: Absorb, source: Path
) -> None:
    mount = absorb(source)
    with open(mount.mounted.path / "ckpt/a", "wb") as file:
        file.write(b"before")
        file.flush()
        # All is drained that can be, and it is in use all the same.
        busy = mount.run("umount", mount.mounted.path)
        assert busy.code == 10 and f"by pid {os.getpid()}" in busy.err
        assert mount.run("umount", "--lazy", mount.mounted.path).code == 0
        file.write(b" and after")
    pid = Path(f"/proc/{mount.mounted.pid}")
    wait_until(lambda: not pid.exists(), "the daemon has not ended")
    assert (source / "ckpt/a").read_bytes() == b"before and after"


# With "open: none" the process that sets the watches for opens may still wait for the stopped
# daemon, and the mount is busy.
@pytest.mark.modes("relay")
def test_a_mount_that_is_read_only_is_asked_for_nothing(
    monarch: MonarchCommand, tree: Tree, run: Run
) -> None:
    mount = WritableMount(run, monarch.mount(tree({"a": 10})))
    assert mount.status()["writing"] is None
    assert mount.files() == {}
    assert mount.ckpt("wait")["drained"]
    # Not even for an answer: its daemon is stopped.
    stop(mount.mounted.pid)
    ending = start(monarch, "umount", str(mount.mounted.path))
    try:
        wait_until(
            lambda: str(mount.mounted.path) not in mounts(), "it is not unmounted", timeout_s=100
        )
    finally:
        os.kill(mount.mounted.pid, signal.SIGCONT)
    ending.communicate(timeout=100)
    assert ending.returncode == 0


@pytest.mark.fault("S16")
@pytest.mark.promise(99)
@pytest.mark.finding("B2")
@pytest.mark.modes("auto")
def test_files_written_before_are_read_by_a_mount_that_absorbs_nothing(
    monarch: MonarchCommand, tree: Tree, run: Run
) -> None:
    monarch.expects_log("not drained at the end: .* kept in tier fast")
    source = tree({f"{number}.jpg": 10_000 for number in range(120)})
    tiers, slowly = {"fast": "64MiB"}, "writeback.bandwidth=100KB"
    written = monarch.mount(source, tiers=tiers, options=["absorb=ckpt/**", slowly])
    (written.path / "ckpt").mkdir()
    content = {"ckpt/a": contents("a", 20_000_000), "ckpt/b": contents("b", 30_000)}
    for name, data in content.items():
        with (written.path / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def all_is_read(mounted: Mounted) -> None:
        for name, data in content.items():
            assert (mounted.path / name).read_bytes() == data
            assert os.stat(mounted.path / name).st_size == len(data)
        assert (mounted.path / "1.jpg").read_bytes() == contents("1.jpg", 10_000)

    written.kill()
    again = monarch.mount(source, tiers=tiers, options=[slowly])
    assert again.status()["mode"]["open"] == "open"
    all_is_read(again)
    assert again.xattr("ckpt/a", "user.monarch.durable") == "local"
    again.umount("--abandon")

    where = ["--state", str(again.state), "--tier", f"{again.tiers['fast']}:64MiB"]
    refused = monarch(
        *("mount", str(source), str(again.path), *where, "-o", "open=none"), check=False
    )
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "open: none is not possible" in refused.stderr
    monarch.expects_log("open: none is not possible")

    last = monarch.mount(source, tiers=tiers)
    all_is_read(last)
    wait_until(lambda: last.xattr("ckpt/a", "user.monarch.durable") == "source", "it is drained")
    all_is_read(last)
    assert run("ckpt", "verify", last.path).code == 0
    last.umount()
    # All that was written is in the snapshot by now.
    monarch.mount(source, tiers=tiers, arguments=["--refresh"]).umount()
    without = monarch.mount(source, tiers=tiers)
    assert without.status()["mode"]["open"] == "none"
    all_is_read(without)


@pytest.mark.promise(147)
def test_a_refused_change_is_set_aside_retried_and_given_up(absorb: Absorb, tree: Tree) -> None:
    source = tree({"data": 10})
    mount = absorb(source)
    mount.mounted.cli.expects_log("the source refuses|set aside|draining to the source continues")
    at = mount.mounted.path / "ckpt"
    for name in ("x", "y"):
        (source / "ckpt" / name).write_bytes(b"theirs")
        (at / name).mkdir()
        (at / name / "file").write_bytes(b"beneath")
    (at / "weights").write_bytes(b"weights")
    wait_until(lambda: mount.alarm() == ["drain-refused"], "nothing is refused")
    assert "ckpt/x: mkdir: File exists (EEXIST) (holds up its user" in (
        mount.run("ckpt", "set-aside", mount.mounted.path).out
    )
    mount.ckpt("set-aside", "ckpt/x", code=1)
    wait_until(
        lambda: "ckpt/y: mkdir" in mount.run("ckpt", "set-aside", mount.mounted.path).out,
        "the drain does not come to the second directory",
    )
    mount.ckpt("set-aside", os.fspath(at / "y"), code=1)
    mount.ckpt("wait", "ckpt/weights", "--timeout", "30s")
    report = mount.status()
    assert mount.alarm() == ["written-set-aside"]
    assert "2 changes are set aside" in report["health"]["why"]
    assert report["writing"]["aside"] == ["ckpt/x", "ckpt/y"]
    assert report["writing"]["aside_operations"] >= 4
    # The next mount knows it.
    mount.run("umount", mount.mounted.path, "--abandon")
    mount = absorb(source)
    wait_until(lambda: mount.alarm() == ["written-set-aside"], "it is forgotten")
    assert mount.ckpt("retry", "ckpt/x", code=1)["refused"][0]["path"] == "ckpt/x"
    (source / "ckpt/x").unlink()
    # The drain may be faster than the command, as the second time. The source refuses y still.
    for _ in range(2):
        taken = mount.run("ckpt", "retry", mount.mounted.path, "ckpt/x")
        assert (taken.code, taken.out) == (0, "the source refuses nothing at ckpt/x\n")
    whole = mount.run("ckpt", "discard", mount.mounted.path, ".")
    assert whole.code == 2 and "no path is named" in whole.err
    at = mount.mounted.path / "ckpt"
    assert (at / "y/file").read_bytes() == b"beneath"
    assert "removed on the mount: ckpt/y\n" in (
        mount.run("ckpt", "discard", mount.mounted.path, "ckpt/y").out
    )
    mount.ckpt("wait", "--timeout", "30s")
    assert mount.alarm() == []
    assert not (at / "y/file").exists() and "y" not in os.listdir(at)
    assert (source / "ckpt/x/file").read_bytes() == b"beneath"
    assert (source / "ckpt/y").read_bytes() == b"theirs"
