"""The extended attributes that a mount shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from monarch.types import Ino
from monarch.vfs.filesystem import ExtendedAttributes
from monarch.vfs.measured import MeasuredJobs
from monarch.vfs.read_side import ReadSide
from monarch.vfs.readers import Readers


@pytest.mark.promise(253)
async def test_a_pack_cannot_give_attributes_of_the_mount_itself() -> None:
    names = SimpleNamespace(
        attributes=lambda ino: SimpleNamespace(is_file=False),
        is_rewritten=lambda ino: False,
        has_acls=False,
    )
    nothing = SimpleNamespace(places=lambda: None)
    read = SimpleNamespace(names=names, residency=None, records=None, metrics=None, copies=nothing)
    readers = SimpleNamespace(traced=None)
    shown = ExtendedAttributes(
        cast(ReadSide, read), cast(Readers, readers), None, MeasuredJobs(lambda ino: 0)
    )
    shown.of_source = lambda ino: {b"user.note": b"1", b"user.monarch.copies": b"forged"}
    assert await shown.names(Ino(1)) == [b"user.note"]
    assert await shown.get(Ino(1), b"user.note") == b"1"
    assert await shown.get(Ino(1), b"user.monarch.copies") is None
