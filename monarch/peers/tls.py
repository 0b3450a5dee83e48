"""TLS between members: the certificate of this node, and the connections to other nodes.

Members know each other by the secret of the job, not by the names in certificates. So the proofs of
a hello (``hello.py``) are also of the certificate that encrypts the connection: a channel binding,
``tls-server-end-point`` of RFC 5929. Any certificate serves, and no authority is asked. A program
between two members, which has another certificate, gets no token and no bytes.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

from monarch.errors import UsageError
from monarch.peers.connections import Connection
from monarch.peers.secret import read_private

_MOST_BYTES = 1 << 20


class Certificate:
    """The files ``cert`` and ``key`` of this node, PEM. ``fingerprint`` is what the proofs have of
    the certificate; only after ``read``."""

    def __init__(self, cert: Path, key: Path) -> None:
        self.cert, self.key = cert, key
        self.fingerprint = ""

    def read(self) -> None:
        """Reads both files, which may have been replaced. Raises UsageError if one of them cannot
        be used, or if other users can read the key."""
        read_private(self.key.resolve(), f"peers.tls_key {os.fspath(self.key)!r}", _MOST_BYTES)
        try:
            # Not the one of ``client_context``: that has no certificate.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # A key with a password would be asked for on the terminal.
            context.load_cert_chain(self.cert, self.key, password="")
            # The first one of a chain is that of the node.
            text = self.cert.read_text(encoding="ascii")
            end = text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
            der = ssl.PEM_cert_to_DER_cert(text[text.index(ssl.PEM_HEADER) : end])
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise UsageError(
                f"peers.tls_cert {os.fspath(self.cert)!r} and peers.tls_key: {reason}",
                hint="name a certificate and its key without a password, both PEM",
            ) from error
        self.fingerprint = fingerprint_of(der)


def fingerprint_of(certificate: bytes) -> str:
    """The SHA-256 of a certificate in DER, as hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()


def client_context() -> ssl.SSLContext:
    """What connections to members have in common. The hello checks their certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@dataclass(slots=True, eq=False)
class TlsConnection(Connection):
    """An encrypted connection. Its limits are not in the kernel: one call may wait several times
    for the member."""

    socket: ssl.SSLSocket

    def limit(self, seconds: float) -> None:
        self.limit_s = seconds
        self.socket.settimeout(seconds)

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise BrokenPipeError from error

    def receive_whole(self, size: int) -> bytes:
        data, got, until_s = bytearray(size), 0, time.monotonic() + self.limit_s
        try:
            with memoryview(data) as view:
                while got < size:
                    self.socket.settimeout(max(until_s - time.monotonic(), 1e-6))
                    count = self.socket.recv_into(view[got:])
                    if not count:
                        break
                    got += count
        finally:
            self.socket.settimeout(self.limit_s)
        return bytes(data) if got == size else bytes(data[:got])

    def certificate(self) -> str:
        der = self.socket.getpeercert(binary_form=True)
        return fingerprint_of(der or b"")
