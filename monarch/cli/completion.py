"""``monarch completion``: prints the completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from monarch.cli.complete import KeyComplete


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
