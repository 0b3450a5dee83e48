"""The shipped files: wheel, sdist, container, systemd unit and Slurm scripts."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

import monarch as package
from tests.conftest import MonarchCommand, Mounted, Tree, mounts, require_fuse
from tests.equipment.processes import is_running
from tests.equipment.waiting import wait_until

ROOT = Path(__file__).parents[1]
SLURM = ROOT / "conf" / "slurm"


SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
EXTENSION = f"monarch/fuse/_datapath{SUFFIX}"
EXTENSIONS = (EXTENSION, f"monarch/datasets/_many{SUFFIX}")


def checkout(directory: Path) -> Path:
    """A copy of the shipped files, without earlier builds."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, directory)
    shutil.copytree(
        ROOT / "monarch",
        directory / "monarch",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    return directory


def build(source: Path, output: Path, *kinds: str, **environment: str) -> str:
    """Builds from ``source``; returns what was said."""
    # Without isolation: pip would fetch setuptools from the network, and it is here.
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(output), "."],
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist it was built from."""
    directory = tmp_path_factory.mktemp("build")
    build(checkout(tmp_path_factory.mktemp("checkout")), directory)
    return directory


def test_the_wheel_holds_every_module_the_extension_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith(f"monarch_fs-{package.__version__}-cp")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "monarch").rglob("*.py")} | {
        "monarch/py.typed",
        *EXTENSIONS,
    }
    assert modules <= names
    assert {name.split("/")[0] for name in names - modules} == {
        f"monarch_fs-{package.__version__}.dist-info"
    }
    assert any(name.endswith("/LICENSE") for name in names)


def test_the_sdist_holds_what_a_build_needs(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "monarch/__init__.py"} <= names
    assert c_files() <= names


def c_files() -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / "monarch").rglob("*.[ch]")}


def test_each_c_file_is_compiled_and_each_header_is_watched() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    named: dict[str, set[str]] = defaultdict(set)
    for kind, line in re.findall(r"^(sources|depends) = (\[[^]]*\])", text, re.MULTILINE):
        named[kind] |= set(re.findall(r'"(monarch/[\w/]+\.[ch])"', line))
    assert named["sources"] == {name for name in c_files() if name.endswith(".c")}
    assert named["depends"] == {name for name in c_files() if name.endswith(".h")}


class Installed:
    """A virtual environment with a wheel; its dependencies are found in this one's."""

    def __init__(self, wheel: Path, directory: Path) -> None:
        venv.create(directory / "venv", with_pip=False, symlinks=True)
        self._directory = directory
        self.bin = directory / "venv" / "bin"
        # Where packages go is asked of the new environment.
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.packages = self.run("python", "-c", ask).strip()
        Path(self.packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install"]
            + ["-q", "--no-deps", "--no-index", str(wheel)],
            check=True,
            capture_output=True,
        )

    def run(self, program: str, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self._directory,
            env={k: v for k, v in {**os.environ, **environment}.items() if k != "PYTHONPATH"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return (
            done.stdout
            if done.returncode == 0
            else f"{done.returncode}: {done.stdout}{done.stderr}"
        )


def test_the_installed_wheel_runs(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    installed = Installed(wheel, tmp_path)
    assert package.__version__ in installed.run("monarch", "--version")
    ask = "import monarch.fuse._datapath as it; print(it.__file__)"
    assert installed.run("python", "-c", ask).strip() == f"{installed.packages}/{EXTENSION}"


@pytest.mark.modes("auto")
def test_without_a_compiler_the_installation_succeeds_and_a_mount_says_what_it_lacks(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    require_fuse()
    source = tmp_path / "checkout"
    source.mkdir()
    said = build(checkout(source), tmp_path, "--wheel", CC="/bin/false")
    assert 'building extension "monarch.fuse._datapath" failed' in said
    (wheel,) = tmp_path.glob("*.whl")
    installed = Installed(wheel, tmp_path)
    made = Mounted(monarch, tmp_path / "mnt", tree({"a": 1000}), tmp_path / "state", {})
    made.path.mkdir()
    monarch.mounted.append(made)
    mount = ["mount", str(made.source), str(made.path), "--state", str(made.state)]
    mount += ["--tier", f"{tmp_path / 'tier'}:1MiB"]
    environment = monarch.environment()

    asked = installed.run("monarch", *mount, "-o", "datapath=passthrough", **environment)
    assert asked.startswith("8: ")
    assert "datapath: passthrough is not possible: the native datapath is not built" in asked

    installed.run("monarch", *mount, "-o", "datapath=relay", **environment)
    assert (made.path / "a").read_bytes() == (made.source / "a").read_bytes()
    mode = json.loads(installed.run("monarch", "status", str(made.path), "--json", **environment))
    assert mode["mode"]["datapath"] == "python"
    assert "is not built: install gcc" in mode["mode"]["why"]
    assert "warn  datapath: python" in installed.run("monarch", "doctor", **environment)
    made.umount()


def test_each_dependency_says_what_it_is_for() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    requirements = [line for line in lines if re.match(r' {4}"\w[\w-]*([>=;]|",)', line)]
    assert len(requirements) >= 20
    assert [line for line in requirements if " # " not in line] == []


def test_each_package_that_is_imported_is_a_dependency() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r"^dependencies = \[$(.*?)^\]$", text, re.MULTILINE | re.DOTALL)
    assert declared is not None
    names = {name.replace("-", "_") for name in re.findall(r'"([a-z0-9-]+)>=', declared[1])}
    # The names of their distributions, and modules that belong to one of the same version. The
    # adapters of frameworks are optional, and so are figures.
    others = {"yaml", "pydantic_core", "monarch", "torch", "tensorflow", "webdataset", "matplotlib"}
    known = names | others | sys.stdlib_module_names
    imported = set()
    for path in (ROOT / "monarch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    assert imported - known == set()
    assert names - imported - {"pyyaml"} == set()


def test_the_container_says_how_it_is_run() -> None:
    text = (ROOT / "Dockerfile").read_text()
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    for flag in (
        "--device /dev/fuse",
        "--cap-add SYS_ADMIN",
        "--security-opt apparmor=unconfined",
        ":rshared",
    ):
        assert flag in comment
    instructions = re.sub(r"\\\n", " ", text).splitlines()
    known = re.findall("[A-Z]+", "FROM RUN WORKDIR COPY STOPSIGNAL HEALTHCHECK ENTRYPOINT CMD")
    for line in instructions:
        assert not line.strip() or line.startswith("#") or line.split()[0] in known, line
    copied = [line.split()[1:-1] for line in instructions if line.startswith("COPY")]
    assert all((ROOT / name).exists() for names in copied for name in names)
    (health,) = (line for line in instructions if line.startswith("HEALTHCHECK"))
    assert "monarch status --json" in health


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_systemd_accepts_the_unit() -> None:
    unit = ROOT / "conf" / "monarch@.service"
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.finding("B14")
def test_the_unit_s_daemon_stays_in_the_foreground_where_its_log_goes_to_the_journal() -> None:
    lines = (ROOT / "conf" / "monarch@.service").read_text().splitlines()
    assert [line.split()[2:4] for line in lines if line.startswith("ExecStart=")] == [
        ["mount", "--foreground"]
    ]


class Node:
    """A Slurm node as its prolog and epilog see it, with the settings file of this test."""

    def __init__(self, monarch: MonarchCommand, directory: Path, settings: str) -> None:
        self._monarch = monarch
        self._settings = directory / "slurm.conf"
        bin_dir = directory / "bin"
        bin_dir.mkdir()
        command = bin_dir / "monarch"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m monarch "$@"\n')
        command.chmod(0o755)
        self.log = directory / "slurm.log"
        self._settings.write_text(
            f"MONARCH_PATH={bin_dir}\nMONARCH_RUN={directory / 'run'}\nMONARCH_LOG={self.log}\n"
            f"MONARCH_CONFIG={directory / 'monarch.yaml'}\n{settings}\n"
        )

    def run(self, script: str, job: int) -> int:
        # Its output is a pipe: run() would wait for a daemon that kept it open.
        return subprocess.run(
            [str(SLURM / script)],
            env={
                **self._monarch.environment(),
                "MONARCH_SLURM_CONF": str(self._settings),
                "SLURM_JOB_ID": str(job),
                "SLURM_NODELIST": "n[1-2]",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        ).returncode


def test_jobs_that_share_a_node_share_its_mount_until_the_last_one_ends(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    require_fuse()
    source = tree({"a": 1000})
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    (tmp_path / "tier").mkdir()
    (tmp_path / "monarch.yaml").write_text(
        f"mounts:\n  train:\n    source: {source}\n    mountpoint: {mountpoint}\n"
        f"    tiers: [{{name: fast, path: {tmp_path / 'tier'}, capacity: 1MiB, keep_free: 0}}]\n"
        f"    state: {tmp_path / 'state'}\n"
    )
    node = Node(monarch, tmp_path, f'MONARCH_MOUNTS="train:{mountpoint}"\nMONARCH_EVICT=yes')
    try:
        assert node.run("prolog.sh", 1) == 0
        assert (mountpoint / "a").read_bytes() == (source / "a").read_bytes()
        assert node.run("prolog.sh", 2) == 0
        assert node.run("epilog.sh", 1) == 0
        assert str(mountpoint) in mounts(), "job 2 still reads it"
        assert node.run("epilog.sh", 2) == 0
        assert str(mountpoint) not in mounts(), node.log.read_text()
        assert node.run("epilog.sh", 2) == 0
        assert "failed" not in node.log.read_text()
        assert [
            path.name for path in (tmp_path / "tier").rglob("*") if path.stat().st_size == 1000
        ] == []
    finally:
        if str(mountpoint) in mounts():
            monarch("umount", str(mountpoint), "--lazy", check=False)


@pytest.mark.modes("relay")
@pytest.mark.promise(310, 311)
def test_the_prolog_removes_only_caches_that_it_has_made_and_uses_no_short_key(
    monarch: MonarchCommand, tmp_path: Path
) -> None:
    (tmp_path / "monarch.yaml").write_text("mounts: {}\n")
    jobs, key = tmp_path / "jobs", tmp_path / "key"
    node = Node(
        monarch,
        tmp_path,
        f'MONARCH_MOUNTS="train:{tmp_path}/mnt-%j"\nMONARCH_JOBS={jobs} MONARCH_KEY={key}',
    )
    # No job runs on this node.
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "squeue").chmod(0o755)
    for other in ("home", "77", "3"):
        (jobs / other).mkdir(parents=True)
        (jobs / other / "precious").touch()
    key.touch(mode=0o600)
    assert node.run("prolog.sh", 1) == 0
    assert sorted(path.name for path in jobs.iterdir()) == ["1", "3", "77", "home"]
    assert not (jobs / "1" / "secret").exists()
    assert f"{key} is not used" in node.log.read_text()
    key.write_bytes(bytes(32))
    assert node.run("prolog.sh", 2) == 0
    assert (jobs / "2" / "secret").stat().st_mode & 0o777 == 0o600
    # A directory of another program with the number of a job.
    assert node.run("prolog.sh", 3) == 0
    assert node.run("epilog.sh", 3) == 0
    assert all((jobs / other / "precious").exists() for other in ("home", "77", "3"))
    assert not (jobs / "1").exists() and not (jobs / "2").exists()


@pytest.mark.modes("relay")
@pytest.mark.promise(311)
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_cache_with_written_files_stays_if_its_daemon_was_killed(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path, is_killed: bool
) -> None:
    require_fuse()
    source, jobs, mountpoint = tree({"ckpt": None}), tmp_path / "jobs", tmp_path / "mnt-1"
    (tmp_path / "monarch.yaml").write_text(
        f"mounts:\n  train:\n    source: {source}\n    mountpoint: {tmp_path}/mnt-$SLURM_JOB_ID\n"
        "    tiers: [{name: fast, path: $MONARCH_JOB/tier, capacity: 1MiB, keep_free: 0}]\n"
        "    state: $MONARCH_JOB/state\n    absorb: [ckpt/**]\n"
    )
    node = Node(monarch, tmp_path, f'MONARCH_MOUNTS="train:{tmp_path}/mnt-%j"\nMONARCH_JOBS={jobs}')
    try:
        assert node.run("prolog.sh", 1) == 0
        pid = json.loads(monarch("status", str(mountpoint), "--json").stdout)["pid"]
        # While a process may write to a file, its bytes may be here alone.
        fd = os.open(mountpoint / "ckpt" / "f", os.O_CREAT | os.O_WRONLY)
        try:
            os.write(fd, b"written")
            if is_killed:
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: not is_running(pid), "the daemon has ended")
        finally:
            with suppress(OSError):
                os.close(fd)
        assert node.run("epilog.sh", 1) == 0
        assert (jobs / "1").exists() == is_killed, node.log.read_text()
        assert is_killed or (source / "ckpt" / "f").read_bytes() == b"written"
    finally:
        if str(mountpoint) in mounts():
            monarch("umount", str(mountpoint), "--lazy", check=False)


@pytest.mark.parametrize(("strict", "status"), [("no", 0), ("yes", 1)])
def test_a_failed_mount_drains_the_node_only_if_asked(
    monarch: MonarchCommand, tmp_path: Path, strict: str, status: int
) -> None:
    (tmp_path / "monarch.yaml").write_text("mounts: {}\n")
    settings = f'MONARCH_MOUNTS="train:{tmp_path / "mnt"}"\nMONARCH_STRICT={strict}'
    node = Node(monarch, tmp_path, settings)
    assert node.run("prolog.sh", 1) == status
    assert "monarch mount train failed" in node.log.read_text()
