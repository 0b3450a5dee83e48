"""How a member proves that it knows the secret, before it gets a token and before its bytes count.

Any program on a node of the job may listen at the ports of a member. So each new connection begins
with a request that has no token, but a random challenge. The answer has two proofs: HMAC-SHA256
with the secret over the challenge, the name of the member, and the address and the port at which
the connection arrived; one of them also over the set of files. A program that passes the request on
to a member gets proofs for the port of that member, which differs from its own. With TLS the proofs
are of the certificate, too (``tls.py``).

A token is of one member: it is of no use at another one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from dataclasses import dataclass, field
from typing import Literal

HELLO = "hello"
_CHALLENGE_BYTES = 32
# A challenge and a proof, as hexadecimal digits.
CHALLENGE = "[0-9a-f]{64}"
_PROOF_DIGITS = 64
PROOFS_BYTES = 2 * _PROOF_DIGITS
# What the engine makes of the request for the daemon.
_PASSED_ON = re.compile(rf"/{HELLO}/({CHALLENGE})/([0-9a-f.:]+)/([0-9]{{1,5}})", re.ASCII)

Found = Literal["member", "other-set", "stranger"]


def new_challenge() -> str:
    return secrets.token_hex(_CHALLENGE_BYTES)


def hello_request(challenge: str) -> bytes:
    return f"GET /{HELLO}/{challenge} HTTP/1.1\r\nHost: monarch\r\n\r\n".encode()


@dataclass(frozen=True, slots=True)
class MemberKey:
    """What the members of a job compute from its secret for the member ``member``, which answers
    for the set ``set_name``."""

    member: str
    set_name: str
    _secret: bytes = field(repr=False)

    def token(self) -> str:
        """What a request to the member must show, as hexadecimal digits."""
        return self._digest("token", self.member)

    def proofs(self, challenge: str, address: str, port: int, certificate: str = "") -> bytes:
        """The answer to a challenge on a connection to this address and port, with the fingerprint
        of the certificate that encrypts it, if any. Raises ValueError for a text that is no IP
        address."""
        where = ipaddress.ip_address(address.partition("%")[0]).compressed
        fields = (challenge, self.member, where, str(port), certificate)
        of_set = self._digest("set", *fields, self.set_name)
        return (of_set + self._digest("member", *fields)).encode()

    def answer(self, path: str, certificate: str = "") -> bytes | None:
        """The answer to a request that the engine passes on, with the fingerprint of the
        certificate of this node; None for one of another form."""
        match = _PASSED_ON.fullmatch(path)
        if match is None:
            return None
        try:
            return self.proofs(match[1], match[2], int(match[3]), certificate)
        except ValueError:
            return None

    def judge(
        self, proofs: bytes, challenge: str, address: str, port: int, certificate: str = ""
    ) -> Found:
        """Which program has given ``proofs`` behind this certificate: the member, the member with
        another set, or one that does not know the secret."""
        right = self.proofs(challenge, address, port, certificate)
        if hmac.compare_digest(proofs[:_PROOF_DIGITS], right[:_PROOF_DIGITS]):
            return "member"
        if hmac.compare_digest(proofs[_PROOF_DIGITS:], right[_PROOF_DIGITS:]):
            return "other-set"
        return "stranger"

    def _digest(self, use: str, *fields: str) -> str:
        # No field has a line feed.
        text = "\n".join([f"monarch peers {use}", *fields])
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()
