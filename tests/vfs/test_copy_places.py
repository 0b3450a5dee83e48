"""Where the daemon's user may open the copies: only while no decision depends on opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monarch.tiers.contents import copy_name
from monarch.types import XATTR_COPIES
from tests.vfs.conftest import FILES, Rigs
from tests.vfs.rig import Rig


async def places(rig: Rig) -> dict[str, Any] | None:
    value = await rig.filesystem.xattrs.get(rig.ino("d"), XATTR_COPIES)
    return None if value is None else json.loads(value)


@pytest.mark.promise(252)
async def test_the_copies_are_named_when_every_file_has_one(rigs: Rigs) -> None:
    rig = rigs(sends_opens=False)
    for name in FILES:
        assert await places(rig) is None
        ino = rig.copy(name)
    found = await places(rig)
    assert found is not None
    assert (found["records"], found["acls"]) == (str(rig.records.path), False)
    assert found["term"] == rig.records.term
    (directory,) = found["directories"].values()
    assert (Path(directory) / copy_name(ino)).read_bytes() == FILES[name]
    assert await rig.filesystem.xattrs.get(ino, XATTR_COPIES) is None
    rig.filesystem.readers.traced = lambda *opened: None
    assert await places(rig) is None
    rig.filesystem.readers.traced = None
    assert await places(rig) == found
    rig.read_side.promotions.forget_copy(ino)
    assert await places(rig) is None


@pytest.mark.promise(252)
@pytest.mark.parametrize("settings", [{"sends_opens": True}, {"verify": "open"}])
async def test_no_copy_is_named_if_an_open_matters(rigs: Rigs, settings: dict[str, Any]) -> None:
    rig = rigs(**{"sends_opens": False, **settings})
    for name in FILES:
        rig.copy(name)
    assert await places(rig) is None
