"""The accounting of a Slurm that tests start: slurmdbd, with a MariaDB that only root reaches.

The database is made anew, in memory, and listens at a unix socket alone. It has a directory of its
own for temporary tables: their names have only the number of its process, which is the same in the
namespace of each cluster, and in a shared directory one database ends by those of another.
"""

from __future__ import annotations

from pathlib import Path

PROGRAMS = ("slurmdbd", "sacct", "sacctmgr", "mariadbd")

# The system tables alone, and no rights: each program at the socket is root. A log of the usual
# size would be most of the database.
_DATABASE = """\
set -e
mount -t tmpfs -o mode=700 database "$0/data"
options=(--no-defaults --user=root --datadir="$0/data" --log-error="$0/database.log"
    --tmpdir="$0/temporary" --innodb-log-file-size=4M --innodb-use-native-aio=0 --skip-grant-tables)
{ printf 'create database mysql;\nuse mysql;\n'; cat /usr/share/mysql/*_system_tables.sql; } |
    mariadbd "${options[@]}" --bootstrap
exec mariadbd "${options[@]}" --socket="$0/socket" --pid-file="$0/pid" --skip-networking
"""


class Accounting:
    """The files of slurmdbd on the host ``host``, which is beside ``slurm.conf`` in
    ``directory``."""

    def __init__(self, directory: Path, host: str) -> None:
        self._database = directory / "database"
        self._file = directory / "slurmdbd.conf"
        self._munge = directory / "munge" / "socket"
        self._host = host

    def prepare(self) -> None:
        self._database.mkdir(mode=0o700)
        for name in ("data", "temporary"):
            (self._database / name).mkdir()
        self._file.touch(mode=0o600)
        self._file.write_text(
            f"AuthInfo={self._munge}\nDbdHost={self._host}\nSlurmUser=root\n"
            f"LogFile={self._file.with_suffix('.log')}\nPidFile={self._file.with_suffix('.pid')}\n"
            "StorageType=accounting_storage/mysql\nStorageUser=root\n"
        )

    def settings(self) -> str:
        """The lines of ``slurm.conf``."""
        return (
            "AccountingStorageType=accounting_storage/slurmdbd\n"
            f"AccountingStorageHost={self._host}\nAccountingStoragePass={self._munge}\n"
        )

    def database(self) -> list[str]:
        """The command that runs the database."""
        return ["bash", "-c", _DATABASE, str(self._database)]

    def environment(self) -> dict[str, str]:
        """That of slurmdbd, which has no setting for a socket."""
        return {"MYSQL_UNIX_PORT": str(self._socket())}

    def is_ready(self) -> bool:
        """Whether the database has its socket."""
        return self._socket().exists()

    def _socket(self) -> Path:
        return self._database / "socket"
