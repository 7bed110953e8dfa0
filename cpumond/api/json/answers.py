"""What requests do that ask why: idle CPU."""

from __future__ import annotations

from cpumond.api import pool_views
from cpumond.api.json import requests
from cpumond.api.json.call import Call
from cpumond.scheduler.access import Rights
from cpumond.scheduler.elements import Tree
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.why.idle import IdleReport, in_pool, readable


class AnswerHandlers:
    """A part of ``JsonApi``."""

    scheduler: Scheduler

    async def explain_idle(self, call: Call) -> IdleReport:
        query: requests.IdleQuery = call.query
        tree = self.scheduler.state.find_tree(call.path["tree"])
        pool = pool_views.find_pool(tree, query.pool) if query.pool else tree.root
        report = await self.read_idle(tree, Rights(self.scheduler.state, call.user))
        if pool.is_root:
            return report
        above = frozenset(each.name for each in pool.ancestors())
        below = frozenset(each.name for each in pool_views.walk_pools(pool))
        return in_pool(report, pool.name, above, below)

    async def read_idle(self, tree: Tree, rights: Rights) -> IdleReport:
        """The report on a tree, as the asker may see it."""
        return self._show_readable(await self.scheduler.idle.read(tree), rights)

    def last_reports(self, rights: Rights) -> dict[str, IdleReport]:
        """Those that there are, by tree, the default one first."""
        default = self.scheduler.state.config.default_tree
        known = sorted(self.scheduler.idle.reports.items(), key=lambda item: (item[0] != default, item[0]))
        return {name: self._show_readable(report, rights) for name, report in known}

    def _show_readable(self, report: IdleReport, rights: Rights) -> IdleReport:
        records = self.scheduler.state.record_of
        return readable(report, lambda name: (found := records(name)) is None or rights.may_read(found))
