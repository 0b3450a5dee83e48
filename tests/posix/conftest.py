"""The directory that the tests write to: a mount with ``write: absorb``, or a plain directory.

``--modes native`` runs all tests on the file system of pytest's own directory, which shows that the
tests expect of a mount only the behaviour of a disk. One mount serves all tests of a mode, each in
a directory of its own that was in the source before. After the last test it is unmounted, and the
source must have exactly the tree that the mount had.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted
from tests.posix.calls import USER, as_user, write_file
from tests.posix.trees import Tree, differences, tree

NATIVE = "native"
WRITTEN_WAYS = ("python", "relay", "passthrough")

# What each test finds in its directory, as it came from the source.
OLD = b"from the source\n" * 1000
DIRECTORIES = 400
# A directory of the source with so many names.
MANY = "many"
NAMES = 10_000

# What a file system may do without, and how it says so. Without the native datapath no code can
# distinguish holes from bytes, or move them.
_REFUSALS = {
    "tmpfile": (errno.EOPNOTSUPP,),
    "exchange": (errno.EINVAL,),
    "devices": (errno.EPERM,),
    "a directory of the source that is renamed": (errno.EXDEV,),
    "a file of the source that is written while it is read": (errno.ETXTBSY,),
}
_REFUSALS_OF_PYTHON = {"fallocate": (errno.EOPNOTSUPP,)}
_REFUSALS_OF_DISKS = {"direct": (errno.EINVAL,), "fallocate": (errno.EOPNOTSUPP,)}


class DocumentedRefusalError(Exception):
    """What the file system does without is refused with the errno that says so."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except DocumentedRefusalError:
        return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "way" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--modes").split(",")
        ways = [way for way in (*WRITTEN_WAYS, NATIVE) if way in chosen]
        # For the session: the tests of one way come together, and share a mount.
        metafunc.parametrize("way", ways, scope="session")


def options(way: str) -> list[str]:
    """Options of ``monarch mount -o`` for a mount that every user may write."""
    settings = ["write=absorb", f"datapath={way}"]
    return [*settings, "allow_other"] if os.geteuid() == 0 else settings


@dataclass
class Place:
    """Where files are made, and the source that they come to. ``used`` tells which test had which
    directory.
    """

    way: str
    root: Path
    source: Path
    used: dict[bytes, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def may_refuse(self, what: str) -> Iterator[None]:
        """The test is over, and has passed, where the block is refused and may be."""
        allowed = dict(_REFUSALS_OF_DISKS if self.way == NATIVE else _REFUSALS)
        if self.way == "python":
            allowed |= _REFUSALS_OF_PYTHON
        try:
            yield
        except OSError as error:
            if error.errno not in allowed.get(what, ()):
                raise
            raise DocumentedRefusalError from error

    def next_directory(self, test: str) -> Path:
        name = f"{len(self.used):03}"
        self.used[name.encode()] = test
        return self.root / name

    def at_source(self, name: str) -> str:
        """The path at the source of a name in the current directory."""
        return str(self.source / f"{len(self.used) - 1:03}" / name)

    def named(self, difference: str) -> str:
        """With the test in whose directory it is."""
        first = difference[1:4].encode()
        return f"{self.used[first]}: {difference}" if first in self.used else difference


def fill(source: Path) -> None:
    """What the tests find: a file, one with two names, a directory with a file, and links."""
    for number in range(DIRECTORIES):
        here = source / f"{number:03}"
        (here / "full" / "deep").mkdir(parents=True)
        (here / "full" / "inner").write_bytes(b"inner")
        (here / "empty").mkdir()
        (here / "old").write_bytes(OLD)
        (here / "old").chmod(0o644)
        (here / "twin").write_bytes(b"twin")
        os.link(here / "twin", here / "other twin")
        (here / "link").symlink_to("old")
        (here / "dangling").symlink_to("nothing")
        here.chmod(0o755)
    many = source / MANY
    many.mkdir()
    for number in range(NAMES):
        os.symlink("x", many / f"{number:05}")


def trees_differ(source: Path, expected: Tree) -> list[str]:
    return differences(expected, tree(source, names_only=(MANY.encode(),)))


@contextlib.contextmanager
def drained_at_the_end(mounted: Mounted, named: Callable[[str], str] = str) -> Iterator[None]:
    """After the block ``monarch umount`` drains, and the source is then what the mount was."""
    yield
    expected = tree(mounted.path, names_only=(MANY.encode(),))
    mounted.umount()
    differences = [named(difference) for difference in trees_differ(mounted.source, expected)]
    assert not differences, "the source is not what the mount was:\n" + "\n".join(differences[:60])


@pytest.fixture(scope="session")
def place(way: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp(f"posix-{way}")
    if way == NATIVE:
        fill(directory)
        yield Place(way, directory, directory)
        shutil.rmtree(directory)
        return
    command = MonarchCommand(directory, uuid.uuid4().hex, way)
    source = Path(tempfile.mkdtemp(prefix="monarch-posix-", dir=_in_memory()))
    try:
        source.chmod(0o755)
        fill(source)
        mounted = command.mount(source, tiers={"fast": "2GiB"}, options=options(way))
        made = Place(way, mounted.path, source)
        with drained_at_the_end(mounted, made.named):
            yield made
    finally:
        try:
            command.close()
        finally:
            shutil.rmtree(source)


def _in_memory() -> Path | None:
    """Where files cost nothing, if they can have all that a disk's can: a source of thousands of
    them is made for each way and each process of pytest.
    """
    memory = Path("/dev/shm")
    try:
        with tempfile.NamedTemporaryFile(dir=memory) as file:
            os.setxattr(file.fileno(), "user.a", b"x")
    except OSError:
        return None
    return memory


@pytest.fixture
def here(place: Place, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A directory of this test's own in the place, and the current one: names are relative."""
    path = place.next_directory(request.node.name)
    before = os.getcwd()
    old_umask = os.umask(0o022)
    os.chdir(path)
    yield place
    os.umask(old_umask)
    os.chdir(before)


@pytest.fixture(params=["root", "user"])
def anyone(here: Place, request: pytest.FixtureRequest) -> Iterator[Place]:
    """The same, once as root and once as a user without any rights but to this directory."""
    if request.param == "root":
        yield here
        return
    with _given_away():
        yield here


@contextlib.contextmanager
def _given_away() -> Iterator[None]:
    """The current directory, and all in it, belongs to the user that makes the calls."""
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    mine = ("old", "full", "full/inner", "full/deep", "empty", "twin", "link", "dangling")
    for name in (".", *mine):
        os.chown(name, USER, USER, follow_symlinks=False)
    with as_user():
        yield


@pytest.fixture(params=["new", "from the source"])
def full(anyone: Place, request: pytest.FixtureRequest) -> str:
    """A directory that holds a file, ``inner``, and an empty directory, ``deep``."""
    if request.param == "from the source":
        return "full"
    os.makedirs("new/deep")
    write_file("new/inner", b"inner")
    return "new"


@pytest.fixture(params=["new", "from the source", "of a user"])
def name(here: Place, request: pytest.FixtureRequest) -> Iterator[str]:
    """A file that holds ``OLD``: one that was just made, or one that the source has."""
    if request.param == "from the source":
        yield "old"
        return
    with contextlib.ExitStack() as stack:
        if request.param == "of a user":
            stack.enter_context(_given_away())
        write_file("new", OLD)
        yield "new"
