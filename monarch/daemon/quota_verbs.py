"""The request of the control socket that changes the quotas of jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from monarch.config.quotas import quota_of
from monarch.control.server import Send, Verb
from monarch.errors import UsageError
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.quota_changes import QuotaChange, QuotaChanges
from monarch.vfs.quotas import JobQuotas, Quota
from monarch.vfs.source_limit import SourceLimit


class QuotaVerbs:
    """``quotas`` are None for a mount without any. ``capacity`` returns the bytes of all tiers."""

    def __init__(self, quotas: JobQuotas | None, capacity: Callable[[], int]) -> None:
        self._quotas = quotas
        self._capacity = capacity
        self._threads = ThreadPool(1, "quotas", abandon=True)

    def table(self) -> Mapping[str, Verb]:
        return {"quotas": self._change}

    async def _change(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Changes the quotas in ``quotas``, which are written as in the configuration, or adds
        them; with ``dry`` it only answers what would change. Either all are changed or none."""
        quotas, wanted = self._quotas, params.get("quotas")
        if quotas is None:
            raise UsageError(
                "this mount has no quotas",
                hint="mount it with at least one in its configuration, such as `quotas: [{}]`",
            )
        if not isinstance(wanted, list) or not all(isinstance(each, dict) for each in wanted):
            raise UsageError("quotas must be a list of objects")
        # The name of a user may be looked up in a directory service that hangs.
        made = await self._threads.run(self._made, wanted)
        names = {(each.user, each.group) for each in made}
        if len(names) < len(made):
            raise UsageError("two quotas are for one job")
        new = sum(quotas.of(*name) is None for name in names)
        room = quotas.room(made)
        if new > room:
            raise UsageError(
                f"there is room for {room} more quotas, and {new} are new",
                hint="quotas that were added leave when their job has ended",
            )
        changes = [self._change_of(quotas, each) for each in made]
        if params.get("dry") is not True:
            quotas.change(*made)
        return QuotaChanges(changes).to_dict()

    def _made(self, wanted: list[dict[str, Any]]) -> list[Quota]:
        return [self._quota(each) for each in wanted]

    def _quota(self, raw: dict[str, Any]) -> Quota:
        settings = quota_of(raw)
        return Quota(
            settings.job,
            settings.user_number(),
            None if settings.cgroup is None else PurePosixPath(settings.cgroup),
            settings.tier_within(self._capacity()),
            SourceLimit(settings.source_bandwidth),
        )

    def _change_of(self, quotas: JobQuotas, quota: Quota) -> QuotaChange:
        known = quotas.of(quota.user, quota.group)
        return QuotaChange(
            job=quota.name if known is None else known.name,
            is_new=known is None,
            charged=0 if known is None else quotas.charged(known),
            tier=quota.tier,
            source_limit=quota.source.rate,
            tier_before=None if known is None else known.tier,
            source_limit_before=0 if known is None else known.source.rate,
        )
