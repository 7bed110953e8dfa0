"""``cpumond scheduler``."""

from __future__ import annotations

import math
import os

import click

from cpumond.cli.output import print_text
from cpumond.core.errors import UsageError
from cpumond.scheduler.program.config import DEFAULT_SCHEDULER_CONFIG_PATH, load_scheduler_config


@click.command("scheduler", epilog="Example: cpumond scheduler --config /etc/cpumond/scheduler.toml")
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    help=f"Configuration, TOML. Default: {DEFAULT_SCHEDULER_CONFIG_PATH} if it exists, else built-in defaults.",
)
@click.option("--check", is_flag=True, help="Only check the configuration, its token file and its certificate.")
@click.option("--new-store", is_flag=True, help="Set the databases in state_dir aside and begin with empty ones.")
@click.option("--time-scale", type=click.FloatRange(0.001, 1e6), default=1.0, help="For tests only: time runs faster.")
def scheduler_command(config_path: str | None, check: bool, new_store: bool, time_scale: float) -> int:
    """Run the scheduler (pools, fair share, preemption) for agents, `yt`, and `cpumond pool|operation|node|tree`.

    SIGTERM and SIGINT end it; every acknowledged change is in its database."""
    if not math.isfinite(time_scale):
        raise UsageError(f"--time-scale: must be a finite number, got {time_scale}")
    if config_path is None and os.path.exists(DEFAULT_SCHEDULER_CONFIG_PATH):
        config_path = DEFAULT_SCHEDULER_CONFIG_PATH
    if check:
        from cpumond.scheduler.program.reload import check_files

        check_files(load_scheduler_config(config_path))
        print_text(f"{config_path or 'built-in defaults'}: good.")
        return 0
    from cpumond.api.server import make_app
    from cpumond.api.standby import make_standby_app
    from cpumond.scheduler.program.main import run_scheduler

    return run_scheduler(config_path, make_app, new_store, time_scale, make_standby_app)
