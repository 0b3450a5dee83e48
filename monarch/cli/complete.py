"""Shell completion of file names, running mounts, names in a configuration, and settings; and
``monarch completion``, which prints its script."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, get_completion_class

# No function here may fail or wait for long: it runs when a user presses the tab key.


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
    """The mounts of this user, or directories if no mount matches."""
    from monarch.config.defaults import state_root
    from monarch.control.registry import Registry

    if incomplete.startswith(("/", "~")) or not incomplete:
        found = [record.mountpoint for record in Registry(state_root()).all()]
        if items := _beginning(incomplete, found):
            return items
    return directories(context, parameter, incomplete)


def sources(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The mounts of the configuration files (with -c, of that file only), or directories."""
    from monarch.config import load
    from monarch.errors import ConfigError

    file = context.params.get("file")
    names: list[str] = []
    for path in [Path(file)] if file else default_configurations():
        with suppress(ConfigError):
            names += load.load(path)
    items = _beginning(incomplete, names)
    return items or ([] if file else directories(context, parameter, incomplete))


def options(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The keys of -o; of several keys, the last is completed."""
    from monarch.config.load import option_keys

    before, comma, last = incomplete.rpartition(",")
    keys = (key if is_flag else f"{key}=" for key, is_flag in option_keys().items())
    return _beginning(f"{before}{comma}{last}", (f"{before}{comma}{key}" for key in keys))


def default_configurations() -> list[Path]:
    """The configuration files that are searched, in this order, if -c is not given."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [Path("/etc/monarch/monarch.yaml"), Path(home) / "monarch" / "monarch.yaml"]


def _beginning(incomplete: str, found: Iterable[str]) -> list[CompletionItem]:
    # bash would split a name with a newline or a blank into several answers.
    plain = (text for text in found if text.isprintable() and " " not in text)
    return [CompletionItem(text) for text in plain if text.startswith(incomplete)]


class KeyComplete(BashComplete):
    """The completion of click, without a blank after a key that needs a value."""

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)",
        'COMPREPLY+=("$value"); [[ $value == *= ]] && compopt -o nospace',
    )


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    For bash, put this into ~/.bashrc: eval "$(monarch completion bash)"
    """
    script = KeyComplete if shell == "bash" else get_completion_class(shell)
    assert script is not None, f"click completes for {shell}"
    root = context.find_root()
    click.echo(script(root.command, {}, "monarch", "_MONARCH_COMPLETE").source())
