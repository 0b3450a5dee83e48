"""``monarch plan apply``: flags and options of the jobs of a plan as files, and their quotas."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from monarch.cli.daemon_call import JSON, ask, mount_of
from monarch.cli.options import FILE
from monarch.cli.output import remark, show
from monarch.cli.plan_file import GrantReport, PlanReport, read_plan, whole_limit
from monarch.cli.written_files import replace_whole
from monarch.config.quotas import quota_of
from monarch.control.registry import MountRecord
from monarch.errors import UsageError
from monarch.telemetry.quota_changes import QuotaChange, QuotaChanges
from monarch.text import escape_text, format_bytes

# A name that is also the name of a file, and needs no quotes in a shell.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
# The control group of the jobs of Slurm, with its plugin cgroup/v2.
_SLURM = "/system.slice/slurmstepd.scope/job_{}"
_PATH = "PATH"

# The job of a quota, as in the configuration: {"user": NAME} or {"cgroup": PATH}.
Who = dict[str, str]


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done, or with ``dry_run`` would be: ``files`` and their content, and the changed
    quotas of ``mountpoint``. ``skipped``: jobs without GPUs on ``node``."""

    dry_run: bool
    files: dict[str, str]
    mountpoint: str | None
    node: str
    quotas: list[QuotaChange]
    skipped: list[str]


def _whos(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, Who]:
    found: dict[str, Who] = {}
    for value in values:
        job, _, who = value.partition("=")
        kind, _, name = who.partition(":")
        if not job or job in found or not name or kind not in ("user", "cgroup", "slurm"):
            what = f"{value!r} is not JOB=user:NAME, JOB=cgroup:PATH or JOB=slurm:NUMBER, once each"
            raise click.BadParameter(what, context, parameter)
        if kind == "slurm":
            if not re.fullmatch(r"[0-9]{1,10}", name):
                raise click.BadParameter(f"{name!r} is no number of a job", context, parameter)
            kind, name = "cgroup", _SLURM.format(name)
        if kind == "cgroup":
            try:
                quota_of({kind: name})
            except UsageError as error:
                raise click.BadParameter(str(error), context, parameter) from error
        found[job] = {kind: name}
    return found


@click.command(
    epilog="""\b
Examples:
  monarch plan apply plan.json -o plan/ --dry-run
  monarch plan apply plan.json -o plan/ --tier-path /nvme/monarch
  sbatch $(cat plan/resnet18.sbatch) train.sh
  monarch plan apply plan.json --mount /mnt/data --job resnet18=slurm:4711 --job bert=user:alice
"""
)
@click.argument("file", metavar="PLAN", type=FILE)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIRECTORY",
    help="Write here JOB.sbatch with the flags of sbatch of each job, JOB.NODE.mount with the"
    " options of its mount on each node, and with --job NODE.quotas.yaml with the quotas of a mount"
    " that the jobs share.",
)
@click.option(
    "--tier-path",
    default=_PATH,
    metavar="PATH",
    help="The directory of the tier in the options of mounts.  [default: the word PATH]",
)
@click.option(
    "--mount",
    "place",
    type=click.Path(path_type=Path),
    metavar="MOUNT",
    help="Set the quotas of the jobs in this mount now, until its end. It must have quotas.",
)
@click.option(
    "--job",
    "whos",
    multiple=True,
    callback=_whos,
    metavar="JOB=WHO",
    help="The processes of a job of the plan: user:NAME, cgroup:PATH, or slurm:NUMBER for a job of"
    " Slurm with control groups of version 2. Repeat it.",
)
@click.option(
    "--node",
    metavar="NAME",
    help="The node of --mount, as the plan names it. Default: the name of this one.",
)
@click.option("--dry-run", is_flag=True, help="Change nothing, and show what would be done.")
@JSON
def apply(
    file: Path,
    output: Path | None,
    tier_path: str,
    place: Path | None,
    whos: Mapping[str, Who],
    node: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Carry out PLAN, which `monarch plan allocate -o PLAN` has written.

    For jobs that have mounts of their own, -o writes the flags of sbatch and the options of the
    mounts. For jobs that share a mount, --mount and --job set their quotas in the running daemon,
    which takes them from its own user and root only. Quotas that the configuration has return at
    the next mount.
    """
    plan = read_plan(file)
    if output is None and place is None:
        raise UsageError("nothing is to be done: name a directory (-o) or a mount (--mount)")
    if re.search(r"""[\s*?'"\[\]\\$]""", tier_path):
        raise UsageError("--tier-path: a shell divides this path, or changes it")
    jobs = {each.job: each for each in plan.jobs}
    strange = sorted(whos.keys() - jobs.keys())
    if strange:
        raise UsageError(f"--job: the plan has no job {escape_text(strange[0])}")
    here = node or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    if place is not None:
        here = _node_of(plan, here, named=node is not None)
        if not whos:
            raise UsageError("--mount: name the processes of a job with --job, such as a=user:bob")
    files = {} if output is None else _files(plan, whos, tier_path)
    record = None if place is None else mount_of(place)
    skipped = [job for job in whos if here not in jobs[job].gpus] if record is not None else []
    wanted = [_quota(jobs[job], who, here) for job, who in whos.items() if job not in skipped]
    # The mount may refuse the quotas, and the disk the files: the quotas are changed last.
    changes = [] if record is None else _ask(record, wanted, dry_run=True)
    if output is not None and not dry_run:
        _write(output, files)
    if record is not None and not dry_run:
        changes = _ask(record, wanted, dry_run=False)
    mountpoint = None if record is None else record.mountpoint
    paths = {os.fspath((output or Path()) / name): text for name, text in files.items()}
    applied = Applied(dry_run, paths, mountpoint, here, changes, skipped)
    show(asdict(applied), as_json, *_lines(applied))
    for job in skipped:
        remark(f"monarch: {escape_text(job)} has no GPUs on {escape_text(here)}: no quota")


def _ask(record: MountRecord, wanted: list[dict[str, Any]], *, dry_run: bool) -> list[QuotaChange]:
    """Changes the quotas of a mount, or only asks it for the changes."""
    params = {"quotas": wanted, "dry": dry_run}
    return ask(record, "quotas", params, answer=QuotaChanges).changes if wanted else []


def _node_of(plan: PlanReport, node: str, *, named: bool) -> str:
    """The name of a node in the plan. Raises UsageError if it has no job there."""
    nodes = sorted({name for each in plan.jobs for name in each.gpus})
    own = [node] if named else [node, node.partition(".")[0]]
    # The name as it is written comes first, then one with other capital letters.
    for form in (str, str.lower):
        for name in nodes:
            if form(name) in map(form, own):
                return name
    raise UsageError(
        f"the plan has no job on {escape_text(node)}; its nodes are"
        f" {escape_text(', '.join(nodes[:5]))}{', ...' if len(nodes) > 5 else ''}",
        hint="name the node of the mount with --node",
    )


def _quota(grant: GrantReport, who: Who, node: str) -> dict[str, Any]:
    """The quota of a job on a node, as the configuration has it."""
    return {
        **who,
        "tier": grant.tier_bytes.get(node, 0),
        "source_bandwidth": whole_limit(grant.source_limit),
    }


def _files(plan: PlanReport, whos: Mapping[str, Who], tier_path: str) -> dict[str, str]:
    """The files of a plan by their names."""
    files: list[tuple[str, str]] = []
    quotas: dict[str, list[str]] = {}
    for each in plan.jobs:
        for name in (each.job, *each.gpus, *each.mount):
            if not _PLAIN.fullmatch(name):
                raise UsageError(
                    f"{escape_text(name)!r} is not the name of a file",
                    hint="name jobs with letters, digits, dots, dashes and underscores",
                )
        files.append((f"{each.job}.sbatch", f"{each.sbatch}\n"))
        for node, options in each.mount.items():
            # The first word after --tier is PATH:BYTES.
            text = options.replace(f" {_PATH}:", f" {tier_path}:", 1)
            files.append((f"{each.job}.{node}.mount", f"{text}\n"))
        for node in each.gpus if each.job in whos else ():
            fields = _quota(each, whos[each.job], node)
            text = ", ".join(f"{key}: {_yaml(value)}" for key, value in fields.items())
            quotas.setdefault(node, []).append(f"  - {{{text}}}\n")
    for node, lines in quotas.items():
        files.append((f"{node}.quotas.yaml", "quotas:\n" + "".join(lines)))
    found = dict(files)
    if len(found) < len(files):
        # As those of the job a on b.c, and of the job a.b on c.
        raise UsageError("two files of this plan would have the same name", hint="rename a job")
    return found


def _write(directory: Path, files: Mapping[str, str]) -> None:
    """Writes the files into a directory, which is made if it is missing. Raises OSError; of
    directories that were made no empty one stays."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            replace_whole(directory / name, text)
    except OSError:
        with suppress(OSError):
            for each in missing:
                each.rmdir()
        raise


def _yaml(value: object) -> str:
    """An integer, or a string in quotes: without them ``no`` and ``null`` are other values."""
    if isinstance(value, int):
        return str(value)
    text = str(value).replace("'", "''")
    return f"'{text}'"


def _lines(applied: Applied) -> list[str]:
    does, sets = ("would write", "would set") if applied.dry_run else ("wrote", "set")
    lines = []
    for path, text in applied.files.items():
        shown = [f"  {escape_text(line)}" for line in text.splitlines()]
        lines += [f"{does} {escape_text(path)}:", *shown]
    where = escape_text(applied.mountpoint or "")
    for each in applied.quotas:
        before = "no quota" if each.is_new else _limits(each.tier_before, each.source_limit_before)
        now = _limits(each.tier, each.source_limit)
        lines.append(f"{sets} in {where}, {escape_text(each.job)}: {now} (before: {before})")
        if each.tier is not None and each.charged > each.tier:
            charged = format_bytes(each.charged)
            lines.append(f"  its copies of {charged} stay; it gets no more until some have left")
    return lines


def _limits(tier: int | None, source: int) -> str:
    copies = "any copies" if tier is None else f"copies of {format_bytes(tier)}"
    return f"{copies}, source {format_bytes(source)}/s" if source else f"{copies}, any source"
