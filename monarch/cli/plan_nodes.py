"""``monarch plan nodes``: asks Slurm for the nodes that ``monarch plan allocate`` divides."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from monarch.analysis.allocation import Server
from monarch.cli.daemon_call import JSON
from monarch.cli.options import FILE, bandwidth, parse_rate
from monarch.cli.output import remark, show
from monarch.cli.written_files import replace_whole
from monarch.config.document import read_document
from monarch.errors import ConfigError, MonarchError, UsageError
from monarch.peers.members import expand_as_written
from monarch.text import MiB, counted, escape_text, parse_bytes

# Names, CPUs, the temporary disk in MB, generic resources, state.
_FORMAT = "%N|%c|%d|%G|%t"
# A controller that does not answer is asked for ten seconds and more by default.
_ANSWER_S = 60.0
# States of nodes that run jobs or may soon, as `sinfo` abbreviates them.
_IN_SERVICE = frozenset(("idle", "mix", "alloc", "comp", "resv", "plnd"))
# After a state: powered down, not answering and so on; the node is in service all the same.
_MARKS = "*~#!%$@^-+"
# An entry of a generic resource: gpu:a100:4(S:0-1), gpu:4.
_GPUS = re.compile(r"gpu(?::[^:,()]+)?:([0-9]{1,6})(?:\([^()]*\))?")
_NUMBERED = re.compile(r"(.*?)([0-9]+)")
# CPUs and MB of a node. With several values in a group Slurm shows the least one and a plus sign.
_CORES, _DISK = re.compile(r"([1-9][0-9]{0,5})\+?"), re.compile(r"([0-9]{1,12})\+?")
# Characters of a line in a message.
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that are alike: ``names`` is a list of hosts as in Slurm, ``tier`` in bytes."""

    names: str
    gpus: int
    cores: int
    tier: int


@dataclass(frozen=True, slots=True)
class Left:
    """Nodes that are left out, and the reason."""

    names: str
    why: str


def _tier(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


@click.command(
    epilog="""\b
Examples:
  monarch plan nodes -o nodes.yaml
  monarch plan nodes --partition gpu --tier 800GB --source 5GB/s -o nodes.yaml
  monarch plan nodes --json | jq .nodes
"""
)
@click.option(
    "--partition",
    metavar="NAME",
    help="Only the nodes of this partition.",
)
@click.option(
    "--tier",
    callback=_tier,
    metavar="SIZE",
    help="The bytes for tiers on each node. Default: the temporary disk that Slurm knows"
    " (TmpDisk).",
)
@click.option(
    "--gpus",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help="The GPUs of a node for which Slurm has none. Default: such a node is left out.",
)
@bandwidth("--source", "source", help="Bytes that the source gives all jobs in a second.")
@click.option(
    "-o",
    "--output",
    type=FILE,
    metavar="FILE",
    help="Write the nodes into this YAML file. Default: print them.",
)
@JSON
def nodes(
    partition: str | None,
    tier: int | None,
    gpus: int | None,
    source: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Ask Slurm for its nodes, and write them as a file for `monarch plan allocate`.

    Nodes that are down or drained, that have no GPUs, or no disk for a tier, are left out and
    named. A job gets whole cores as Slurm counts them: with several threads in a core these are
    threads.
    """
    groups, left = groups_of(_ask_slurm(partition), tier=tier, gpus=gpus)
    for each in left:
        remark(f"monarch: {escape_text(each.names)} left out: {each.why}")
    if not groups:
        raise MonarchError("Slurm has no node that a plan could divide")
    text = yaml_of(groups, source)
    if output is not None:
        replace_whole(output, text)
        names = sum(len(expand_as_written(each.names)) for each in groups)
        remark(f"monarch: {escape_text(os.fspath(output))}: {counted(names, 'node', 'nodes')}")
    if as_json:
        shown = [asdict(each) for each in groups]
        show({"nodes": shown, "left": [asdict(each) for each in left]}, True)
    elif output is None:
        show(None, False, *text.splitlines())


def _ask_slurm(partition: str | None) -> list[str]:
    command = ["sinfo", "--noheader", f"--format={_FORMAT}"]
    if partition is not None:
        command.append(f"--partition={partition}")
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
        )
    except FileNotFoundError:
        raise MonarchError(
            "there is no Slurm here: sinfo is not found",
            hint="write the file by hand (monarch plan allocate --help)",
        ) from None
    except OSError as error:
        raise MonarchError(f"sinfo cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise MonarchError(f"sinfo has not answered for {_ANSWER_S:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise MonarchError(f"Slurm does not answer: {escape_text(said[-1])}")
    return done.stdout.splitlines()


def groups_of(
    lines: Iterable[str], *, tier: int | None, gpus: int | None
) -> tuple[list[Group], list[Left]]:
    """The nodes of the lines of ``sinfo``, and those that are left out. A node may be in several
    lines. Raises MonarchError for a line that is not one of ``sinfo``."""
    alike: dict[tuple[int, int, int], list[str]] = {}
    left: dict[str, list[str]] = {}
    seen: set[str] = set()
    for line in filter(str.strip, lines):
        names, cores, disk, given, state = _fields(line)
        number = _gpus_in(given) or gpus or 0
        size = disk * MiB if tier is None else tier
        why = ""
        if state.rstrip(_MARKS) not in _IN_SERVICE:
            why = f"its state is {state}"
        elif not number:
            why = "it has no GPUs; --gpus N counts them"
        elif not size:
            why = "Slurm knows no disk for a tier; name its size with --tier"
        for name in names:
            if name not in seen:
                seen.add(name)
                place = left.setdefault(why, []) if why else None
                (alike.setdefault((number, cores, size), []) if place is None else place).append(
                    name
                )
    groups = [Group(folded(names), *key) for key, names in alike.items()]
    return groups, [Left(folded(names), why) for why, names in left.items()]


def _fields(line: str) -> tuple[list[str], int, int, str, str]:
    try:
        names, cores, disk, given, state = line.strip().split("|")
        if (number := _CORES.fullmatch(cores)) and (size := _DISK.fullmatch(disk)):
            return expand_as_written(names), int(number[1]), int(size[1]), given, state
    except (ValueError, UsageError):
        pass
    raise MonarchError(f"sinfo printed a line that is not known: {escape_text(line[:_LONGEST])}")


def _gpus_in(given: str) -> int:
    """The GPUs in the generic resources of a node."""
    return sum(
        int(match[1])
        for entry in re.split(r",(?![^()]*\))", given)
        if (match := _GPUS.fullmatch(entry.strip()))
    )


def folded(names: Iterable[str]) -> str:
    """A list of hosts as Slurm writes it: n01, n02 and n03 are ``n[01-03]``."""
    return ",".join(_folded(sorted(set(names))))


def _folded(names: list[str]) -> Iterator[str]:
    by_form: dict[tuple[str, int], list[int]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None or len(match[2]) > 15:
            yield name
        else:
            by_form.setdefault((match[1], len(match[2])), []).append(int(match[2]))
    for (prefix, width), numbers in by_form.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][-1] + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        ends = [sorted({run[0], run[-1]}) for run in runs]
        parts = ["-".join(f"{each:0{width}}" for each in pair) for pair in ends]
        is_one = len(numbers) == 1
        yield f"{prefix}{parts[0]}" if is_one else f"{prefix}[{','.join(parts)}]"


def yaml_of(groups: Iterable[Group], source: float | None) -> str:
    """The file for ``monarch plan allocate``; ``source`` in bytes/s."""
    lines = [] if source is None else [f"source: {int(source)}"]
    lines.append("nodes:")
    for each in groups:
        lines.append(
            f'  - {{names: "{each.names}", gpus: {each.gpus}, cores: {each.cores},'
            f" tier: {each.tier}}}"
        )
    return "\n".join(lines) + "\n"


def read_nodes(path: Path) -> tuple[float | None, list[Server]]:
    """The bandwidth of the source, None if it is not limited, and the nodes. Raises OSError,
    ConfigError."""
    path.stat()
    problems: list[tuple[int, str]] = []
    top = read_document(path, problems, begin="nodes:")
    if top is not None and not problems:
        try:
            return _nodes_of(top.plain())
        except _Mistake as error:
            problems.append((top.line_of(error.loc), str(error)))
    raise ConfigError([f"{path}:{line}: {what}" for line, what in problems])


class _Mistake(ValueError):
    """A mistake in the file of the nodes, and the keys that lead to it."""

    def __init__(self, what: str, *loc: int | str) -> None:
        super().__init__(what)
        self.loc = loc


def _nodes_of(raw: Any) -> tuple[float | None, list[Server]]:
    """Raises _Mistake."""
    if not isinstance(raw, dict) or not isinstance(raw.get("nodes"), list) or not raw["nodes"]:
        raise _Mistake("there is no list 'nodes'; see monarch plan allocate --help", "nodes")
    if unknown := sorted(map(str, raw.keys() - {"nodes", "source"})):
        what = f"unknown key {unknown[0]!r}; there are nodes and source"
        raise _Mistake(what, unknown[0])
    servers: dict[str, Server] = {}
    for number, group in enumerate(raw["nodes"]):
        for server in _group_of(group, "nodes", number):
            if server.name in servers:
                raise _Mistake(f"the node {server.name} is listed twice", "nodes", number, "names")
            servers[server.name] = server
    if not servers:
        raise _Mistake("no node is named", "nodes")
    try:
        source = float(parse_rate(str(raw["source"]))) if "source" in raw else None
    except (UsageError, ValueError) as error:
        raise _Mistake(str(error), "source") from error
    if source == 0:
        raise _Mistake("source is 0; leave it out if the source has no limit", "source")
    return source, [*servers.values()]


def _group_of(group: Any, *loc: int | str) -> list[Server]:
    """The nodes of an item of the list. Raises _Mistake."""
    if not isinstance(group, dict) or group.keys() != {"names", "gpus", "cores", "tier"}:
        raise _Mistake("each of nodes has names, gpus, cores and tier", *loc)
    names = group["names"]
    if not isinstance(names, str):
        what = f"names is {names!r}; write one text in quotes, like 'n[1-4]'"
        raise _Mistake(what, *loc, "names")
    for key in ("gpus", "cores"):
        if type(group[key]) is not int or not 1 <= group[key] < 1 << 20:
            raise _Mistake(f"{key} of {names} is {group[key]!r}", *loc, key)
    key = "tier"
    try:
        tier = parse_bytes(str(group["tier"]))
        key = "names"
        expanded = expand_as_written(names)
    except (UsageError, ValueError) as error:
        raise _Mistake(str(error), *loc, key) from error
    return [Server(name, group["gpus"], group["cores"], tier) for name in expanded]
