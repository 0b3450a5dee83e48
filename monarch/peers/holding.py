"""Requests between members about written files: one member keeps files of another.

    /SET/hold/MEMBER/OFFER      asks a member to keep a file: it requests the two that follow
    /SET/record/MEMBER/OFFER    the record of the file that this node offers
    /SET/bytes/MEMBER/OFFER     its bytes
    /SET/held/TOKEN/NUMBER      whether the file of an object is kept; any if the number is 0
    /SET/version/TOKEN/NUMBER   its version; the latest one of the mount if the number is 0
    /SET/forget/TOKEN/NUMBER/VERSION
                                removes it, up to that version; all of the mount if the number is 0,
                                and then "not kept" says that there is a later version

MEMBER is a digest of the name of the member that has the file. An OFFER is a number that is used
once, higher than all earlier ones of the member: it is the version of the record. Bytes are served
only as long as it stands. An answer has the form of those of ``answers.py``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import trio

from monarch.errors import MonarchError
from monarch.peers.client import COMING, NOT_KEPT, OK, PeerClient, PeerFailed, until_known
from monarch.peers.held import RECORD_BYTES, HeldFiles, Record, Take
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.text import MiB

log = logging.getLogger(__name__)

# Where the engine finds the objects when the daemon has named one.
WRITTEN = "/written"
FORM = (
    "(?:hold|record|bytes|held|version)/[0-9a-f]{16,64}/[0-9]{1,19}"
    "|forget/[0-9a-f]{16,64}/[0-9]{1,19}/[0-9]{1,19}"
)
REQUEST = re.compile(rf"GET /[0-9a-f]{{32}}/({FORM}) HTTP/1\.[01]\r\n".encode())
# The digits of a version in an answer.
_DIGITS = 19
# No clock of a node has given a later version: this is a time of the year 2116, in nanoseconds.
_LAST_VERSION = 1 << 62
# Files that are received at a time from one member, and from all together.
_THREADS, _MOST_THREADS = 4, 16
# Short requests to other members at a time: those that do not answer must not delay the others.
_AT_ONCE = 32
# The members that are asked to keep one file.
_ASKED = 2
# The bytes of one request.
_PART = 8 * MiB
# How long a file, and the part of it that came, may take, in seconds, and for each byte.
_LEAST_S = 10.0
_BYTE_S = 1 / 20e6
# How long an answer to an offer is known, for a member that asks again, in seconds.
_KEPT_S = 10.0
# The most offers of one member that are known at a time.
_MOST_ARRIVING = 1000
# How long a member that did not take a file in time is not asked to keep files, in seconds.
_REST_S = 60.0
# How often a member that keeps files is asked for one of them, in seconds.
CHECK_S = 5.0


@dataclass(frozen=True, slots=True)
class Placed:
    """The member that keeps a file, None if none does. Those in ``doubtful`` may keep it, or
    another version of it, as well."""

    client: PeerClient | None
    doubtful: Sequence[PeerClient]


@dataclass(slots=True)
class _Offer:
    """A file that another member is asked to keep. When it last requested something, and how many
    parts of the bytes it has requested."""

    record: Record
    seen_s: float
    parts: int = 0

    def is_late(self, until_s: float) -> bool:
        """Whether the member has not ended by ``until_s``, or has stopped before all bytes."""
        if self.parts * _PART < self.record.size:
            until_s = min(until_s, self.seen_s + _LEAST_S)
        return _now() > until_s


def member_id(name: str) -> str:
    """The name of a member in requests."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


class Holding:
    """Belongs to the event loop. ``others`` are the clients of the other members by ``member_id``,
    those first that are asked first; ``own`` is the one of this node. ``objects`` returns where an
    object is, below the directory that the engine calls ``WRITTEN``. ``is_recoverable`` returns
    whether this node could write a file through its own mount."""

    def __init__(
        self,
        held: HeldFiles,
        others: Mapping[str, PeerClient],
        own: str,
        patience_s: float,
        objects: Callable[[int], Path],
        is_recoverable: Callable[[Record], bool],
    ) -> None:
        self.held = held
        self._others = others
        self._own = own
        self._patience_s = patience_s
        self._objects = objects
        self._is_recoverable = is_recoverable
        self._threads = ThreadPool(_MOST_THREADS, "held files", abandon=True)
        self._asks = ThreadPool(_THREADS, "replicas", abandon=True)
        # Short calls do not wait for those that move whole files.
        self._removals = ThreadPool(1, "held files removed", abandon=True)
        self._requests = ThreadPool(_AT_ONCE, "replica requests", abandon=True)
        self._limiter = Limiter(log)
        # Until when members that were late are not asked.
        self._rests_s: dict[PeerClient, float] = {}
        # The files that other members are asked to keep now. No earlier daemon had these numbers.
        self._offered: dict[int, _Offer] = {}
        self._last_offer = time.time_ns()
        self._numbering = threading.Lock()
        # The offers that this node got, and whether it keeps the file, once that is known; and the
        # right of each member to send one.
        self._arriving: dict[tuple[str, int], bool | None] = {}
        self._arrived = trio.Condition()
        self._turns = {member: trio.CapacityLimiter(_THREADS) for member in others}

    # -- for other members ---------------------------------------------------------------------

    async def answer(
        self, request: re.Match[bytes], nursery: trio.Nursery
    ) -> tuple[int, bytes, str]:
        """The status, the bytes and further fields of an answer. Raises OSError."""
        kind, whose, *numbers = request[1].decode().split("/")
        number = int(numbers[0])
        if kind == "hold":
            return await self._hold(whose, number, nursery), b"", ""
        if kind == "held":
            return OK if self._keeps(whose, number) else NOT_KEPT, b"", ""
        if kind == "version":
            version = self.held.version(whose, number)
            return (NOT_KEPT, b"", "") if version is None else (OK, b"%019d" % version, "")
        if kind == "forget":
            await self._removals.run(self.held.forget, whose, number, int(numbers[1]))
            return NOT_KEPT if number == 0 and self.held.keeps(whose) else OK, b"", ""
        offer = self._offered.get(number)
        if offer is None or whose != self._own:
            return NOT_KEPT, b"", ""
        offer.seen_s = _now()
        if kind == "record":
            return OK, offer.record.to_text().encode("ascii"), ""
        offer.parts += 1
        where = self._objects(offer.record.number)
        return OK, b"", f"X-Accel-Redirect: {WRITTEN}/{where}\r\n"

    def _keeps(self, token: str, number: int) -> bool:
        if number == 0:
            return self.held.keeps(token)
        return self.held.version(token, number) is not None

    async def _hold(self, member: str, offer: int, nursery: trio.Nursery) -> int:
        """Whether this node keeps a file; ``COMING`` while that is not known."""
        client, key = self._others.get(member), (member, offer)
        if client is None:
            return NOT_KEPT
        if key not in self._arriving:
            if sum(known == member for known, _ in self._arriving) >= _MOST_ARRIVING:
                return NOT_KEPT
            self._arriving[key] = None
            nursery.start_soon(self._receive, client, key)
        with trio.move_on_after(self._patience_s):
            async with self._arrived:
                while self._arriving.get(key, False) is None:
                    await self._arrived.wait()
        is_kept = self._arriving.get(key, False)
        if is_kept is None:
            return COMING
        return OK if is_kept else NOT_KEPT

    async def _receive(self, client: PeerClient, key: tuple[str, int]) -> None:
        is_kept = False
        try:
            try:
                async with self._turns[key[0]]:
                    is_kept = await self._threads.run(self._fetch, client, *key)
            except (PeerFailed, MonarchError, OSError, ValueError) as error:
                self._limiter.warning(
                    f"held {client.name}", "a file of node %s is not kept: %s", client.name, error
                )
            finally:
                self._arriving[key] = is_kept
                with trio.CancelScope(shield=True):
                    async with self._arrived:
                        self._arrived.notify_all()
            await trio.sleep(_KEPT_S)
        finally:
            del self._arriving[key]

    def _fetch(self, client: PeerClient, member: str, offer: int) -> bool:
        """Gets a file from the member that has written it. Raises PeerFailed, OSError, and
        ValueError for a record of another form."""
        answer = client.get(f"record/{member}/{offer}", RECORD_BYTES)
        if answer.status != OK:
            return False
        record = replace(Record.from_text(answer.data), version=offer)
        if not self._is_recoverable(record):
            raise ValueError(
                f"the patterns of `absorb` on this node do not cover {os.fsdecode(record.path)!r},"
                " or names beside it"
            )

        late_s = _now() + _LEAST_S

        def fetch(take: Take) -> None:
            for offset in range(0, record.size, _PART):
                if _now() > late_s + offset * _BYTE_S:
                    raise PeerFailed("slow")
                size = min(_PART, record.size - offset)
                answer = client.get(f"bytes/{member}/{offer}", size, offset)
                if answer.status != OK:
                    raise PeerFailed("broken")
                take(answer.data)

        return self.held.put(record, fetch)

    # -- for the files of this node ------------------------------------------------------------

    @property
    def members(self) -> Collection[PeerClient]:
        """The other members."""
        return self._others.values()

    async def ask(self, record: Record) -> Placed:
        """Asks other members to keep a file."""
        number = self.newest()
        self._offered[number] = offer = _Offer(record, _now())
        try:
            return await self._asks.run(self._ask, number, offer)
        finally:
            del self._offered[number]

    def _ask(self, number: int, offer: _Offer) -> Placed:
        record = offer.record
        asked = 0
        doubtful: list[PeerClient] = []
        for client in self._others.values():
            if asked == _ASKED:
                break
            if self._rests_s.get(client, 0.0) > _now() or not client.breaker.admits(_now()):
                continue
            asked += 1
            began_s, offer.parts = _now(), 0
            offer.seen_s, until_s = began_s, began_s + _LEAST_S + record.size * _BYTE_S
            is_late = partial(offer.is_late, until_s)
            status = self._told(client, f"hold/{self._own}/{number}", is_late)
            if status == OK:
                return Placed(client, doubtful)
            if status != NOT_KEPT or self._has_other_version(client, record):
                doubtful.append(client)
            if status == COMING:
                self._rests_s[client] = _now() + _REST_S
                self._limiter.warning(
                    f"late {client.name}",
                    "node %s has not kept a written file within %.0f s: it is not asked to keep"
                    " files for %.0f s",
                    *(client.name, _now() - began_s, _REST_S),
                )
        return Placed(None, doubtful)

    def _has_other_version(self, client: PeerClient, record: Record) -> bool:
        """Whether a member that did not take a file keeps another version of it."""
        version = self._version_at(client, record.token, record.number)
        self._follow(version)
        return version is not None

    def _follow(self, version: int | None) -> None:
        """Lets the next version be later than one that a member keeps: the clock of this node may
        have been set back since."""
        if version is not None and version <= _LAST_VERSION:
            with self._numbering:
                self._last_offer = max(self._last_offer, version)

    def newest(self) -> int:
        """A version that is later than all so far."""
        with self._numbering:
            self._last_offer += 1
            return self._last_offer

    async def is_held(self, client: PeerClient, record: Record) -> bool:
        """Whether a member answers, and keeps a file."""
        return await self._asked(client, f"held/{record.token}/{record.number}") == OK

    async def forget(self, client: PeerClient, token: str, number: int, version: int) -> bool:
        """Lets a member remove a file up to this version, or all of a mount if the number is 0;
        False if it does not answer, or is not asked because it has not answered, or keeps a later
        version of the mount: then the next one of ``newest`` is later still."""
        if number:
            if not client.breaker.admits(_now()):
                return False
        elif client.breaker.is_out(_now()) or not await self._requests.run(client.is_there):
            # A mount begins with the removal of all. A node that is mounted later must not be left
            # out. A node that does not answer must not use up the one try after a pause.
            return False
        status = await self._asked(client, f"forget/{token}/{number}/{version}")
        if status == NOT_KEPT:
            self._follow(await self._requests.run(self._version_at, client, token, 0))
        return status == OK

    async def _asked(self, client: PeerClient, name: str) -> int:
        until_s = _now() + _LEAST_S
        return await self._requests.run(self._told, client, name, lambda: _now() > until_s)

    # -- for the files of a member that is gone ----------------------------------------------------

    async def keepers(self, token: str) -> list[str]:
        """The other members that answer, and keep files of a mount."""

        async def keeps(member: str, client: PeerClient) -> bool:
            return await self._asked(client, f"held/{token}/0") == OK

        return await self._those(self._others, keeps)

    async def is_left_to(self, members: Collection[str], record: Record) -> bool:
        """Whether one of these members, and not this one, is to recover an object: it keeps a later
        version. Of the same version one of the two is the first, by their names."""

        async def is_first(member: str, client: PeerClient) -> bool:
            version = await self._requests.run(
                self._version_at, client, record.token, record.number
            )
            return version is not None and (version, self._own) > (record.version, member)

        return bool(await self._those(members, is_first))

    async def _those(
        self, members: Iterable[str], ask: Callable[[str, PeerClient], Awaitable[bool]]
    ) -> list[str]:
        """The members for which ``ask`` returns True. They are asked at the same time, but for
        those that are left out since they have not answered."""
        found: list[str] = []

        async def ask_one(member: str) -> None:
            client = self._others[member]
            if client.breaker.admits(_now()) and await ask(member, client):
                found.append(member)

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(ask_one, member)
        return sorted(found)

    def _version_at(self, client: PeerClient, token: str, number: int) -> int | None:
        """The version of an object that a member keeps, the latest one of the mount if the number
        is 0; None if it keeps none, or does not answer."""
        try:
            answer = client.get(f"version/{token}/{number}", _DIGITS)
            return int(answer.data) if answer.status == OK else None
        except (PeerFailed, ValueError):
            return None

    async def recovered(self, members: Iterable[str], record: Record) -> None:
        """Lets members remove an object up to the version of ``record``. One that does not answer
        finds the bytes, or writes its own beside them."""

        what = record.token, record.number, record.version
        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(self.forget, self._others[member], *what)

    def _told(self, client: PeerClient, name: str, is_late: Callable[[], bool]) -> int:
        """The status of the answer of a member to a request, 0 without an answer; ``COMING`` if
        nothing else is known when it ``is_late``."""
        try:
            return until_known(partial(client.get, name, 0), is_late).status
        except PeerFailed as error:
            self._limiter.warning(
                f"replica {client.name}",
                "node %s, which is to keep written files, does not answer: %s",
                *(client.name, error.kind),
            )
            return 0


def _now() -> float:
    return time.monotonic()
