"""The parts and the state of one agent, which belong to the tick's thread."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from cpumond.agent.clock import HostClock
from cpumond.agent.config import AgentConfig, Resources
from cpumond.agent.engines import Engines
from cpumond.agent.jobs.assigned import AssignedJobs
from cpumond.agent.jobs.job import Usage
from cpumond.agent.limits.units import UnitLimits
from cpumond.agent.limits.writer import LimitWriter
from cpumond.agent.peaks import PeakFile
from cpumond.agent.places import Places
from cpumond.agent.registry import RegisteredJobs
from cpumond.agent.report import Reporter
from cpumond.agent.snapshot import TickEnd
from cpumond.agent.table import JobTable
from cpumond.agent.totals import Due, RunTotals
from cpumond.agent.watch import Watcher
from cpumond.host.cgroup import read_host_cores
from cpumond.host.cgroup.mounts import Hierarchies

if TYPE_CHECKING:
    from cpumond.agent.report.scheduler import SchedulerLink


class AgentContext:
    """The parts of one agent. ``last`` is the end of the newest tick; any thread may read it."""

    def __init__(
        self,
        config: AgentConfig,
        hierarchies: Hierarchies,
        reporter: Reporter,
        clock: type[HostClock],
        assigned: AssignedJobs | None,
        units: UnitLimits | None,
    ) -> None:
        self.config = config
        self.hierarchies = hierarchies
        self.reporter = reporter
        self.link: SchedulerLink | None = None
        """Sends heartbeats to the scheduler, whose responses arrive through ``Agent.take_answer``."""
        self.assigned = assigned
        self.on_offer: Callable[[], None] = lambda: None
        """Called when the host's resources differ from those registered with the scheduler."""
        self.clock = clock
        self.watcher = Watcher()
        self.totals = RunTotals()
        self.due = Due()
        self.units = units or UnitLimits(hierarchies.cpu_version)
        self.engines = Engines(hierarchies, config.node_id)
        self.writer = LimitWriter(config, self.units, self.totals)
        self.peaks = PeakFile(config.state_dir, hierarchies.cpu_root, hierarchies.read_root_id(), clock)
        self.table = JobTable(config, hierarchies, self.writer, self.watcher, self.peaks)
        self.registered = RegisteredJobs(config.state_dir)
        self.places = Places(self.writer.look_after_files, self.registered.look_after_file, self.peaks.look_after_file)
        if assigned is not None:
            self.places.looks.append(assigned.look_after_files)
            assigned.list_owners = lambda: [path for path in self.table.jobs if path not in self.followed]
        self.incarnation = uuid.uuid4().hex
        self.capacity_cores = config.resources.cpu or read_host_cores(hierarchies)
        self.read_resources: Callable[[], Resources] = lambda: self.config.resources
        self.period_s = config.node_settings().check_period_s
        self.last: TickEnd | None = None
        self.stopping = False
        self.stride = 1
        """Number of ticks per check of a job; more than 1 while the agent exceeds its CPU budget."""
        self.discovery_problems: list[str] = []
        self.empty_rescans = 0
        self.followed: set[str] = set()
        """Cgroups of the scheduler's jobs that the monitor follows."""
        self.metrics_address = config.metrics.listen
        """Address of the Prometheus endpoint, with the port in use even if none was configured."""
        self.service_ends: dict[str, int] = {}
        self.refused_config = ""
        """Why the last reload was refused; "" if the configuration in the files is in force."""

    def use_config(self, config: AgentConfig) -> None:
        """Switch to a new configuration. Jobs get their new settings at the next rescan."""
        self.config = self.table.config = self.writer.config = config
        self.due.report = True

    def use_resources(self, resources: Resources) -> None:
        self.use_config(msgspec.structs.replace(self.config, resources=resources))
        self.capacity_cores = resources.cpu or self.capacity_cores
        if self.assigned is not None:
            self.assigned.config = self.config
        self.on_offer()

    def read_usage(self) -> dict[str, Usage]:
        """Return by cgroup the monitor's figures of the scheduler's jobs."""
        return {path: job.usage() for path in self.followed if (job := self.table.jobs.get(path)) is not None}

    @property
    def keeps_samples(self) -> bool:
        """Whether a page can show graphs of the jobs: the page of this node, or that of its scheduler."""
        return self.config.web.samples > 0 and bool(self.config.web.listen or self.config.scheduler.addresses)
