"""What the shell may complete: file names, running mounts, names of a configuration, settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem

# Nothing here may fail or wait for long: a user has pressed the tab key.


def directories(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


def files(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def mount_points(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The mounts of this user, or directories if none begins so."""
    from monarch.places import state_root
    from monarch.registry import Registry

    if incomplete.startswith(("/", "~")) or not incomplete:
        found = [record.mountpoint for record in Registry(state_root()).all()]
        if items := _beginning(incomplete, found):
            return items
    return directories(context, parameter, incomplete)


def sources(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The mounts of a configuration, with -c of that file alone, or directories."""
    file = context.params.get("file")
    names = _names([Path(file)] if file else default_configurations())
    items = _beginning(incomplete, names)
    return items or ([] if file else directories(context, parameter, incomplete))


def options(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The keys of -o, the last one of several."""
    from monarch.config import option_keys

    before, comma, last = incomplete.rpartition(",")
    keys = (key if is_flag else f"{key}=" for key, is_flag in option_keys().items())
    return _beginning(f"{before}{comma}{last}", (f"{before}{comma}{key}" for key in keys))


def default_configurations() -> list[Path]:
    """The files that are searched for a mount when no configuration is named, in this order."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [Path("/etc/monarch/monarch.yaml"), Path(home) / "monarch" / "monarch.yaml"]


def _names(candidates: Sequence[Path]) -> list[str]:
    from monarch import config
    from monarch.errors import ConfigError

    names: list[str] = []
    for path in candidates:
        try:
            names += config.load(path).mounts
        except ConfigError:
            continue
    return names


def _beginning(incomplete: str, found: Iterable[str]) -> list[CompletionItem]:
    # A line or a blank in a name would be several answers.
    plain = (text for text in found if text.isprintable() and " " not in text)
    return [CompletionItem(text) for text in plain if text.startswith(incomplete)]


class KeyComplete(BashComplete):
    """As click's, but no blank is put behind a key that is to have a value."""

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)",
        'COMPREPLY+=("$value"); [[ $value == *= ]] && compopt -o nospace',
    )
