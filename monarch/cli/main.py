"""The command ``monarch``: finds the verb, and turns errors into a message and an exit code."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from monarch import __version__
from monarch.errors import ConfigError, MonarchError, UsageError
from monarch.text import escape_text


class Verb(NamedTuple):
    target: str
    help: str


# The help is repeated here so that `monarch --help` and completion need not import the verbs: that
# takes half a second on a node whose Python is on the parallel file system.
VERBS = {
    "mount": Verb("monarch.cli.mount:mount", "Mount a directory through the tiers of this node."),
    "umount": Verb("monarch.cli.umount:umount", "Unmount, and end its daemon."),
    "status": Verb("monarch.cli.status:status", "Show what mounts hold, serve and copy."),
    "warm": Verb("monarch.cli.warm:warm", "Copy files into the tiers before a job starts."),
    "trace": Verb("monarch.cli.trace:trace", "Record the opens of a mount in a file."),
    "analyze": Verb("monarch.cli.analyze:analyze", "Measure where a training job waits."),
    "report": Verb("monarch.cli.report:report", "Write a page about a mount and its epochs."),
    "evict": Verb("monarch.cli.evict:evict", "Remove copies from the tiers."),
    "ckpt": Verb("monarch.cli.ckpt:ckpt", "List, await, verify or prune all files written."),
    "fsck": Verb("monarch.cli.fsck:fsck", "Check all that a mount keeps, and repair it."),
    "snapshot": Verb("monarch.cli.snapshot:snapshot", "Build, show, verify or diff snapshots."),
    "pack": Verb("monarch.cli.pack:pack", "Put small files into large chunks; check and unpack."),
    "lmdb": Verb("monarch.cli.lmdb:lmdb", "Make the index of an LMDB file, or show the file."),
    "simulate": Verb("monarch.cli.simulate:simulate", "Compute hits and traffic before a job."),
    "plan": Verb("monarch.cli.plan:plan", "Divide cores and tiers of nodes among jobs."),
    "doctor": Verb("monarch.cli.doctor:doctor", "Check whether this node can mount, and how well."),
    "completion": Verb(
        "monarch.cli.complete:completion", "Print the completion script of a shell."
    ),
}

# The verbs that run a command: its arguments stand behind `--`, and may be empty.
_RUN_COMMANDS = {("analyze", "run"), ("plan", "profile")}

EXIT_CODES = {
    0: "success",
    1: "the answer is no (snapshot verify, diff, fsck, ckpt verify, pack verify, lmdb index"
    " --verify), or a failure without a code of its own",
    2: "mistake on the command line or in the configuration",
    3: "the mount point cannot be used",
    4: "the source failed, or differs from the snapshot",
    5: "the snapshot cannot be used",
    6: "a tier or the state directory cannot be used",
    7: "another daemon uses the tier or the state",
    8: "the kernel or fusermount3 refused the mount, or the daemon died",
    9: "no Monarch daemon answers there",
    10: "files are open; nothing was done",
    11: "degraded, says status --check: all is served, but something is wrong",
    12: "failing, says status --check: some reads or writes fail or wait now",
    13: "not all written files are at the source yet (umount, ckpt wait); nothing was undone",
    14: "the pack cannot be used, or cannot be written",
    15: "no verdict: the measured runs differ too much, or are not comparable (analyze, plan"
    " profile)",
    130: "interrupted from the keyboard",
}


class _Verbs(click.Group):
    """A group that imports a verb when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        module, _, name = verb.target.partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command), f"{verb.target} is a command"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            near = difflib.get_close_matches(name, VERBS, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(VERBS)}"
            raise click.UsageError(f"no such command {name!r}; {advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        verbs = [
            CompletionItem(name, help=verb.help)
            for name, verb in VERBS.items()
            if name.startswith(incomplete)
        ]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)


@click.group(
    cls=_Verbs,
    name="monarch",
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="monarch", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve training data of a parallel file system from the tiers of this node."""


def main() -> int:
    """Runs the command line of this process. Returns its exit code."""
    _open_standard_streams()
    code = _run()
    try:
        sys.stdout.flush()
    except OSError as error:
        # The flush of Python at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # The reader of a pipe may close it.
        if not isinstance(error, BrokenPipeError):
            if code == 0:
                _print_error(f"standard output: {error.strerror}")
            return code or 1
    return code


def _open_standard_streams() -> None:
    """Opens /dev/null for each standard stream that the caller has closed. Otherwise a file that is
    opened later has the number of the stream, and a child or a daemon gets another file as it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free descriptor is that of the stream.
            fd = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode))


def _own_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments behind the verb, without those of a command that the verb runs."""
    if tuple(arguments[:2]) in _RUN_COMMANDS and "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    return arguments[1:]


def _require_no_empty_argument(arguments: Sequence[str]) -> None:
    """Raises UsageError for an empty argument: as a path it would be the current directory."""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        option, equals, value = argument.partition("=")
        is_option = argument.startswith("--") and equals
        if argument == "" or (is_option and value == ""):
            named = option if is_option else before
            place = f"{named}: " if named.startswith("-") else ""
            hint = "check for a variable that is not set"
            raise UsageError(f"{place}the value is empty", hint=hint)


def _run() -> int:
    try:
        _require_no_empty_argument(_own_arguments(sys.argv[1:]))
        result = cli.main(prog_name="monarch", standalone_mode=False)
    except ConfigError as error:
        _print_error(*error.problems)
        return error.exit_code
    except MonarchError as error:
        _print_error(str(error))
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        # A group without a verb, such as `monarch ckpt`: its help is the message.
        error.show()
        return error.exit_code
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        command = context.command_path if context is not None else "monarch"
        message = error.format_message().rstrip(".").replace("\n", " ")
        _print_error(f"{message[:1].lower()}{message[1:]} (see '{command} --help')")
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader of the output closed the pipe.
        return 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        _print_error(f"{place}{error.strerror or error}")
        return 1
    # The result is the exit code of the verb or of `ctx.exit`, or None.
    return result if isinstance(result, int) else 0


def _print_error(*lines: str) -> None:
    for line in lines:
        click.echo(f"monarch: {escape_text(line)}", err=True)
