"""``monarch mount``: starts a daemon and returns when its mount answers."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from monarch.cli import complete
from monarch.cli.output import Scanning, progress_bar, remark
from monarch.cli.source_watch import unanswered, watched
from monarch.config import load
from monarch.config.defaults import state_directory, state_root
from monarch.config.settings import MountSettings
from monarch.control.registry import Registry, alive, real_path
from monarch.errors import ConfigError, FuseError, MonarchError, UsageError, error_of
from monarch.posix import signals
from monarch.posix.bounded_calls import wait_for_threads
from monarch.text import escape_text
from monarch.types import Progress

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
# Threads of calls that ended are gone within milliseconds; one whose call hangs is not awaited.
_THREADS_END_S = 1.0
# The time in which a daemon that does not mount heeds a signal, in seconds.
_SIGNAL_S = 5.0


@click.command(
    epilog="""\b
Examples:
  monarch mount /pfs/imagenet /mnt/data
  monarch mount /pfs/imagenet /mnt/data --tier /dev/shm/me:32GiB --tier /nvme/me:800GiB
  monarch mount imagenet                    a mount of /etc/monarch/monarch.yaml
  monarch mount -c my.yaml imagenet
  monarch mount /pfs/imagenet /mnt/data -o limits.copy_workers=8,allow_other
"""
)
@click.argument("source_or_name", metavar="SOURCE|NAME", shell_complete=complete.sources)
@click.argument("mountpoint", required=False, shell_complete=complete.directories)
@click.option(
    "-c",
    "--config",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    # Parsed before NAME, whose completion needs it.
    is_eager=True,
    shell_complete=complete.files,
    help="Take mount NAME from this file. Default: /etc/monarch/monarch.yaml, then"
    " ~/.config/monarch/monarch.yaml.",
)
@click.option(
    "--tier",
    "tiers",
    metavar="PATH[:SIZE]",
    shell_complete=complete.directories,
    multiple=True,
    help="A tier; repeat it, fastest first. Default: the largest local scratch.",
)
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    shell_complete=complete.files,
    help="The file of the snapshot; it is built, with a message, if it does not exist.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    metavar="DIR",
    shell_complete=complete.directories,
    help="Directory for persistent state: snapshot, records, log.",
)
@click.option(
    "--peers",
    metavar="MEMBERS",
    help="The other nodes of the job, which share their copies with this one: slurm, dns:NAME, or a"
    " list like node[1-4]; see docs/nodes.md.",
)
@click.option(
    "-o",
    "options",
    shell_complete=complete.options,
    metavar="KEY=VALUE,...",
    multiple=True,
    help="Any key of the configuration file, such as limits.copy_workers=8.",
)
@click.option(
    "--refresh",
    is_flag=True,
    help="Compare the whole source with the snapshot first, and bring the snapshot up to date, as"
    " `monarch snapshot refresh` does. Default: see snapshot.freshness.",
)
@click.option(
    "--foreground", is_flag=True, help="Do not detach from the terminal; log to stderr, too."
)
def mount(
    source_or_name: str,
    mountpoint: str | None,
    *,
    file: Path | None,
    tiers: Sequence[str],
    snapshot: Path | None,
    state: Path | None,
    peers: str | None,
    options: Sequence[str],
    refresh: bool,
    foreground: bool,
) -> None:
    """Show SOURCE at MOUNTPOINT, served from the tiers of this node.

    Returns when the mount answers. The first mount of a source builds a snapshot of its names.
    """
    if mountpoint is None or file is not None:
        file = file or _configuration_with(source_or_name)
        if mountpoint is not None or tiers or snapshot is not None or state is not None:
            raise UsageError(
                "with -c, the mount point, tiers, snapshot and state come from the file",
                hint="monarch mount -c FILE NAME [-o KEY=VALUE]",
            )
        settings = _settings_of_file(file, source_or_name, options, peers)
    else:
        settings = load.from_options(
            Path(source_or_name),
            Path(mountpoint),
            tiers=tiers,
            snapshot=snapshot,
            state=state,
            peers=peers,
            options=options,
        )
    # The path that the kernel's mount table will show: /data may be a link to /raid.
    real = {"mountpoint": Path(real_path(settings.mountpoint))}
    settings = settings.model_copy(update=real)
    # The daemon is imported here, so that mistakes above are reported without delay.
    with _one_blas_thread():
        from monarch.daemon import run as daemon

    was_to_absorb = bool(settings.absorbs)
    with signals.interruptible_at_once(), watched(settings.source, lambda: _give_up(settings)):
        settings = daemon.prepare(settings)
    if was_to_absorb and not settings.absorbs:
        remark(
            f"monarch: {escape_text(os.fspath(settings.source))} is a pack, which is read-only:"
            " `write` and `absorb` have no effect, and writing fails with EROFS"
        )
    if settings.snapshot.file is not None:
        _report_missing_snapshot(settings.snapshot.file)
    scanning = Scanning(settings.source)
    try:
        if foreground:
            _serve_here(settings, refresh, scanning)
            return
        with signals.interruptible():
            remarks = _start(
                settings,
                lambda progress, ready: daemon.run(
                    settings, refreshed=refresh, foreground=False, progress=progress, ready=ready
                ),
                scanning,
            )
    except KeyboardInterrupt:
        remark(f"monarch: interrupted: nothing is mounted; {scanning.interrupted()}")
        raise
    _report(settings, remarks)


def _give_up(settings: MountSettings) -> NoReturn:
    """Ends this process, whose main thread may be in a call to the source that hangs."""
    error = unanswered(settings.source)
    remark(f"monarch: {escape_text(str(error))}")
    os._exit(error.exit_code)


def _unmount(settings: MountSettings, pid: int) -> None:
    """Unmounts what the daemon ``pid`` has mounted since this process began, when nothing was
    mounted there. Another daemon may have mounted there since."""
    from monarch.fuse import mountpoint as mountpoints

    place = os.path.abspath(settings.mountpoint)
    with suppress(MonarchError):
        if mountpoints.mount_at(settings.mountpoint) is None:
            return
        records = Registry(state_root()).all()
        if not any(it.mountpoint == place and it.pid != pid and alive(it) for it in records):
            mountpoints.unmount(settings.mountpoint, lazy=True)


def _report_missing_snapshot(file: Path) -> None:
    try:
        os.lstat(file)
    except FileNotFoundError:
        path_text = escape_text(os.fspath(file))
        remark(
            f"monarch: snapshot {path_text} does not exist: it is built now, from a scan of the"
            " source"
        )
    except OSError:
        # The mount itself reports it.
        return


def _serve_here(settings: MountSettings, refresh: bool, scanning: Scanning) -> None:
    """Serves the mount in this process until the mount ends."""
    from monarch.daemon import run as daemon

    def give_up() -> NoReturn:
        _unmount(settings, os.getpid())
        _give_up(settings)

    with ExitStack() as until_ready:
        watch = watched(settings.source, give_up)
        scanning.advanced = until_ready.enter_context(watch)
        scanning.bar = until_ready.enter_context(progress_bar())

        def ready(remarks: list[str]) -> None:
            until_ready.close()
            _report(settings, remarks)
            _notify_service_manager()

        daemon.run(settings, refreshed=refresh, foreground=True, progress=scanning, ready=ready)


def _report(settings: MountSettings, remarks: Sequence[str]) -> None:
    """Reports the mount, its mode and how much of it fits; then the remarks."""
    first, *others = remarks
    tiers = ", ".join(f"{tier.name} ({tier.path})" for tier in settings.tiers)
    mounted = f"{settings.source} is at {settings.mountpoint}, tiers: {tiers}; {first}"
    for line in (mounted, *others):
        remark(f"monarch: {escape_text(line)}")


def _settings_of_file(
    file: Path, name: str, options: Sequence[str], peers: str | None
) -> MountSettings:
    mounts = load.load(file)
    if name not in mounts:
        raise ConfigError([f"{file}:1: no mount {name!r}; there are {', '.join(sorted(mounts))}"])
    return load.with_options(mounts[name], options, peers=peers)


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Lets NumPy's OpenBLAS, if it is imported here, start no threads. It would start one for each
    processor: the daemon has no use for them, and must not be forked beside them."""
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_BLAS_THREADS]
        if before is not None:
            os.environ[_BLAS_THREADS] = before


Serve = Callable[[Progress, Callable[[list[str]], None]], None]


def _start(settings: MountSettings, serve: Serve, scanning: Scanning) -> list[str]:
    """Runs ``serve`` in a daemon; returns its remarks when it is ready, or raises its error."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    wait_for_threads(_THREADS_END_S)
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _become_daemon(writing, serve)
    os.close(writing)
    gave_up = threading.Event()

    def give_up() -> None:
        gave_up.set()
        if not _end(pid):
            _unmount(settings, pid)
            _give_up(settings)

    try:
        with watched(settings.source, give_up) as scanning.advanced:
            remarks = _wait_until_ready(reading, settings, scanning)
    except KeyboardInterrupt:
        _end(pid)
        _clear_dead_mount(settings)
        raise
    except MonarchError:
        if not gave_up.is_set():
            raise
    finally:
        os.close(reading)
    if gave_up.is_set():
        # Also if the daemon got ready while it was ended.
        _clear_dead_mount(settings)
        raise unanswered(settings.source)
    return remarks


def _clear_dead_mount(settings: MountSettings) -> None:
    """Unmounts what a killed daemon may have mounted at the last moment."""
    from monarch.daemon.run import clear_dead_mount

    clear_dead_mount(settings.mountpoint)


def _end(pid: int) -> bool:
    """Ends a daemon that does not mount yet, and returns whether it has ended. It is killed if a
    call of it hangs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _SIGNAL_S
        try:
            os.kill(pid, number)
            while time.monotonic() < deadline:
                if os.waitpid(pid, os.WNOHANG) != (0, 0):
                    return True
                time.sleep(0.01)
        except (ProcessLookupError, ChildProcessError):
            return True
    return False


def _wait_until_ready(reading: int, settings: MountSettings, scanning: Scanning) -> list[str]:
    """Shows the daemon's progress, returns its remarks. The pipe has one JSON object a line."""
    with progress_bar() as scanning.bar, open(reading, "rb", closefd=False) as lines:
        for line in lines:
            raw = json.loads(line)
            if "progress" in raw:
                scanning(*raw["progress"])
            elif "error" in raw:
                raise error_of(raw["exit_code"], raw["error"], hint=raw["hint"])
            else:
                return list(raw["remarks"])
    where = settings.log.file or state_directory(settings) / "daemon.log"
    raise FuseError("the daemon died before the mount answered", hint=f"see {where}")


def _configuration_with(name: str) -> Path:
    """The first default configuration file with a mount of this name. Raises UsageError if there
    is none, and ConfigError."""
    hint = "monarch mount SOURCE MOUNTPOINT, or monarch mount -c FILE NAME"
    if "/" in name:
        raise UsageError("a mount point is missing", hint=hint)
    there = [path for path in complete.default_configurations() if path.exists()]
    for path in there:
        if name in load.load(path):
            return path
    places = there or complete.default_configurations()
    shown = " or ".join(escape_text(os.fspath(path)) for path in places)
    what = f"no mount {escape_text(name)!r} in" if there else "neither a mount point nor a file:"
    raise UsageError(f"{what} {shown}", hint=hint)


def _notify_service_manager() -> None:
    """Reports to systemd that the mount is ready, if NOTIFY_SOCKET is set (sd_notify(3))."""
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
        # NOTIFY_SOCKET writes the leading zero byte of an abstract address as @.
        manager.connect("\0" + address[1:] if address.startswith("@") else address)
        manager.sendall(b"READY=1")


def _become_daemon(writing: int, serve: Serve) -> NoReturn:
    """Runs ``serve`` in this child: in a new session, without the caller's descriptors."""
    code = 0
    try:
        signals.heed_all()
        os.setsid()
        os.chdir("/")
        os.umask(0o077)
        # A process that waits for the end of our output, such as a Slurm step, must not wait for
        # the daemon, nor must a process that waits for a lock that a script holds by a descriptor.
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd != writing:
                with suppress(OSError):
                    os.close(fd)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        pipe = _Pipe(writing)
        try:
            serve(lambda *step: pipe.send(progress=step), pipe.send_ready)
        except MonarchError as error:
            pipe.send(error=error.args[0], hint=error.hint, exit_code=error.exit_code)
            code = error.exit_code
        except KeyboardInterrupt:
            code = 130
        except BaseException as error:
            import logging

            logging.getLogger(__name__).exception("the daemon died")
            pipe.send(error=f"the daemon died: {error!r}", hint="see its log", exit_code=8)
            code = 8
    finally:
        # Not sys.exit(): the exit handlers of the interpreter belong to the parent.
        os._exit(code)


class _Pipe:
    """The pipe from the daemon to the command that started it; used until the mount is ready."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, **what: Any) -> None:
        if self._fd >= 0:
            try:
                os.write(self._fd, json.dumps(what).encode() + b"\n")
            except BrokenPipeError:
                # The command was killed; the mount continues.
                self._fd = -1

    def send_ready(self, remarks: list[str]) -> None:
        """Sends the remarks, and closes the pipe."""
        self.send(remarks=remarks)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
