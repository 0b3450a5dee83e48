"""The map in docs/architecture.md, checked from the code's own imports.

The checker is a function from sources to broken rules, so that it can be tested with broken code.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.equipment.imports import Import, cycles, imports_of, resolved, sources_of

PACKAGE = Path(__file__).parents[1] / "monarch"

# Bottom to top. A module imports from lower lines, or from its own package. The modules of a line
# in PLAIN may import each other, without a cycle.
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("vocabulary", ("types", "errors", "text")),
    ("kernel", ("posix",)),
    ("data sets", ("datasets",)),
    ("settings", ("config",)),
    ("telemetry", ("telemetry",)),
    ("pillars", ("namespace", "placement", "foresight", "tiers", "packs", "control")),
    ("mounted packs", ("packmount", "peers")),
    ("analysis", ("analysis",)),
    ("movement", ("transfer",)),
    ("write-back", ("writeback",)),
    ("file system", ("vfs",)),
    ("FUSE", ("fuse", "frameworks")),
    ("interface for trainers", ("order",)),
    ("checks", ("checks",)),
    ("daemon", ("daemon",)),
    ("command line", ("cli", "__main__")),
)
PLAIN = {"vocabulary", "command line"}
RANK = {name: rank for rank, (_, names) in enumerate(LAYERS) for name in names}

# The package itself gives names of these modules, and imports each when its name is used.
ON_DEMAND = {"monarch.datasets.files", "monarch.frameworks.watch"}

# The most modules beside the packages: a new module belongs into a package.
MOST_LOOSE = 6

# The read path and the copy path meet in the residency table: vfs is handed what it needs of the
# engine. Both know the number of readers, and both call the source.
SEPARATE = {
    ("vfs", "transfer"): {
        f"monarch.transfer.{name}" for name in ("source_load", "source_calls", "pace")
    }
}

CONFINED = {
    "pyfuse3": ("fuse",),
    "lmdb": ("namespace", "datasets.lmdb_compare"),
    "sqlite3": ("namespace",),
    "yaml": ("config.document",),
    "numpy": (
        *("posix.buckets", "namespace", "placement", "foresight", "tiers", "packs", "packmount"),
        *("frameworks", "datasets", "peers.ownership", "peers.ranges", "peers.source", "analysis"),
        *("cli.recorded", "cli.simulate", "cli.simulate_nodes"),
    ),
    "torch": ("frameworks",),
    "matplotlib": ("cli.plots",),
    "click": ("cli",),
    "rich": ("cli",),
    "prometheus_client": ("telemetry.metric_families",),
}

# The extension may be missing, so one module for each of its tasks imports it.
EXTENSION = "monarch.fuse._datapath"
ITS_MODULES = (
    *("monarch.fuse.datapath", "monarch.namespace.look", "monarch.telemetry.passes"),
    "monarch.tiers.lots",
)

# The time is an argument of these modules, and so is all other state of the machine.
PURE = (
    *("monarch.analysis", "monarch.placement", "monarch.foresight"),
    *("monarch.tiers.doubts", "monarch.telemetry.timeline"),
    *("monarch.transfer.concurrency", "monarch.transfer.outages", "monarch.transfer.pace"),
    *("monarch.frameworks.sampler", "monarch.frameworks.interval", "monarch.frameworks.format"),
    *("monarch.frameworks.chunk_order", "monarch.datasets.lmdb_pages", "monarch.datasets.ranges"),
    *("monarch.writeback.history", "monarch.writeback.op", "monarch.writeback.conflicts"),
    "monarch.writeback.path_table",
    "monarch.writeback.journal_records",
    *("monarch.packs.format", "monarch.packs.index", "monarch.packs.plan"),
    *("monarch.datasets.staging_table", "monarch.datasets.staging_kept"),
    *("monarch.peers.members", "monarch.peers.ownership", "monarch.peers.breaker"),
)
# What a pure module may import of the package besides pure modules: vocabulary, settings and
# reports, for their values.
VALUES = frozenset(
    (
        *("types", "errors", "text", "config.settings", "config.path_pattern", "posix.buckets"),
        *("posix.credentials", "telemetry.passes", "telemetry.report", "packs.tree"),
        *("telemetry.foresight_report", "telemetry.figures", "writeback.numbers"),
    )
)
# Functions that a pure module could call without an import.
IMPURE_CALLS = frozenset(("__import__", "eval", "exec", "input", "open", "print"))
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

# Not imported, since something outside the package starts them.
ENTRIES = frozenset(
    (
        *("monarch", "monarch.__main__", "monarch.cli.main"),
        *("monarch.frameworks.checkpoint", "monarch.frameworks.torch", "monarch.order"),
        *("monarch.frameworks.tensorflow", "monarch.frameworks.webdataset"),
        "monarch.frameworks.lmdb",
        "monarch.datasets.staging",
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


# Words that only this project used, or for something else than the field does.
PRIVATE_WORDS = frozenset(
    (
        *("absorbing", "checkup", "dress", "footing", "home", "hurry", "inquiry", "nameless"),
        *("premises", "shelf", "shun", "sides", "stock", "survey", "symptoms", "touched", "ward"),
    )
)


def broken_rules(sources: Mapping[str, str]) -> list[str]:
    """Every broken rule, as ``module:line: what``. ``sources``: dotted module name to its text.

    A package is named as its ``__init__``: ``monarch.vfs`` beside ``monarch.vfs.binding``.
    """
    trees = {module: ast.parse(text) for module, text in sources.items()}
    written = {module: list(imports_of(module, tree, sources)) for module, tree in trees.items()}
    imports = {
        module: [resolved(found, sources) for found in targets]
        for module, targets in written.items()
    }
    broken: list[str] = []
    for module in sorted(sources):
        broken += _layer_rules(module, imports[module])
        broken += _confinement_rules(module, imports[module])
        broken += _purity_rules(module, trees[module], imports[module])
        broken += _extension_rules(module, trees[module], written[module])
        broken += _word_rules(module, trees[module])
        if _unit(module) != "cli":
            broken += [f"{module}:{line}: print" for line in _prints(trees[module])]
    broken += cycles(imports)
    broken += _unused(sources, trees, imports)
    broken += _empty_packages(sources)
    return broken


def _unit(module: str) -> str:
    """The second component: what the layers are made of. The package itself is vocabulary."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "types"


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
        if module == "monarch" and found.target in ON_DEMAND:
            continue
        same_line = RANK[target] == RANK[unit]
        if RANK[target] > RANK[unit] or (same_line and LAYERS[RANK[unit]][0] not in PLAIN):
            yield f"{module}:{found.line}: {unit} imports {target}, which is not below it"
        if (unit, target) in SEPARATE and found.target not in SEPARATE[unit, target]:
            yield f"{module}:{found.line}: {unit} imports {target}; it is handed what it needs"


def _confinement_rules(module: str, imports: list[Import]) -> Iterator[str]:
    for found in imports:
        top = found.target.split(".")[0]
        if top in CONFINED and not any(
            f"{module}.".startswith(f"monarch.{room}.") for room in CONFINED[top]
        ):
            yield f"{module}:{found.line}: {top} belongs to {' and '.join(CONFINED[top])}"


def _is_pure(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in PURE)


def _purity_rules(module: str, tree: ast.Module, imports: list[Import]) -> Iterator[str]:
    """A pure module imports no clock, file or loop, nor another module that might use one for it,
    and opens no file without an import."""
    if not _is_pure(module):
        return
    for found in imports:
        top, _, below = found.target.partition(".")
        if top in IMPURE:
            yield f"{module}:{found.line}: {top} in a pure module"
        if top == "monarch" and not _is_pure(found.target) and below not in VALUES:
            yield f"{module}:{found.line}: {found.target}, which is not pure, in a pure module"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in IMPURE_CALLS:
            yield f"{module}:{node.lineno}: {node.id} in a pure module"


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
        if word in NOT_USED | PRIVATE_WORDS:
            yield f"{module}:1: a module is not named {word!r}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            words = {word.lower() for word in re.findall(r"[A-Z][a-z]*", node.name)}
            for word in sorted(words & NOT_USED):
                yield f"{module}:{node.lineno}: class {node.name} is named {word!r}"
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            parts = re.findall(r"[A-Z]?[a-z]+", node.name)
            for word in sorted({part.lower() for part in parts} & PRIVATE_WORDS):
                yield f"{module}:{node.lineno}: {node.name} is a private word: {word!r}"


def _prints(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield node.lineno


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
        f"{module}:1: no module imports it"
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


def test_every_module_keeps_to_the_map() -> None:
    assert broken_rules(sources_of(PACKAGE)) == []


def test_few_modules_lie_beside_the_packages() -> None:
    loose = [path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    assert len(loose) <= MOST_LOOSE, sorted(loose)


def test_every_directory_of_the_package_holds_modules() -> None:
    for directory in PACKAGE.rglob("*"):
        if directory.is_dir() and directory.name not in ("__pycache__", "native"):
            assert list(directory.glob("*.py")), f"{directory} is empty"


def test_every_module_says_what_it_is_responsible_for() -> None:
    for module, text in sources_of(PACKAGE).items():
        docstring = ast.get_docstring(ast.parse(text))
        assert docstring, f"{module} has no docstring"


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("monarch.types", "import monarch.config.load", "types imports config"),
        ("monarch.namespace.scan", "from monarch.placement import ledger", "imports placement"),
        ("monarch.tiers.tier", "from ..control import messages", "tiers imports control"),
        ("monarch.vfs.binding", "from monarch.transfer.engine import Engine", "handed what it"),
        (
            "monarch.transfer.queue",
            "def f():\n  import monarch.daemon.mount",
            "transfer imports daemon",
        ),
        ("monarch.vfs.binding", "import pyfuse3", "pyfuse3 belongs to fuse"),
        ("monarch.fuse.session", "from monarch.fuse import _datapath", "extension belongs to"),
        ("monarch.daemon.mount", "import monarch.fuse._datapath as d", "extension belongs to"),
        ("monarch.fuse.datapath_mode", "load('monarch.fuse._datapath')", "extension belongs to"),
        ("monarch.tiers.tier", "import lmdb", "lmdb belongs to namespace"),
        ("monarch.cli.mount", "from yaml import safe_load", "yaml belongs to config.document"),
        ("monarch.placement.ledger", "import time", "time in a pure module"),
        ("monarch.transfer.pace", "from trio import sleep", "trio in a pure module"),
        ("monarch.analysis.replay", "import time", "time in a pure module"),
        ("monarch.analysis.allocation", "from pathlib import Path", "pathlib in a pure module"),
        ("monarch.analysis.nodes", "import trio", "trio in a pure module"),
        ("monarch.analysis.nodes", "open('/etc/hosts')", "open in a pure module"),
        ("monarch.analysis.nodes", "from io import open", "io in a pure module"),
        (
            "monarch.analysis.stalls",
            "from monarch.control.messages import f",
            "monarch.control.messages, which is not pure",
        ),
        ("monarch.frameworks.interval", "import time", "time in a pure module"),
        ("monarch.frameworks.torch", "import monarch.daemon.mount", "frameworks imports daemon"),
        ("monarch.order", "import torch", "torch belongs to frameworks"),
        ("monarch.daemon.mount", "print('x')", "print"),
        ("monarch.tiers.utils", "", "not named 'utils'"),
        ("monarch.tiers.tier", "class TierManager: ...", "is named 'manager'"),
        ("monarch.transfer.ward", "", "not named 'ward'"),
        ("monarch.tiers.tier", "class WardOfTiers: ...", "a private word: 'ward'"),
        ("monarch.tiers.tier", "class Tier:\n  def bring_home(self): ...", "private word: 'home'"),
        ("monarch.elsewhere", "", "no place in the layers"),
        ("monarch.tiers.forgotten", "", "no module imports it"),
    ],
)
def test_a_module_that_breaks_a_rule_is_found(module: str, text: str, complaint: str) -> None:
    sources = dict.fromkeys(
        (
            "monarch.config.load",
            "monarch.daemon.mount",
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
        "monarch.text": "from monarch.errors import E",
        "monarch.errors": "import monarch.text",
    }
    assert any("imports itself" in line for line in broken_rules(sources))


def test_modules_that_keep_every_rule_pass() -> None:
    sources = {
        "monarch": "",
        "monarch.__main__": "from monarch.cli.main import main",
        "monarch.cli.main": "VERBS = {'mount': 'monarch.cli.mount'}",
        "monarch.cli.mount": "from monarch.daemon.mount import serve\nprint(serve)",
        "monarch.daemon.mount": "import trio\nfrom monarch.vfs import filesystem",
        "monarch.vfs": "",
        "monarch.vfs.filesystem": "from .binding import Binding",
        "monarch.vfs.binding": "import os",
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


def test_a_trainer_that_announces_its_files_loads_no_file_system_and_no_framework() -> None:
    loaded = _loaded_by("import monarch.frameworks.announce")
    assert loaded & {"pyfuse3", "lmdb", "trio", "numpy", "pydantic", "yaml", "torch"} == set()


def test_a_trainer_that_saves_checkpoints_loads_no_file_system_and_no_framework() -> None:
    loaded = _loaded_by("import monarch.frameworks.checkpoint")
    assert "numpy" in loaded
    assert loaded & {"pyfuse3", "lmdb", "trio", "pydantic", "yaml", "torch"} == set()


def test_the_command_line_starts_without_the_file_system() -> None:
    loaded = _loaded_by("import monarch.cli.main")
    assert loaded & {"pyfuse3", "lmdb", "trio", "numpy", "pydantic", "yaml", "rich"} == set()
