"""The members of a job: host lists of Slurm, lists, and names of the DNS."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.errors import UsageError
from monarch.peers.members import Endpoint, expand, listed, members_of, own_index
from monarch.peers.ownership import MOST_MEMBERS

# What `scontrol show hostnames` of Slurm 22.05.8 printed.
OF_SCONTROL = {
    "n[01-03,7],gpu5": "n01 n02 n03 n7 gpu5",
    "rack[0-1]n[0-2]": "rack0n0 rack0n1 rack0n2 rack1n0 rack1n1 rack1n2",
    "n[08-10]": "n08 n09 n10",
    "n[9-010]": "n9 n10",
    "n[1-2][3-4]": "n13 n14 n23 n24",
    "n[001-3]": "n001 n002 n003",
    "n[2,1]": "n2 n1",
    "n[1,01]": "n1 n01",
    "n[1,1]": "n1 n1",
    "n[1-1]": "n1",
    "[1-3]": "1 2 3",
    "1[1-2]": "11 12",
    "tux1-3": "tux1-3",
    "a,b": "a b",
    " a , b": "a b",
    "a,,b": "a b",
    "a b\nc": "a b c",
    "n[1-3],n[2-4]": "n1 n2 n3 n2 n3 n4",
    "n[9999999999-10000000001]": "n9999999999 n10000000000 n10000000001",
    "n[00000000000000000001-2]": "n00000000000000000001 n00000000000000000002",
    "": "",
}

REFUSED = [
    *("n[3-1]", "n[10-9]", "n[]", "n[1-]", "n[-1]", "n[a]", "n[1--3]", "n[1-2-3]", "n[1-3:2]"),
    *("n[[1-2]]", "n[1-2", "n1-2]", "n[1,,2]", "n[1 - 3]", "n[+1-3]", "n[0x1-0x3]", "n{1-3}"),
    *("(null)", "ünix[1-2]", "-n", "n/1", "n;reboot", "n[1-3]-", "a" * 254, "n[\u0661-\u0663]"),
    # More names than there may be, some of them more than memory has.
    *("n[0-99999]", "n[1-18446744073709551616]", "n[1-200][1-200]", "[1-2]" * 64),
    *(",".join(["n[1-16000]"] * 2), "n[" + "1," * 20_000 + "1]", "a," * 20_000),
    *("[" * 100_000, "[,1" * 50_000, "x" * 5_000_000),
]


@pytest.mark.parametrize("text", OF_SCONTROL)
def test_a_host_list_is_expanded_as_slurm_does(text: str) -> None:
    assert expand(text) == OF_SCONTROL[text].split()


def test_a_name_may_have_text_after_its_brackets() -> None:
    assert expand("n[1-2]-ib,r[1-2]n[3].x") == ["n1-ib", "n2-ib", "r1n3.x", "r2n3.x"]


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_a_text_that_is_no_short_host_list_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        expand(text)
    message = str(raised.value)
    assert len(message) < 200
    assert message.isprintable()


@settings(max_examples=150, deadline=None)
@given(st.text("n01-9[],:x. ", max_size=40))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    for parse in (expand, listed):
        try:
            names = [str(name) for name in parse(text)]
        except UsageError:
            continue
        assert all(name and not set(name) & set(" ,") for name in names)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_host_list_has_the_names_that_were_put_into_it(data: st.DataObject) -> None:
    expected, parts = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        prefix = data.draw(st.text(string.ascii_lowercase, min_size=1, max_size=3))
        suffix = data.draw(st.sampled_from(["", "-ib", ".local"]))
        ranges, numbers = [], []
        for _ in range(data.draw(st.integers(1, 3))):
            first = data.draw(st.integers(0, 1200))
            last = first + data.draw(st.integers(0, 30))
            width = data.draw(st.integers(1, 5))
            ranges.append(f"{first:0{width}}" + (f"-{last:0{width}}" if last > first else ""))
            numbers += [f"{number:0{width}}" for number in range(first, last + 1)]
        parts.append(f"{prefix}[{','.join(ranges)}]{suffix}")
        expected += [f"{prefix}{number}{suffix}" for number in numbers]
    assert expand(",".join(parts)) == expected


def none_resolved(name: str) -> list[str]:
    raise AssertionError(f"{name} was asked of the DNS")


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_NODELIST": "n[1-2],N10", "SLURM_NODELIST": "n9"},
        {"SLURM_JOB_NODELIST": "(null)", "SLURM_NODELIST": "n[1-2],n10"},
        {"SLURM_NODELIST": "n10,n2,n1"},
    ],
)
def test_the_members_are_those_of_the_job_in_one_order(environ: dict[str, str]) -> None:
    assert [str(member) for member in members_of("slurm", environ, none_resolved)] == [
        *("n1", "n10", "n2")
    ]


def test_without_a_job_of_slurm_the_message_names_the_variables() -> None:
    for environ in ({}, {"SLURM_JOB_NODELIST": ""}, {"SLURM_NODELIST": "(null)"}):
        with pytest.raises(UsageError, match="SLURM_JOB_NODELIST nor SLURM_NODELIST"):
            members_of("slurm", environ, none_resolved)


def test_a_list_has_names_addresses_and_ports() -> None:
    text = "b:8080, A. n[08-10]:99 [FD80::1]:80 fd80::0:2,[::3],10.0.0.[1-2]"
    expected = [
        *("10.0.0.1", "10.0.0.2", "::3", "a", "b:8080", "[fd80::1]:80", "fd80::2"),
        *("n08:99", "n09:99", "n10:99"),
    ]
    assert [str(member) for member in listed(text)] == expected
    assert members_of(text.replace(",", " ").split(), {}, none_resolved) == listed(text)
    assert listed(",".join(expected)) == listed(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the list of members is empty"),
        (" , ,", "the list of members is empty"),
        ("a,b,A", "the member a is listed twice"),
        ("n[1-3],n2", "the member n2 is listed twice"),
        ("a:1,a:1", "the member a:1 is listed twice"),
        ("a:0", "port must be 1 to 65535"),
        ("a:65536", "port must be 1 to 65535"),
        ("a:x", "port must be 1 to 65535"),
        ("a:", "port must be 1 to 65535"),
        ("fe80::x", "no IPv6 address"),
        ("http://a/", "port must be"),
        ("[fe80::1]:80,a", "fe80::1 is an address of one link"),
        ("fd00::1%eth0,a", "fd00::1%eth0 is an address of one link"),
        ("::ffff:10.0.0.1,a", "write 10.0.0.1"),
        ("a,0.0.0.0", "0.0.0.0 is not the address of one node"),
        ("a,::", ":: is not the address of one node"),
        ("a,224.0.0.1", "224.0.0.1 is not the address of one node"),
        ("255.255.255.255", "is not the address of one node"),
        ("a b\x1b[31mc", "no host name"),
    ],
)
def test_a_list_with_a_mistake_is_refused_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as raised:
        listed(text)
    assert str(raised.value).isprintable()


def test_the_members_behind_a_name_are_its_addresses() -> None:
    def resolve(name: str) -> list[str]:
        assert name == "peers.train.svc"
        return ["FD00::0:1", "fd00::2", "fd00::1"]

    found = members_of("dns:peers.train.svc:8080", {}, resolve)
    assert [str(member) for member in found] == ["[fd00::1]:8080", "[fd00::2]:8080"]
    for setting, complaint in (
        ("dns:", "no name for the DNS"),
        ("dns:a b", "no name for the DNS"),
        ("dns:x", "has no address"),
    ):
        with pytest.raises(UsageError, match=complaint):
            members_of(setting, {}, lambda name: [])


@pytest.mark.parametrize(
    ("addresses", "own", "members"),
    [
        ("fd00::1 10.1.0.1 fd00::2 10.1.0.2", None, "10.1.0.1 10.1.0.2"),
        ("fd00::1 10.1.0.1 fd00::2 10.1.0.2", "fd00::2", "fd00::1 fd00::2"),
        ("fd00::1 10.1.0.1 fd00::2 10.1.0.2", "10.1.0.1", "10.1.0.1 10.1.0.2"),
        # One node has no address of IPv4.
        ("10.1.0.1 fd00::1 fd00::2", None, "fd00::1 fd00::2"),
        ("10.1.0.1 10.1.0.2", "fd00::1", "10.1.0.1 10.1.0.2"),
    ],
)
def test_a_node_with_an_address_of_each_family_counts_once(
    addresses: str, own: str | None, members: str
) -> None:
    found = members_of("dns:x", {}, lambda name: addresses.split(), address=own)
    assert [str(member) for member in found] == members.split()


def test_a_name_with_too_many_addresses_is_refused() -> None:
    def resolve(name: str) -> list[str]:
        return [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in range(MOST_MEMBERS + 1)]

    with pytest.raises(UsageError, match="at most 16,384 hosts"):
        members_of("dns:peers", {}, resolve)


def test_this_node_is_found_by_the_name_of_slurm_its_own_names_and_its_addresses() -> None:
    members = listed("n1,n2,n10,10.0.0.7,gpu.cluster")
    at = {str(member): index for index, member in enumerate(members)}
    assert own_index(members, {"SLURMD_NODENAME": "n10"}, ["n1"]) == at["n10"]
    assert own_index(members, {}, ["N2.cluster.local", "N2"]) == at["n2"]
    assert own_index(members, {}, ["n2.cluster.local"]) == at["n2"]
    assert own_index(members, {}, ["other", "10.0.0.7"]) == at["10.0.0.7"]
    assert own_index(members, {}, ["gpu"]) == at["gpu.cluster"]


def test_two_members_on_one_node_are_distinguished_by_their_ports() -> None:
    members = [Endpoint("a", 1), Endpoint("a", 2), Endpoint("b")]
    assert own_index(members, {}, ["a"], port=2) == 1
    assert own_index(members, {}, ["b"], port=2) == 2


@pytest.mark.parametrize(
    ("members", "name", "complaint"),
    [
        ("n[1-9]", "login", r"login, is none of the members n1, n2, n3, n4, n5 and 4 others"),
        ("10.0.0.1", "10.0.0.2", "is none of the members 10.0.0.1"),
        ("n1.a,n1.b", "n1", "is more than one of the members"),
        ("a:1,a:2", "a", "is more than one of"),
    ],
)
def test_a_node_that_is_no_member_is_refused(members: str, name: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        own_index(listed(members), {}, [name])
