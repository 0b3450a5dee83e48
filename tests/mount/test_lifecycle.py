"""A mount from its first answer to its end by command, by signal or by SIGKILL."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest

from monarch.cli.mount import _unmount
from monarch.config.settings import MountSettings
from monarch.fuse.mountpoint import unmount
from tests.conftest import EVERY_MODE, MonarchCommand, Mounted, Tree, contents, mounts, processes
from tests.equipment import slowfs
from tests.equipment.processes import is_running, stop
from tests.equipment.slowfs import SlowSource
from tests.mount.command import (
    assert_nothing_is_left,
    needs_fuse,
    needs_root,
    one_line,
    registered,
    stages,
    start,
    wait_until,
)
from tests.mount.observe import account

# How reads are served has nothing to do with it, but where a test says so.
pytestmark = [needs_fuse, pytest.mark.modes("auto")]

needs_slow_source = pytest.mark.skipif(
    slowfs.unavailable() is not None, reason=slowfs.unavailable() or ""
)


def ended_cleanly(state: Path) -> bool:
    """What the records say to the next daemon: if not, it verifies each copy before its use."""
    (records,) = state.glob("residency-*")
    header = records.read_bytes()[:4096]
    return json.loads(header.rstrip(b"\0"))["clean"] is True


def ended(process: subprocess.Popen[str], timeout_s: float = 100) -> str:
    """What it wrote to stderr until its end."""
    try:
        return process.communicate(timeout=timeout_s)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


# -- the beginning -----------------------------------------------------------------------------


def test_the_command_returns_when_the_mount_answers_and_its_daemon_is_its_own(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"a/b": b"content"})
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    # The command's own output is a pipe as well: had the daemon kept it, `run` would not return.
    state, mnt, tier = (monarch.directory / name for name in ("state", "mnt", "tier"))
    mnt.mkdir()
    made = registered(monarch, mnt, source, state, {"tier": tier})
    done = subprocess.run(
        [sys.executable, "-m", "monarch", "mount", str(source), str(mnt)]
        + ["--tier", f"{tier}:1MiB", "--state", str(state)],
        env=monarch.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        pass_fds=[writing],
    )
    assert os.listdir(mnt / "a") == ["b"] and (mnt / "a/b").read_bytes() == b"content"
    assert (done.returncode, done.stdout) == (0, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"monarch: {source} is at {mnt}, tiers: tier ({tier}); ")
    made.pid = int(made.status()["pid"])
    os.close(writing)
    os.set_blocking(reading, False)  # the daemon would hold it open
    assert os.read(reading, 1) == b""
    os.close(reading)
    assert os.getsid(made.pid) == made.pid
    daemon = psutil.Process(made.pid)
    assert daemon.cwd() == "/"
    assert daemon.net_connections("inet") == []


@pytest.mark.fault("M3")
def test_in_the_foreground_it_stays_logs_to_stderr_and_ends_on_sigterm_with_0(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source, mnt, state = tree({"a": b"content"}), tmp_path / "mnt", tmp_path / "state"
    mnt.mkdir()
    registered(monarch, mnt, source, state)
    arguments = ["mount", "--foreground", str(source), str(mnt), "--state", str(state)]
    process = start(monarch, *arguments, "--tier", f"{tmp_path}/tier:1MiB")
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("monarch: "):
            break
    assert lines[-1].startswith(f"monarch: {source} is at {mnt}, tiers: tier ({tmp_path}/tier); ")
    assert any(line.endswith(" info monarch.daemon.mount: ready\n") for line in lines)
    assert (mnt / "a").read_bytes() == b"content"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output = ended(process)
    assert process.returncode == 0
    assert "ending on SIGTERM" in output and "Traceback" not in output
    assert_nothing_is_left(monarch)
    assert ended_cleanly(state)


@needs_slow_source
@pytest.mark.fault("M3")
@pytest.mark.promise(103)
def test_signals_ignored_by_nohup_end_nothing_and_sigterm_ends_the_daemon(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source, mnt, state = tree({f"{name}": 1 for name in range(400)}), tmp_path / "mnt", "state"
    mnt.mkdir()
    ignored = (signal.SIGHUP, signal.SIGINT)
    with SlowSource(source, tmp_path / "slow") as slow:
        slow.rules("lat readdir 300", "lat getattr 100")
        (tmp_path / "built").mkdir()
        command = ["snapshot", "build", str(slow.path), "-o", str(tmp_path / "built/names")]
        process = start(monarch, *command, ignored=ignored)
        wait_until(lambda: os.listdir(tmp_path / "built") != [], "the build does not begin")
        for number in (*ignored, signal.SIGTERM):
            process.send_signal(number)
        ended(process)
        assert process.returncode == 130
        assert os.listdir(tmp_path / "built") == []
    where = ["--state", str(tmp_path / state), "--tier", f"{tmp_path}/tier:1MiB"]
    registered(monarch, mnt, source, tmp_path / state)
    process = start(
        monarch, "mount", "--foreground", str(source), str(mnt), *where, ignored=ignored
    )
    wait_until(lambda: os.path.ismount(mnt), "it does not mount")
    for number in ignored:
        process.send_signal(number)
    assert len(os.listdir(mnt)) == 400 and process.poll() is None
    process.send_signal(signal.SIGTERM)
    output = ended(process)
    assert process.returncode == 0
    assert "ending on SIGTERM" in output and "SIGHUP" not in output and "SIGINT" not in output
    # A daemon does not run in the background of a shell: a signal to it is intended.
    made = registered(monarch, mnt, source, tmp_path / state)
    ended(start(monarch, "mount", str(source), str(mnt), *where, ignored=ignored))
    made.pid = int(made.status()["pid"])
    os.kill(made.pid, signal.SIGINT)
    wait_until(lambda: not psutil.pid_exists(made.pid), "the daemon still runs")
    assert ended_cleanly(tmp_path / state)


def test_without_tier_and_state_both_are_found(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"a": b"content"})
    directory = monarch.directory
    mnt, scratch = directory / "mnt", directory / "scratch"
    mnt.mkdir()
    scratch.mkdir()
    state_root = directory / "home/state/monarch"
    made = registered(monarch, mnt, source, state_root)
    done = subprocess.run(
        [sys.executable, "-m", "monarch", "mount", str(source), str(mnt)],
        env={**monarch.environment(), "MONARCH_SCRATCH": str(scratch)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    status = made.status()
    made.pid = int(status["pid"])
    (tier,) = status["tiers"]
    assert Path(tier["path"]).parent == scratch / f"monarch-{os.getuid()}"
    (made.state,) = state_root.glob("source-*")
    assert (mnt / "a").read_bytes() == b"content"


# -- interrupted while it begins ---------------------------------------------------------------


@needs_slow_source
@pytest.mark.parametrize(
    ("number", "foreground"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)],
)
@pytest.mark.finding("F5", "R")
@pytest.mark.promise(125)
@pytest.mark.fault("M3")
def test_a_signal_while_the_snapshot_is_built_leaves_nothing_and_says_so(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path, number: signal.Signals, foreground: bool
) -> None:
    tree({f"{number}/file": 1 for number in range(400)})
    mnt, state = tmp_path / "mnt", tmp_path / "state"
    mnt.mkdir()
    with SlowSource(tmp_path / "source", tmp_path / "slow") as slow:
        slow.rules("lat readdir 300", "lat getattr 100")
        where = ["--state", str(state), "--tier", f"{tmp_path}/tier:1MiB"]
        mode = ["--foreground"] if foreground else []
        process = start(monarch, "mount", str(slow.path), str(mnt), *where, *mode)
        # Not below tmp_path as a whole, where the slow source is.
        wait_until(lambda: stages(state) != [], "the build does not begin")
        process.send_signal(number)
        output = ended(process)
        assert process.returncode == 130
        assert processes("MONARCH_TEST_CASE", monarch.case) == {}
        (line,) = [
            x for x in output.splitlines() if x.startswith("monarch: interrupted: nothing is")
        ]
        scanned = (
            r"; (the scan had read [\d,]+ entr(y|ies), which are not kept|nothing was scanned yet)"
        )
        assert re.search(scanned, line), line
        assert "Traceback" not in output
    assert_nothing_is_left(monarch)
    assert not (state / "snapshot.lmdb").exists()


# -- signals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.fault("M3")
def test_a_signal_to_the_daemon_is_a_clean_end(
    monarch: MonarchCommand, tree: Tree, number: signal.Signals
) -> None:
    made = monarch.mount(tree({"a": 1000}))
    (made.path / "a").read_bytes()
    wait_until(lambda: made.xattr("a") != "source", "it is not promoted")
    os.kill(made.pid, number)
    wait_until(lambda: not psutil.pid_exists(made.pid), "the daemon still runs")
    assert_nothing_is_left(monarch)
    assert ended_cleanly(made.state)
    assert f"ending on {number.name}" in made.log_text


@needs_slow_source
@pytest.mark.modes(*EVERY_MODE)
@pytest.mark.fault("M3")
def test_sigterm_amid_readers_and_a_large_copy_ends_at_once_and_leaves_no_stage(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    size = 48 << 20
    tree({f"large/{number}": size for number in range(4)})
    with SlowSource(tmp_path / "source", tmp_path / "slow") as slow:
        slow.rules("read_MBps 20")
        made = monarch.mount(slow.path, tiers={"fast": "1GiB"})
        wrong: list[str] = []
        opened = threading.Barrier(5, timeout=100)
        readers = [
            threading.Thread(
                target=_read_on, args=(made.path / "large", str(n), size, opened, wrong)
            )
            for n in range(4)
        ]
        for reader in readers:
            reader.start()
        opened.wait()
        wait_until(lambda: made.stages() != [], "no copy is under way")
        os.kill(made.pid, signal.SIGTERM)
        wait_until(lambda: not psutil.pid_exists(made.pid), "it still runs")
        for reader in readers:
            reader.join(60)
        assert not any(reader.is_alive() for reader in readers)
        assert wrong == []
    assert_nothing_is_left(monarch)
    assert ended_cleanly(made.state)


def _read_on(
    directory: Path, name: str, size: int, opened: threading.Barrier, wrong: list[str]
) -> None:
    """Read until the mount is gone: right bytes, then an error."""
    expected = contents(f"large/{name}", size)
    try:
        with (directory / name).open("rb", buffering=0) as file:
            opened.wait()
            at = 0
            while piece := file.read(1 << 20):
                if piece != expected[at : at + len(piece)]:
                    wrong.append(f"{name} at {at}")
                at += len(piece)
            if at != size:
                wrong.append(f"{name} ends at {at}")
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENODEV):
            wrong.append(f"{name}: {error}")


# -- umount ------------------------------------------------------------------------------------


@pytest.mark.finding("B15")
@pytest.mark.promise(126)
@pytest.mark.modes(*EVERY_MODE)
@pytest.mark.fault("I2", "M3")
def test_umount_of_a_busy_mount_names_the_processes_and_does_nothing_unless_lazy(
    monarch: MonarchCommand, tree: Tree
) -> None:
    made = monarch.mount(tree({"a": b"content"}))
    with (made.path / "a").open("rb") as file:
        done = monarch("umount", str(made.path), check=False)
        line = one_line(done)
        assert (done.returncode, f"in use by pid {os.getpid()}" in line) == (10, True), line
        assert (made.path / "a").read_bytes() == b"content"
        lazy = monarch("umount", "--lazy", str(made.path))
        assert (lazy.returncode, f": pid {os.getpid()}" in lazy.stderr) == (0, True), lazy.stderr
        # One line: the mount is detached, not unmounted.
        assert lazy.stderr.count("\n") == 1 and "is unmounted" not in lazy.stderr
        assert str(made.path) not in mounts()
        assert file.read() == b"content"
        health = account(made)["health"]
        assert health["state"] == "degraded", health
        (problem,) = health["problems"]
        assert problem["kind"] == "detached"
        assert problem["what"].endswith(f"processes still use it: pid {os.getpid()}")
        assert monarch("status", "--check", str(made.path), check=False).returncode == 11
    wait_until(lambda: not psutil.pid_exists(made.pid), "the daemon still runs")
    assert_nothing_is_left(monarch)
    assert ended_cleanly(made.state)


@pytest.mark.promise(110)
def test_a_mount_has_the_name_that_links_lead_to_as_well(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = tree({"d/a": b"content"})
    real, linked, link = tmp_path / "real" / "mnt", tmp_path / "linked" / "mnt", tmp_path / "link"
    real.mkdir(parents=True)
    linked.parent.symlink_to("real")
    link.symlink_to(linked)
    names = (real, linked, link)
    for name in names:
        tier = f"{tmp_path / 'tier'}:10MiB"
        made = monarch("mount", str(source), str(name), "--tier", tier)
        assert f"{source} is at {real}," in made.stderr
        try:
            assert str(real) in mounts()
            report = [json.loads(monarch("status", str(one), "--json").stdout) for one in names]
            assert {(each["pid"], each["mountpoint"]) for each in report} == {
                (report[0]["pid"], str(real))
            }
            for one in names:
                monarch("warm", str(one / "d" / "a"), "--wait")
                evicted = json.loads(monarch("evict", str(one), str(link / "d"), "--json").stdout)
                assert evicted["files"] == 1
                assert monarch("fsck", str(one)).returncode == 0
            with (name / "d" / "a").open("rb"):
                busy = monarch("umount", str(name), check=False)
                assert (busy.returncode, f"pid {os.getpid()}" in busy.stderr) == (10, True)
        finally:
            monarch("umount", str(name))
        assert str(real) not in mounts()
        assert_nothing_is_left(monarch)


@pytest.mark.fault("I2")
def test_umount_says_so_where_there_is_no_monarch_mount(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    done = monarch("umount", str(tmp_path), check=False)
    assert (done.returncode, "is no Monarch mount" in one_line(done)) == (9, True)
    made = monarch.mount(tree({"a": 1}))
    first = monarch("umount", str(made.path))
    figures = f"its figures: monarch report {made.state}"
    assert first.stderr == f"monarch: {made.path} is unmounted; {figures}\n"
    again = monarch("umount", str(made.path), check=False)
    assert (again.returncode, "is no Monarch mount" in one_line(again)) == (9, True)


def test_umount_shows_any_mount_point_on_one_line(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source, mnt = tree({"a": 1}), tmp_path / "a\n\x1b[31m\udcff"
    mnt.mkdir()
    monarch(
        "mount", str(source), str(mnt), "--state", f"{tmp_path}/state", "--tier", f"{tmp_path}/t"
    )
    done = monarch("umount", str(mnt))
    figures = f"its figures: monarch report {tmp_path}/state"
    assert done.stderr == f"monarch: {tmp_path}/a\\n\\x1b[31m\\xff is unmounted; {figures}\n"
    assert_nothing_is_left(monarch)


@pytest.mark.parametrize("command", [["umount"], ["fusermount3", "-u"]])
def test_the_system_s_own_umount_ends_the_daemon_cleanly(
    monarch: MonarchCommand, tree: Tree, command: list[str]
) -> None:
    made = monarch.mount(tree({"a": 1}))
    (made.path / "a").read_bytes()
    subprocess.run([*command, str(made.path)], check=True)
    wait_until(lambda: not psutil.pid_exists(made.pid), "the daemon still runs")
    assert_nothing_is_left(monarch)
    assert ended_cleanly(made.state)


@pytest.mark.promise(127)
@pytest.mark.modes("relay")
@pytest.mark.parametrize("datapath", ["python", "auto"])
def test_the_end_of_a_mount_leaves_another_one_that_is_at_its_place_by_then(
    monarch: MonarchCommand, tree: Tree, datapath: str
) -> None:
    """Its daemon may get no processor for as long as an unmount and another mount take."""
    source, others = tree({"a": b"first"}), monarch.directory / "others"
    others.mkdir()
    (others / "a").write_bytes(b"second")
    first = monarch.mount(source, options=[f"datapath={datapath}"])
    stop(first.pid)
    try:
        unmount(first.path, lazy=True)
        second = monarch.mount(others, tiers={"other": "10MiB"}, state=monarch.directory / "second")
    finally:
        os.kill(first.pid, signal.SIGCONT)
    wait_until(lambda: not is_running(first.pid), "the first daemon has ended")
    assert (second.path / "a").read_bytes() == b"second"
    second.umount()
    assert str(second.path) not in mounts()


def test_a_command_that_gives_up_leaves_the_mount_of_another_daemon(
    monarch: MonarchCommand, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = monarch.mount(tree({"a": b"bytes"}))
    monkeypatch.setenv("MONARCH_STATE_ROOT", monarch.environment()["MONARCH_STATE_ROOT"])
    settings = MountSettings.model_construct(mountpoint=mounted.path)
    _unmount(settings, os.getpid())
    assert (mounted.path / "a").read_bytes() == b"bytes"
    _unmount(settings, mounted.pid)
    assert str(mounted.path) not in mounts()
    wait_until(lambda: not is_running(mounted.pid), "the daemon has ended")


def test_verbs_that_ask_a_running_mount_load_little(monarch: MonarchCommand, tree: Tree) -> None:
    """Counted in modules, not in time: each of these may take a tenth of a second."""
    made = monarch.mount(tree({"a": b"content"}))
    heavy = {"pyfuse3", "lmdb", "trio", "pydantic", "yaml", "rich", "numpy", "prometheus_client"}
    code = """
import atexit, sys
atexit.register(lambda: sys.stderr.write("\\n" + " ".join(sys.modules)))
sys.argv[0] = "monarch"
from monarch.cli.main import main
sys.exit(main())
"""
    for arguments in (
        ("status", str(made.path), "--json"),
        ("status", "--json"),
        ("status", "--check", str(made.path)),
        ("evict", str(made.path)),
        ("warm", str(made.path)),
        ("umount", str(made.path)),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=monarch.environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        loaded = set(done.stderr.splitlines()[-1].split())
        assert (done.returncode, "monarch.control.registry" in loaded) == (0, True), done.stderr
        assert loaded & heavy == set(), arguments
    assert_nothing_is_left(monarch)


# -- death -------------------------------------------------------------------------------------


@pytest.mark.modes(*EVERY_MODE)
@pytest.mark.fault("M1", "M2")
@pytest.mark.promise(12)
def test_a_killed_daemon_is_reported_at_once_and_the_next_mount_repairs_it(
    monarch: MonarchCommand, tree: Tree
) -> None:
    made = monarch.mount(tree({"a": b"content", "b": 100_000, "c": 10}))
    assert (made.path / "a").read_bytes() == b"content"
    with (made.path / "b").open("rb", buffering=0) as file:
        assert file.read() == contents("b", 100_000)
        made.kill()
        # What the kernel holds of a file that is open can still be read; nothing else can.
        assert os.pread(file.fileno(), 9, 50_000) == contents("b", 100_000)[50_000:50_009]
        for touch in (lambda: os.listdir(made.path), lambda: (made.path / "c").read_bytes()):
            with pytest.raises(OSError) as caught:
                touch()
            assert caught.value.errno == errno.ENOTCONN
        overview = monarch("status")
        (line,) = [x for x in overview.stdout.splitlines() if x.startswith(f"{made.path} ")]
        assert line.split()[-1] == "dead"
        done = monarch("status", str(made.path), check=False)
        assert (done.returncode, "is dead" in one_line(done)) == (9, True)
        assert not ended_cleanly(made.state)
        # Although a reader still holds a file of the dead mount open.
        again = monarch.mount(made.source)
        assert (again.path / "a").read_bytes() == b"content"
        assert again.pid != made.pid
    again.umount()
    assert ended_cleanly(made.state)


@pytest.mark.fault("M2")
def test_umount_cleans_up_after_a_killed_daemon(monarch: MonarchCommand, tree: Tree) -> None:
    made = monarch.mount(tree({"a": 1}))
    made.kill()
    assert monarch("umount", str(made.path)).returncode == 0
    assert_nothing_is_left(monarch)
    assert os.listdir(made.path) == []


# -- status, metrics, doctor -------------------------------------------------------------------


def test_two_mounts_live_side_by_side_and_status_shows_both(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    one = monarch.mount(tree({"sub/a": b"one"}))
    other_source = tmp_path / "other"
    (other_source / "sub").mkdir(parents=True)
    (other_source / "sub/a").write_bytes(b"two")
    two = _mount_other(monarch, other_source)
    assert (one.path / "sub/a").read_bytes() + (two.path / "sub/a").read_bytes() == b"onetwo"
    listed = json.loads(monarch("status", "--json").stdout)["mounts"]
    ours = {line["mountpoint"]: line for line in listed if line["pid"] in (one.pid, two.pid)}
    assert set(ours) == {str(one.path), str(two.path)}
    for line in ours.values():
        assert line["residency"]["files"] >= 0 and line["log"].endswith("daemon.log")
        assert (line["state"], line["trouble"]) == ("serving", "")
    # Any path inside names the mount, and needs not exist.
    inside = json.loads(monarch("status", str(two.path / "sub/none"), "--json").stdout)
    assert inside["source"] == str(other_source)
    assert inside["pid"] == two.pid
    table = monarch("status").stdout.splitlines()
    for made in (one, two):
        (row,) = [line for line in table if line.startswith(f"{made.path} ")]
        assert row.split()[1] == str(made.source) and row.split()[-1] == "ok"
    one.umount()
    assert (two.path / "sub/a").read_bytes() == b"two"


def _mount_other(monarch: MonarchCommand, source: Path) -> Mounted:
    directory = monarch.directory / "second"
    (directory / "mnt").mkdir(parents=True)
    made = registered(
        monarch, directory / "mnt", source, directory / "state", {"tier": directory / "tier"}
    )
    where = ["--state", str(made.state), "--tier", f"{directory}/tier:1MiB"]
    monarch("mount", str(source), str(made.path), *where)
    made.pid = int(made.status()["pid"])
    return made


def test_metrics_are_shown_on_this_machine_only_and_only_when_asked_for(
    monarch: MonarchCommand, tree: Tree
) -> None:
    made = monarch.mount(
        tree({"a": b"content"}),
        # Where the kernel tells no opens there is no sample of them.
        options=["open=open", "metrics.enabled", "metrics.address=localhost:0"],
    )
    (made.path / "a").read_bytes()
    listening = [c for c in psutil.Process(made.pid).net_connections("inet") if not c.raddr]
    assert {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1"}
    (port,) = {c.laddr.port for c in listening}
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=60) as page:
        text = page.read().decode()
    assert "monarch_" in text and "python_gc" not in text
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] not in ("#", ""))
    assert sum(float(v) for k, v in samples.items() if k.startswith("monarch_opens_total")) == 1
    # A page that is being fetched does not hold up the end.
    with contextlib.closing(urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=60)):
        made.umount()


@needs_root
def test_doctor_finds_this_machine_fit_and_says_why_if_not(monarch: MonarchCommand) -> None:
    done = monarch("doctor", "--json", check=False)
    answer = json.loads(done.stdout)
    failed = {check["name"] for check in answer["checks"] if check["status"] == "fail"}
    # Other people's dead mounts on this machine are no fault of the machine.
    assert failed <= {"mounts"}
    assert (done.returncode, answer["ok"]) == ((1, False) if failed else (0, True))
    assert {check["name"]: check["status"] for check in answer["checks"]}["fuse device"] == "ok"
