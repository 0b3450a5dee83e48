"""The map in docs/architecture.md, checked from the code's own imports.

The checker is a function from sources to broken rules, so that it can be shown broken code too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "monarch"

# Bottom to top. A module imports from lower lines, or from its own package. The modules of a line
# in PLAIN may import each other, without a cycle.
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "vocabulary",
        (
            *("types", "errors", "units", "order", "points", "text", "acl"),
            *("absorbed", "beneath", "buckets", "credentials", "ending", "footing"),
            *("health", "registry", "report", "signals", "sparse", "threads", "timeouts"),
        ),
    ),
    ("settings", ("settings", "places", "config", "metrics", "exposition", "log")),
    ("pillars", ("namespace", "placement", "tiers", "control")),
    ("movement", ("transfer",)),
    ("write-back", ("writeback",)),
    ("file system", ("vfs",)),
    ("door", ("fuse", "frameworks")),
    (
        "composition",
        (
            *("absorbing", "checkup", "daemon", "doctor", "fsck", "lost", "modes", "overlaps"),
            *("node_mounts", "remarks"),
            *("premises",),
            *("metrics_page",),
            *("scrub", "sides", "snapshots", "state", "status", "supervision", "symptoms", "verbs"),
            *("watch", "write_premises", "written_verbs"),
        ),
    ),
    ("command line", ("cli", "__main__")),
)
PLAIN = {"vocabulary", "settings", "composition", "command line"}
RANK = {name: rank for rank, (_, names) in enumerate(LAYERS) for name in names}

# The read path and the copy path meet in the residency table: vfs is handed what it needs of the
# engine. Who is reading is known to both.
SEPARATE = {("vfs", "transfer"): {"monarch.transfer.readers"}}

CONFINED = {
    "pyfuse3": ("fuse",),
    "lmdb": ("namespace",),
    "sqlite3": ("namespace",),
    "yaml": ("config",),
    "numpy": ("buckets", "order", "namespace", "placement", "tiers", "daemon", "frameworks"),
    "torch": ("frameworks",),
    "click": ("cli",),
    "rich": ("cli",),
    "prometheus_client": ("exposition",),
}

# The extension may be missing, so one module for each thing that it does asks for it.
EXTENSION = "monarch.fuse._datapath"
ITS_MODULES = ("monarch.fuse.datapath", "monarch.namespace.look")

# Time is an argument here, and so is everything else that the machine could tell.
PURE = (
    *("monarch.placement", "monarch.order"),
    "monarch.tiers.doubts",
    *("monarch.transfer.outages", "monarch.transfer.pace", "monarch.transfer.throttle"),
    *("monarch.frameworks.interval", "monarch.frameworks.layout"),
    *("monarch.writeback.losses", "monarch.writeback.ops", "monarch.writeback.touched"),
)
IMPURE = frozenset(
    (
        "asyncio",
        "concurrent",
        "datetime",
        "io",
        "lmdb",
        "multiprocessing",
        "os",
        "pathlib",
        "pyfuse3",
        "select",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "trio",
    )
)

# Imported by nobody, since something outside the package starts them.
ENTRIES = frozenset(
    (
        *("monarch", "monarch.__main__", "monarch.cli.main"),
        *("monarch.frameworks.checkpoint", "monarch.frameworks.torch"),
    )
)

NOT_USED = frozenset(
    (
        "base",
        "cache",
        "data",
        "handler",
        "helper",
        "helpers",
        "impl",
        "info",
        "level",
        "manager",
        "service",
        "util",
        "utils",
    )
)


@dataclass(frozen=True, slots=True)
class Import:
    target: str
    line: int


def broken_rules(sources: Mapping[str, str]) -> list[str]:
    """Every broken rule, as ``module:line: what``. ``sources``: dotted module name to its text.

    A package is named as its ``__init__``: ``monarch.vfs`` beside ``monarch.vfs.handles``.
    """
    trees = {module: ast.parse(text) for module, text in sources.items()}
    written = {module: list(_imports(module, tree, sources)) for module, tree in trees.items()}
    imports = {
        module: [_resolved(found, sources) for found in targets]
        for module, targets in written.items()
    }
    broken: list[str] = []
    for module in sorted(sources):
        broken += _layer_rules(module, imports[module])
        broken += _confinement_rules(module, imports[module])
        broken += _extension_rules(module, trees[module], written[module])
        broken += _word_rules(module, trees[module])
        if _unit(module) != "cli":
            broken += [f"{module}:{line}: print" for line in _prints(trees[module])]
    broken += _cycles(imports)
    broken += _unused(sources, trees, imports)
    broken += _empty_packages(sources)
    return broken


def _unit(module: str) -> str:
    """The second component: what the layers are made of. The package itself is vocabulary."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "types"


def _imports(module: str, tree: ast.Module, sources: Mapping[str, str]) -> Iterator[Import]:
    is_package = any(other.startswith(f"{module}.") for other in sources)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = module.split(".")
                package = parts[: len(parts) - node.level + is_package]
                origin = ".".join([*package, origin] if origin else package)
            yield from (Import(f"{origin}.{alias.name}", node.lineno) for alias in node.names)


def _resolved(found: Import, sources: Mapping[str, str]) -> Import:
    """An imported name is a module where there is one, else part of the module before it."""
    target = found.target
    if target.split(".")[0] == "monarch":
        while target not in sources and "." in target:
            target = target.rpartition(".")[0]
    return Import(target, found.line)


def _layer_rules(module: str, imports: list[Import]) -> Iterator[str]:
    unit = _unit(module)
    if unit not in RANK:
        yield f"{module}:1: {unit} has no place in the layers"
        return
    for found in imports:
        if found.target.split(".")[0] != "monarch":
            continue
        target = _unit(found.target)
        if target == unit or target not in RANK or found.target == "monarch":
            continue
        same_line = RANK[target] == RANK[unit]
        if RANK[target] > RANK[unit] or (same_line and LAYERS[RANK[unit]][0] not in PLAIN):
            yield f"{module}:{found.line}: {unit} imports {target}, which is not below it"
        if (unit, target) in SEPARATE and found.target not in SEPARATE[unit, target]:
            yield f"{module}:{found.line}: {unit} imports {target}; it is handed what it needs"


def _confinement_rules(module: str, imports: list[Import]) -> Iterator[str]:
    pure = any(module == name or module.startswith(f"{name}.") for name in PURE)
    for found in imports:
        top = found.target.split(".")[0]
        if top in CONFINED and _unit(module) not in CONFINED[top]:
            yield f"{module}:{found.line}: {top} belongs to {' and '.join(CONFINED[top])}"
        if pure and top in IMPURE:
            yield f"{module}:{found.line}: {top} in a pure module"


def _extension_rules(module: str, tree: ast.Module, written: list[Import]) -> Iterator[str]:
    if module in ITS_MODULES:
        return
    named = [
        Import(node.value, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for found in [*written, *named]:
        if found.target == EXTENSION or found.target.startswith(f"{EXTENSION}."):
            yield f"{module}:{found.line}: the extension belongs to {' and '.join(ITS_MODULES)}"


def _word_rules(module: str, tree: ast.Module) -> Iterator[str]:
    for word in re.split(r"[._]+", module):
        if word in NOT_USED:
            yield f"{module}:1: a module is not named {word!r}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            words = {word.lower() for word in re.findall(r"[A-Z][a-z]*", node.name)}
            for word in sorted(words & NOT_USED):
                yield f"{module}:{node.lineno}: class {node.name} is named {word!r}"


def _prints(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield node.lineno


def _cycles(imports: Mapping[str, list[Import]]) -> list[str]:
    """Modules that import each other, at whatever distance. An import of a package's own
    ``__init__`` by its members is Python's doing and not counted."""
    graph = {
        module: {
            found.target
            for found in targets
            if found.target in imports and not module.startswith(f"{found.target}.")
        }
        for module, targets in imports.items()
    }
    broken: list[str] = []
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            broken.append(f"{module}:1: imports itself by {' > '.join(path[path.index(module) :])}")
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    return broken


def _unused(
    sources: Mapping[str, str],
    trees: Mapping[str, ast.Module],
    imports: Mapping[str, list[Import]],
) -> list[str]:
    used = {found.target for module in imports for found in imports[module]}
    # The command line loads a verb by its name, when it is called.
    named = {
        node.value.partition(":")[0]
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return [
        f"{module}:1: nobody imports it"
        for module in sorted(sources)
        if module not in ENTRIES | used
        and not any(other.startswith(f"{module}.") for other in sources)
        and module not in named
        and not (_unit(module) == "cli" and module.rpartition(".")[2] in named)
    ]


def _empty_packages(sources: Mapping[str, str]) -> list[str]:
    # A package without members looks like a module whose whole text is its docstring.
    return [
        f"{module}:1: an empty package"
        for module, text in sources.items()
        if len(ast.parse(text).body) <= 1
        and not any(other.startswith(f"{module}.") for other in sources)
        and module.count(".") == 1
        and (PACKAGE / module.split(".")[1]).is_dir()
    ]


def _sources() -> dict[str, str]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("monarch", *path.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text()
    return found


def test_every_module_keeps_to_the_map() -> None:
    assert broken_rules(_sources()) == []


def test_every_directory_of_the_package_holds_modules() -> None:
    for directory in PACKAGE.rglob("*"):
        if directory.is_dir() and directory.name != "__pycache__":
            assert list(directory.glob("*.py")), f"{directory} is empty"


def test_every_module_says_what_it_is_responsible_for() -> None:
    for module, text in _sources().items():
        docstring = ast.get_docstring(ast.parse(text))
        assert docstring, f"{module} has no docstring"


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("monarch.types", "import monarch.config", "types imports config"),
        ("monarch.namespace.scan", "from monarch.placement import ledger", "imports placement"),
        ("monarch.tiers.tier", "from ..control import messages", "tiers imports control"),
        ("monarch.vfs.handles", "from monarch.transfer.engine import Engine", "handed what it"),
        ("monarch.transfer.copy", "def f():\n  import monarch.daemon", "transfer imports daemon"),
        ("monarch.vfs.handles", "import pyfuse3", "pyfuse3 belongs to fuse"),
        ("monarch.fuse.session", "from monarch.fuse import _datapath", "extension belongs to"),
        ("monarch.daemon", "import monarch.fuse._datapath as d", "extension belongs to"),
        ("monarch.modes", "load('monarch.fuse._datapath')", "extension belongs to"),
        ("monarch.tiers.tier", "import lmdb", "lmdb belongs to namespace"),
        ("monarch.cli.mount", "from yaml import safe_load", "yaml belongs to config"),
        ("monarch.placement.ledger", "import time", "time in a pure module"),
        ("monarch.transfer.throttle", "from trio import sleep", "trio in a pure module"),
        ("monarch.frameworks.interval", "import time", "time in a pure module"),
        ("monarch.frameworks.torch", "import monarch.daemon", "frameworks imports daemon"),
        ("monarch.order", "import torch", "torch belongs to frameworks"),
        ("monarch.daemon", "print('x')", "print"),
        ("monarch.tiers.utils", "", "not named 'utils'"),
        ("monarch.tiers.tier", "class TierManager: ...", "is named 'manager'"),
        ("monarch.elsewhere", "", "no place in the layers"),
        ("monarch.tiers.forgotten", "", "nobody imports it"),
    ],
)
def test_a_module_that_breaks_a_rule_is_found(module: str, text: str, complaint: str) -> None:
    sources = dict.fromkeys(
        (
            "monarch.config",
            "monarch.daemon",
            "monarch.control.messages",
            "monarch.placement.ledger",
            "monarch.transfer.engine",
        ),
        "",
    )
    found = broken_rules({**sources, module: text})
    assert any(line.startswith(f"{module}:") and complaint in line for line in found), found


def test_modules_that_import_each_other_are_found() -> None:
    sources = {
        "monarch.units": "from monarch.errors import E",
        "monarch.errors": "import monarch.units",
    }
    assert any("imports itself" in line for line in broken_rules(sources))


def test_modules_that_keep_every_rule_pass() -> None:
    sources = {
        "monarch": "",
        "monarch.__main__": "from monarch.cli.main import main",
        "monarch.cli.main": "VERBS = {'mount': 'monarch.cli.mount'}",
        "monarch.cli.mount": "from monarch.daemon import serve\nprint(serve)",
        "monarch.daemon": "import trio\nfrom monarch.vfs import filesystem",
        "monarch.vfs": "",
        "monarch.vfs.filesystem": "from .handles import Handles",
        "monarch.vfs.handles": "import os",
    }
    assert broken_rules(sources) == []


def _loaded_by(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
    )
    return set(done.stdout.split())


def test_a_trainer_that_sends_a_hint_loads_no_file_system() -> None:
    loaded = _loaded_by("import monarch.control.client")
    assert loaded & {"pyfuse3", "lmdb", "trio", "numpy"} == set()


def test_a_trainer_that_saves_checkpoints_loads_no_file_system_and_no_framework() -> None:
    loaded = _loaded_by("import monarch.frameworks.checkpoint")
    assert "numpy" in loaded
    assert loaded & {"pyfuse3", "lmdb", "trio", "pydantic", "yaml", "torch"} == set()


def test_the_command_line_starts_without_the_file_system() -> None:
    loaded = _loaded_by("import monarch.cli.main")
    assert loaded & {"pyfuse3", "lmdb", "trio", "numpy", "pydantic", "yaml", "rich"} == set()
