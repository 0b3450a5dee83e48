"""A tree with all kinds of entries, and its pack."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packs.trees import copied, make_tree, pack


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tree and its pack, which no test changes."""
    top = tmp_path_factory.mktemp("packs")
    source = make_tree(top / "source")
    pack(source, top / "pack")
    return source, top / "pack"


@pytest.fixture
def own(made: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the pack, which the test may damage."""
    return copied(made[1], tmp_path / "own")
