"""``monarch fsck``: checks all that a mount keeps, and repairs it with --repair."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.text import Text

from monarch.checks.fsck import check_state
from monarch.cli.daemon_call import JSON, MOUNT_OR_STATE, ask, last_state
from monarch.cli.output import emit_json, progress_bar, say, stdout
from monarch.config.defaults import state_root
from monarch.control.registry import MountRecord, Registry, alive, real_path
from monarch.errors import LockedError, NotMountedError, UsageError
from monarch.telemetry.report import Finding, FsckProgress, FsckReport
from monarch.text import counted, escape_text, format_bytes

_PROBLEMS = 1


@click.command(
    epilog="""\b
Examples:
  monarch fsck /mnt/data                       a mounted mount: its daemon checks
  monarch fsck /mnt/data --digests             the same, and reads every copy
  monarch fsck /var/lib/monarch/imagenet-1f2e3d4c --repair
  monarch fsck /mnt/data --json | jq .findings
"""
)
@MOUNT_OR_STATE
@click.option("--digests", is_flag=True, help="Read every copy and compare it with its digest.")
@click.option("--repair", is_flag=True, help="Repair what is wrong; without it nothing is changed.")
@JSON
def fsck(place: Path, digests: bool, repair: bool, as_json: bool) -> int:
    """Check everything that a mount keeps: copies, records, snapshot, directories.

    The daemon of a served mount does the check. Otherwise the state directory is checked, given by
    its path or by the mount point. --repair deletes damaged copies and records. It never changes
    the source. The exit code is 1 if something is wrong and was not repaired.
    """
    registry = Registry(state_root())
    record = _record(registry, place)
    with progress_bar(quiet=as_json, of_bytes=digests) as advance:

        def on_progress(at: FsckProgress) -> None:
            if digests:
                advance(at.bytes_done, at.bytes_total, "reading copies")
            else:
                advance(at.done, at.total, "checking copies")

        if record is not None and alive(record):
            report = ask(
                record,
                "fsck",
                {"digests": digests, "repair": repair},
                answer=FsckReport,
                # No timeout: a slow disk or a directory of many copies may take long for one step.
                timeout=None,
                on_progress=lambda raw: on_progress(FsckProgress.from_dict(raw)),
            )
        else:
            state = Path(record.state) if record is not None else last_state(place)
            try:
                report = check_state(
                    state, registry=registry, digests=digests, repair=repair, progress=on_progress
                )
            except LockedError as error:
                hint = "give the mount point to check a served mount"
                raise LockedError(str(error.args[0]), hint=hint) from error
    if as_json:
        emit_json(report)
    else:
        for finding in report.findings:
            stdout().print(_line(finding), soft_wrap=True)
        say(_summary(report))
    return _PROBLEMS if report.problems > report.repaired else 0


def _record(registry: Registry, place: Path) -> MountRecord | None:
    """The mount at or above ``place``, found by names alone: a dead mount may hang."""
    try:
        record = registry.find(place)
    except NotMountedError:
        return None
    if real_path(place, [record.mountpoint]) != record.mountpoint:
        raise UsageError(
            f"{escape_text(os.fspath(place))} is in the mount {escape_text(record.mountpoint)}",
            hint=f"fsck checks a mount as a whole: monarch fsck {escape_text(record.mountpoint)}",
        )
    return record


def _line(finding: Finding) -> Text:
    words = f"  {finding.where}: {escape_text(finding.path)}: {escape_text(finding.what)}"
    word = ("repaired", "green") if finding.repaired else ("wrong   ", "bold red")
    repair = "--repair: " if finding.mends and not finding.repaired else ""
    return Text.assemble(word, f"{words} [{finding.kind}]\n        {repair}{finding.remedy}")


def _summary(report: FsckReport) -> str:
    summary = f"{counted(report.files, 'copy', 'copies')} checked"
    if report.bytes:
        summary += f", {format_bytes(report.bytes)} read"
    if not report.problems:
        return f"{summary}: nothing is wrong"
    summary += f": {counted(report.problems, 'problem', 'problems')}"
    if unlisted := report.problems - len(report.findings):
        summary += f" ({unlisted:,} of them not listed)"
    if report.repaired == report.problems:
        return f"{summary}, all repaired"
    return f"{summary}, {report.repaired:,} repaired" if report.repaired else summary
