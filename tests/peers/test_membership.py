"""The members, secrets, ports and addresses that the settings of a mount lead to."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from monarch.checks.peers import _doubts, check_peers
from monarch.config import load
from monarch.config.settings import (
    MountSettings,
    PeerSettings,
    SnapshotSettings,
    WritebackSettings,
)
from monarch.daemon import run
from monarch.errors import ConfigError, Unanswered, UsageError
from monarch.packs.format import FORMAT
from monarch.peers import network
from monarch.peers.hello import MemberKey
from monarch.peers.members import Endpoint
from monarch.peers.membership import Membership, membership
from monarch.peers.network import addresses_of, listening_address, own_names
from monarch.peers.secret import VARIABLE, ports_of, read_secret

SECRET = "a secret of the job, long enough"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """It finds no mistake in its configuration."""
    path = tmp_path / "nginx"
    path.write_text("#!/bin/sh\necho test is successful\n")
    path.chmod(0o755)
    return path


def test_a_list_with_addresses_names_this_node(engine: Path) -> None:
    settings = PeerSettings(
        members="127.0.77.[1-3]", address="127.0.77.2", port=21800, engine=engine
    )
    found = membership(settings, {VARIABLE: SECRET})
    assert found is not None
    assert (found.own, found.address, len(found.members)) == (1, "127.0.77.2", 3)
    assert found.ports == found.own_ports == list(range(21800, 21808))
    assert found.secret == SECRET.encode()
    assert SECRET not in repr(found)


def test_a_port_in_the_list_is_the_only_one_of_its_member(engine: Path) -> None:
    settings = PeerSettings(members="127.0.0.1:9000,elsewhere", address="127.0.0.1", engine=engine)
    found = membership(settings, {VARIABLE: SECRET})
    assert found is not None
    assert (found.own_ports, found.ports) == ([9000], ports_of(SECRET.encode(), 0))


@pytest.mark.promise(276)
@pytest.mark.parametrize("members", ["", "127.0.0.1"])
def test_without_other_members_there_is_no_membership(members: str) -> None:
    assert membership(PeerSettings(members=members), {}) is None


@pytest.mark.parametrize(
    ("members", "environ", "message"),
    [
        ("slurm", {}, "no job of Slurm"),
        ("elsewhere[1-4]", {VARIABLE: SECRET}, "is none of the members"),
        ("127.0.0.1,elsewhere", {}, "no secret"),
        ("127.0.0.1,elsewhere", {VARIABLE: "short"}, "16 to 4096 bytes"),
    ],
)
def test_a_mistake_is_one_line_with_a_remedy(
    members: str, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        membership(PeerSettings(members=members), environ)
    assert "\n" not in str(error.value)


@pytest.mark.promise(272)
def test_a_secret_that_other_users_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(UsageError, match="No such file"):
        read_secret(file, {})
    file.write_text(SECRET + "\n")
    file.chmod(0o640)
    with pytest.raises(UsageError, match="other users can read it"):
        read_secret(file, {})
    file.chmod(0o600)
    assert read_secret(file, {VARIABLE: "another"}) == SECRET.encode()
    if os.geteuid() == 0:
        os.chown(file, 4711, -1)
        with pytest.raises(UsageError, match="uid 4711"):
            read_secret(file, {})
        os.chown(file, 0, -1)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(UsageError):
        read_secret(tmp_path / "link", {})


def test_tokens_and_ports_follow_from_the_secret_and_each_member_has_a_token_of_its_own() -> None:
    one, other = SECRET.encode(), b"another secret of another job"
    keys = [MemberKey(*each) for each in (("a", "0", one), ("b", "0", one), ("a", "0", other))]
    assert len({key.token() for key in keys}) == 3
    assert keys[0].token() == MemberKey("a", "1", one).token()
    assert all(SECRET not in key.token() + repr(key) for key in keys)
    assert ports_of(one, 0) == ports_of(one, 0) != ports_of(other, 0)
    assert all(20_000 <= port < 30_000 for port in ports_of(one, 0))
    assert ports_of(one, 65_533) == [65_533, 65_534, 65_535]


def test_this_node_knows_its_names_and_the_address_of_the_way_to_others() -> None:
    names = own_names()
    assert socket.gethostname() in names
    assert "127.0.0.1" in names
    assert addresses_of("127.0.0.1") == ["127.0.0.1"]
    assert listening_address([Endpoint("127.0.0.1"), Endpoint("127.0.0.2")], 0) == "127.0.0.1"
    with pytest.raises(UsageError, match=r"peers\.address"):
        listening_address([Endpoint("a" * 64), Endpoint("127.0.0.2")], 0)


def test_an_address_of_one_link_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ["fe80::1%eth0", "fe80::1", "fd00::1", "10.0.0.1"]
    monkeypatch.setattr(
        network, "call_within", lambda *_: [(0, 0, 0, "", (each, 0)) for each in known]
    )
    assert addresses_of("node") == ["fd00::1", "10.0.0.1"]
    del known[2:]
    with pytest.raises(OSError, match="node has only addresses of one link"):
        addresses_of("node")


@pytest.mark.parametrize("address", ["fe80::1", "fe80::1%lo", "0.0.0.0", "::", "::ffff:127.0.0.1"])
def test_this_node_listens_at_an_address_that_others_can_use(engine: Path, address: str) -> None:
    given = mount_settings(members="127.0.77.1,127.0.77.2", address=address, engine=engine)
    (check,) = check_peers(given, {VARIABLE: SECRET})
    assert check.status == "fail" and " is " in check.detail and check.detail.isprintable()
    assert check.advice == "use an address at which the nodes reach each other"


def test_a_dns_that_answers_only_for_ipv4_costs_a_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[int] = [socket.AF_INET]
    waits: list[float] = []

    def within(
        seconds: float,
        function: Callable[..., object],
        name: str,
        port: None,
        family: int,
        kind: int,
    ) -> object:
        waits.append(seconds)
        if family not in answers:
            raise Unanswered
        return function(name, port, family, kind)

    monkeypatch.setattr(network, "call_within", within)
    assert addresses_of("127.0.0.1", within_s=4.0) == ["127.0.0.1"]
    assert (len(waits), sum(waits)) == (2, 4.0)
    answers.clear()
    with pytest.raises(TimeoutError, match=r"does not answer for 127\.0\.0\.1"):
        addresses_of("127.0.0.1")


def test_a_member_that_is_not_known_does_not_hide_the_way_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"own": "127.0.1.1", "here": "127.0.1.2", "lost": "192.0.2.1", "there": "192.0.2.2"}
    routes = {"192.0.2.2": "192.0.2.9"}

    def find(names: dict[str, str], name: str) -> str:
        if name not in names:
            raise OSError(errno.ENETUNREACH, "not known")
        return names[name]

    def resolved(name: str, *, within_s: float = 1.0) -> list[str]:
        return [find(known, name)]

    def address(*others: str) -> str:
        return listening_address([Endpoint(name) for name in ("own", *others)], 0)

    monkeypatch.setattr(network, "addresses_of", resolved)
    monkeypatch.setattr(network, "_address_towards", partial(find, routes))
    assert address("there") == "192.0.2.9"
    assert address("unknown", "lost", "here", "there") == "192.0.2.9"
    assert address("unknown", "here") == "127.0.1.1"
    with pytest.raises(UsageError, match=r"peers\.address"):
        address("unknown", "lost")


def test_a_name_for_which_the_dns_does_not_answer_leaves_the_others_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"own": "127.0.1.1", "there": "192.0.2.2"}
    hung = threading.Event()

    def resolved(name: str, *, within_s: float = 1.0) -> list[str]:
        if name not in known:
            hung.wait(within_s)
            raise TimeoutError(errno.ETIMEDOUT, "the DNS does not answer")
        return [known[name]]

    monkeypatch.setattr(network, "_RESOLVE_S", 60.0)
    monkeypatch.setattr(network, "addresses_of", resolved)
    monkeypatch.setattr(network, "_address_towards", {"192.0.2.2": "192.0.2.9"}.__getitem__)
    others = [Endpoint(name) for name in ("own", "hangs", "hangs too", "there")]
    assert listening_address(others, 0) == "192.0.2.9"
    # Without an answer the time ends, and the remedy is named.
    monkeypatch.setattr(network, "_RESOLVE_S", 0.05)
    with pytest.raises(UsageError, match="the DNS does not answer"):
        listening_address(others[:3], 0)
    hung.set()


def test_a_job_of_many_nodes_costs_each_node_one_name_of_the_dns(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def addresses_of(name: str, *, within_s: float = 0.0) -> list[str]:
        asked.append(name)
        return ["192.0.2.7"]

    monkeypatch.setattr(network, "addresses_of", addresses_of)
    settings = PeerSettings(members="slurm", engine=engine)
    environ = {
        VARIABLE: SECRET,
        "SLURM_JOB_NODELIST": "n[0001-1024]",
        "SLURMD_NODENAME": "n0512",
    }
    found = membership(settings, environ)
    assert found is not None
    assert (found.own, found.address, len(found.members)) == (511, "192.0.2.7", 1024)
    assert asked == ["n0512"]


# -- the configuration, doctor and status ----------------------------------------------------------


def mount_settings(**peers: object) -> MountSettings:
    given = {"name": "m", "source": Path("/s"), "mountpoint": Path("/m"), "peers": peers}
    return MountSettings.model_validate(given)


def test_members_are_a_text_or_a_list_and_an_option(tmp_path: Path) -> None:
    assert mount_settings(members=["a", "b:80"]).peers.members == "a,b:80"
    settings = load.from_options(
        tmp_path / "s", tmp_path / "m", peers="n[1-2]", options=["peers.port=21000"]
    )
    assert (settings.peers.members, settings.peers.port) == ("n[1-2]", 21000)
    assert load.with_options(settings, [], peers="dns:x").peers.members == "dns:x"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["peers.address=here"], "'here' is no IP address"),
        (["peers.members=a\nb"], "is no list of members"),
        (["peers.members=a", "source_identity=caller"], "exclude each other"),
        (["peers.patience=11s"], "peers.patience"),
        (["peers.port=70000"], "peers.port"),
    ],
)
def test_mistakes_in_the_settings_are_reported(
    tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load.from_options(tmp_path / "s", tmp_path / "m", options=options)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of 127.0.77.1 at which a program listens."""
    with socket.create_server(("127.0.77.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        yield port


def test_doctor_checks_the_members_the_secret_the_engine_and_the_port(
    engine: Path, taken: int
) -> None:
    def statuses(**peers: object) -> list[tuple[str, str]]:
        given = {"address": "127.0.77.1", "engine": engine, **peers}
        found = check_peers(mount_settings(**given), {VARIABLE: SECRET})
        return [(check.status, check.detail) for check in found]

    assert statuses() == []
    assert statuses(members="127.0.77.1")[0][0] == "ok"
    for members, why in ((None, "peers.members is not set"), ("127.0.77.1", "the only member")):
        given = mount_settings(members=members, address="127.0.77.1", engine=engine).model_copy(
            update={"absorb": ("**",), "writeback": WritebackSettings(replicate=1)}
        )
        (check,) = check_peers(given, {VARIABLE: SECRET})
        assert check.status == "warn" and why in check.detail
        assert "writeback.replicate has no effect" in check.detail
    ((status, detail),) = statuses(members="127.0.77.1,127.0.77.2")
    assert status == "ok" and str(engine) in detail
    ((status, detail),) = statuses(members=f"127.0.77.1:{taken},127.0.77.2", port=taken)
    assert status == "warn" and "is free" in detail
    ((status, detail),) = statuses(members="192.0.2.1,127.0.77.2", address="192.0.2.1")
    assert status == "fail" and "192.0.2.1 port" in detail and "Cannot assign" in detail
    ((status, detail),) = statuses(members="elsewhere1,elsewhere2", address=None)
    assert status == "fail" and "none of the members" in detail


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (b"#!/bin/sh\necho 'no thread library' >&2\nexit 1\n", "no thread library"),
        (
            b"#!/bin/sh\necho no port\n"
            b"echo nginx: configuration file ./nginx.conf test failed\nexit 1\n",
            "cannot serve the copies: no port",
        ),
        (b"#!/bin/sh\nexit 3\n", "no word in its log, exit status 3"),
        (b"#!/bin/sh\nkill -SEGV $$\n", "no word in its log, signal 11"),
        (b"#!/bin/sh\nexec sleep 60\n", "it has not ended after 1 s"),
        (b"#!/gone\n", "No such file"),
        (b"", "no word in its log, exit status 0"),
    ],
    ids=["mistake", "reason", "no word", "crash", "hangs", "interpreter", "empty"],
)
def test_doctor_tries_the_engine(
    engine: Path, monkeypatch: pytest.MonkeyPatch, program: bytes, why: str
) -> None:
    monkeypatch.setattr("monarch.peers.engine._CHECK_S", 1.0 if b"sleep" in program else 60.0)
    engine.write_bytes(program)
    given = mount_settings(members="127.0.77.1,127.0.77.2", address="127.0.77.1", engine=engine)
    (check,) = check_peers(given, {VARIABLE: SECRET})
    assert (check.status, why in check.detail) == ("fail", True), check
    assert f"{engine} cannot serve the copies" in check.detail
    assert SECRET not in check.detail


@pytest.mark.parametrize("name", ["nginx", "caddy"])
def test_doctor_finds_no_fault_in_a_real_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", os.path.dirname(sys.executable)])
    program = shutil.which(name, path=path)
    if program is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setattr("monarch.peers.engine._CHECK_S", 60.0)
    given = mount_settings(members="127.0.77.1,127.0.77.2", address="127.0.77.1", engine=program)
    (check,) = check_peers(given, {VARIABLE: SECRET})
    assert check.status == "ok", check


@pytest.mark.parametrize(
    ("members", "doubt"),
    [
        ("127.0.77.1,localhost", None),
        ("127.0.77.1,same.test", "same.test is this node, too"),
        ("127.0.77.1,127.0.77.2,other.test", "other.test is 127.0.77.2, too"),
        ("127.0.77.1,gone.test", "the name gone.test is not known"),
        ("127.0.77.1:7000,same.test:7001", None),
    ],
)
def test_doctor_names_members_that_are_no_other_nodes(
    engine: Path, monkeypatch: pytest.MonkeyPatch, members: str, doubt: str | None
) -> None:
    names = {"same.test": ["127.0.77.1"], "other.test": ["127.0.77.2"], "localhost": ["127.0.0.1"]}

    def resolved(name: str, **limits: float) -> list[str]:
        if name == "gone.test":
            raise OSError("unknown")
        return names.get(name, [name])

    monkeypatch.setattr("monarch.peers.network.addresses_of", resolved)
    monkeypatch.setattr("monarch.checks.peers.is_free", lambda address, port: True)
    given = mount_settings(members=members, address="127.0.77.1", port=7000, engine=engine)
    (check,) = check_peers(given, {VARIABLE: SECRET})
    assert check.status == ("ok" if doubt is None else "warn")
    assert doubt is None or doubt in check.detail


@pytest.mark.parametrize(
    ("absorb", "snapshot", "is_said"),
    [
        ((), {}, False),
        (("ckpt/**",), {}, True),
        (("ckpt/**",), {"freshness": "never"}, False),
        (("ckpt/**",), {"file": "/given"}, False),
    ],
)
def test_doctor_says_that_a_node_that_mounts_again_has_another_snapshot(
    engine: Path, absorb: tuple[str, ...], snapshot: dict[str, str], is_said: bool
) -> None:
    given = mount_settings(members="127.0.77.1,127.0.77.2", address="127.0.77.1", engine=engine)
    more = {"absorb": absorb, "snapshot": SnapshotSettings.model_validate(snapshot)}
    found = list(check_peers(given.model_copy(update=more), {VARIABLE: SECRET}))
    said = [check.status for check in found if "another one than the others" in check.detail]
    assert said == ["warn"] * is_said


def test_doctor_says_that_other_nodes_do_not_reach_a_loopback_address() -> None:
    members = [Endpoint("127.0.0.1"), Endpoint("192.0.2.2"), Endpoint("localhost")]
    found = Membership(members, 0, "192.0.2.1", [1], [1], Path("nginx"), b"")
    assert list(_doubts(found)) == [
        "at 127.0.0.1 each node reaches only itself",
        "localhost is this node, too",
    ]


def test_a_pack_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "pack.json").write_text(json.dumps({"format": FORMAT}))
    settings = mount_settings(members="a,b").model_copy(update={"source": tmp_path})
    with pytest.raises(UsageError, match="does not share yet"):
        run.prepare(settings)
