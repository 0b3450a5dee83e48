"""``monarch plan``: the cores and tiers for jobs that share servers."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import click

from monarch.analysis.allocation import POLICIES, Grant, Source, bound
from monarch.analysis.allocation import allocate as allocate_jobs
from monarch.analysis.profile import model_of, result_of
from monarch.analysis.sensitivity import (
    Job,
    Sensitivity,
    job_of,
    modelled,
    require_version,
    sensitivity_of,
)
from monarch.cli.daemon_call import JSON
from monarch.cli.json_files import read_json
from monarch.cli.options import FILE, Capacity, aligned, bandwidth, counts_of
from monarch.cli.output import progress_bar, remark, show
from monarch.cli.plan_apply import apply
from monarch.cli.plan_file import VERSION, GrantReport, PlanReport, whole_limit
from monarch.cli.plan_nodes import nodes, read_nodes
from monarch.cli.plan_profile import profile
from monarch.cli.profile_file import read_profile
from monarch.cli.recorded import read
from monarch.cli.sensitivity_file import (
    GPUS,
    OUTPUT,
    TIERS,
    rate_text,
    write_matrix,
)
from monarch.cli.written_files import replace_whole
from monarch.errors import UsageError
from monarch.text import counted, escape_text, format_bytes

_MOST_JOBS = 10_000
_MAKES_JOBS = "monarch plan profile"


def _rates(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[int, float]:
    measured: dict[int, float] = {}
    for value in values:
        cores, _, number = value.partition(":")
        try:
            count, files = int(cores), float(number)
        except ValueError:
            count, files = 0, 0.0
        if not 1 <= count < 1 << 20 or not 0 < files < 1e15 or count in measured:
            what = f"{value!r} is not CORES:RATE, such as 6:790, once for each number of cores"
            raise click.BadParameter(what, context, parameter)
        measured[count] = files
    return measured


@click.group()
def plan() -> None:
    """Divide the cores and tiers of nodes among jobs.

    A job with few GPUs may need many cores, and another one none of its share. `profile` measures
    for one job how its rate depends on both, and `sensitivity` computes it from measurements that
    exist. `nodes` asks Slurm for the nodes, `allocate` divides them among such jobs, and `apply`
    carries the plan out: Slurm gives a job its cores; the capacity of its tier is an option of its
    mount, or a quota of a mount that jobs share (docs/planning.md).
    """


plan.add_command(apply)
plan.add_command(nodes)
plan.add_command(profile)


@plan.command()
@click.argument("job", metavar="JOB")
@click.option(
    "--profile",
    type=FILE,
    metavar="FILE",
    help="A profile of the job (monarch analyze run).",
)
@click.option(
    "--cores",
    callback=counts_of,
    metavar="LIST",
    help="The numbers of cores to compute from the profile, like 1,2,4. Default: up to those that"
    " the profile has.",
)
@click.option(
    "--data",
    type=FILE,
    metavar="FILE",
    help="Without a profile: a snapshot of the data set, or a trace.",
)
@click.option(
    "--rate",
    "measured",
    multiple=True,
    callback=_rates,
    metavar="CORES:RATE",
    help="Without a profile: the files a second that the job uses with this number of cores,"
    " measured in an epoch in which all files were in the tier. Repeat it.",
)
@bandwidth(
    "--source-bandwidth",
    "source",
    help="Bytes that the source gives this job in a second, like 500MB. Default with a profile: as"
    " when it was measured.",
)
@TIERS
@GPUS
@OUTPUT
@JSON
def sensitivity(
    job: str,
    profile: Path | None,
    cores: list[int],
    data: Path | None,
    measured: dict[int, float],
    source: float | None,
    tiers: list[Capacity],
    gpus: int,
    output: Path,
    as_json: bool,
) -> None:
    """Write how the rate of JOB depends on its cores and on the size of its tier.

    With a profile all rates follow from the model of the job that the profile has. Without one,
    only the rates for the numbers of cores are measured, with all files in the tier. Those for
    smaller tiers follow: the files that do not fit come from the source in each epoch.

    \b
    Examples:
      monarch plan sensitivity resnet18 --profile profile.json --cores 3,6,12 -o resnet18.json
      monarch plan sensitivity resnet18 --data imagenet.snapshot --rate 3:410 --rate 6:790 \\
          --rate 12:980 --source-bandwidth 100MB -o resnet18.json
    """
    if profile is not None and data is None and not measured:
        unit = "batches"
        found = _from_profile(profile, job, gpus, cores=cores, source=source, tiers=tiers)
    elif profile is None and data is not None and measured and source is not None and not cores:
        unit = "files"
        with progress_bar(quiet=as_json) as progress:
            files = read(data, progress).files
        found = sensitivity_of(
            job,
            gpus,
            measured,
            files=len(files),
            total=files.bytes,
            source=source,
            tiers=[tier.of(files.bytes) for tier in tiers],
        )
    else:
        raise UsageError("either --profile is needed, or --data, --rate and --source-bandwidth")
    try:
        job_of(found)
    except ValueError as error:
        raise UsageError(f"{escape_text(job)}: {error}") from error
    write_matrix(found, output, unit, as_json)


def _from_profile(
    file: Path,
    job: str,
    gpus: int,
    *,
    cores: list[int],
    source: float | None,
    tiers: list[Capacity],
) -> Sensitivity:
    name, profile = escape_text(os.fspath(file)), read_profile(file)
    total = result_of(profile).epoch_bytes
    model, _ = model_of(profile)
    if model is None:
        raise UsageError(
            f"{name} has no model: all runs read the same share of the files from the tiers",
            hint="copy the files into the tiers first (monarch warm), and measure again",
        )
    if source is not None:
        if not model.source_bytes_s:
            raise UsageError(
                f"{name}: the job did not read faster from the tiers than from the source",
                hint="leave out --source-bandwidth",
            )
        model = model.with_source(source)
    powers = [1 << power for power in range(profile.cores.bit_length())]
    return modelled(
        job,
        gpus,
        model,
        total=total,
        cores=cores or [*powers, profile.cores],
        tiers=[tier.of(int(total)) for tier in tiers],
    )


@plan.command()
@click.argument("nodes", type=FILE, metavar="NODES")
@click.argument(
    "jobs",
    nargs=-1,
    required=True,
    type=FILE,
    metavar="JOB...",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    default="tune",
    show_default=True,
    help="How to divide: fair (in proportion to the GPUs), greedy (the full demand of each, while"
    " there is room), or tune (the demand, but no job less than its fair share).",
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    metavar="FILE",
    help="Write the plan into this JSON file, for `monarch plan apply`.",
)
@JSON
def allocate(
    nodes: Path, jobs: tuple[Path, ...], policy: str, output: Path | None, as_json: bool
) -> None:
    """Divide the cores and tiers of NODES among jobs.

    NODES is a YAML file with the nodes; `monarch plan nodes` writes it where there is Slurm. JOB is
    a file of `monarch plan profile` or `sensitivity`; the first ones have priority if there are too
    few GPUs. Shown are for each job its cores, tier and rate, the flags of sbatch and the options
    of its mount. `bound` is an upper limit of the mean speed-up.

    \b
    Example of NODES:
      source: 5GB            # bytes that the source gives all jobs in a second; may be left out
      nodes:
        - {names: "n[01-04]", gpus: 8, cores: 24, tier: 500GB}

    \b
    Examples:
      monarch plan allocate nodes.yaml resnet18.json bert.json -o plan.json
      monarch plan allocate nodes.yaml jobs/*.json --policy fair --json
    """
    budget, servers = read_nodes(nodes)
    if len(jobs) > _MOST_JOBS:
        raise UsageError(f"{len(jobs):,} jobs are more than {_MOST_JOBS:,}")
    read_jobs = [_read_job(path) for path in jobs]
    names = Counter(job.name for job in read_jobs)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise UsageError(f"two files have the job {escape_text(twice[0])}")
    try:
        source = None if budget is None else Source.of(budget, read_jobs, servers)
        found = allocate_jobs(policy, read_jobs, servers, source)
        limit = bound([grant.job for grant in found.grants], servers, source)
    except ValueError as error:
        raise UsageError(escape_text(str(error))) from error
    reports = [_report(grant) for grant in found.grants]
    count = max(1, len(reports))
    report = PlanReport(
        VERSION,
        policy,
        len(servers),
        sum(server.gpus for server in servers),
        reports,
        found.waiting,
        sum(each.speedup for each in reports) / count,
        limit / count,
    )
    if output is not None:
        replace_whole(output, json.dumps(report.to_dict(), indent=2) + "\n")
    show(report, as_json, *_lines(report))
    if found.waiting:
        waiting = ", ".join(map(escape_text, found.waiting))
        remark(f"monarch: there is no place for {waiting}")


def _report(grant: Grant) -> GrantReport:
    job, option = grant.job, grant.option
    limit = option.source if option.source < grant.need else None
    for_each_gpu = -(-option.tier_bytes // job.gpus)
    tiers = {node: count * for_each_gpu for node, count in grant.gpus.items()}
    limited = "" if limit is None else f" -o limits.source_bandwidth={whole_limit(limit)}"
    return GrantReport(
        job=job.name,
        gpus=dict(grant.gpus),
        cores=option.cores,
        tier_bytes=tiers,
        rate=option.rate,
        fair_rate=grant.fair.rate,
        speedup=option.rate / grant.fair.rate,
        source=grant.need,
        source_limit=limit,
        sbatch=f"--gpus={job.gpus} --cpus-per-gpu={option.cores // job.gpus}"
        f" --nodes={len(grant.gpus)} --nodelist={','.join(grant.gpus)}",
        mount={node: f"--tier PATH:{tier}{limited}" for node, tier in tiers.items() if tier},
    )


def _lines(report: PlanReport) -> list[str]:
    rows = [["job", "GPUs", "cores", "tier", "rate", "fair", "speed-up", "source"]]
    flags = []
    for each in report.jobs:
        rows.append(
            [
                escape_text(each.job),
                str(sum(each.gpus.values())),
                str(each.cores),
                format_bytes(sum(each.tier_bytes.values())),
                rate_text(each.rate),
                rate_text(each.fair_rate),
                f"{each.speedup:.2f}",
                f"{format_bytes(each.source_limit or each.source)}/s",
            ]
        )
        flags.append(f"{escape_text(each.job)}: sbatch {each.sbatch}")
        flags += [f"  {node}: monarch mount ... {text}" for node, text in each.mount.items()]
    nodes = counted(report.nodes, "node", "nodes")
    return [
        f"{nodes}, {counted(report.gpus, 'GPU', 'GPUs')}; {report.policy}: mean speed-up"
        f" {report.speedup:.2f} over fair shares; bound {report.bound:.2f}",
        "",
        *aligned(rows),
        "",
        *flags,
    ]


# -- files -----------------------------------------------------------------------------------------


def _read_job(path: Path) -> Job:
    raw = read_json(path, made_by=_MAKES_JOBS)
    try:
        if not isinstance(raw, dict) or "monarch_sensitivity" not in raw:
            raise ValueError("it has no key monarch_sensitivity")
        require_version(raw["monarch_sensitivity"])
        return job_of(Sensitivity.from_dict(raw))
    except ValueError as error:
        raise UsageError(
            f"{escape_text(os.fspath(path))} is not a file of a job: {escape_text(str(error))}",
            hint=f"`{_MAKES_JOBS}` writes one",
        ) from error
