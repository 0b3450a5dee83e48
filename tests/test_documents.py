"""What the documents say can be typed, loaded and found."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

from monarch import config
from monarch.cli.main import EXIT_CODES, VERBS

ROOT = Path(__file__).parents[1]
PAGES = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")
DOCUMENTS = [
    *(ROOT / f"{page}.md" for page in PAGES),
    ROOT / "Dockerfile",
    *sorted((ROOT / "docs").glob("*.md")),
]


def commands() -> list[str]:
    """Every ``monarch ...`` of the documents: lines of code blocks and words in backquotes."""
    found = set()
    for path in DOCUMENTS:
        text = re.sub(r"\\\n#?", " ", path.read_text())
        found |= set(re.findall(r"^(?:# +)?(monarch [a-z].*)$", text, re.MULTILINE))
        found |= set(re.findall(r"`(monarch [a-z][^`\n]*)`", text))
        found |= set(re.findall(r" (monarch mount .*)$", text, re.MULTILINE))
    return sorted(found)


@pytest.mark.parametrize("text", commands())
def test_each_command_in_the_documents_can_be_typed(text: str) -> None:
    words = shlex.split(text, comments=True)[1:]
    target, _, name = VERBS[words[0]].target.partition(":")
    command: click.Command = getattr(importlib.import_module(target), name)
    arguments = words[1:]
    if isinstance(command, click.Group) and arguments:
        nested = command.get_command(click.Context(command), arguments[0])
        assert nested is not None, arguments[0]
        command, arguments = nested, arguments[1:]
    # Named in a sentence, a command may stand without its arguments.
    try:
        command.make_context(command.name, arguments)
    except click.MissingParameter:
        assert not any(word.startswith("/") for word in arguments)
    except click.UsageError:
        # A group without a verb asks for one.
        if arguments or not isinstance(command, click.Group):
            raise


@pytest.mark.finding("F8")
@pytest.mark.parametrize(
    ("verb", "others"),
    [
        ("mount", ["monarch snapshot refresh", "snapshot.freshness"]),
        ("snapshot refresh", ["monarch mount --refresh", "snapshot.freshness"]),
        ("ckpt", ["all files written", "checkpoints or not"]),
    ],
)
def test_help_tells_one_thing_from_others_of_a_similar_name(verb: str, others: list[str]) -> None:
    name, _, nested = verb.partition(" ")
    target, _, attribute = VERBS[name].target.partition(":")
    command: click.Command = getattr(importlib.import_module(target), attribute)
    if nested:
        assert isinstance(command, click.Group)
        command = command.commands[nested]
    told = " ".join(command.get_help(click.Context(command, info_name=verb)).split())
    assert [words for words in others if words not in told] == []


def test_there_are_commands_to_be_checked() -> None:
    assert len(commands()) > 15


def test_the_configuration_of_the_readme_loads(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "monarch.yaml").write_text(text)
    loaded = config.load(tmp_path / "monarch.yaml")
    settings = loaded.mounts["imagenet"]
    assert settings.allow_other
    assert [tier.name for tier in settings.tiers] == ["monarch", "nvme"]


def test_the_readme_lists_the_exit_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    listed = {int(code): meaning.replace("`", "") for code, meaning in rows}
    assert listed == EXIT_CODES


def test_each_link_leads_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"
