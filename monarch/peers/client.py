"""Requests to one member of the job: the bytes of a copy, over connections that are kept.

The requests are HTTP/1.1 without bodies, in threads. Every wait has a limit, and so has every
length that a member can send: a member may be broken, and its port may be of another program. So
each connection begins with a hello (``hello.py``), and has no other use before its answer is right.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from monarch.peers.breaker import Breaker
from monarch.peers.connections import Connection, Connections, OwnConnections
from monarch.peers.hello import PROOFS_BYTES, MemberKey, hello_request, new_challenge
from monarch.peers.members import Endpoint
from monarch.peers.network import addresses_of
from monarch.peers.tls import TlsConnection
from monarch.telemetry.log import Limiter
from monarch.text import MiB

log = logging.getLogger(__name__)

T = TypeVar("T")

# The header of the token in a request, and that of the digest in an answer.
TOKEN_HEADER = "X-Monarch-Token"
DIGEST_HEADER = "X-Monarch-Digest"
# The status of an answer without bytes: they are being fetched, or the member does not keep them.
OK, COMING, NOT_KEPT, REFUSED, TOO_MANY = 200, 202, 404, 403, 429
# No status of HTTP: the engine has a copy of another size, so of another version.
OTHER_SIZE = 0
# As OK, with a part of a copy; and the part is not in the copy.
_PART, _NO_PART = 206, 416
# The answer of nginx with TLS to a request without it.
_BAD = 400
_TLS_REMEDY = "name peers.tls_cert on all nodes or on none"
_STATUSES = frozenset({OK, COMING, NOT_KEPT})

CONNECT_S = 0.2
# The least limit of the wait for the answer to a hello, in seconds: the daemon gives it.
_HELLO_S = 1.0
# Once for each member, unless it moves.
_RESOLVE_S = 1.0
_MOST_HEAD = 4096
_DIGITS = frozenset(b"0123456789")
_DIGEST = re.compile(rb"[0-9a-f]{16}")

Kind = Literal["unreachable", "slow", "broken", "wrong-secret", "other-set", "damaged"]

# What is said of a member with several ports, the most specific reason last.
_REASONS: tuple[Kind, ...] = ("unreachable", "broken", "wrong-secret", "other-set")


# The least time between two requests for what is coming, in seconds: a member answers COMING only
# after a part of its patience, but a broken one may do so at once.
_AGAIN_S = 0.01


# What the engine answers itself, from a copy of any version.
_AT_ENGINE = ("c/", "s/")


class PeerFailed(Exception):
    """A member did not give the bytes; ``kind`` is the reason, and ``remedy`` is for a person, if
    it is known."""

    def __init__(self, kind: Kind, remedy: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.remedy = remedy


class _OtherSize(PeerFailed):
    """An answer has another number of bytes than it should."""

    def __init__(self) -> None:
        super().__init__("broken")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with the status OK, COMING, NOT_KEPT or OTHER_SIZE. ``data`` is empty unless the
    status is OK; ``digest`` is that of its header, None if it has none."""

    status: int
    data: bytes
    digest: int | None


def until_known(get: Callable[[], Answer], is_late: Callable[[], bool]) -> Answer:
    """The answer to a request that is repeated while it is COMING, until it ``is_late``. Raises
    PeerFailed."""
    while True:
        began_s = time.monotonic()
        answer = get()
        if answer.status != COMING or is_late():
            return answer
        time.sleep(max(0.0, began_s + _AGAIN_S - time.monotonic()))


class PeerClient:
    """The connections to one member; thread-safe. ``ports`` are those at which it may listen. A
    member answers only for its own set of files, that of ``key``. ``tls``: what encrypts the
    connections; None: nothing."""

    def __init__(
        self,
        endpoint: Endpoint,
        ports: Sequence[int],
        key: MemberKey,
        breaker: Breaker,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = str(endpoint)
        self.breaker = breaker
        self._host = endpoint.host
        self._ports = [endpoint.port] if endpoint.port else list(ports)
        self._key = key
        self._tls = tls
        self._before = f"GET /{key.set_name}/".encode()
        fields = f"Host: monarch\r\n{TOKEN_HEADER}: {key.token()}\r\n"
        self._fields = f" HTTP/1.1\r\n{fields}".encode()
        self.connections: Connections = OwnConnections()
        self._finding = threading.Lock()
        # The address at which it answered last, and those that took long, the last one last.
        self._address: tuple[str, int] | None = None
        self._slow: list[str] = []
        # The last failure; None if the last call was answered, or there was none.
        self.trouble: Kind | None = None
        self.was_asked = False
        self._limiter = Limiter(log)

    @property
    def request(self) -> tuple[bytes, bytes]:
        """What a request has before and after the name of the file."""
        return self._before, self._fields + b"\r\n"

    def close(self) -> None:
        self.connections.drop()

    def get(self, name: str, size: int, offset: int | None = None) -> Answer:
        """The answer to a request for ``name``, whose bytes are ``size`` if they come. If there is
        an ``offset``, the name may be that of a copy from which the bytes from there on are
        requested. OTHER_SIZE is no failure: the daemon of the member knows which version it has.
        Raises PeerFailed; the breaker has then counted the failure."""
        began = time.monotonic()
        self.was_asked = True
        # The bytes after the first MiB have limits of their own.
        parts = 1 + size // MiB
        try:
            answer = self._get(name, size, offset)
            self.trouble = None
        except PeerFailed as error:
            if isinstance(error, _OtherSize) and name.startswith(_AT_ENGINE):
                return Answer(OTHER_SIZE, b"", None)
            self._noted(error)
            raise
        finally:
            waited_s = time.monotonic() - began
            self.late(waited_s - parts * self.breaker.fair_s)
        if answer.status != COMING:
            self.breaker.answered(waited_s / parts)
        return answer

    def is_there(self) -> bool:
        """Whether the member answers a hello. No failure is counted."""
        try:
            self._connected().close()
        except PeerFailed:
            return False
        return True

    def greet(self) -> None:
        """Asks with a hello whether the member, which was left out, answers again. No bytes come,
        so those that were wrong remain the last ones."""
        try:
            # Not kept: the datapath would ask over it, with many requests at once.
            self._connected().close()
        except PeerFailed as error:
            self._noted(error)
            return
        self.breaker.greeted(time.monotonic())
        self.trouble = "damaged" if self.breaker.is_damaged else None

    def late(self, seconds: float) -> None:
        """Records that the member took ``seconds`` longer than a fair time, until now."""
        now = time.monotonic()
        self.breaker.late(now, seconds)
        if seconds > 0 and self.breaker.is_out(now):
            # The member may be left out for another reason, and its failure was late, too.
            self.trouble = self.trouble or "slow"
            # So the datapath asks it no more.
            self.connections.drop()

    def damaged(self) -> PeerFailed:
        """Records that the bytes of an answer were wrong; returns the error to raise."""
        return self._noted(PeerFailed("damaged"))

    def too_late(self) -> PeerFailed:
        """Records that the member took too long to read the source; returns the error to raise. It
        answers, so the breaker counts no failure."""
        self.trouble = "slow"
        return PeerFailed("slow")

    def used(self, latencies_s: Sequence[float], slow: int, late_s: float) -> None:
        """Records requests of the datapath: answers after these latencies, answers that did not
        come in time, and the time for which answers were late."""
        # The datapath asks no member that is left out: these answers came before the failures.
        is_old = self.breaker.is_out(time.monotonic())
        for latency_s in () if is_old else latencies_s:
            self.was_asked, self.trouble = True, None
            self.breaker.answered(latency_s)
            # The datapath has compared the digests.
            self.breaker.right()
        for _ in range(slow):
            self._noted(PeerFailed("slow"))
        self.late(late_s)

    def _noted(self, error: PeerFailed) -> PeerFailed:
        """Records a failure."""
        self.was_asked, self.trouble = True, error.kind
        if error.remedy:
            self._limiter.warning(
                error.remedy,
                "node %s answers (%s), but not as this node expects: %s",
                *(self.name, error.kind, error.remedy),
            )
        now = time.monotonic()
        if error.kind == "damaged":
            self.breaker.damaged(now)
        else:
            self.breaker.failed(now)
        if self.breaker.is_out(now):
            # So the datapath asks it no more.
            self.connections.drop()
        return error

    def _get(self, name: str, size: int, offset: int | None) -> Answer:
        request = self._before + name.encode() + self._fields
        if offset is not None:
            request += f"Range: bytes={offset}-{offset + size - 1}\r\n".encode()
        request += b"\r\n"
        kept = self.connections.take()
        if kept is not None:
            # The member may have closed it meanwhile, and then answers nothing.
            answer = self._answer(kept, request, size)
            if answer is not None:
                return answer
        answer = self._answer(self._connected(), request, size)
        if answer is None:
            raise PeerFailed("broken")
        return answer

    def _answer(self, connection: Connection, request: bytes, size: int) -> Answer | None:
        """Sends a request; the connection is kept for the next one if it may be used again. None if
        it was closed before the answer. Raises PeerFailed."""
        is_kept = False
        try:
            answer, is_kept = self._exchange(connection, request, size, self.breaker.limit_s)
            if answer is not None and answer.status == REFUSED:
                self._address = None
                raise PeerFailed("wrong-secret")
            if answer is not None and answer.status == _NO_PART:
                raise _OtherSize
            if answer is not None and answer.status not in _STATUSES:
                raise PeerFailed("broken")
            return answer
        finally:
            if not is_kept or not self.connections.keep(connection):
                connection.close()

    def _exchange(
        self,
        connection: Connection,
        request: bytes,
        size: int,
        limit_s: float,
    ) -> tuple[Answer | None, bool]:
        """Sends a request. The answer, None if the connection was closed before, and whether the
        connection may be used again. Raises PeerFailed."""
        try:
            connection.limit(limit_s)
            connection.send(request)
            head, rest = _head(connection, time.monotonic() + limit_s)
            return _answer(connection, head, rest, size) if head else (None, False)
        except (BrokenPipeError, ConnectionResetError):
            return None, False
        except (BlockingIOError, TimeoutError):
            raise PeerFailed("slow") from None
        except OSError:
            raise PeerFailed("broken") from None

    def _connected(self) -> Connection:
        """A new connection to the member. Raises PeerFailed."""
        address = self._address
        try:
            if address is not None:
                try:
                    return self._proven(address)
                except (PeerFailed, OSError) as error:
                    # The member may have been started again, with another port, and another program
                    # may have this one.
                    self._address = None
                    if _takes_long(error):
                        raise
            if not self._finding.acquire(timeout=CONNECT_S + self.breaker.limit_s):
                raise PeerFailed("unreachable")
            try:
                address = self._address
                if address is None:
                    return self._find()
            finally:
                self._finding.release()
            return self._proven(address)
        except OSError:
            raise PeerFailed("unreachable") from None

    def _find(self) -> Connection:
        """A connection to the member at the address and port at which it answers for this set. It
        may listen at one of its addresses only, and other programs, and other mounts of the job,
        may have some of the ports. Raises PeerFailed, OSError."""
        failure = PeerFailed("unreachable")
        until_s = time.monotonic() + self._hello_limit_s
        for address in itertools.product(self._addresses(), tuple(self._ports)):
            try:
                connection = self._proven(address)
            except (PeerFailed, OSError) as error:
                if _takes_long(error) or time.monotonic() > until_s:
                    # A program that does not answer, or late, must not hide the member behind it
                    # again.
                    _put_last(address[0], self._slow)
                    _put_last(address[1], self._ports)
                    raise
                if isinstance(error, PeerFailed):
                    failure = max(failure, error, key=_specific)
                continue
            self._address = address
            return connection
        raise failure

    @property
    def _hello_limit_s(self) -> float:
        return max(self.breaker.limit_s, _HELLO_S)

    def _addresses(self) -> list[str]:
        """The addresses of the member, those last that took long. Raises OSError, also if the DNS
        takes too long."""
        try:
            return [str(ipaddress.ip_address(self._host))]
        except ValueError:
            found = addresses_of(self._host, within_s=_RESOLVE_S)
            # An address that the name does not have any more must not be remembered for ever.
            self._slow = [each for each in self._slow if each in found]
            return [each for each in found if each not in self._slow] + self._slow

    def _proven(self, address: tuple[str, int]) -> Connection:
        """A new connection to this address, at which the member has proved that it is one. Raises
        PeerFailed, OSError."""
        limit_s = self._hello_limit_s
        connection = self._encrypted(_connect(address), limit_s)
        is_proven = False
        try:
            challenge = new_challenge()
            answer, is_kept = self._exchange(
                connection, hello_request(challenge), PROOFS_BYTES, limit_s
            )
            if answer is not None and answer.status == TOO_MANY:
                raise PeerFailed("slow")
            if answer is not None and answer.status == _BAD and self._tls is None:
                raise PeerFailed("broken", _TLS_REMEDY)
            if answer is None or answer.status != OK or not is_kept:
                raise PeerFailed("broken")
            found = self._key.judge(answer.data, challenge, *address, connection.certificate())
            if found != "member":
                raise PeerFailed("other-set" if found == "other-set" else "wrong-secret")
            is_proven = True
            return connection
        finally:
            if not is_proven:
                connection.close()

    def _encrypted(self, connected: socket.socket, limit_s: float) -> Connection:
        """A connection with TLS, if the members use it. Raises PeerFailed, OSError."""
        if self._tls is None:
            return Connection(connected)
        try:
            connected.settimeout(limit_s)
            return TlsConnection(self._tls.wrap_socket(connected))
        except ssl.SSLError:
            connected.close()
            raise PeerFailed("broken", _TLS_REMEDY) from None
        except OSError:
            connected.close()
            raise


def _specific(error: PeerFailed) -> int:
    """A higher number for a failure that says more."""
    return _REASONS.index(error.kind)


def _takes_long(error: PeerFailed | OSError) -> bool:
    """Whether a port failed after a wait, so that no further one is tried in this call."""
    if isinstance(error, PeerFailed):
        return error.kind == "slow"
    return not isinstance(error, ConnectionRefusedError)


def _put_last(item: T, items: list[T]) -> None:
    with suppress(ValueError):
        items.remove(item)
    items.append(item)


def _connect(address: tuple[str, int]) -> socket.socket:
    """Raises OSError, TimeoutError after ``CONNECT_S``."""
    connection = socket.create_connection(address, timeout=CONNECT_S)
    # From now on the kernel limits the waits: ``Connection.limit``.
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _head(connection: Connection, until_s: float) -> tuple[bytes, bytes]:
    """The head of an answer, and the bytes behind it that came with it; nothing if the connection
    was closed. Raises OSError, PeerFailed."""
    got = connection.receive(64 * 1024)
    while got and (end := got.find(b"\r\n\r\n")) < 0:
        if len(got) > _MOST_HEAD:
            raise PeerFailed("broken")
        if time.monotonic() > until_s:
            raise PeerFailed("slow")
        more = connection.receive(_MOST_HEAD)
        if not more:
            raise PeerFailed("broken")
        got += more
    return (got[: end + 2], got[end + 4 :]) if got else (b"", b"")


def _answer(connection: Connection, head: bytes, rest: bytes, size: int) -> tuple[Answer, bool]:
    """The answer with this head, and whether its connection may be used again. Raises OSError,
    PeerFailed for an answer of another form, and for other than ``size`` bytes."""
    status = head[9:12]
    if not head.startswith(b"HTTP/1.1 ") or not _DIGITS.issuperset(status) or len(status) < 3:
        raise PeerFailed("broken")
    fields = _fields(head)
    length = fields.get(b"content-length", b"")
    if not length or len(length) > 19 or not _DIGITS.issuperset(length):
        raise PeerFailed("broken")
    is_kept = fields.get(b"connection", b"").lower() != b"close"
    if int(status) not in (OK, _PART):
        # Its bytes are a text for a person.
        return Answer(int(status), b"", None), is_kept and len(rest) == int(length)
    if int(length) != size:
        raise _OtherSize
    if len(rest) > size:
        raise PeerFailed("broken")
    parts, left = [rest], size - len(rest)
    while left:
        part = connection.receive_whole(min(left, MiB))
        if len(part) < min(left, MiB):
            raise PeerFailed("broken")
        parts.append(part)
        left -= len(part)
    digest = fields.get(DIGEST_HEADER.lower().encode(), b"")
    number = int(digest, 16) if _DIGEST.fullmatch(digest) else None
    return Answer(OK, b"".join(parts), number), is_kept


def _fields(head: bytes) -> dict[bytes, bytes]:
    fields = {}
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        fields[name.lower()] = value.strip()
    return fields
