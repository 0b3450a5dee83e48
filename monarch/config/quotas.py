"""The settings of a job that shares a mount with others."""

from __future__ import annotations

import pwd
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ValidationError, model_validator

from monarch.config.values import AbsolutePath, Section, Size, size_of
from monarch.errors import UsageError
from monarch.text import MOST_BYTES

# Each job with a quota has a bit for each file (MOST_JOBS of placement/quotas.py).
MOST_QUOTAS = 16
# The kernel has 32 bits for it; the last number means that there is none.
_MOST_USER = (1 << 32) - 2


def _share_or_size(value: object) -> object:
    if isinstance(value, str) and value.rstrip().endswith("%"):
        number = value.rstrip()[:-1].strip()
        if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", number) and 0 < float(number) <= 100:
            return f"{number}%"
        raise ValueError(f"{value!r} is no share; write it like 30%")
    try:
        size = size_of(value)
    except ValueError as error:
        raise ValueError(f"{error}, or like 30%") from error
    if not 0 <= size <= MOST_BYTES:
        raise ValueError(f"{size} is not a number of bytes")
    return str(size)


def _group(path: Path) -> Path:
    # The kernel shows each group by one path.
    if ".." in path.parts or path.root != "/" or "\n" in str(path):
        raise ValueError(f"{str(path)!r} is no path of a control group in /proc/PID/cgroup")
    return path


def _user(value: object) -> object:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else value


class QuotaSettings(Section):
    user: Annotated[str, BeforeValidator(_user)] | None = None
    """Name or number of the user whose processes are the job."""
    cgroup: Annotated[AbsolutePath, AfterValidator(_group)] | None = None
    """Control group of version 2 whose processes, and those of the groups in it, are the job, like
    /system.slice/slurmstepd.scope/job_7."""
    tier: Annotated[str, BeforeValidator(_share_or_size)] | None = None
    """Bytes of copies in all tiers together, like 200GiB, or a share of the tiers, like 30%. null:
    no limit."""
    source_bandwidth: Size = 0
    """Bytes per second that the job reads from the source; 0: no limit."""

    @model_validator(mode="after")
    def _names_one_job(self) -> QuotaSettings:
        if self.user is not None and self.cgroup is not None:
            raise ValueError("user and cgroup exclude each other; leave one of them out")
        if self.user is not None:
            self.user_number()
        return self

    def user_number(self) -> int | None:
        """The number of the user, None if the job is not that of a user. Raises ValueError."""
        if self.user is None:
            return None
        if self.user.isdecimal():
            if (number := int(self.user)) > _MOST_USER:
                raise ValueError(f"no user has the number {self.user}")
            return number
        try:
            return pwd.getpwnam(self.user).pw_uid
        except KeyError:
            raise ValueError(f"there is no user {self.user!r} on this node") from None

    def tier_within(self, capacity: int) -> int | None:
        """The bytes of copies, of tiers with ``capacity`` bytes; None: no limit."""
        if self.tier is None:
            return None
        if self.tier.endswith("%"):
            return int(Fraction(self.tier[:-1]) / 100 * capacity)
        return int(self.tier)

    @property
    def job(self) -> str:
        """The job in words."""
        if self.cgroup is not None:
            return f"cgroup {self.cgroup}"
        return "all others" if self.user is None else f"user {self.user}"


def quota_of(raw: object) -> QuotaSettings:
    """A quota that does not come from a configuration. Raises UsageError."""
    try:
        return QuotaSettings.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = str(first.get("ctx", {}).get("error", first["msg"]))
        raise UsageError(f"{where}: {what}" if where else what) from error
