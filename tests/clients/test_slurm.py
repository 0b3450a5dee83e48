"""Jobs of a real Slurm share their caches: prolog and epilog, and a user without root."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import stat
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.cli.plan_nodes import read_nodes
from monarch.peers.members import expand
from tests.conftest import contents, require_fuse
from tests.equipment import slurm
from tests.equipment.slurm import SlurmLab
from tests.equipment.waiting import becomes_true, wait_until
from tests.mount.command import python_for_others

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "epochs.py"
MEASURED = PROGRAM.with_name("measured.py")
FILES = {f"d{n % 4}/f{n:02}": contents(f"f{n}", 700 + 31 * n) for n in range(40)}
# A loaded machine needs longer than the usual 20 s.
LONG_S = 120.0
# What the first node says. Slurm makes all letters small.
COMMENT = (
    r"data on n1: saved: at least [\d,]+ opens, [\d.]+ \w+ not served by the source,"
    r"from other nodes: [\d,]+ files?, [\d.]+ \w+"
)
# An ordinary user that every Debian has: Slurm wants a name.
UID = 5


class Cluster:
    """Three nodes with the scripts of ``conf/slurm``, and a data set."""

    def __init__(self, lab: SlurmLab, directory: Path) -> None:
        self.lab = lab
        self.source = directory / "source"
        self.results = directory / "results"
        self._directory = directory
        for name, content in FILES.items():
            path = self.source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        digests = {name: hashlib.sha256(each).hexdigest() for name, each in FILES.items()}
        (directory / "digests").write_text(json.dumps(digests))
        self.results.mkdir()
        self.results.chmod(0o1777)

    def submit(self, script: str, *options: str, user: bool = False, last: str = "") -> Job:
        """A job that runs a script; ``user``: as an ordinary user. $1 is the directory of the job,
        $2 is ``last``."""
        number = uuid.uuid4().hex[:8]
        path = self._directory / f"job-{number}.sh"
        path.write_text(f"#!/bin/bash\n{script}")
        path.chmod(0o755)
        directory = self.results / number
        directory.mkdir()
        directory.chmod(0o1777)
        as_user = (f"--uid={UID}", f"--gid={UID}") if user else ()
        output = f"--output={directory}/output"
        shown = self.lab.ask(
            *("sbatch", "--parsable", output, "--chdir=/", *as_user, *options, str(path)),
            str(directory),
            *filter(None, [last]),
        )
        return Job(self, int(shown), directory)

    def reader(self, mount: str, epochs: int) -> str:
        """The command that reads a mount; $1 is the directory of the job."""
        program = f"{python_for_others()} {PROGRAM} {mount} {self._directory}/digests $1 {epochs}"
        return f"srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 {program}"

    def assert_nothing_is_left(self, *nodes: str, jobs: int = 0) -> None:
        """No mount, process, port, secret, socket or copy of a job, but of so many jobs."""
        for node in nodes:
            disk = self.lab.disk_of(node)

            def left(node: str = node, disk: Path = disk) -> dict[str, list[Any]]:
                lines = self.lab.processes(node).values()
                found: dict[str, list[Any]] = {
                    "mounts": self.lab.mounts(node),
                    "daemons": [line for line in lines if "-m monarch" in line],
                    "engines": [line for line in lines if "nginx" in line],
                    "ports": [port for port in self.lab.ports(node) if 20_000 <= port < 30_000],
                    "caches": list((disk / "jobs").glob("*")),
                    "mount points": list(disk.glob("mnt-*")),
                }
                if not jobs:
                    found["sockets"] = [path for path in disk.rglob("*") if _is_socket(path)]
                    found["locks"] = list((disk / "run").glob("job-*"))
                return {name: each for name, each in found.items() if each}

            def is_clean() -> bool:
                found = left()
                return all(len(each) == jobs for each in found.values())

            if not becomes_true(is_clean, timeout_s=LONG_S, step_s=0.1):
                pytest.fail(f"{node}: {left()}\n{self.lab.logs()}")


class Job:
    """A job of the cluster. Its program has made files in ``directory``."""

    def __init__(self, cluster: Cluster, number: int, directory: Path) -> None:
        self._lab = cluster.lab
        self.number = number
        self.directory = directory

    def reaches(self, moment: str, epoch: int, *nodes: str) -> None:
        """Waits until the program is at this moment of an epoch on these nodes."""
        for node in nodes:
            self.waits_for(f"{moment}-{node}-{epoch}")

    def waits_for(self, name: str) -> Path:
        path = self.directory / name
        if not becomes_true(path.exists, timeout_s=LONG_S):
            self._fail(f"{name} is missing")
        return path

    def passes(self, *moments: str) -> None:
        """Lets the program pass moments, such as half-1."""
        for moment in moments:
            (self.directory / moment).touch()

    def assert_read(self, *nodes: str) -> None:
        """All bytes that were read on these nodes were right."""
        for node in nodes:
            assert json.loads(self.waits_for(f"end-{node}").read_text()) == [], node

    def ends(self, *states: str) -> dict[str, str]:
        """What Slurm says of the job when it has ended in one of these states."""

        def has_ended() -> bool:
            return self.shown().get("JobState") in states

        if not becomes_true(has_ended, timeout_s=LONG_S, step_s=0.1):
            self._fail("it has not ended so")
        return self.shown()

    def _fail(self, why: str) -> None:
        # A job that was requeued has its output beside the directories of its runs.
        outputs = [each / "output" for each in (self.directory, self.directory.parent)]
        output = "".join(path.read_text() for path in outputs if path.exists())
        pytest.fail(f"job {self.number}: {why}: {self.shown()}\n{output}\n{self._lab.logs()}")

    def shown(self) -> dict[str, str]:
        text = self._lab.ask("scontrol", "-o", "show", "job", str(self.number))
        # A value may have blanks.
        parts = text.split("=")
        keys = [part.rpartition(" ")[2] for part in parts[:-1]]
        values = [part.rpartition(" ")[0] for part in parts[1:-1]] + [parts[-1]]
        return dict(zip(keys, values, strict=True))

    def comments(self) -> list[str]:
        """What the accounting has kept of the epilog, at least one line."""
        options = ("--noheader", "--parsable2", "--allocations", "--format=AdminComment")
        return self._lab.ask("sacct", f"--jobs={self.number}", *options).split("\n")

    def secret(self, node: str) -> str:
        path = self._lab.disk_of(node) / "jobs" / str(self.number) / "secret"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        return path.read_text()


def _is_socket(path: Path) -> bool:
    try:
        return path.is_socket()
    except OSError:
        return False


def prepare(lab: SlurmLab, source: Path) -> None:
    """The scripts and settings of the administrator, on the disk of each node."""
    where = lab.directory
    (where / "monarch").write_text(f'#!/bin/sh\nexec {python_for_others()} -m monarch "$@"\n')
    (where / "monarch").chmod(0o755)
    (where / "key").touch(mode=0o600)
    (where / "key").write_bytes(os.urandom(32))
    (where / "monarch.conf").write_text(
        f'MONARCH_MOUNTS="data:{lab.disk}/mnt-%j"\n'
        f"MONARCH_CONFIG={where}/monarch.yaml\n"
        f"MONARCH_PATH={where}\n"
        f"MONARCH_KEY={where}/key\n"
        "MONARCH_COMMENT=yes\n"
        f"MONARCH_REPORT={lab.scratch}/pages-%u/%j-%n-%m.html\n"
        f"MONARCH_JOBS={lab.disk}/jobs MONARCH_RUN={lab.disk}/run\n"
        f"MONARCH_LOG={lab.disk}/slurm.log\n"
    )
    (where / "monarch.yaml").write_text(
        f"""\
mounts:
  data:
    source: {source}
    mountpoint: {lab.disk}/mnt-$SLURM_JOB_ID
    tiers: [$MONARCH_JOB/tier:20MiB]
    state: $MONARCH_JOB/state
    allow_other: true
    open: open
    datapath: relay
    peers:
      members: slurm
      secret_file: $MONARCH_JOB/secret
      # A loaded machine must not make a node look slow.
      patience: 10
"""
    )
    environment = {
        "MONARCH_SLURM_CONF": f"{where}/monarch.conf",
        "MONARCH_STATE_ROOT": f"{lab.disk}/state",
        "HOME": str(lab.disk),
        **passed_on(),
    }
    exports = "".join(f"export {name}='{value}'\n" for name, value in environment.items())
    for script, name in ((lab.prolog, "prolog.sh"), (lab.epilog, "epilog.sh")):
        script.write_text(f"#!/bin/bash\n{exports}exec {ROOT}/conf/slurm/{name}\n")


def passed_on() -> dict[str, str]:
    """The environment that every process of Monarch needs here."""
    names = ("PYTHONPYCACHEPREFIX", "MONARCH_TEST_RUN")
    return {
        "PYTHONPATH": f"{ROOT}:{sysconfig.get_paths()['purelib']}",
        **{name: os.environ[name] for name in names if name in os.environ},
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_fuse()
    if reason := slurm.unavailable():
        pytest.skip(reason)
    lab = SlurmLab(3, {**os.environ, **passed_on()})
    directory = lab.directory / "shared"
    directory.mkdir()
    made = Cluster(lab, directory)
    prepare(lab, made.source)
    with lab:
        yield made


@pytest.mark.promise(310, 311)
def test_jobs_have_caches_of_their_own_and_a_node_that_fails_costs_no_byte(
    cluster: Cluster,
) -> None:
    lab = cluster.lab
    mount = f"{lab.disk}/mnt-$SLURM_JOB_ID"
    first = cluster.submit(cluster.reader(mount, 2), "-N3", "--no-kill", "--no-requeue")
    second = cluster.submit(cluster.reader(mount, 2), "-N2", "-w", "n1,n2")
    for job, nodes in ((first, ("n1", "n2", "n3")), (second, ("n1", "n2"))):
        job.passes("half-1")
        job.reaches("whole", 1, *nodes)
    # One secret for each job, which is the same on its nodes, and on no command line.
    secrets = [{job.secret(node) for node in ("n1", "n2")} for job in (first, second)]
    assert [len(each) for each in secrets] == [1, 1] and secrets[0] != secrets[1]
    shown = "".join(line for node in lab.nodes for line in lab.processes(node).values())
    assert "-m monarch mount -c" in shown
    for secret in secrets[0] | secrets[1]:
        assert len(secret.strip()) == 64
        assert secret.strip() not in shown
    # Each job has read the source once.
    for job, nodes in ((first, ("n1", "n2", "n3")), (second, ("n1", "n2"))):
        at = f"{lab.disk}/mnt-{job.number}"
        reports = [settled(cluster, node, at) for node in nodes]
        assert sum(report["source_totals"]["opens"] for report in reports) == len(FILES)
        assert all(report["peers"]["files"] > 0 for report in reports)
        job.passes("whole-1", "whole-2")
        job.reaches("half", 2, *nodes)
    # One node is set down and one job is cancelled, both in the middle of an epoch.
    lab.ask("scontrol", "update", "node=n3", "state=down", "reason=test")
    lab.ask("scancel", str(second.number))
    second.ends("CANCELLED")
    cluster.assert_nothing_is_left("n1", "n2", jobs=1)
    first.passes("half-2")
    first.assert_read("n1", "n2")
    assert first.ends("COMPLETED", "NODE_FAIL", "FAILED")["JobState"] != "NODE_FAIL"
    cluster.assert_nothing_is_left("n1", "n2")
    for job in (first, second):
        # A job that has lost a node has one line for its time before, and one for that after.
        assert all(re.fullmatch(COMMENT, line) for line in job.comments()), job.comments()
    # Slurm has run no epilog on the node that was down, unless it has returned meanwhile. Then the
    # next job there removes what is left.
    # Slurm may have returned it to service already, and then refuses this.
    lab.run("scontrol", "update", "node=n3", "state=resume")
    # Its epilog writes a page with the rights of its user.
    name = pwd.getpwuid(UID).pw_name
    pages = lab.disk_of("n3") / lab.scratch.name / f"pages-{name}"
    pages.mkdir()
    os.chown(pages, UID, UID)
    pages.chmod(0o700)
    third = cluster.submit(cluster.reader(mount, 1), "-N1", "-w", "n3", user=True)
    third.passes("half-1", "whole-1")
    third.assert_read("n3")
    third.ends("COMPLETED")
    cluster.assert_nothing_is_left(*lab.nodes)
    (page,) = pages.iterdir()
    assert page.name == f"{third.number}-n3-data.html"
    assert (page.stat().st_uid, stat.S_IMODE(page.stat().st_mode)) == (UID, 0o600)
    assert page.read_text().rstrip().endswith("</html>")
    for node in lab.nodes:
        log = (lab.disk_of(node) / "slurm.log").read_text()
        assert "failed" not in log and "stays" not in log, log
        # The user of the first jobs has no directory for pages, which has cost nothing else.
        assert node == "n3" or "no page of" in log, log
        assert not any(secret.strip() in log for secret in secrets[0] | secrets[1])


@pytest.mark.promise(310, 311)
def test_a_job_that_is_requeued_begins_with_a_new_cache_and_leaves_nothing(
    cluster: Cluster,
) -> None:
    lab, nodes = cluster.lab, ("n1", "n2")
    mount = f"{lab.disk}/mnt-$SLURM_JOB_ID"
    script = "set -- $1/run${SLURM_RESTART_COUNT:-0}\nmkdir -p $1\n" + cluster.reader(mount, 1)
    job = cluster.submit(script, "-N2", "-w", ",".join(nodes), "--requeue")
    first, second = (Job(cluster, job.number, job.directory / f"run{n}") for n in (0, 1))
    first.reaches("half", 1, *nodes)
    caches = [lab.disk_of(node) / "jobs" / str(job.number) for node in nodes]
    # A file in the caches of the first run shows whether the second one has others.
    for cache in caches:
        (cache / "of-the-first-run").touch()
    lab.ask("scontrol", "requeue", str(job.number))

    def begins_again() -> bool:
        shown = job.shown()
        return (shown["JobState"], shown["Restarts"]) == ("RUNNING", "1")

    wait_until(begins_again, "it runs again", timeout_s=LONG_S)
    second.reaches("half", 1, *nodes)
    assert not any((cache / "of-the-first-run").exists() for cache in caches)
    second.passes("half-1", "whole-1")
    second.assert_read(*nodes)
    job.ends("COMPLETED")
    cluster.assert_nothing_is_left(*nodes)


@pytest.mark.promise(289)
def test_the_nodes_of_a_plan_are_those_of_slurm(cluster: Cluster, tmp_path: Path) -> None:
    lab = cluster.lab
    file = lab.directory / "nodes.yaml"
    shown = lab.ask(
        *(str(lab.directory / "monarch"), "plan", "nodes", "--json"),
        *("--gpus", "2", "--tier", "1GB", "-o", str(file)),
    )
    nodes = json.loads(shown)
    named = [name for each in nodes["nodes"] + nodes["left"] for name in expand(each["names"])]
    assert sorted(named) == lab.nodes
    for each in nodes["nodes"]:
        assert (each["gpus"], each["cores"], each["tier"]) == (2, 8, 10**9)
    budget, servers = read_nodes(file)
    assert budget is None and {each.name for each in servers} <= set(lab.nodes)
    # The nodes of this Slurm have no GPUs and no temporary disk.
    refused = lab.run(str(lab.directory / "monarch"), "plan", "nodes")
    assert refused.returncode == 1 and "it has no GPUs" in refused.stderr


def settled(cluster: Cluster, node: str, mount: str) -> dict[str, Any]:
    """The report of a mount when no copy is under way."""
    lab, found = cluster.lab, {}

    def is_settled() -> bool:
        found.update(
            json.loads(
                lab.ask(
                    *("env", f"MONARCH_STATE_ROOT={lab.disk}/state"),
                    *(str(lab.directory / "monarch"), "status", mount, "--json"),
                    node=node,
                )
            )
        )
        return not found["copies"]["queued"] and not found["copies"]["running"]

    wait_until(is_settled, f"{node}: copies are under way", timeout_s=LONG_S)
    return found


@pytest.mark.promise(312)
def test_a_user_without_root_shares_a_cache_in_the_batch_script(cluster: Cluster) -> None:
    lab = cluster.lab
    monarch = lab.directory / "monarch"
    exports = "".join(f"export {name}='{value}'\n" for name, value in passed_on().items())
    script = f"""\
{exports}
export MONARCH_PEERS_SECRET=$(head -c 32 /dev/urandom | base64)
export D={lab.scratch}/$SLURM_JOB_ID
export HOME=$D XDG_STATE_HOME=$D/state
srun --ntasks-per-node=1 mkdir -p $D/mnt
# The snapshot is built once, on the first node, and given to all.
{monarch} snapshot build {cluster.source} -o $1/snapshot
sbcast $1/snapshot $D/snapshot
srun --overlap --ntasks-per-node=1 {monarch} mount {cluster.source} $D/mnt \\
    --tier $D/tier:20MiB --peers slurm --snapshot $D/snapshot \\
    -o peers.patience=10,open=open --foreground &
srun --overlap --ntasks-per-node=1 bash -c 'until mountpoint -q $D/mnt; do sleep 0.1; done'
{cluster.reader("$D/mnt", 2)}
srun --overlap --ntasks-per-node=1 --output=$1/status-%N {monarch} status $D/mnt --json
srun --overlap --ntasks-per-node=1 {monarch} umount $D/mnt
wait
srun --ntasks-per-node=1 rm -rf $D
"""
    job = cluster.submit(script, "-N3", "--overcommit", user=True)
    job.passes("half-1", "whole-1", "half-2", "whole-2")
    job.ends("COMPLETED")
    job.assert_read(*lab.nodes)
    reports = [json.loads((job.directory / f"status-{n}").read_text()) for n in lab.nodes]
    assert len({report["peers"]["set"] for report in reports}) == 1
    assert all(report["peers"]["files"] > 0 for report in reports)
    cluster.assert_nothing_is_left(*lab.nodes)


@pytest.mark.promise(293)
def test_a_batch_script_measures_its_job_on_a_mount_that_outlives_it(cluster: Cluster) -> None:
    lab, node = cluster.lab, "n1"
    monarch = str(lab.directory / "monarch")
    environment = ("env", f"MONARCH_STATE_ROOT={lab.disk}/state")
    mount = f"{lab.disk}/shared"
    lab.ask("mkdir", mount, node=node)
    lab.ask(
        *(*environment, monarch, "mount", str(cluster.source), mount),
        *("--tier", f"{lab.disk}/shared-tier:20MiB", "-o", "allow_other,open=open,datapath=relay"),
        node=node,
    )
    lab.ask(*environment, monarch, "warm", mount, "--wait", node=node)

    def limits() -> list[float]:
        return [each["share"] for each in settled(cluster, node, mount)["measured"]]

    exports = "".join(f"export {name}='{value}'\n" for name, value in passed_on().items())
    script = f"""\
{exports}
{monarch} analyze run --mount {mount} --iters 10 --repeat 1 --most-repeat 1 --x 0 \\
    --out $1/profile.json -- srun {python_for_others()} {MEASURED} {mount} $1 $2
echo $? > $1/code
"""
    assert limits() == []
    measured = cluster.submit(script, "-N1", "-w", node, user=True)
    measured.ends("COMPLETED")
    # The rates are those of a busy machine, so any verdict is right.
    output = (measured.directory / "output").read_text()
    assert (measured.directory / "code").read_text().strip() in ("0", "15"), output
    profile = json.loads((measured.directory / "profile.json").read_text())
    assert [run["phase"] for run in profile["runs"]] == ["synthetic", "cached", "real"]
    assert [share["hits"] for share in profile["result"]["shares"]] == [0.0, 1.0]
    wait_until(lambda: limits() == [], "the limits have ended", timeout_s=LONG_S)
    cancelled = cluster.submit(script, "-N1", "-w", node, user=True, last="hangs")
    cancelled.waits_for("hangs")
    # Those of the run before may end up to a second after it.
    wait_until(lambda: limits() == [0.0], "only the last run is measured", timeout_s=LONG_S)
    lab.ask("scancel", str(cancelled.number))
    cancelled.ends("CANCELLED")
    wait_until(lambda: limits() == [], "they have ended with the job", timeout_s=LONG_S)
    assert not (cancelled.directory / "profile.json").exists()
    assert not any(str(MEASURED) in line for line in lab.processes(node).values())
    lab.ask(*environment, monarch, "umount", mount, node=node)
    lab.ask("rmdir", mount, node=node)
    cluster.assert_nothing_is_left(node)
