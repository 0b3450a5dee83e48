"""What was lost is remembered, whatever happens to the daemon, until somebody knows."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from monarch.lost import Lost


def test_it_is_remembered_by_the_next_daemon_until_it_is_acknowledged(tmp_path: Path) -> None:
    lost = Lost(tmp_path)
    lost.hear([])
    assert not list(tmp_path.iterdir())
    lost.hear([b"ckpt/a", b"caf\xe9\n"])
    lost.hear([b"ckpt/a", b"caf\xe9\n", b"ckpt/b"])
    names = (b"ckpt/a", b"caf\xe9\n", b"ckpt/b")
    assert lost.names == Lost(tmp_path).names == names
    lost.acknowledge()
    # The drain goes on telling of what it has told of.
    lost.hear(names)
    assert lost.names == Lost(tmp_path).names == ()
    assert not list(tmp_path.iterdir())
    lost.hear([*names, b"ckpt/c"])
    assert Lost(tmp_path).names == (b"ckpt/c",)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null"])
def test_what_cannot_be_read_is_told_and_in_nobodys_way(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lost.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        lost = Lost(tmp_path)
    assert lost.names == () and "cannot be read" in caplog.text
    lost.hear([b"a"])
    assert Lost(tmp_path).names == (b"a",)


def test_a_directory_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = Lost(tmp_path / "gone")
    lost.hear([b"a"])
    assert lost.names == (b"a",) and "cannot be written" in caplog.text
    lost.acknowledge()
    assert lost.names == ()
