"""``cpumond agent``, ``restore`` and ``check-config``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import click
import msgspec

from cpumond.agent.config import AgentConfig, find_idle_options, load_config
from cpumond.cli.options import config_option
from cpumond.cli.output import output_options, print_json, print_text
from cpumond.core.errors import UsageError
from cpumond.core.words import count


@contextlib.contextmanager
def _without(*modules: str) -> Iterator[None]:
    """Hide modules from import: structlog would import them, and they cost the agent 4 MiB without use."""
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@click.command("agent", epilog="Example: cpumond agent --config /etc/cpumond/cpumond.toml")
@config_option
def agent_command(config_path: str) -> int:
    """Run the agent: measure, decide, write, report, once per check_period.

    SIGTERM and SIGINT restore every limit and end the agent; SIGHUP reloads the configuration."""
    with _without("rich", "greenlet"):
        from cpumond.agent.main import run_agent

    return run_agent(config_path)


@click.command("restore", epilog="Example: cpumond restore --config /etc/cpumond/cpumond.toml")
@config_option
@click.option(
    "--quick",
    is_flag=True,
    help="Only raise lowered quotas, at once; only for ExecStopPost= of the service, before the full run.",
)
def restore_command(config_path: str, quick: bool) -> int:
    """Restore the original limits that a dead agent left lowered (ExecStopPost=).

    Exit code 69: not all are restored. 75: the agent's files are gone, so the lowered limits are unknown. 73 or 77:
    they are restored, but this cannot be recorded in a file. 78: they are restored, and the configuration is wrong."""
    if quick:
        if "SERVICE_RESULT" not in os.environ:
            raise UsageError("--quick is for ExecStopPost=, where systemd passes how the service ended; leave it out")
        from cpumond.agent.limits.first_aid import raise_quotas

        raise_quotas(os.environ)
        return 0
    from cpumond.agent.limits.restore import print_restored, run_restore

    return print_restored(run_restore(config_path))


class CheckedConfig(AgentConfig, frozen=True, kw_only=True):
    """The JSON of ``check-config``: the configuration; ``monitor``: the resulting values, durations as text.

    ``warnings``: options without effect."""

    monitor: dict[str, bool | float | str | None]
    warnings: list[str]


@click.command("check-config", epilog="Example: cpumond check-config --config /etc/cpumond/cpumond.toml --json")
@click.argument("file", required=False)
@config_option
@click.option(
    "-q", "--quiet", is_flag=True, help="Print nothing when the configuration is valid; warnings are printed anyway."
)
@output_options("Print the resulting values as JSON.")
def check_config_command(file: str | None, config_path: str, quiet: bool, as_json: bool) -> None:
    """Check a configuration and print the resulting values; exit code 78 and a sentence for each mistake.

    Warnings on standard error name options without effect (for example those of another limit_rule), files in conf.d
    that are not read, and sources whose limits cannot move. For the scheduler's files: `cpumond scheduler --check`."""
    from cpumond.agent.control import view_settings
    from cpumond.agent.dead_ends import find_dead_ends
    from cpumond.cli.output import warn
    from cpumond.monitor.model import compute_mode

    config = load_config(file or config_path)
    warnings = find_idle_options(config) + find_dead_ends(config)
    if quiet:
        for warning in warnings:
            warn(warning)
        return
    settings = config.node_settings()
    resulting = view_settings(settings, compute_mode(settings))
    if config.scheduler.token:
        hidden = msgspec.structs.replace(config.scheduler, token="(hidden)")  # noqa: S106 - what is shown instead
        config = msgspec.structs.replace(config, scheduler=hidden)
    if as_json:
        values = {**msgspec.structs.asdict(config), "monitor": resulting, "warnings": warnings}
        print_json(msgspec.json.encode(CheckedConfig(**values)))
        return
    sources = count(len(config.source), "source")
    print_text(f"{config.path}: good. Node {config.node_id}, {sources}, mode {resulting['mode']}.")
    click.echo("Resulting job-cpu-monitor:")
    for name, value in resulting.items():
        click.echo(f"  {name} = {value}")
    executor = config.executor
    jobs = "runs no jobs" if executor.kind == "none" else f"runs jobs in {executor.cgroup_root} ({executor.kind})"
    print_text(f"Scheduler: {', '.join(config.scheduler.addresses) or 'none'}; this host {jobs}.")
    print_text(f"Limits may be written {_describe_roots(config)}.")
    for warning in warnings:
        warn(warning)


def _describe_roots(config: AgentConfig) -> str:
    """Where limits may be written, and for which jobs."""
    engines = list(dict.fromkeys(source.kind for source in config.source if source.is_engine))
    others = config.find_roots(is_engines=False)
    if config.managed_roots:
        return f"in {', '.join(root or '/' for root in others)} only (managed_roots)"
    said = [f"of jobs of {' and '.join(engines)}, wherever they are"] if engines else []
    said += [f"in {root}" for root in others]
    if not said:
        return "nowhere: managed_roots is empty, so no cgroup will ever be written"
    return f"{' and '.join(said)}, nowhere else: managed_roots is empty"
