"""The commands, configurations, names and sentences of the documents are right."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import click
import pytest

from monarch.cli.main import EXIT_CODES, VERBS
from monarch.config import load

ROOT = Path(__file__).parents[1]
PAGES = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")
DOCUMENTS = [
    *(ROOT / f"{page}.md" for page in PAGES),
    ROOT / "Dockerfile",
    *sorted((ROOT / "docs").glob("*.md")),
]


# A process is a process, and each sentence has a subject: phrases that hide the noun, with what to
# write instead.
FORBIDDEN = {
    r"\b(he|him|his|himself|she|her)\b": "name the process or the user",
    r"\b(nobody|somebody|anybody|whoever|whomever)\b": "name the process or the user",
    r"(?<!\buser )(?<!\busers )(?<!\bpeople )\bwhom?\b": "name the process or the user",
    r"\btold\b": "says, shows, reports, warns, or a setting",
    r"\b(it|that|this|what) is so\b": "say what is the case",
    r"\blet(s|ting)? go\b": "close, release, drop or remove",
    r"\b(did|does|do) not foresee\b|\bforesaw\b|\bunforeseen\b": "an unexpected error",
    r"\bwhat (is|was|has|had|have) (it|there|been)\b": "name the thing",
    r"\bbr(ing|ings|ought) home\b|\bcomes? home\b": "drain",
    r"\b(is|are) (no|of no) (help|use|end)\b": "say what happens",
    r"\bhas to do with\b|\bhave to do with\b": "name the relation",
}

# Phrases that are clear only to a reader who knows the project, with what to write instead.
UNCLEAR = {
    r"\b(go|goes|going|went) on\b": "continue",
    r"\b(go|goes|going|went) first\b": "'have priority' or 'overtake'",
    r"\bby (itself|themselves)\b": "'automatically', or name what acts",
    r"\bas ever\b": "'as before'",
    r"\bfor (good|ever)\b": "'permanently'",
    r"\ball else\b": "'all other' and the noun",
    r"\bwithout (an end|end|a trace)\b": "'endless', or say what is left",
    r"\b(put|puts|putting) off\b": "'postpone'",
    r"\bg(i|a)ves? way\b": "'is evicted' or 'is replaced'",
    r"\b(make|made|making) ahead\b|\bstaged? ahead\b(?! of)": "'in advance'",
    r"\b(turn|turns|turned) red\b": "'fail'",
    r"\btells?\b": "'say', 'show' or 'report'",
    r"\b(hear|hears|heard)\b": "'receive' or 'be notified'",
    r"\blook(s|ed|ing)? (at|after)\b": "'check', 'read' or 'compare'",
    r"\b(come|comes|came|coming|goes?) to the source\b": "'reach the source' or 'be drained'",
    r"\b(is|are|was|were|be|been) brought\b": "'be drained' or 'be copied'",
    r"\bstands? aside\b": "'give priority to'",
    r"\bon top\b": "'in addition'",
    r"\b(of late|mostly)\b": "'recently', 'in most cases'",
    r"\bfrom below\b": "'from the next lower tier or the source'",
    r"\bbeside the (training|readers|interpreter|event loop)\b": "'during' or 'outside'",
    r"\b(clear|sweep|swept|clean)(s|ed)? (up|away) \b": "'remove', and name the things",
    r"(?<=[.:;] )(Those|That) (of|that|which|who)\b": "repeat the noun",
}

# A sentence with more words than this has more than one thought.
_MOST_WORDS = 40

# The record of a decision (docs/adr/): its title, three paragraphs and at most this many lines.
_MOST_DECISION_LINES = 15
_DECISION = re.compile(
    r"# (\d+)\. .+\n\n\*\*Context\.\*\* .+?\n\n\*\*Decision\.\*\* .+?\n\n\*\*Costs\.\*\* .+",
    re.DOTALL,
)
_DECISIONS = sorted((ROOT / "docs/adr").glob("*.md"))


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text()


def _is_source(path: Path) -> bool:
    return path.suffix in (".py", ".c", ".h")


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
    help_text = " ".join(command.get_help(click.Context(command, info_name=verb)).split())
    assert [words for words in others if words not in help_text] == []


def test_there_are_commands_to_be_checked() -> None:
    assert len(commands()) > 15


def test_the_configuration_of_the_readme_loads(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "monarch.yaml").write_text(text)
    settings = load.load(tmp_path / "monarch.yaml")["imagenet"]
    assert settings.allow_other
    assert [tier.name for tier in settings.tiers] == ["monarch", "nvme"]


def test_the_readme_lists_the_exit_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    listed = {int(code): meaning.replace("`", "") for code, meaning in rows}
    assert listed == EXIT_CODES


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|(`+)[^`]*\1", "CODE", text, flags=re.DOTALL)


def phrases(text: str, forbidden: Mapping[str, str] = FORBIDDEN) -> list[str]:
    """Each forbidden phrase in a text, outside code, with what to write instead."""
    prose = " ".join(without_code(text).split())
    return [
        f"{prose[max(0, match.start() - 30) : match.end() + 20]!r}: {instead}"
        for pattern, instead in forbidden.items()
        for match in re.finditer(pattern, prose, re.IGNORECASE)
    ]


def long_sentences(text: str) -> list[str]:
    """Each sentence of more than ``_MOST_WORDS``: of paragraphs, list items and cells of tables."""
    parts = re.split(r"\n\s*\n|\n(?=[#*] |\d+\. )|\|", without_code(text))
    sentences = (
        sentence for part in parts for sentence in re.split(r"(?<=[.:;?])\s+", part.strip())
    )
    return [sentence for sentence in sentences if len(sentence.split()) > _MOST_WORDS]


@pytest.mark.parametrize(
    "path",
    [*(ROOT / f"{page}.md" for page in PAGES), *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda path: path.name,
)
def test_each_sentence_of_the_documents_names_its_subject(path: Path) -> None:
    assert phrases(path.read_text()) == []


@pytest.mark.parametrize(
    "path",
    [*(ROOT / f"{page}.md" for page in PAGES), *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda path: path.name,
)
def test_each_sentence_of_the_documents_is_clear_to_a_new_reader(path: Path) -> None:
    text = path.read_text()
    assert phrases(text, UNCLEAR) == []
    assert long_sentences(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "The drain goes on by itself.",
        "What is written comes to the source in order.",
        "Names are read.\nThose of others wait.",
        "The tier is looked\nat again, and all else goes on.",
        "Old files give way to new ones.",
    ],
)
def test_a_phrase_that_is_clear_only_to_the_authors_is_found(text: str) -> None:
    assert phrases(text, UNCLEAR) != []


def faults_of_decision(name: str, text: str) -> list[str]:
    """What is wrong with the form of a record of a decision."""
    found = []
    match = _DECISION.fullmatch(text)
    if match is None:
        found.append("not a title and the paragraphs Context, Decision and Costs")
    elif name[:4] != f"{int(match[1]):04}":
        found.append("the number of the title is not that of the file")
    if text.count("\n\n") > 3:
        found.append("more than three paragraphs")
    if len(text.splitlines()) > _MOST_DECISION_LINES:
        found.append(f"more than {_MOST_DECISION_LINES} lines")
    if re.search(r"-(what|who|whom|nobody|somebody|ours|anothers|his|told)\b", name):
        found.append("the name does not state the subject")
    return found


@pytest.mark.parametrize("path", _DECISIONS, ids=lambda path: path.name)
def test_each_decision_states_its_context_and_its_costs(path: Path) -> None:
    assert faults_of_decision(path.name, path.read_text()) == []


def test_a_decision_without_the_form_is_found() -> None:
    good = "# 7. Keep it\n\n**Context.** a\n\n**Decision.** b\n\n**Costs.** c\n"
    assert faults_of_decision("0007-keep-it.md", good) == []
    assert faults_of_decision("0008-keep-it.md", good) != []
    assert faults_of_decision("0007-what-is-kept.md", good) != []
    assert faults_of_decision("0007-keep-it.md", good.replace("Costs", "Price")) != []
    assert faults_of_decision("0007-keep-it.md", good + "\nmore\n") != []
    assert faults_of_decision("0007-keep-it.md", good + "c\n" * 10) != []


def test_the_decisions_that_are_referred_to_are_there() -> None:
    numbers = {int(path.name[:4]) for path in _DECISIONS}
    assert len(numbers) == len(_DECISIONS)
    referred = {
        int(number)
        for path in [*(ROOT / "docs").rglob("*.md"), *(ROOT / "monarch").rglob("*.*")]
        if path.suffix == ".md" or _is_source(path)
        for number in re.findall(r"\bADR (\d+)", path.read_text())
    }
    assert len(referred) > 10
    assert referred - numbers == set()


def test_each_module_of_the_tests_says_in_plain_words_what_it_is_for() -> None:
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        if complaints := phrases(docstring, {**FORBIDDEN, **UNCLEAR}):
            found[str(path.relative_to(ROOT))] = complaints
    assert found == {}


def test_a_long_sentence_is_found_in_a_paragraph_and_in_a_table() -> None:
    long = "word " * 41
    assert long_sentences(f"Short.\n\n{long}.") != []
    assert long_sentences(f"| `x` | {long} |") != []
    assert long_sentences("| a | b |\n" * 60 + "* item\n" * 60) == []


@pytest.mark.parametrize(
    "text",
    [
        "Whoever asks is told.",
        "a fifo, which\nhe opens",
        "who waits for it",
        "it is for who asks",
        "the tier is let go of",
        "if that is so",
    ],
)
def test_a_sentence_without_a_subject_is_found(text: str) -> None:
    assert phrases(text) != []


def test_a_sentence_with_a_subject_is_not_found() -> None:
    assert phrases("The user who wrote it may read it. `nobody` is a user's name.") == []


def test_each_link_leads_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_each_path_of_the_package_in_the_documents_is_there() -> None:
    missing = [
        f"{path.name}: {name}"
        for path in DOCUMENTS
        for name in re.findall(r"`((?:monarch|tests)/[\w./]+)`", path.read_text())
        if "NAME" not in name and not (ROOT / name).exists()
    ]
    assert missing == []


def test_the_glossary_has_each_term_once_in_alphabetical_order() -> None:
    rows = re.findall(r"^\| (.*?) \| .* \| `.*` \|$", text_of("glossary"), re.MULTILINE)
    assert len(rows) > 50
    assert rows == sorted(set(rows))


def _methods() -> set[str]:
    """Each ``Class.method`` of the package."""
    return {
        f"{node.name}.{item.name}"
        for path in (ROOT / "monarch").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _defines(source: str, name: str) -> bool:
    """Whether a module of Python or C defines ``name``, which may be ``Class.method``."""
    return all(
        re.search(
            rf"^ *(?:async )?(?:def|class) {part}\b|^\w[\w *]*\b{part}\(", source, re.MULTILINE
        )
        for part in name.split(".")
    )


def test_a_function_of_the_tour_in_another_module_is_found() -> None:
    assert _defines("class A:\n    async def f(self): ...", "A.f")
    assert _defines("static int opens_take(void)", "opens_take")
    assert not _defines("class A: ...\nA().f()", "A.f")


def test_each_function_of_the_tour_is_there() -> None:
    sources = [path.read_text() for path in (ROOT / "monarch").rglob("*.*") if _is_source(path)]
    defined = {
        name
        for text in sources
        for name in re.findall(r"(?:\bdef |\bclass |^\w[\w *]*\b)(\w+)[(:]", text, re.MULTILINE)
    }
    words = re.findall(r"`([A-Z]\w*\.\w+|_?[a-z]+(?:_[a-z]+)+|[A-Z]\w+)`", text_of("tour"))
    names = {part for word in words for part in word.split(".")}
    assert len(names) > 60
    assert names - defined == set()
    pairs = re.findall(r"`([\w.]+)`\s+(?:\(|in\s+)`(monarch/[\w/]+\.(?:py|c))`", text_of("tour"))
    assert len(pairs) > 30
    assert [pair for pair in pairs if not _defines((ROOT / pair[1]).read_text(), pair[0])] == []
    assert {word for word in words if "." in word} - _methods() == set()
