"""Which modules import which others, found by parsing their sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Import:
    target: str
    line: int


def sources_of(package: Path) -> dict[str, str]:
    """The texts of all modules of a package by dotted name; a package has that of ``__init__``."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text()
    return found


def imports_of(module: str, tree: ast.Module, sources: Mapping[str, str]) -> Iterator[Import]:
    """As they are written: a name that is imported from a module is part of the target."""
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


def resolved(found: Import, sources: Mapping[str, str]) -> Import:
    """The target as a module, where it is one of ``sources`` or a name in one of them."""
    target = found.target
    if target.split(".")[0] in {module.split(".")[0] for module in sources}:
        while target not in sources and "." in target:
            target = target.rpartition(".")[0]
    return Import(target, found.line)


def cycles(imports: Mapping[str, list[Import]]) -> list[str]:
    """Modules that import each other, at whatever distance.

    An import of a package's own ``__init__`` by its members is Python's doing and does not count.
    """
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
