"""The daemon's answers to the engine, for copies that the engine does not find: a unix socket.

The engine passes requests on as HTTP/1.1 over a few connections that it keeps. An answer is one of:

    200    the bytes with their digest, or the name of a file, from which the engine then sends them
    202    the bytes are being fetched from the source: the member asks again
    404    this node does not keep the file, or does not know it in this version

Requests are for a small file, or for some granules of a large one (spans.py). A hello is answered
with the proofs that this node is a member.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import trio
import xxhash

from monarch.errors import MonarchError
from monarch.peers.client import COMING, DIGEST_HEADER, NOT_KEPT, OK
from monarch.peers.hello import MemberKey
from monarch.peers.holding import REQUEST, Holding
from monarch.peers.nginx import INTERNAL
from monarch.peers.spans import Span, short_digest
from monarch.peers.tls import Certificate
from monarch.posix.files import closing_fd
from monarch.telemetry.log import Limiter
from monarch.types import Ino

log = logging.getLogger(__name__)

_MOST_HEAD = 4096
# The connections that are served at a time: further ones wait in the socket.
_MOST_CONNECTIONS = 512
# The most that Linux allows by default. An engine whose connection is refused answers 502 to its
# client, which then takes this node for broken; the event loop accepts one in each round.
_BACKLOG = 4096
_IDLE_S = 120.0
_SET = rb"GET /[0-9a-f]{32}/"
_FILE = re.compile(_SET + rb"(?:d|c/[0-9a-f]{2})/([0-9]{1,10}) HTTP/1\.[01]\r\n")
_SPAN = re.compile(
    _SET + rb"(?:r|s/[0-9a-f]{2})/([0-9]{1,10})/([0-9]{1,9})-([0-9]{1,9}) HTTP/1\.[01]\r\n"
)
_PATH = re.compile(rb"GET (/\S*) HTTP/1\.[01]\r\n")
_HEAD_END = b"\r\n\r\n"
# What announces bytes behind the head.
_BODY = re.compile(rb"\r\n(?:transfer-encoding|content-length)[ \t]*:(?![ \t]*0+[ \t]*\r)", re.I)
# Errors of accept that end by themselves, and the pause after one, in seconds.
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SCARCE_PAUSE_S = 0.1
# The pause before the socket, which could not be made, is tried again, in seconds.
_SOCKET_PAUSE_S = 5.0
# How long the bytes of a fetch are kept for a member that asks again, in seconds.
_KEPT_S = 2.0

Content = bytes | memoryview


# What members request: a file, or some granules of a large one.
Wanted = Ino | Span


@dataclass(frozen=True, slots=True)
class Found:
    """What a member gets, with its digest: the bytes, or the file in a tier with the path ``place``
    beneath the directory of the engine, from which the engine sends what was requested."""

    digest: int
    content: Content | None = None
    place: str = ""


class Files(Protocol):
    """The files of this node, as other members may have them."""

    def copy_of(self, ino: Ino) -> Found | None:
        """The copy of a small file, None if there is none."""

    def size_to_fetch(self, wanted: Wanted) -> int | None:
        """The bytes that may be fetched for other members; None if none may be, because this node
        would not keep them, or has another version."""

    async def fetch(self, wanted: Wanted) -> Found | None:
        """What is wanted, fetched and kept as for a reader of this node; None if it is not kept.
        Raises MonarchError, OSError."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """A fetch of ``size`` bytes for other members. When it is ``done`` it has ``found`` them, or
    failed. They are kept for a while, unless they are ``given_up`` for others, and until the last
    of the ``answers`` with them is sent."""

    size: int
    done: trio.Event = field(default_factory=trio.Event)
    given_up: trio.Event = field(default_factory=trio.Event)
    found: Found | None = None
    answers: int = 0
    is_counted: bool = True


def digest_of(content: Content) -> int:
    """The first 8 bytes of the XXH3 (128 bits) of bytes: what members compare."""
    return short_digest(xxhash.xxh3_128_digest(content))


class Answers:
    """Belongs to the event loop. ``key`` is that of this node, and so is ``certificate``, with
    TLS. ``patience_s``: a member gets an answer at most this many seconds later. At most
    ``most_held`` bytes are being fetched for members or kept for them. ``holding`` answers for
    written files."""

    def __init__(
        self,
        path: Path,
        files: Files,
        key: MemberKey,
        *,
        patience_s: float,
        most_held: int,
        certificate: Certificate | None = None,
        holding: Holding | None = None,
    ) -> None:
        self._path = path
        self._files = files
        self._key = key
        self._certificate = certificate
        self._holding = holding
        self._limiter = Limiter(log)
        self._patience_s = patience_s
        self._most_held = most_held
        self._held = 0
        self._places = trio.Semaphore(_MOST_CONNECTIONS)
        self._fetches: dict[Wanted, _Fetch] = {}
        # What the request that is being decided is for.
        self._asked: Wanted | None = None
        # What was fetched from the source for other members.
        self.fetched_files = self.fetched_bytes = 0

    def is_asked(self, ino: Ino) -> bool:
        """Whether a file is being fetched for another member."""
        return ino == self._asked or ino in self._fetches

    async def run(self) -> None:
        """Answers until cancelled."""
        with ExitStack() as opened:
            while True:
                try:
                    listener = opened.enter_context(_listening(self._path))
                    break
                except OSError as error:
                    self._limiter.warning(
                        "socket",
                        "requests of other nodes, which read the source, get no answer: %s: %s",
                        *(self._path, error.strerror),
                    )
                    await trio.sleep(_SOCKET_PAUSE_S)
            async with trio.open_nursery() as nursery:
                while True:
                    await self._places.acquire()
                    stream = await self._accepted(listener)
                    nursery.start_soon(self._serve, stream, nursery)

    async def _accepted(self, listener: trio.SocketListener) -> trio.SocketStream:
        """The next connection. Raises OSError."""
        while True:
            try:
                return await listener.accept()
            except OSError as error:
                if error.errno not in _SCARCE:
                    raise
                self._limiter.warning(
                    "scarce",
                    "no connection for a request of another node, which reads the source: %s",
                    error.strerror,
                )
                await trio.sleep(_SCARCE_PAUSE_S)

    async def _serve(self, stream: trio.SocketStream, nursery: trio.Nursery) -> None:
        """Answers the requests of one connection, one after the other."""
        try:
            async with stream:
                # A disk that fails ends a connection, and the member reads the source.
                with suppress(trio.BrokenResourceError, trio.TooSlowError, OSError, MonarchError):
                    while head := await _requested(stream):
                        if not await self._answer_to(stream, head, nursery):
                            break
        except Exception:
            self._unexpected()
        finally:
            self._places.release()

    async def _answer_to(
        self, stream: trio.SocketStream, head: bytes, nursery: trio.Nursery
    ) -> bool:
        """Answers a request; False if it has another form."""
        if (request := _FILE.match(head)) is not None:
            await self._answer(stream, Ino(int(request[1])), nursery)
            return True
        if (request := _SPAN.match(head)) is not None:
            ino, first, last = map(int, request.groups())
            await self._answer(stream, Span(Ino(ino), first, last), nursery)
            return True
        if self._holding is not None and (request := REQUEST.match(head)) is not None:
            status, content, fields = await self._holding.answer(request, nursery)
            await _send(stream, status, content, fields=fields)
            return True
        path = _PATH.match(head)
        proofs = None if path is None else self._proofs(path[1].decode("ascii", "replace"))
        if proofs is not None:
            await _send(stream, OK, proofs)
        return proofs is not None

    def _proofs(self, path: str) -> bytes | None:
        """The answer to a hello; None for another request."""
        fingerprint = "" if self._certificate is None else self._certificate.fingerprint
        return self._key.answer(path, fingerprint)

    def _unexpected(self) -> None:
        """Logs the exception that is being handled. The other answers continue."""
        self._limiter.exception(
            "unexpected",
            "internal error in an answer to another node, which reads the source instead. This is a"
            " bug, please report it",
        )

    async def _answer(
        self, stream: trio.SocketStream, wanted: Wanted, nursery: trio.Nursery
    ) -> None:
        found = None if isinstance(wanted, Span) else self._files.copy_of(wanted)
        fetch = self._fetches.get(wanted)
        if found is None and fetch is None and (size := self._size_to_fetch(wanted)) is not None:
            if not self._has_room(size):
                await trio.sleep(self._patience_s)
                await _send(stream, COMING)
                return
            fetch = self._begin(wanted, size, nursery)
        if found is None and fetch is not None:
            with trio.move_on_after(self._patience_s):
                await fetch.done.wait()
            if not fetch.done.is_set():
                await _send(stream, COMING)
                return
            found = fetch.found
        if found is None:
            await _send(stream, NOT_KEPT)
        elif found.content is None:
            where = f"X-Accel-Redirect: {INTERNAL}/{found.place}\r\n"
            await _send(stream, OK, digest=found.digest, fields=where)
        elif fetch is None:
            await _send(stream, OK, found.content, digest=found.digest)
        else:
            await self._send_fetched(stream, fetch, found.content, found.digest)

    async def _send_fetched(
        self, stream: trio.SocketStream, fetch: _Fetch, content: Content, digest: int
    ) -> None:
        """Sends bytes, which count as held until the member has them: it may be slow."""
        fetch.answers += 1
        try:
            await _send(stream, OK, content, digest=digest)
        finally:
            fetch.answers -= 1
            self._count_off(fetch)

    def _size_to_fetch(self, wanted: Wanted) -> int | None:
        self._asked = wanted
        try:
            return self._files.size_to_fetch(wanted)
        finally:
            self._asked = None

    def _has_room(self, size: int) -> bool:
        """Whether so many bytes may be fetched. Bytes that are kept are given up for them, the
        oldest first: now they are in a tier, or soon will be."""
        for fetch in self._fetches.values():
            if self._held + size <= self._most_held:
                break
            if fetch.done.is_set() and not (fetch.given_up.is_set() or fetch.answers):
                self._give_up(fetch)
        return self._held + size <= self._most_held

    def _give_up(self, fetch: _Fetch) -> None:
        """Ends the time in which bytes are kept."""
        fetch.given_up.set()
        self._count_off(fetch)

    def _count_off(self, fetch: _Fetch) -> None:
        """The bytes do not count any more if they are given up and no answer has them."""
        if fetch.is_counted and fetch.given_up.is_set() and not fetch.answers:
            fetch.is_counted = False
            self._held -= fetch.size

    def _begin(self, wanted: Wanted, size: int, nursery: trio.Nursery) -> _Fetch:
        """Begins to fetch something for other members."""
        fetch = self._fetches[wanted] = _Fetch(size)
        self._held += size
        nursery.start_soon(self._fetch, wanted, fetch)
        return fetch

    async def _fetch(self, wanted: Wanted, fetch: _Fetch) -> None:
        try:
            try:
                fetch.found = await self._files.fetch(wanted)
            except (MonarchError, OSError) as error:
                log.debug("not fetched for another node: %s", error)
            except Exception:
                self._unexpected()
            if fetch.found is not None and fetch.found.content is not None:
                self.fetched_files += not isinstance(wanted, Span)
                self.fetched_bytes += len(fetch.found.content)
            fetch.done.set()
            with trio.move_on_after(_KEPT_S):
                await fetch.given_up.wait()
        finally:
            fetch.done.set()
            self._give_up(fetch)
            del self._fetches[wanted]


@contextmanager
def _listening(path: Path) -> Iterator[trio.SocketListener]:
    """A listening socket at ``path``, only for this user. Raises OSError."""
    with suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    with closing_fd(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=directory)
        with socket.socket(socket.AF_UNIX) as made:
            # Before bind, so that the file never exists with a wider mode.
            os.fchmod(made.fileno(), 0o600)
            # The address of a socket has at most 107 bytes; a path may be longer.
            made.bind(f"/proc/self/fd/{directory}/{path.name}")
            made.listen(_BACKLOG)
            try:
                with trio.socket.from_stdlib_socket(made) as listener:
                    yield trio.SocketListener(listener)
            finally:
                with suppress(OSError):
                    os.unlink(path.name, dir_fd=directory)


async def _requested(stream: trio.SocketStream) -> bytes:
    """The head of the next request; empty at the end of the requests, for a head that is too long,
    and for a request with a body. Raises trio.BrokenResourceError."""
    head = b""
    with trio.move_on_after(_IDLE_S):
        while not head.endswith(_HEAD_END):
            part = await stream.receive_some(_MOST_HEAD)
            head += part
            if not part or len(head) > _MOST_HEAD:
                return b""
        # A body may have the form of a request: its answer would go to another client of the
        # engine, or to a client without the token.
        has_body = _BODY.search(head) or head.index(_HEAD_END) + len(_HEAD_END) < len(head)
        return b"" if has_body else head
    return b""


async def _send(
    stream: trio.SocketStream,
    status: int,
    content: Content = b"",
    *,
    digest: int | None = None,
    fields: str = "",
) -> None:
    """Raises trio.BrokenResourceError."""
    if digest is not None:
        fields += f"{DIGEST_HEADER}: {digest:016x}\r\n"
    head = f"HTTP/1.1 {status} Answer\r\nContent-Length: {len(content)}\r\n{fields}\r\n"
    with trio.fail_after(_IDLE_S):
        await stream.send_all(head.encode())
        if content:
            await stream.send_all(content)
