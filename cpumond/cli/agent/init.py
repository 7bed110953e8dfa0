"""``cpumond init``: find the engines that run jobs on this host, and write files that let cpumond follow their jobs."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import click
import msgspec

from cpumond.agent.config import AgentConfig, Source, load_config
from cpumond.cli.agent import init_files
from cpumond.cli.agent.init_files import Planned
from cpumond.cli.engines import EngineSeen, JobsSeen, describe_fates, format_some, list_troubles, see_engines
from cpumond.cli.options import config_option
from cpumond.cli.output import can_ask, output_options, print_json, print_text
from cpumond.cli.replacement import Replacement
from cpumond.core.errors import CreateError, from_os_error
from cpumond.core.words import count

if TYPE_CHECKING:
    from cpumond.agent.discovery.workloads import Workload
    from cpumond.host.cgroup.mounts import Hierarchies

UNIT_DIR: Final = "/etc/systemd/system"
SERVICE: Final = "cpumond.service"
MAIN_FILE: Final = (
    "# The agent's configuration. Put your settings into files in conf.d/ beside this one.\n"
    "# Every key with its default: cpumond.toml(5). `cpumond check-config` prints the result.\n"
)
NEXT: Final = ("systemctl daemon-reload && systemctl restart cpumond", "cpumond status", "cpumond doctor")


class InitPlan(msgspec.Struct, frozen=True):
    """Findings, and files to write; ``others``: sentences about workloads that belong to no engine."""

    engines: list[EngineSeen]
    others: list[str]
    files: list[Planned]
    notes: list[str]

    @property
    def due(self) -> list[Planned]:
        return [file for file in self.files if file.is_due]

    @property
    def foreign(self) -> list[Planned]:
        return [file for file in self.files if file.state == "foreign"]


@click.command("init", epilog="Example: cpumond init --yes && systemctl daemon-reload && systemctl restart cpumond")
@config_option
@click.option("--yes", is_flag=True, help="Write without a question, for scripts.")
@click.option(
    "--socket",
    "sockets",
    multiple=True,
    metavar="KIND=PATH",
    help="Where an engine listens, if not at its default path, for example docker=/run/docker-2.sock; may be repeated.",
)
@click.option(
    "--unit-dir",
    metavar="DIR",
    help=f"Folder of the unit's drop-in.  [default: {UNIT_DIR}, where systemd runs this machine]",
)
@output_options("Print everything as JSON; writes only with --yes.")
def init_command(config_path: str, yes: bool, sockets: tuple[str, ...], unit_dir: str | None, as_json: bool) -> None:
    """Find the engines that run jobs here (Docker, Podman, Slurm, Kubernetes) and let cpumond follow their jobs.

    Prints what was found, what would be managed and what would not, and why. After a question it writes
    conf.d/engines.toml beside the configuration, in shadow mode, and a drop-in for the unit, which otherwise hides
    other services' sockets. Without a terminal and without --yes it only prints the files that it would write.

    A file that `cpumond init` did not write, or that was changed since, is never replaced. A second run changes
    nothing."""
    if unit_dir is None and os.path.isdir("/run/systemd/system"):
        unit_dir = UNIT_DIR
    plan = make_plan(config_path, init_files.parse_sockets(sockets), unit_dir)
    if not as_json:
        print_text("\n".join(draw_findings(plan)), indent="    ")
        print_files(plan)
    is_written = bool(plan.due) and (yes or (not as_json and _ask(plan)))
    if is_written:
        for file in plan.due:
            write_file(file)
    if as_json:
        print_json(msgspec.json.encode(view_plan(plan, is_written)))
    elif is_written:
        print_text(f"written: {', '.join(file.path for file in plan.due)}")
        click.echo("Next:\n" + "\n".join(f"  {command}" for command in NEXT))
    if plan.foreign:
        raise CreateError(
            f"{plan.foreign[0].path}: was not written by `cpumond init`, or was changed since, and is left alone; add "
            "the missing settings yourself, or move the file away and run this again"
        )


def _ask(plan: InitPlan) -> bool:
    """Ask whether to write the files; False without a terminal."""
    if not can_ask():
        print_text("Nothing is written: there is no terminal to ask at; `cpumond init --yes` writes it.")
        return False
    return click.confirm(f"Write {count(len(plan.due), 'file')}?")


def make_plan(config_path: str, more: list[Source], unit_dir: str | None) -> InitPlan:
    """Examine this host and plan its files. Raises ConfigError, AccessError, UnavailableError."""
    from cpumond.cli.doctor.host import list_process_names
    from cpumond.host.cgroup.mounts import open_hierarchies

    is_there = os.path.exists(config_path)
    config = load_config(config_path if is_there else None)
    path = os.path.join(os.path.dirname(os.path.abspath(config_path)), "conf.d", init_files.SOURCES_FILE)
    own = init_files.read_own_sources(path)
    hierarchies = open_hierarchies(config.mountinfo)
    seen = see_engines(config, hierarchies, list_process_names(), more)
    shown = [each for each in seen if each.is_here or each.is_configured or any(s.kind == each.kind for s in more)]
    sources = choose_sources(own, config, seen, more)
    notes = []
    files = [] if is_there or not sources else [Planned(config_path, MAIN_FILE, "new")]
    if body := init_files.render_sources(sources):
        files.append(init_files.plan_file(path, body))
    followed = {
        each.kind: each.sockets for each in seen if each.is_configured or any(s.kind == each.kind for s in sources)
    }
    place = os.path.join(unit_dir or UNIT_DIR, f"{SERVICE}.d", init_files.DROP_IN_FILE)
    if "podman" in followed:
        followed["podman"] = sorted({*followed["podman"], *init_files.read_own_user_sockets(place)})
    drop_in = init_files.render_drop_in(followed)
    if drop_in and unit_dir is not None:
        files.append(init_files.plan_file(place, drop_in))
    elif drop_in:
        notes.append("systemd does not run this machine: nothing hides sockets from the agent, so no drop-in is needed")
    notes += [
        f"{each.facts.daemon}: no source is written for it, because it does not answer: see above"
        for each in shown
        if not (each.is_configured or each.can_be_followed)
    ]
    return InitPlan(shown, list_others(hierarchies, seen), files, notes)


def choose_sources(
    own: list[Source], config: AgentConfig, seen: Iterable[EngineSeen], more: Iterable[Source]
) -> list[Source]:
    """Return the sources of the generated file: those in the existing file, and one for each engine that has none yet.

    An engine that is down at the moment keeps its source; a kubelet that does not answer gets none."""
    # An engine that another file names is left to that file.
    others = list((Counter(map(_key, config.source)) - Counter(map(_key, own))).elements())
    sources = [*own, *(source for source in more if _key(source) not in {*others, *map(_key, own)})]
    named = {kind for kind, _ in others} | {source.kind for source in sources}
    found = [each for each in seen if each.can_be_followed and each.kind not in named]
    return sources + [msgspec.convert(init_files.make_source(each.kind, each.own_socket), Source) for each in found]


def _key(source: Source) -> tuple[str, str]:
    return source.kind, source.socket


def list_others(hierarchies: Hierarchies, seen: Iterable[EngineSeen]) -> list[str]:
    """Sentences about the workloads of this host that belong to no engine."""
    from cpumond.agent.discovery.workloads import list_sources
    from cpumond.cli.agent.estimate_watch import find_workloads, list_leaves
    from cpumond.core.job_cgroups import list_above

    jobs = {job.path for each in seen for job in each.found}
    kinds = {kind for each in seen for kind in each.facts.workloads}

    def is_engines(workload: Workload) -> bool:
        # The lines about the engine show these workloads, even if the cgroups of workload and job differ.
        return workload.kind in kinds or workload.path in jobs or not jobs.isdisjoint(list_above(workload.path))

    workloads = find_workloads([hierarchies.cpu_root], "")
    found = [each for each in workloads if each.path.isprintable() and not is_engines(each)]
    sketches = list_sources(found, lambda path: list_leaves(hierarchies.cpu_root, path))
    of_system = sorted({path for sketch in sketches if sketch.keep_shadow for path in sketch.paths})
    rest = sorted({path for sketch in sketches if not sketch.keep_shadow for path in sketch.paths} - set(of_system))
    said = []
    if of_system:
        names = format_some(path.rpartition("/")[2] for path in of_system)
        said.append(f"{count(len(of_system), 'service')} and sessions of the system{names}: left alone")
    if rest:
        said.append(
            f"{count(len(rest), 'other workload')}{format_some(rest)}: left alone; `cpumond estimate --write FILE` "
            "makes sources for them"
        )
    return said


def draw_findings(plan: InitPlan) -> Iterator[str]:
    nothing = "No job engine was found on this host (Docker, Podman, Slurm, Kubernetes)."
    yield "Found on this host:" if plan.engines else nothing
    for seen in plan.engines:
        yield f"  {seen.headline}{'' if seen.is_here else ': not on this host now'}"
        yield from (f"    {sentence}" for sentence in describe_fates(seen.kind, seen.jobs))
        for text, advice in list_troubles(seen):
            yield f"    {text}"
            yield f"    -> {advice}"
    yield from (f"  {sentence}" for sentence in plan.others)
    yield from plan.notes


def print_files(plan: InitPlan) -> None:
    """Print the files to write, and those that are left alone. The lines of files are shown unchanged."""
    if not plan.due and not plan.foreign:
        print_text("There is nothing to write.")
    for file in plan.files:
        lines: Iterable[str] = ()
        if file.state == "same":
            said = "is up to date"
        elif file.state == "foreign":
            said = "was not written by cpumond, or was changed since; it is left alone"
            lines = _list_missing(file)
        else:
            said = "would be created" if file.state == "new" else "would be replaced"
            lines = file.text.splitlines()
        print_text(f"{file.path}: {said}")
        for line in lines:
            click.echo(f"  {line}".rstrip())


def _list_missing(file: Planned) -> Iterator[str]:
    """Settings that the new file would have and the existing one lacks."""
    with contextlib.suppress(OSError), open(file.path, encoding="utf-8", errors="replace") as present:
        yield "settings that it lacks:"
        yield from (f"  {line}" for line in init_files.list_missing(present.read(), file.text))


def write_file(file: Planned) -> None:
    """Write one file, creating its folder. Raises AccessError, CreateError."""
    folder = os.path.dirname(file.path)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, f"make {folder}", "run this as root") from error
    with Replacement(file.path, "--config or --unit-dir") as target:
        if not init_files.is_as_planned(file):
            raise CreateError(f"{file.path}: was created or changed in the meantime and is left alone; run this again")
        target.write(file.text)
    with contextlib.suppress(OSError):
        os.chmod(file.path, 0o644)


class SocketAnswer(msgspec.Struct, frozen=True):
    """The answer at an engine's socket; ``problem``: why there was none; "" if it answered."""

    title: str
    problem: str
    notes: tuple[str, ...]


class EngineFound(msgspec.Struct, frozen=True):
    """An engine in the JSON of ``init``, with the answer at each of its sockets."""

    kind: str
    title: str
    is_configured: bool
    sockets: dict[str, SocketAnswer]
    jobs: JobsSeen


class InitAnswer(msgspec.Struct, frozen=True):
    """The JSON of ``init``; ``next``: the commands to run next. Keys are stable."""

    version: int
    engines: list[EngineFound]
    others: list[str]
    notes: list[str]
    files: list[Planned]
    is_written: bool
    next: list[str]


def view_plan(plan: InitPlan, is_written: bool) -> InitAnswer:
    engines = [
        EngineFound(
            seen.kind, seen.describe(), seen.is_configured,
            {socket: SocketAnswer(view.title, view.problem, view.notes) for socket, view in seen.views.items()},
            seen.jobs,
        )
        for seen in plan.engines
    ]  # fmt: skip
    return InitAnswer(1, engines, plan.others, plan.notes, plan.files, is_written, list(NEXT) if is_written else [])
