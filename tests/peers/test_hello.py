"""The proofs of a member: each part of the connection counts."""

from __future__ import annotations

import pytest

from monarch.peers.hello import PROOFS_BYTES, MemberKey, new_challenge

SECRET, SET = b"the secret of the job", "ab" * 16
KEY = MemberKey("node1", SET, SECRET)
CHALLENGE = "5c" * 32
PROOFS = KEY.proofs(CHALLENGE, "10.0.0.1", 20_000)


@pytest.mark.promise(297)
@pytest.mark.parametrize(
    ("key", "challenge", "address", "port", "found"),
    [
        (KEY, CHALLENGE, "10.0.0.1", 20_000, "member"),
        (MemberKey("node1", "cd" * 16, SECRET), CHALLENGE, "10.0.0.1", 20_000, "other-set"),
        (MemberKey("node2", SET, SECRET), CHALLENGE, "10.0.0.1", 20_000, "stranger"),
        (MemberKey("node1", SET, SECRET + b"x"), CHALLENGE, "10.0.0.1", 20_000, "stranger"),
        (KEY, "5d" * 32, "10.0.0.1", 20_000, "stranger"),
        (KEY, CHALLENGE, "10.0.0.2", 20_000, "stranger"),
        (KEY, CHALLENGE, "10.0.0.1", 20_001, "stranger"),
    ],
)
def test_a_proof_holds_for_one_member_challenge_address_and_port(
    key: MemberKey, challenge: str, address: str, port: int, found: str
) -> None:
    assert len(PROOFS) == PROOFS_BYTES
    assert key.judge(PROOFS, challenge, address, port) == found


def test_bytes_of_any_form_are_no_proof() -> None:
    for proofs in (b"", b"0" * PROOFS_BYTES, bytes(range(128, 256)), PROOFS[1:], PROOFS[::-1]):
        assert KEY.judge(proofs, CHALLENGE, "10.0.0.1", 20_000) == "stranger"


def test_an_address_counts_in_any_form_of_its_text() -> None:
    short = KEY.proofs(CHALLENGE, "fe80::1", 1)
    assert short == KEY.proofs(CHALLENGE, "FE80:0:0:0::1%eth0", 1)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        f"/hello/{CHALLENGE}",
        f"/hello/{CHALLENGE}/10.0.0.1",
        f"/hello/{CHALLENGE}/10.0.0/1",
        f"/hello/{CHALLENGE}/...../1",
        f"/hello/{CHALLENGE}/10.0.0.1/123456",
        f"/hello/{CHALLENGE[1:]}/10.0.0.1/1",
        f"/hello/{CHALLENGE}/10.0.0.1/1\n",
    ],
)
def test_a_request_of_another_form_has_no_answer(path: str) -> None:
    assert KEY.answer(path) is None


def test_a_request_from_the_engine_is_answered_for_its_address_and_port() -> None:
    assert KEY.answer(f"/hello/{CHALLENGE}/10.0.0.1/20000") == PROOFS
    assert new_challenge() != new_challenge()
