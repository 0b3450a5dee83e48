"""The process of a mount: what is checked before it, its limits, and its event loop.

The process that calls ``run`` must have no threads and no event loop yet.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import trio

from monarch.checks.preflight import check_apart, with_state_directory
from monarch.config.defaults import default_tier, state_directory, state_root
from monarch.config.settings import MountSettings
from monarch.control.registry import Registry
from monarch.control.state_directory import hold_state, write_undrained
from monarch.daemon.mount import open_mount
from monarch.daemon.snapshot_choice import log_gaps, snapshot_for
from monarch.daemon.subsystems import Parts
from monarch.daemon.write_status import LossAlarm
from monarch.errors import MonarchError, TierError, UsageError, sole_cause
from monarch.fuse import mountpoint as mountpoints
from monarch.fuse.datapath_mode import Abilities, check_possible
from monarch.namespace.overlay import NAME_BYTES
from monarch.packmount.source import open_source
from monarch.packs.directory import KEPT_INDEX, is_pack, require_complete
from monarch.peers.membership import membership
from monarch.peers.source import PeerSource
from monarch.posix import signals
from monarch.posix.credentials import keep_quotas
from monarch.posix.mounts import is_dead
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry import log as log_setup
from monarch.text import KiB, counted, format_bytes
from monarch.tiers.hierarchy import require_known
from monarch.tiers.source import close_result
from monarch.types import Progress
from monarch.writeback import lease
from monarch.writeback.earlier import require_former_tiers_drained

log = logging.getLogger(__name__)


# Time limit for syncing the tiers at the end. After it the next mount verifies the copies.
_SYNC_DEADLINE_S = 10.0
# The value that conf/monarch@.service sets.
_OOM_SCORE_ADJUST = -500
# Constants of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BLOCK_BYTES = 256 * KiB


def prepare(settings: MountSettings) -> MountSettings:
    """Checks everything that can be checked without side effects and fills in the default tier.
    Unmounts the mount of a dead daemon. Raises MonarchError."""
    if is_pack(os.fsencode(settings.source)):
        if settings.peers.members:
            raise UsageError(
                f"{os.fspath(settings.source)} is a pack, which peers.members does not share yet",
                hint="leave out peers.members, or mount the directory that was packed",
            )
        settings = _of_pack(settings)
    else:
        require_complete(os.fsencode(settings.source))
    abilities = Abilities.here()
    check_possible(settings, abilities)
    names_max = settings.writeback.names_within(abilities.memory_bytes, each=NAME_BYTES)
    chosen = {
        "limits": settings.limits.within(abilities.memory_bytes),
        "writeback": settings.writeback.model_copy(update={"names_max": names_max}),
        "tiers": settings.tiers or (default_tier(settings),),
    }
    settings = settings.model_copy(update=chosen)
    clear_dead_mount(settings.mountpoint)
    mountpoints.check(settings.mountpoint, settings.source)
    for tier in settings.tiers:
        mountpoints.check_tier(tier.path, settings.source, settings.mountpoint)
    records = Registry(state_root()).all()
    settings = with_state_directory(settings, records)
    check_apart(settings, records)
    return settings


def _of_pack(settings: MountSettings) -> MountSettings:
    """The settings of a mount of a pack: its files cannot be written, never change, and are opened
    as extents of chunks, whose modes say nothing about them."""
    return settings.model_copy(
        update={
            "write": "none",
            "absorb": (),
            "snapshot": settings.snapshot.model_copy(update={"freshness": "never"}),
            "source_identity": "daemon",
        }
    )


def clear_dead_mount(mountpoint: Path) -> None:
    """Unmounts the mount of a dead daemon."""
    if mountpoints.mount_at(mountpoint) is not None and is_dead(mountpoint):
        # Processes that have files open there continue to get errors.
        mountpoints.unmount(mountpoint, lazy=True)


def run(
    settings: MountSettings,
    *,
    refreshed: bool,
    foreground: bool,
    progress: Progress,
    ready: Callable[[list[str]], None],
) -> None:
    """Serves one mount until its end. ``ready`` is called with the remarks when it answers.

    ``refreshed``: bring an existing snapshot up to date first. Raises MonarchError.
    """
    _allow_descriptors()
    _be_spared()
    keep_quotas()
    _give_memory_back()
    state = state_directory(settings)
    with hold_state(settings, state), ExitStack() as cleanup:
        path = settings.log.file or state / "daemon.log"
        try:
            logbook = log_setup.setup(settings.log, path=path, foreground=foreground)
        except OSError as error:
            raise TierError(
                f"log file {os.fspath(path)!r}: {error.strerror}",
                hint="name a writable one with -o log.file=FILE",
            ) from error
        log.info("mounting %s at %s", settings.source, settings.mountpoint)
        try:
            threads = ThreadPool(
                settings.limits.source_concurrency, "source", abandon=True, discard=close_result
            )
            members = membership(settings.peers, os.environ)

            def close(fd: int) -> None:
                threads.start(os.close, fd)

            top = os.fsencode(settings.source)
            if members is None:
                source = open_source(top, close, state / KEPT_INDEX)
            else:
                source = PeerSource(top, close)
            cleanup.callback(source.close)
            require_known(settings.tiers, state)
            _require_written(settings, state)
            leases = lease.prepared(source) if settings.absorbs else nullcontext()
            with signals.interruptible(), leases:
                snapshot, just_built, put_off = snapshot_for(
                    settings, state, source, refreshed, progress
                )
            cleanup.callback(snapshot.close)
            log_gaps(snapshot)
            parts = Parts(
                *(settings, state, source, threads, snapshot, just_built, put_off, logbook),
                *(progress, members),
            )
            _run_loop(parts, ready)
        except MonarchError as error:
            log.error("%s", error)
            raise
        log.info("ended")


def _require_written(settings: MountSettings, state: Path) -> None:
    """Raises TierError if a tier with changes that the source lacks is missing. Reports those that
    were in memory and are lost."""
    lost = require_former_tiers_drained(settings, state)
    if lost is None:
        return
    log.error(
        "lost with the memory of tier %r: %s (%s) that the source lacks; the machine has been"
        " started since: %s%s",
        lost.tier,
        counted(lost.operations, "change", "changes"),
        format_bytes(lost.bytes),
        lost.names[0] if lost.names else "",
        ", ..." if len(lost.names) > 1 else "",
    )
    LossAlarm(state).report(map(os.fsencode, lost.names))
    try:
        write_undrained(state, None)
    except OSError as error:
        raise TierError(
            f"state directory {os.fspath(state)!r}: {error.strerror}",
            hint="check its disk: `dmesg`",
        ) from error


def _allow_descriptors() -> None:
    """Raises the soft limit of descriptors to the hard limit: each open file may need one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _be_spared() -> None:
    """Makes the kernel kill other processes first when memory is short: readers need the daemon.

    Only root may lower the score; a score set by the parent process is kept.
    """
    with suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) == 0:
            file.seek(0)
            file.write(str(_OOM_SCORE_ADJUST))


def _give_memory_back() -> None:
    """Configures malloc to return freed memory to the kernel, as far as it can.

    Thousands of files are fetched by one thread and freed by another. With an arena for each
    thread, and large blocks kept for reuse, the process would hold several times the memory in use.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda parameter, value: 0)
    mallopt(_M_ARENA_MAX, 2)
    mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _LARGE_BLOCK_BYTES)


def _run_loop(parts: Parts, ready: Callable[[list[str]], None]) -> None:
    """``trio.run``, but raises the exception itself and not an ExceptionGroup of one."""
    try:
        trio.run(_serve, parts, ready)
    except BaseException as error:
        if (cause := sole_cause(error)) is error:
            raise
        raise cause from None


async def _serve(parts: Parts, ready: Callable[[list[str]], None]) -> None:
    mount = open_mount(parts)
    clean = False
    try:
        await mount.serve(ready)
        clean = True
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _SYNC_DEADLINE_S):
            await mount.close(clean=clean)
