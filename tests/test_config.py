"""Configuration: the reference file, every kind of mistake with its line, options, and defaults."""

from __future__ import annotations

import os
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from monarch.config import load
from monarch.config.defaults import default_tier, readable_name, state_directory, state_root
from monarch.config.quotas import QuotaSettings
from monarch.config.settings import (
    LimitSettings,
    MountSettings,
    SnapshotSettings,
    TierSettings,
)
from monarch.config.values import Section
from monarch.errors import ConfigError, MonarchError
from monarch.posix.mounts import MountedFileSystem, mount_table
from monarch.text import GiB, KiB, MiB

REFERENCE = Path(__file__).parent.parent / "conf" / "monarch.yaml"

HEADER = """\
# Every key of Monarch's configuration with its default. Copy what you change.
#
# Sizes are bytes or text like 500MB (decimal) and 800GiB (binary). In paths, ~ and $NAME are
# expanded, so that $SLURM_TMPDIR is the scratch of the job. null: as described.

# Merged under each mount; what a mount says itself goes before.
"""


def written(value: object) -> str:
    """A default as the reference file writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value and value % KiB == 0:
        unit, name = next(
            (u, n) for u, n in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")) if value >= u
        )
        return f"{value // unit}{name}"
    return "[]" if value == () else str(value)


def described(model: type[Section], keys: list[str], indent: str) -> list[str]:
    lines = []
    for key in keys:
        field = model.model_fields[key]
        comment = textwrap.wrap(field.description or "", 100 - len(indent) - 2)
        lines += [f"{indent}# {line}" for line in comment]
        if isinstance(field.default, Section):
            inner = type(field.default)
            lines += [f"{indent}{key}:", *described(inner, list(inner.model_fields), indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {written(field.default)}")
    return lines


def reference() -> str:
    """The reference file as the models have it."""
    shared = [k for k in MountSettings.model_fields if k not in ("name", "source", "mountpoint")]
    example = {
        "source: PydanticUndefined": "source: /pfs/imagenet",
        "mountpoint: PydanticUndefined": "mountpoint: /mnt/imagenet",
        "path: PydanticUndefined": "path: /local/monarch/imagenet",
        "name: PydanticUndefined": "name: imagenet",
    }
    mount = described(MountSettings, ["source", "mountpoint"], " " * 4)
    tier = described(TierSettings, list(TierSettings.model_fields), " " * 8)
    lines = [
        "defaults:",
        *described(MountSettings, shared, "  "),
        "",
        "mounts:",
        "  # The key is the name: `monarch mount imagenet`, if this file is"
        " /etc/monarch/monarch.yaml or",
        "  # ~/.config/monarch/monarch.yaml; else `monarch mount -c FILE imagenet`.",
        "  imagenet:",
        *mount,
        "    tiers:",
        "      -",
        *tier,
    ]
    text = "\n".join(lines) + "\n"
    for default, shown in example.items():
        text = text.replace(default, shown)
    return HEADER + text


def test_the_reference_file_lists_every_key_with_its_default_and_meaning() -> None:
    assert REFERENCE.read_text() == reference()


def test_the_reference_file_is_valid_and_means_the_defaults() -> None:
    mount = load.load(REFERENCE)["imagenet"]
    bare = MountSettings(
        name="imagenet",
        source=Path("/pfs/imagenet"),
        mountpoint=Path("/mnt/imagenet"),
        tiers=(TierSettings(path=Path("/local/monarch/imagenet")),),
    )
    assert mount.model_dump() == bare.model_dump()


def test_every_key_is_described_in_a_sentence() -> None:
    models: list[type[Section]] = [MountSettings, TierSettings, *Section.__subclasses__()]
    for model in models:
        for key, field in model.model_fields.items():
            assert (field.description or "").endswith("."), f"{model.__name__}.{key}"


# --- Mistakes -------------------------------------------------------------------------------------


def problems_of(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load.load(path)
    assert caught.value.exit_code == 2
    for problem in caught.value.problems:
        assert problem.startswith(f"{path}:")
        assert "\n" not in problem
    return [problem.removeprefix(f"{path}:") for problem in caught.value.problems]


def mistakes(tmp_path: Path, content: str | bytes) -> list[str]:
    path = tmp_path / "monarch.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return problems_of(path)


def in_mount(line: str) -> str:
    return f"mounts:\n  a:\n    source: /pfs/a\n    mountpoint: /mnt/a\n    {line}\n"


# Each is line 5 of a mount that is otherwise right.
MISTAKES = {
    "capacity with no such unit": ("tiers: [{path: /t, capacity: 10GBB}]", "'10GBB' is not a size"),
    "short tier with no such unit": ("tiers: ['/t:10GBB']", "'10GBB' is not a size"),
    "short tier without its size": ("tiers: ['/t:']", "'' is not a size"),
    "short tier without its path": ("tiers: [':10GB']", "has no path"),
    "negative capacity": ("tiers: [{path: /t, capacity: -1}]", "at least 1"),
    "negative capacity in words": ("tiers: [{path: /t, capacity: -1GiB}]", "is not a size"),
    "no capacity": ("tiers: [{path: /t, capacity: 0}]", "at least 1"),
    "capacity beyond 64 bits": ("tiers: [{path: /t, capacity: 99999P}]", "more bytes than"),
    "half a byte": ("tiers: [{path: /t, capacity: 1.5}]", "is not a size"),
    "true as a size": ("tiers: [{path: /t, capacity: true}]", "is not a size"),
    "tier without a path": ("tiers: [{capacity: 1GB}]", "path is missing; add 'path: ...'"),
    "tier that is a number": ("tiers: [7]", "must be a mapping"),
    "tiers that are no list": ("tiers: /t", "tiers is '/t'; it must be a list"),
    "two tiers of one name": (
        "tiers: [{path: /t, name: x}, {path: /u, name: x}]",
        "two tiers are named 'x'",
    ),
    "tier with an unknown key": (
        "tiers: [{path: /t, capcity: 1GB}]",
        "unknown key 'capcity' in tiers[0]; did you mean 'capacity'?",
    ),
    "unknown key": ("alow_other: true", "unknown key 'alow_other'; did you mean 'allow_other'?"),
    "unknown key, nothing near": ("zzz: 1", "unknown key 'zzz'; conf/monarch.yaml lists every key"),
    "key beside its section": ("copy_workers: 4", "did you mean 'limits.copy_workers'?"),
    "key of a section": (
        "limits: {copy_worker: 4}",
        "unknown key 'copy_worker' in limits; did you mean 'copy_workers'?",
    ),
    "name as a key": ("name: b", "the mount is named by its key 'a'"),
    "seed": ("placement: {seed: 3}", "unknown key 'seed' in placement"),
    "workers in words": ("limits: {copy_workers: many}", "'many'; it must be a whole number"),
    "yes workers": ("limits: {copy_workers: yes}", "must be a whole number"),
    "no workers": ("limits: {copy_workers: 0}", "at least 1"),
    "too many workers": ("limits: {copy_workers: 100000}", "at most 4096"),
    "buffer below a file": ("limits: {buffer_max: 1MiB}", "raise buffer_max"),
    "section that is a list": ("limits: [1]", "must be a mapping"),
    "policy": ("placement: {policy: lur}", "did you mean 'lru'?"),
    "datapath": ("datapath: passthru", "did you mean 'passthrough'?"),
    "open": ("open: no", "open is false; it must be 'auto', 'open' or 'none'"),
    "no opens with passthrough": (
        "<<: {datapath: passthrough, open: none}",
        "open: none and datapath: passthrough exclude each other; set datapath: relay",
    ),
    "no opens with python": (
        "<<: {open: none, datapath: python}",
        "open: none and datapath: python exclude each other",
    ),
    "no opens to verify at": (
        "<<: {open: none, verify: open}",
        "open: none and verify: open exclude each other, because no open would be seen",
    ),
    "flag": ("allow_other: perhaps", "must be true or false"),
    "freshness": ("snapshot: {freshness: often}", "use mount, never or ttl:DURATION"),
    "duration": ("snapshot: {freshness: 'ttl:10x'}", "'10x' is not a duration"),
    "no duration": ("snapshot: {freshness: 'ttl:0'}", "longer than 0"),
    "freshness that is a number": ("snapshot: {freshness: 5}", "must be text"),
    "address": ("metrics: {address: '9464'}", "is not HOST:PORT"),
    "port": ("metrics: {address: 'localhost:99999'}", "is not HOST:PORT"),
    "relative path": ("state: var/x", "is relative; write an absolute path"),
    "empty path": ("state: ''", "is empty"),
    "path that is a number": ("state: 5", "must be a path"),
    "unset variable": ("state: $NOT_SET_HERE/x", "$NOT_SET_HERE is not set in the environment"),
    "unset variable in braces": ("state: '${NOT_SET_HERE}/x'", "${NOT_SET_HERE} is not set"),
    "home of an unknown user": ("state: ~no-such-user/x", "has no home directory"),
    "tag": ("tiers: !!python/tuple []", "is not allowed"),
    "tag of a word": ("state: !path /x", "put it in quotes"),
    "date of no day": ("state: 2026-99-99", "put it in quotes"),
    "tier in the source": ("tiers: [/pfs/a/t]", "tier /pfs/a/t is inside the source /pfs/a"),
    "source in a tier": ("tiers: [/pfs]", "tier /pfs contains the source /pfs/a"),
    "tier that is the source": ("tiers: [/pfs/a]", "tier /pfs/a is also the source"),
    "tier in the mount": ("tiers: [/mnt/a/t]", "tier /mnt/a/t is inside the mount point"),
    "tier twice": ("tiers: [/t, /t/]", "tier /t is given twice; leave one of them out"),
    "tier in a tier": ("tiers: [/t, /t/u]", "tier /t/u is inside the tier /t"),
    "state in the source": ("state: /pfs/a/s", "state directory /pfs/a/s is inside the source"),
    "log in the mount": ("log: {file: /mnt/a/log}", "log.file /mnt/a/log is inside the mount"),
    "rules that are no list": ("rules: {match: a}", "rules is {'match': 'a'}; it must be a list"),
    "rule without a match": ("rules: [{pin: true}]", "rules[0].match is missing; add 'match: ...'"),
    "rule of nothing": (
        "rules: [{match: a/**}]",
        "the rule for a/** does nothing; add `pin: true`",
    ),
    "rule with an unknown key": (
        "rules: [{match: a, pinn: true}]",
        "unknown key 'pinn' in rules[0]; did you mean 'pin'?",
    ),
    "rule with a pattern above the mount": (
        "rules: [{match: ../a, pin: true}]",
        "rules[0].match: '../a' holds an empty part",
    ),
    "rule that admits sometimes": (
        "rules: [{match: a, admit: seldom}]",
        "rules[0].admit is 'seldom'; it must be 'auto' or 'never'",
    ),
    "rule that pins nothing": (
        "rules: [{match: a, pin: true, admit: never}]",
        "rules[0]: admit: never and pin: true exclude each other; leave one of them out",
    ),
    "rule for a tier and for none": (
        "<<: {tiers: [{path: /t, name: x}], rules: [{match: a, tier: x, admit: never}]}",
        "rules[0]: admit: never and tier: x exclude each other",
    ),
    "rule for no tier of the mount": (
        "<<: {tiers: [{path: /t, name: x}], rules: [{match: a, tier: y}]}",
        "rules: [0] names no tier of the mount: 'y'; the tiers are x",
    ),
    "rule for a tier without tiers": (
        "rules: [{match: a, tier: y}]",
        "names no tier of the mount: 'y'; name one under `tiers`",
    ),
    "rule after one of the same pattern": (
        "rules: [{match: a, pin: true}, {match: a, admit: never}]",
        "rules: [1] has no effect: an earlier rule has the match 'a'; make it one rule",
    ),
    "pinned files without a caller": (
        "<<: {source_identity: caller, rules: [{match: a, pin: true}]}",
        "source_identity: caller and a rule with pin: true exclude each other",
    ),
    "quota with an unknown key": ("quotas: [{tear: 30%}]", "unknown key 'tear' in quotas[0]"),
    "quota for two jobs": (
        "quotas: [{user: root, cgroup: /a, tier: 30%}]",
        "quotas[0]: user and cgroup exclude each other",
    ),
    "quota for no user of this node": (
        "quotas: [{user: no-such-user, tier: 30%}]",
        "quotas[0]: there is no user 'no-such-user' on this node",
    ),
    "quota for a number that no user has": (
        "quotas: [{user: 4294967295, tier: 30%}]",
        "quotas[0]: no user has the number 4294967295",
    ),
    "an unpaired surrogate in a path": (
        'snapshot: {file: "/s\\ud800"}',
        "has an unpaired surrogate",
    ),
    "quota of a group with dots": (
        "quotas: [{cgroup: /a/../b, tier: 30%}]",
        "quotas[0].cgroup: '/a/../b' is no path of a control group",
    ),
    "quota of a group with two slashes": (
        "quotas: [{cgroup: //a}]",
        "'//a' is no path of a control group",
    ),
    "quota of a group of two lines": (
        'quotas: [{cgroup: "/a\\nb"}]',
        "is no path of a control group",
    ),
    "quota of less than nothing": ("quotas: [{tier: -1}]", "-1 is not a number of bytes"),
    "quota that is no number": ("quotas: [{tier: .nan}]", "quotas[0].tier: nan is not a size"),
    "time that is no number": ("writeback: {commit: [1]}", "commit: [1] is not a duration"),
    "quota of more than everything": ("quotas: [{tier: 130%}]", "'130%' is no share"),
    "quota that is no size": ("quotas: [{tier: much}]", "or like 30%"),
    "quota after one for all": (
        "quotas: [{tier: 30%}, {user: root, tier: 70%}]",
        "quotas: [1] has no effect: an earlier one is for all processes",
    ),
    "quota for the same user": (
        "quotas: [{user: root, tier: 30%}, {user: root, tier: 70%}]",
        "quotas: [1] has no effect: an earlier one is for user root",
    ),
    "quota for the same user by number": (
        "quotas: [{user: root, tier: 30%}, {user: 0, tier: 70%}]",
        "quotas: [1] has no effect: an earlier one is for user 0",
    ),
    "quotas without opens": (
        "<<: {open: none, quotas: [{tier: 30%}]}",
        "quotas exclude open: none",
    ),
    "quotas with evictions": (
        "<<: {placement: {policy: lru}, quotas: [{tier: 30%}]}",
        "quotas exclude placement.policy: lru",
    ),
    "quotas with other nodes": (
        "<<: {peers: {members: [a, b]}, quotas: [{tier: 30%}]}",
        "quotas exclude peers.members",
    ),
    "too many tiers": (f"tiers: [{', '.join(f'/t{n}' for n in range(17))}]", "more than 16"),
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.values(), ids=MISTAKES.keys())
@pytest.mark.fault("I1")
def test_a_mistake_is_reported_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    (problem,) = mistakes(tmp_path, in_mount(line))
    assert problem.startswith("5: ")
    assert message in problem


DOCUMENTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "1: the file is empty"),
    "only a comment": ("# later\n", "1: the file has no content"),
    "a list": ("- a\n", "1: the file must be a mapping"),
    "no mounts": ("defaults: {}\n", "1: there are no mounts"),
    "mounts with nothing below": ("\nmounts:\n", "2: there are no mounts"),
    "mounts as a list": ("mounts: [a]", "1: there are no mounts"),
    "mount with nothing below": ("mounts:\n  a:\n", "2: mount 'a' must be a mapping"),
    "defaults that are no mapping": (in_mount("") + "defaults: 3", "6: defaults must be a mapping"),
    "a default source": (
        in_mount("") + "defaults:\n  source: /x",
        "7: 'source' cannot be a default",
    ),
    "name with a slash": (
        "mounts: {a/b: {source: /s, mountpoint: /m}}",
        "1: mount name 'a/b' must be letters",
    ),
    "unknown section": (
        in_mount("") + "mount: {}",
        "6: unknown key 'mount'; did you mean 'mounts'?",
    ),
    "key twice": (
        in_mount("source: /pfs/b"),
        "5: key 'source' is given twice, first in line 3; remove one of them",
    ),
    "mount twice": (in_mount("") + "  a: {}", "6: key 'a' is given twice, first in line 2"),
    "key that is a list": (in_mount("? [x]\n    : 1"), "5: a key must be a word"),
    "merge of a word": (in_mount("<<: x"), "5: '<<' takes a mapping"),
    "tab": ("mounts:\n\ta: 1\n", "2: not YAML: found character"),
    "open bracket": ("mounts: [", "1: not YAML: "),
    "unknown alias": ("mounts: *nothing", "1: not YAML: found undefined alias"),
    "two documents": ("a: 1\n---\nb: 2\n", "2: not YAML: but found another document"),
    "not UTF-8": (b"mounts:\n  a: caf\xe9\n", "2: byte 0xe9 is not UTF-8"),
    "binary": (b"\x7fELF\x02\x01\x01\x00\x00", "1: character 127 is not printable"),
    "control character": (b"mounts:\n  a: \x01\n", "2: character 1 is not printable"),
    "too large": ("#" * 300_000, "1: is larger than 256 KiB"),
    "deep": ("[" * 5000, "1: not YAML: deeper than 32"),
    "alias into itself": ("mounts: &a {a: *a}", "1: an alias contains itself"),
    "billion laughs": (
        "a0: &a0 [x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
        "1: aliases grow into more than 100000 values",
    ),
    "many mounts of many defaults": (
        f"defaults: {{tiers: [{'/,' * 2000}]}}\nmounts: {{"
        + "".join(f"m{n}: {{}}, " for n in range(900))
        + "}",
        "2: too many mounts",
    ),
}


@pytest.mark.parametrize(("content", "message"), DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.fault("I1")
def test_a_file_that_is_not_yaml_is_reported(
    content: str | bytes, message: str, tmp_path: Path
) -> None:
    assert [p for p in mistakes(tmp_path, content) if p.startswith(message)]


@pytest.mark.fault("I1")
def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    content = """\
        defaults:
          limits:
            copy_workers: none
        mounts:
          a:
            sorce: /pfs/a
            mountpoint: mnt/a
            tiers:
              - path: /t
                capacity: 10GBB
              - /u:5XB
          b:
            source: /pfs/b
            mountpoint: /mnt/b
            verify: nver
          c: 5
        mount:
    """
    assert [p.split(";")[0] for p in mistakes(tmp_path, textwrap.dedent(content))] == [
        "3: limits.copy_workers is 'none'",
        "5: source is missing",
        "6: unknown key 'sorce'",
        "7: mountpoint: 'mnt/a' is relative",
        "10: tiers[0].capacity: '10GBB' is not a size",
        "11: tiers[1]: '5XB' is not a size",
        "15: verify is 'nver'",
        "16: mount 'c' must be a mapping",
        "17: unknown key 'mount'",
    ]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{source: /pfs/b, mountpoint: /mnt/a}", "mount point /mnt/a is that of mount 'a'"),
        (
            "{source: /pfs/b, mountpoint: /mnt/b, tiers: [/t/u]}",
            "tier /t/u is inside the tier of 'a'",
        ),
        ("{source: /pfs/b, mountpoint: /mnt/b, tiers: [/pfs/a/t]}", "inside the source of 'a'"),
        (
            "{source: /pfs/b, mountpoint: /mnt/b, tiers: [/mnt/a/t]}",
            "inside the mount point of 'a'",
        ),
        ("{source: /pfs/a, mountpoint: /mnt/b}", "is that of mount 'a'; give each its own"),
        ("{source: /pfs/b, mountpoint: /mnt/b, state: /s}", "state directory /s is that of mount"),
    ],
)
@pytest.mark.fault("I1", "M1")
def test_mounts_that_would_meet_are_refused(second: str, message: str, tmp_path: Path) -> None:
    first = in_mount("tiers: [/t]")
    if "/s}" in second:
        first += "    state: /s\n"
    problems = mistakes(tmp_path, f"{first}  b: {second}\n")
    assert len(problems) == 1
    assert message in problems[0]
    assert problems[0].startswith(f"{first.count(chr(10)) + 1}: ")


@pytest.mark.fault("I1", "M1")
def test_a_link_does_not_hide_that_a_tier_is_in_the_source(tmp_path: Path) -> None:
    (tmp_path / "source" / "t").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "source" / "t")
    line = f"source: {tmp_path}/source, mountpoint: /mnt/x, tiers: [{tmp_path}/link]"
    (problem,) = mistakes(tmp_path, f"mounts: {{x: {{{line}}}}}")
    assert "is inside the source" in problem


@pytest.mark.fault("I1")
def test_a_path_that_is_not_a_readable_file_is_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    cases = {
        tmp_path: "is a directory",
        tmp_path / "absent": "no such file",
        tmp_path / "pipe": "is not a regular file",
        tmp_path / "loop": "cannot be read: Too many levels of symbolic links",
        tmp_path / ("x" * 300): "cannot be read: File name too long",
        Path("/dev/zero"): "is not a regular file",
    }
    for path, message in cases.items():
        (problem,) = problems_of(path)
        assert problem.startswith(f" {message}")


@pytest.mark.fault("I1")
def test_a_file_without_read_permission_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "monarch.yaml"
    path.write_text(in_mount(""))
    path.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        (problem,) = problems_of(path)
    finally:
        os.seteuid(user)
    assert problem.startswith(" cannot be read: Permission denied")


# --- What a file means ----------------------------------------------------------------------------


def loaded(tmp_path: Path, content: str) -> dict[str, MountSettings]:
    path = tmp_path / "monarch.yaml"
    path.write_text(content)
    return load.load(path)


def test_defaults_go_under_each_mount_key_by_key(tmp_path: Path) -> None:
    mounts = loaded(
        tmp_path,
        """\
        defaults: {limits: {copy_workers: 7, inline_max: 1MiB}, verify: open}
        mounts:
          a: {source: /pfs/a, mountpoint: /mnt/a, limits: {inline_max: 2MiB}}
          b: {source: /pfs/b, mountpoint: /mnt/b, limits: , verify: never}
        """,
    )
    assert mounts["a"].limits == LimitSettings(copy_workers=7, inline_max=2 * MiB)
    assert mounts["b"].limits == LimitSettings(copy_workers=7, inline_max=1 * MiB)
    assert (mounts["a"].verify, mounts["b"].verify) == ("open", "never")


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    mounts = loaded(
        tmp_path,
        """\
        mounts:
          a: &a {source: /pfs/a, mountpoint: /mnt/a, verify: open}
          b: {<<: *a, source: /pfs/b, mountpoint: /mnt/b}
        """,
    )
    assert mounts["b"].verify == "open"
    assert mounts["b"].source == Path("/pfs/b")


def test_tilde_and_variables_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", "/local/job.7")
    monkeypatch.setenv("HOME", "/home/u")
    line = "tiers: ['$SLURM_TMPDIR/monarch:1GiB', ~/t]"
    paths = [tier.path for tier in loaded(tmp_path, in_mount(line))["a"].tiers]
    assert paths == [Path("/local/job.7/monarch"), Path("/home/u/t")]


@pytest.mark.parametrize(
    ("text", "path", "capacity"),
    [
        ("/t", "/t", None),
        ("/t:800GiB", "/t", 800 * GiB),
        ("/t:1000", "/t", 1000),
        ("/a:b/t", "/a:b/t", None),
        ("/a:1G/t", "/a:1G/t", None),
        ("/a:b", "/a:b", None),
        ("/a:b:2T", "/a:b", 2048 * GiB),
    ],
)
def test_a_short_tier_is_a_path_and_a_size(text: str, path: str, capacity: int | None) -> None:
    tier = TierSettings.model_validate(text)
    assert (tier.path, tier.capacity) == (Path(path), capacity)


def test_tiers_are_named_by_their_paths_and_each_differently(tmp_path: Path) -> None:
    line = "tiers: [/a/x, /b/x, {path: /c, name: x-2}, '/d/a b', /e/source]"
    names = [tier.name for tier in loaded(tmp_path, in_mount(line))["a"].tiers]
    assert names == ["x", "x-3", "x-2", "a-b", "source-2"]


def test_freshness_tells_its_seconds() -> None:
    assert SnapshotSettings(freshness="ttl:10m").ttl_s == 600.0
    assert SnapshotSettings().ttl_s is None
    assert SnapshotSettings(freshness="never").ttl_s is None


def test_room_of_a_tier_without_numbers_leaves_the_job_its_share() -> None:
    tier = TierSettings(path=Path("/t"))
    assert tier.capacity_within(100 * GiB) == 50 * GiB
    # A restart finds the same room, although the copies have taken some of it.
    assert tier.capacity_within(60 * GiB, held=40 * GiB) == 50 * GiB
    assert tier.keep_free_within(1000 * GiB) == GiB
    assert tier.keep_free_within(200 * MiB) == 10 * MiB


def test_room_of_a_tier_is_as_set() -> None:
    tier = TierSettings(path=Path("/t"), capacity=5 * GiB, keep_free=2 * GiB)
    assert tier.capacity_within(1) == 5 * GiB
    assert tier.keep_free_within(100) == 2 * GiB


# --- Options --------------------------------------------------------------------------------------


def test_options_set_keys_of_sections() -> None:
    mount = load.from_options(
        Path("/pfs/a"),
        Path("/mnt/a"),
        tiers=["/t:1GiB"],
        snapshot=Path("/shared/a.snapshot"),
        state=Path("/s"),
        options=["limits.copy_workers=8,placement.policy=lru", "allow_other"]
        + ["datapath=relay,open=none"],
    )
    assert (mount.datapath, mount.open) == ("relay", "none")
    assert mount.limits.copy_workers == 8
    assert mount.placement.policy == "lru"
    assert mount.allow_other
    assert mount.tiers[0].capacity == GiB
    assert mount.snapshot.file == Path("/shared/a.snapshot")
    assert mount.name == "a"


def test_the_last_of_two_options_holds() -> None:
    options = ["snapshot.freshness=mount", "snapshot.freshness=never"]
    mount = load.from_options(Path("/pfs/a"), Path("/mnt/a"), options=options)
    assert mount.snapshot.freshness == "never"


def test_relative_paths_are_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/deep")
    monkeypatch.chdir(tmp_path)
    mount = load.from_options(Path("s"), Path("./m"), tiers=["t:1G"], state=Path("link/../x"))
    assert (mount.source, mount.mountpoint) == (tmp_path / "s", tmp_path / "m")
    assert mount.tiers[0].path == tmp_path / "t"
    assert mount.state == tmp_path / "far" / "x"


def test_a_name_of_the_source_need_not_be_utf8_nor_free_of_dollars(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"d\xff $HOME")
    mount = load.from_options(source, tmp_path / "m")
    assert mount.source == source
    assert mount.name == "d-HOME"


@pytest.mark.fault("I1", "I2")
def test_every_wrong_option_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        load.from_options(
            Path("/pfs/a"),
            Path("/pfs/a/m"),
            tiers=["/t:10GBB"],
            options=["limits.copy_wrkers=3,verify", "policy=lru,name=x", "log.level=loud"],
        )
    assert [problem.split(";")[0] for problem in caught.value.problems] == [
        "--tier /t:10GBB: '10GBB' is not a size",
        "-o limits.copy_wrkers=3: unknown key 'limits.copy_wrkers'",
        "-o verify: needs a value",
        "-o policy=lru: unknown key 'policy'",
        "-o name=x: unknown key 'name'",
        "log.level is 'loud'",
    ]
    assert "did you mean 'placement.policy'?" in str(caught.value)


@pytest.mark.finding("R")
def test_options_of_mount_are_taken_or_refused_in_a_short_line() -> None:
    def of(*options: str) -> MountSettings:
        return load.from_options(Path("/pfs/a"), Path("/m"), options=options)

    harmless = "ro,noatime,nodev,nosuid,defaults,_netdev"
    assert of(harmless) == of()
    for options, message in (
        ("zzz", "-o zzz: unknown key 'zzz'; conf/monarch.yaml lists every key"),
        (
            "quotas=[{tier: 30%}]",
            "-o quotas=[{tier: 30%}]: quotas are written in a configuration file",
        ),
        ("placement.rules=x", "-o placement.rules=x: rules are written in a configuration file"),
        ("rw", "-o rw: name the paths that can be written: absorb=PATTERN"),
        ("ro,absorb=a/**", "-o ro: excludes `write` and `absorb`"),
    ):
        with pytest.raises(ConfigError) as caught:
            of(options)
        (problem,) = caught.value.problems
        assert problem.startswith(message) and len(problem) < 100


def test_a_wrong_tier_option_is_reported_once_and_causes_no_other_mistake() -> None:
    with pytest.raises(ConfigError) as caught:
        load.from_options(Path("/pfs/a"), Path("/mnt/a"), tiers=["/t:1XB", "$NOT_SET_HERE/t"])
    first, second = caught.value.problems
    assert first.startswith("--tier /t:1XB: '1XB' is not a size")
    assert second.startswith("--tier $NOT_SET_HERE/t: $NOT_SET_HERE is not set")


def test_directories_that_meet_are_refused_on_the_command_line_too() -> None:
    with pytest.raises(ConfigError, match="mount point /pfs/a/m is inside the source /pfs/a"):
        load.from_options(Path("/pfs/a"), Path("/pfs/a/m"))


def test_a_quota_is_a_share_of_the_tiers_or_a_size() -> None:
    wanted = {"30%": 300, "0.1%": 1, "100 %": 1000, "2KB": 2000, 5: 5}
    for text, nbytes in wanted.items():
        quota = QuotaSettings.model_validate({"tier": text})
        assert quota.tier_within(1000) == nbytes, text
    assert QuotaSettings().tier_within(1000) is None
    for user in (0, "0", "root"):
        assert QuotaSettings.model_validate({"user": user}).user_number() == 0
    with pytest.raises(ValueError):
        QuotaSettings.model_validate({"user": True})


def test_options_go_over_the_rules_of_a_named_mount(tmp_path: Path) -> None:
    line = "tiers: [/t]\n    rules: [{match: '*.lmdb', tier: t}, {match: a, pin: true}]"
    mount = loaded(tmp_path, in_mount(line))["a"]
    assert load.with_options(mount, ["verify=open"]).rules == mount.rules
    with pytest.raises(ConfigError) as caught:
        load.with_options(mount, ["rules=[{match: a, pin: true}]"])
    assert len(caught.value.problems) == 1


def test_options_go_over_a_named_mount_and_leave_the_rest(tmp_path: Path) -> None:
    line = "tiers: [/t, /u/t]\n    limits: {inline_max: 1MiB}"
    mount = loaded(tmp_path, in_mount(line))["a"]
    changed = load.with_options(mount, ["limits.copy_workers=9"])
    assert changed.limits == LimitSettings(copy_workers=9, inline_max=MiB)
    assert changed.tiers == mount.tiers
    # Still known to be a default, so still lowered on a small file system.
    assert changed.tiers[0].keep_free_within(200 * MiB) == 10 * MiB
    with pytest.raises(ConfigError, match="did you mean 'verify'"):
        load.with_options(mount, ["verfy=open"])


# --- State and scratch ----------------------------------------------------------------------------


def mount_of(source: Path, **fields: Any) -> MountSettings:
    return MountSettings(name="m", source=source, mountpoint=Path("/mnt/m"), **fields)


def test_the_state_directory_is_the_same_by_every_name_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "a" / "imagenet").mkdir(parents=True)
    (tmp_path / "b" / "imagenet").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/imagenet")
    one = state_directory(mount_of(tmp_path / "a" / "imagenet"))
    assert one.parent == state_root()
    assert one.name.startswith("imagenet-")
    assert state_directory(mount_of(tmp_path / "link")) == one
    assert state_directory(mount_of(tmp_path / "b" / "imagenet")) != one
    assert state_directory(mount_of(tmp_path, state=Path("/s"))) == Path("/s")


def test_a_readable_name_is_a_file_name_whatever_the_source_is_called() -> None:
    assert readable_name(Path("/")).startswith("root-")
    name = readable_name(Path("/pfs") / os.fsdecode(b"\xff\n ../" + b"x" * 200))
    assert name.isascii() and name.isprintable() and "/" not in name and len(name) < 60


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("/x", "/x/monarch"),
        ("", "/home/u/.local/state/monarch"),
        ("rel", "/home/u/.local/state/monarch"),
    ],
)
def test_state_of_ordinary_users_is_below_their_home_directory(given: str, root: str) -> None:
    environ = {"HOME": "/home/u", "XDG_STATE_HOME": given}
    assert state_root(uid=1000, environ=environ) == Path(root)


def test_a_user_without_a_home_directory_gets_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container that runs as any uid."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="HOME or MONARCH_STATE_ROOT"):
        state_root(uid=4711, environ={})
    assert state_root(uid=4711, environ={"MONARCH_STATE_ROOT": "/x"}) == Path("/x")


def test_root_keeps_its_state_in_var_lib() -> None:
    assert state_root(uid=0, environ={"HOME": "/root"}) == Path("/var/lib/monarch")


class Node:
    """A node with scratch directories below ``root``, on file systems of chosen kinds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings = mount_of(Path("/proc"), state=root / "state")
        self.mounts = [MountedFileSystem(Path("/"), "tmpfs")]

    def scratch(self, name: str, kind: str) -> Path:
        path = self.root / name
        path.mkdir()
        self.mounts.append(MountedFileSystem(path, kind))
        return path

    def choice(self, *directories: Path, **environ: Path) -> Path:
        """The scratch directory of the default tier."""
        variables = {name: str(path) for name, path in environ.items()}
        tier = default_tier(
            self.settings, environ=variables, directories=directories, mounts=self.mounts
        )
        assert tier.capacity is None
        assert tier.path.name == readable_name(self.settings.source)
        assert tier.path.parent.name == f"monarch-{os.getuid()}"
        return tier.path.parent.parent


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_scratch_of_the_job_comes_before_that_of_the_node(node: Node) -> None:
    job, local = node.scratch("job", "xfs"), node.scratch("local", "ext4")
    assert node.choice(local, SLURM_TMPDIR=job) == job
    assert node.choice(local, SLURM_TMPDIR=job, MONARCH_SCRATCH=local) == local
    assert node.choice(local) == local


@pytest.mark.parametrize(
    "kind", ["tmpfs", "ramfs", "nfs4", "lustre", "gpfs", "beegfs", "fuse.sshfs", "cifs", "ceph"]
)
def test_memory_and_network_are_no_scratch(kind: str, node: Node) -> None:
    remote, local = node.scratch("remote", kind), node.scratch("local", "overlay")
    assert node.choice(local, SLURM_TMPDIR=remote) == local
    with pytest.raises(ConfigError, match="name a tier with --tier"):
        node.choice(remote)


def test_missing_and_foreign_scratch_directories_are_passed_over(node: Node) -> None:
    taken, local = node.scratch("taken", "ext4"), node.scratch("local", "ext4")
    (taken / f"monarch-{os.getuid()}").symlink_to("/tmp")
    file = node.root / "file"
    file.write_text("")
    absent = node.root / "absent"
    assert node.choice(local, SLURM_TMPDIR=taken, PBS_JOBFS=file, JOB_TMPDIR=absent) == local


def test_the_file_system_of_the_state_serves_when_there_is_no_scratch(node: Node) -> None:
    node.mounts.append(MountedFileSystem(node.root, "btrfs"))
    assert node.choice() == node.root


def test_the_file_system_of_the_source_is_taken_only_for_want_of_another(node: Node) -> None:
    local = node.scratch("local", "ext4")
    node.settings = mount_of(node.root, state=node.root / "state")
    assert node.choice(local) == local
    memory = Path("/dev/shm")
    if memory.stat().st_dev != local.stat().st_dev:
        node.mounts.append(MountedFileSystem(memory, "ext4"))
        assert node.choice(memory, SLURM_TMPDIR=local) == memory


def test_the_mount_table_is_read_with_its_escapes() -> None:
    text = (
        b"22 27 0:21 / / rw,relatime - ext4 /dev/vda rw\n"
        b"23 22 0:22 / /a\\040b\\134 rw shared:5 master:1 - fuse.sshfs x:/ rw\n"
    )
    assert mount_table(text) == [
        MountedFileSystem(Path("/"), "ext4", "0:21", 22, "/dev/vda"),
        MountedFileSystem(Path("/a b\\"), "fuse.sshfs", "0:22", 23, "x:/"),
    ]
    assert ("/proc", "proc") in [(str(it.mount_point), it.kind) for it in mount_table()]


@pytest.mark.finding("B17")
@pytest.mark.fault("I9")
def test_mounts_with_one_address_of_metrics_are_refused(tmp_path: Path) -> None:
    second = "  b: {source: /pfs/b, mountpoint: /mnt/b, metrics: {enabled: true}}\n"
    first = in_mount("metrics: {enabled: true}")
    (problem,) = mistakes(tmp_path, first + second)
    assert "metrics.address localhost:9464 is that of mount 'a'; give each its own" in problem
    # One that is not shown takes no port, and port 0 is a free one.
    loaded(tmp_path, in_mount("metrics: {enabled: false}") + second)
    free = second.replace("enabled: true", 'enabled: true, address: "localhost:0"')
    loaded(tmp_path, in_mount('metrics: {enabled: true, address: "localhost:0"}') + free)


def test_without_a_thread_to_be_had_a_mount_is_refused_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MonarchError, match=r"no thread can be started.*ulimit -u"):
        load.from_options(tmp_path / "source", tmp_path / "mnt")
