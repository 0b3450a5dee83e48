"""The rules of ``scripts/``: thin launchers, packages without cycles, and no duplicate code."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from scripts.benchmark.options import SUBJECTS
from scripts.tools.launch import ROOT
from tests.equipment.imports import cycles, imports_of, resolved, sources_of

SCRIPTS = ROOT / "scripts"
LAUNCHERS = ("bench", "dataset", "demo", "prove", "sanitize", "soak", "test")

# What a package may import besides itself. Commands that are one module may use every package.
BELOW = {
    "scripts.tools.launch": (),
    "scripts.tools.mount": ("scripts.tools.launch",),
    "scripts.tools.loader": (),
    "scripts.datasets": (),
    "scripts.benchmark": ("scripts.tools", "scripts.datasets"),
    "scripts.soaking": ("scripts.tools",),
    "scripts.tools": ("scripts.datasets",),
}
# Modules that run as programs by their path or by ``python -m``.
PROGRAMS = (
    "scripts.benchmark.plain_pyfuse3",
    "scripts.tools.demo",
    "scripts.tools.metrics_document",
)

MOST_LINES = 600
MOST_LINES_OF_A_FUNCTION = 80
MOST_METHODS = 30
MOST_ARGUMENTS = 10
MOST_LINES_OF_A_LAUNCHER = 15
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A function with fewer statements may well stand twice.
FEWEST_STATEMENTS = 4


def broken_rules(sources: Mapping[str, str]) -> list[str]:
    """Every broken rule, as ``module:line: what``. ``sources``: dotted module name to its text."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    imports = {
        module: [resolved(found, sources) for found in imports_of(module, tree, sources)]
        for module, tree in trees.items()
    }
    broken = cycles(imports)
    for module, tree in trees.items():
        if (lines := sources[module].count("\n")) > MOST_LINES:
            broken.append(f"{module}:1: {lines} lines")
        if not ast.get_docstring(tree):
            broken.append(f"{module}:1: no docstring")
        broken += _sizes(module, tree)
        for found in imports[module]:
            if found.target.startswith("scripts.") and not _may_import(module, found.target):
                broken.append(f"{module}:{found.line}: imports {found.target}")
    broken += _written_twice(trees)
    return broken


def _may_import(module: str, target: str) -> bool:
    rule = next((name for name in BELOW if f"{module}.".startswith(f"{name}.")), None)
    if rule is None:
        return False
    package = ".".join(module.split(".")[:2])
    own = () if rule != package else (package,)
    return any(f"{target}.".startswith(f"{name}.") for name in (*own, *BELOW[rule]))


def _sizes(module: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION:
                yield f"{module}:{node.lineno}: {node.name} has {lines} lines"
        if isinstance(node, ast.ClassDef):
            methods = [member for member in node.body if isinstance(member, FUNCTIONS)]
            if len(methods) > MOST_METHODS:
                yield f"{module}:{node.lineno}: {node.name} has {len(methods)} methods"
            for method in methods:
                arguments = len(method.args.args) - 1 + len(method.args.kwonlyargs)
                if method.name == "__init__" and arguments > MOST_ARGUMENTS:
                    yield f"{module}:{method.lineno}: {node.name} takes {arguments} arguments"


def _written_twice(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Functions whose statements are those of another one, whatever their names and docstrings."""
    seen: dict[str, str] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, FUNCTIONS):
                continue
            body = node.body[ast.get_docstring(node) is not None :]
            statements = sum(isinstance(n, ast.stmt) for top in body for n in ast.walk(top))
            if statements < FEWEST_STATEMENTS:
                continue
            text = "\n".join(map(ast.unparse, body))
            where = f"{module}:{node.lineno}: {node.name}"
            if text in seen:
                yield f"{where} is written in {seen[text]}, too"
            seen[text] = where


def _all_sources() -> dict[str, str]:
    equipment = sources_of(ROOT / "tests" / "equipment")
    return sources_of(SCRIPTS) | {f"tests.{name}": text for name, text in equipment.items()}


def test_every_module_keeps_the_rules() -> None:
    assert broken_rules(_all_sources()) == []


def test_every_module_is_used() -> None:
    sources = sources_of(SCRIPTS)
    started = " ".join(launcher.read_text() for launcher in map(SCRIPTS.joinpath, LAUNCHERS))
    used = {f"scripts.benchmark.{subject}" for subject in SUBJECTS} | set(PROGRAMS)
    for module, text in sources.items():
        tree = ast.parse(text)
        used |= {resolved(found, sources).target for found in imports_of(module, tree, sources)}
    packages = {module.rpartition(".")[0] for module in sources}
    left = {module for module in set(sources) - used - packages if f'"{module}"' not in started}
    assert left == set()


def test_launchers_are_thin_and_nothing_else_lies_beside_them() -> None:
    beside = {path.name for path in SCRIPTS.iterdir() if path.is_file()}
    assert beside == {*LAUNCHERS, "__init__.py"}
    for name in LAUNCHERS:
        assert os.access(SCRIPTS / name, os.X_OK), name
        lines = len((SCRIPTS / name).read_text().splitlines())
        assert lines <= MOST_LINES_OF_A_LAUNCHER, name


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("through", ["path", "link"])
def test_a_launcher_works_from_everywhere(tmp_path: Path, name: str, through: str) -> None:
    path = SCRIPTS / name
    if through == "link":
        (tmp_path / "second").symlink_to(path)
        path = tmp_path / "first"
        path.symlink_to("second")
    # Packages of the directory in which it runs are not ours.
    for package in ("scripts", "tests", "tools"):
        (tmp_path / "here" / package).mkdir(parents=True)
        (tmp_path / "here" / package / "__init__.py").write_text("raise ImportError")
    done = subprocess.run(
        [str(path), "--help"],
        cwd=tmp_path / "here",
        env={**os.environ, "MONARCH_VENV": str(Path(sys.executable).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: scripts/{name} ")
    assert f"examples:\n  scripts/{name}" in done.stdout


@pytest.mark.parametrize(
    ("name", "verbs"),
    [
        ("bench", SUBJECTS),
        ("dataset", ["imagefolder", "tfrecord", "webdataset", "hdf5", "lmdb", "sqlite", "git"]),
    ],
)
def test_each_subject_of_a_launcher_has_help_with_examples(name: str, verbs: Sequence[str]) -> None:
    for verb in verbs:
        done = subprocess.run(
            [sys.executable, SCRIPTS / name, verb, "--help"], capture_output=True, text=True
        )
        assert done.stdout.startswith(f"usage: scripts/{name} {verb} "), done.stderr
        examples = done.stdout.partition("examples:\n")[2].splitlines()
        assert examples and all(f"scripts/{name}" in line for line in examples)


def test_the_installation_of_packages_does_not_start_the_service_of_nginx(tmp_path: Path) -> None:
    """With programs in place of those of Debian; the first installation fails."""
    policy, commands = tmp_path / "policy", tmp_path / "commands"
    programs = {
        "dpkg-query": "exit 1",
        "sudo": 'shift; exec "$@"',
        "update-rc.d": 'echo "service $*"',
        "apt-get": f"""for last; do :; done; echo "apt $last"
for service in nginx nginx.service ssh; do {policy} $service start; echo $service $?; done
[ -e {tmp_path}/failed ] || {{ : >{tmp_path}/failed; exit 100; }}""",
    }
    commands.mkdir()
    for name, text in programs.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    script = f". {SCRIPTS}/tools/setup.sh; SERVICE_POLICY={policy}; ensure_apt rsync nginx-light"
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    said = done.stderr.splitlines()
    assert done.returncode == 0, done.stderr
    calls = [line for line in said if line.startswith("apt ")]
    assert calls == ["apt nginx-light", "apt update", "apt nginx-light"]
    assert said.count("nginx 101") == said.count("nginx.service 101") == said.count("ssh 0") == 3
    assert said[-1] == "service nginx disable"
    assert not policy.exists()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("'D'\nfrom scripts.tools import prove", "imports itself"),
        ("'D'\nfrom scripts.soaking.soak import Soak", "imports scripts.soaking.soak"),
        ("import os", "no docstring"),
        ("'D'\n" + "\n" * 600, "601 lines"),
        ("'D'\ndef f():\n" + " pass\n" * 80, "f has 81 lines"),
        ("'D'\nclass C:\n" + "".join(f" def m{n}(self): 0\n" for n in range(31)), "31 methods"),
        ("'D'\nclass C:\n def __init__(self, a, b, c, d, e, *, f, g, h, i, j, k): 0", "takes 11"),
        ("'D'\ndef g(a):\n 'E'\n if a:\n  b = 1\n  c = 2\n  return b", "written in scripts.t"),
    ],
)
def test_a_module_that_breaks_a_rule_is_found(text: str, complaint: str) -> None:
    sources = {
        "scripts": "'D'",
        "scripts.tools": "'D'",
        "scripts.tools.prove": "'D'\nimport scripts.benchmark.x",
        "scripts.soaking.soak": "'D'\ndef f(a):\n if a:\n  b = 1\n  c = 2\n  return b",
        "scripts.benchmark.x": text,
    }
    found = broken_rules(sources)
    complaint = complaint.replace("scripts.t", "scripts.soaking")
    assert any(complaint in line for line in found), found
