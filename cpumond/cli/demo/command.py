"""``cpumond demo``: a scheduler, an agent and real jobs on this machine, live."""

from __future__ import annotations

import click

from cpumond.cli.demo.jobs import Lever
from cpumond.cli.options import DurationType
from cpumond.cli.output import output_options


@click.command("demo", epilog="Example: cpumond demo --duration 60")
@click.option(
    "--duration", "duration_s", type=DurationType(), default="60s", show_default=True, help="Length of the demo."
)
@click.option(
    "--actuator",
    type=click.Choice(["guarantee", "quota"]),
    default="guarantee",
    show_default=True,
    help="What moves: guarantees alone, with jobs on the freed CPU in the idle class; or CPU quotas.",
)
@output_options("Print only the summary, as JSON.")
def demo_command(duration_s: float, actuator: Lever, as_json: bool) -> int:
    """Run the whole system on this machine: a scheduler, an agent, and real jobs of two pools in real cgroups.

    The job simulation requests the whole node and sleeps most of the time. render and the short frames run on the CPU
    that it does not use, until it wakes up. With guarantees it gets its CPU at once, because the others are in the idle
    class; with quotas when its quota is raised. The demo ends with a summary and removes everything it made, also after
    Ctrl-C or when its terminal is closed."""
    from cpumond.cli.demo.run import run_demo

    return run_demo(duration_s, actuator, as_json)
