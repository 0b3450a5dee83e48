"""``verify`` and ``diff`` find each change, and report none for equal trees."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from monarch.errors import SourceError
from monarch.namespace.compare import Difference, diff, verify
from tests.equipment import slowfs
from tests.namespace.conftest import Taken


@pytest.fixture
def filled(source: Path) -> Path:
    for top in ("a", "b", "c"):
        (source / top / "below").mkdir(parents=True)
        for number in range(10):
            (source / top / f"file {number}").write_bytes(b"content")
            (source / top / "below" / f"{number}").write_bytes(b"content")
    (source / "link").symlink_to("a")
    os.link(source / "a" / "file 0", source / "hard")
    return source


def mutate(source: Path) -> dict[bytes, str]:
    """One change of each kind, and the expected report."""
    status = (source / "a" / "file 1").stat()
    (source / "a" / "file 1").write_bytes(b"longer content")
    os.utime(source / "a" / "file 1", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.utime(source / "a" / "file 2", ns=(1, 1))
    (source / "a" / "file 3").chmod(0o600)
    (source / "b" / "file 4").unlink()
    shutil.rmtree(source / "b" / "below")
    (source / "c" / "below" / "added\n").touch()
    (source / "tree" / "of").mkdir(parents=True)
    (source / "tree" / "of" / "files").touch()
    (source / "link").unlink()
    (source / "link").symlink_to("b")
    (source / "c" / "file 5").unlink()
    (source / "c" / "file 5").mkdir()
    (source / "c" / "file 5" / "file").touch()
    (source / "c").chmod(0o700)
    return {
        b"a/file 1": "changed-size",
        b"a/file 2": "changed-mtime",
        b"a/file 3": "changed",
        b"b/file 4": "missing",
        b"b/below": "missing",
        **{b"b/below/%d" % number: "missing" for number in range(10)},
        b"c/below/added\n": "new",
        b"tree": "new",
        b"tree/of": "new",
        b"tree/of/files": "new",
        b"link": "changed-mtime",
        b"c/file 5": "changed-size",
        b"c/file 5/file": "new",
        b"c": "changed",
    }


def described(differences: list[Difference]) -> dict[bytes, str]:
    found: dict[bytes, str] = {difference.path: difference.kind for difference in differences}
    assert len(found) == len(differences)
    return found


def test_no_difference(filled: Path, taken: Taken, workers: str) -> None:
    snapshot = taken(filled)
    assert verify(filled, snapshot) == []
    assert verify(filled, snapshot, sample=1000) == []
    assert list(diff(snapshot, taken(filled))) == []


def test_each_change_is_found(filled: Path, taken: Taken, workers: str) -> None:
    before = taken(filled)
    expected = mutate(filled)
    found = verify(filled, before)
    assert described(found) == expected
    assert [difference.path for difference in found] == sorted(expected)
    after = taken(filled)
    assert described(list(diff(before, after))) == expected
    opposite = {"missing": "new", "new": "missing"}
    assert described(list(diff(after, before))) == {
        path: opposite.get(kind, kind) if path != b"c/file 5" else kind
        for path, kind in expected.items()
    }
    assert verify(filled, after) == []


def test_each_of_400_seeded_changes_is_found(source: Path, taken: Taken) -> None:
    draw = random.Random(1)
    files = [source / f"{number % 7}" / f"file {number}" for number in range(600)]
    for path in files:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"content")
        os.utime(path, ns=(1, 10**18))
    before = taken(source)
    assert verify(source, before) == []
    expected = {}
    for number, path in enumerate(draw.sample(files, 400)):
        name = os.fsencode(path.relative_to(source))
        if number % 4 == 0:
            path.write_bytes(bytes(draw.randrange(8, 99)))
            os.utime(path, ns=(1, 10**18))
            expected[name] = "changed-size"
        elif number % 4 == 1:
            os.utime(path, ns=(1, 10**18 + draw.randrange(1, 10**9)))
            expected[name] = "changed-mtime"
        elif number % 4 == 2:
            path.unlink()
            expected[name] = "missing"
        else:
            added = path.with_name(f"added {number}")
            added.write_bytes(b"content")
            expected[os.fsencode(added.relative_to(source))] = "new"
    assert described(verify(source, before)) == expected


def test_differences_are_named(filled: Path, taken: Taken) -> None:
    before = taken(filled)
    mutate(filled)
    what = {difference.path: difference.what for difference in verify(filled, before)}
    assert what[b"a/file 1"] == "size, ctime: 7 -> 14 bytes"
    assert what[b"a/file 2"] == "mtime, ctime"
    assert what[b"a/file 3"] == "mode, ctime"


def test_a_sample_of_everything_finds_all_but_what_is_beneath_the_new(
    filled: Path, taken: Taken
) -> None:
    snapshot = taken(filled)
    expected = mutate(filled)
    del expected[b"tree/of"], expected[b"tree/of/files"], expected[b"c/file 5/file"]
    assert described(verify(filled, snapshot, sample=snapshot.entries)) == expected


def test_a_sample_looks_no_more_often_than_asked(
    filled: Path, taken: Taken, tmp_path: Path
) -> None:
    reason = slowfs.unavailable()
    if reason is not None:
        pytest.skip(reason)
    with slowfs.SlowSource(filled, tmp_path / "slow", attribute_s=60) as slow:
        snapshot = taken(slow.path)
        before = slow.counters()
        verify(slow.path, snapshot, sample=3)
        counted = slow.counters()
        assert counted["readdir"] - before["readdir"] <= 2 * 3
        assert counted["open"] == before["open"]


def test_a_source_that_is_missing(filled: Path, taken: Taken) -> None:
    snapshot = taken(filled)
    with pytest.raises(SourceError, match="cannot open the source"):
        verify(filled / "nothing", snapshot)


def test_an_empty_source_misses_everything(filled: Path, taken: Taken) -> None:
    snapshot = taken(filled)
    for path in filled.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    found = verify(filled, snapshot)
    assert {difference.kind for difference in found} == {"missing"}
    assert len(found) == snapshot.entries - 1
