"""``cpumond agent``, ``restore`` and ``check-config``."""

from __future__ import annotations

import click
import msgspec

from cpumond.cli.options import config_option, print_json
from cpumond.config import load_config


@click.command("agent", epilog="Example: cpumond agent --config /etc/cpumond/cpumond.toml")
@config_option
def agent_command(config_path: str) -> int:
    """Run the agent: measure, decide, write, report, once per check_period.

    SIGTERM and SIGINT put every limit back and end it, SIGHUP reads the configuration again.
    """
    from cpumond.agent.main import run_agent

    return run_agent(config_path)


@click.command("restore", epilog="Example: cpumond restore --config /etc/cpumond/cpumond.toml")
@config_option
def restore_command(config_path: str) -> int:
    """Put the original limits back that a dead agent left lowered (ExecStopPost=)."""
    from cpumond.agent.main import run_restore

    done = run_restore(config_path)
    report, path = done.report, done.path
    for name in report.restored:
        click.echo(f"restored {name}")
    if not (report.restored or report.gone or report.errors):
        click.echo(f"nothing to restore in {path}")
    elif report.gone:
        click.echo(f"{len(report.gone)} cgroups of {path} are gone")
    for error in [*report.errors, done.complaint]:
        if error:
            click.echo(f"cpumond: {error}", err=True)
    if done.config_error is not None:
        raise done.config_error
    return 69 if report.errors else 0


@click.command("check-config", epilog="Example: cpumond check-config --config /etc/cpumond/cpumond.toml --json")
@click.argument("file", required=False)
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print the resulting values as JSON.")
def check_config_command(file: str | None, config_path: str, as_json: bool) -> None:
    """Check a configuration and print the resulting values; exit code 78 and one sentence when it is wrong."""
    from cpumond.agent.control import describe_settings
    from cpumond.monitor.model import compute_mode

    config = load_config(file or config_path)
    settings = config.node_settings()
    resulting = describe_settings(settings, compute_mode(settings))
    if config.scheduler.token:
        hidden = msgspec.structs.replace(config.scheduler, token="(hidden)")  # noqa: S106 - what is shown instead
        config = msgspec.structs.replace(config, scheduler=hidden)
    if as_json:
        values = {**msgspec.to_builtins(config), "monitor": resulting}
        print_json(msgspec.json.encode(values))
        return
    click.echo(f"{config.path}: good. Node {config.node_id}, {len(config.source)} sources, mode {resulting['mode']}.")
    click.echo("Resulting job-cpu-monitor:")
    for name, value in resulting.items():
        click.echo(f"  {name} = {value}")
    executor = config.executor
    jobs = "runs no jobs" if executor.kind == "none" else f"runs jobs in {executor.cgroup_root} ({executor.kind})"
    click.echo(f"Scheduler: {config.scheduler.url or 'none'}; this host {jobs}.")
    if not config.managed_roots:
        click.echo("managed_roots is empty: no cgroup will ever be written.")
