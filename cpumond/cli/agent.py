"""``cpumond agent``, ``restore`` and ``check-config``."""

from __future__ import annotations

import os

import click
import msgspec

from cpumond.cli.options import config_option, print_json
from cpumond.config import load_config
from cpumond.errors import UsageError


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
@click.option(
    "--quick",
    is_flag=True,
    help="Only raise lowered quotas, at once; only as ExecStopPost= of the service, before the full one.",
)
def restore_command(config_path: str, quick: bool) -> int:
    """Put the original limits back that a dead agent left lowered (ExecStopPost=)."""
    if quick:
        if "SERVICE_RESULT" not in os.environ:
            raise UsageError("--quick is for ExecStopPost=, where systemd says how the service ended; leave it out")
        from cpumond.agent.first_aid import raise_quotas

        raise_quotas(os.environ)
        return 0
    from cpumond.agent.restore import print_restored, run_restore

    return print_restored(run_restore(config_path))


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
