"""``cpumond cluster``: one scheduler and some agents with real jobs on this machine, for experiments."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import click
import msgspec

from cpumond.cli.options import CoresType
from cpumond.cli.output import output_options, print_line
from cpumond.core.errors import UnavailableError
from cpumond.core.measures import count_cores

if TYPE_CHECKING:
    from cpumond.cluster import Cluster


@click.command("cluster", epilog="Example: cpumond cluster --nodes 3 --cpu 0.5")
@click.option("--nodes", "node_count", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option("--cpu", "cpu_cores", type=CoresType(),
              help="Cores that each node offers.  [default: this machine's CPUs, divided among them]")  # fmt: skip
@click.option(
    "--listen", metavar="HOST:PORT", default="127.0.0.1:0", help="The scheduler's address.  [default: a free port]"
)
@click.option(
    "--schedulers",
    "scheduler_count",
    type=click.IntRange(1, 9),
    default=1,
    show_default=True,
    help="Number of schedulers; several share a PostgreSQL server that is started for them, and one leads.",
)
@click.option("--keep", is_flag=True, help="Keep the files: configurations, logs, the scheduler's database.")
@output_options("Print one line of JSON when all nodes are online, and nothing else.")
def cluster_command(
    node_count: int, cpu_cores: float | None, listen: str, scheduler_count: int, keep: bool, as_json: bool
) -> None:
    """Run a scheduler, or several, and some agents with real jobs on this machine, until Ctrl-C.

    Each agent is a node with its own cgroups. At the end all its processes, jobs and cgroups are removed."""
    from cpumond.cli.demo.host import make_directory, make_place, stop_on_signals
    from cpumond.cluster import CLUSTER_PREFIX, Cluster

    cpu = cpu_cores or max((os.cpu_count() or 1) / node_count, 0.1)
    with stop_on_signals() as stopped:
        place = make_place(CLUSTER_PREFIX)
        # The next cluster removes the leftovers of clusters that have ended, except files that were to be kept.
        directory = make_directory(f"{CLUSTER_PREFIX}kept-" if keep else CLUSTER_PREFIX)
        cluster = Cluster(directory, node_count, cpu=cpu, listen=listen, cgroup_prefix=place.prefix,
                          token=secrets.token_hex(24), web=True, schedulers=scheduler_count)  # fmt: skip
        try:
            with cluster:
                _print(cluster, keep, as_json)
                stopped.wait()
        finally:
            _clean_up(cluster, keep, as_json)


class NodeAnswer(msgspec.Struct, frozen=True):
    """A node of ``cluster --json``: its agent's process, cgroup, control socket and page."""

    pid: int
    cgroup: str
    control_socket: str
    web: str


class ClusterAnswer(msgspec.Struct, frozen=True):
    """Output of ``cluster --json`` once it is ready. ``schedulers``: address -> process id, ``nodes``: by node_id."""

    scheduler: str
    web: str
    token: str
    scheduler_pid: int
    schedulers: dict[str, int]
    directory: str
    nodes: dict[str, NodeAnswer]


def _print(cluster: Cluster, keep: bool, as_json: bool) -> None:
    address = cluster.url.removeprefix("http://")
    if as_json:
        nodes = {
            node.node_id: NodeAnswer(node.pid, node.cgroup_root, node.control_socket, node.web_url)
            for node in cluster.nodes
        }
        told = ClusterAnswer(
            cluster.url, f"{cluster.url}/", cluster.token, cluster.scheduler.pid,
            {scheduler.url: scheduler.pid for scheduler in cluster.schedulers}, cluster.directory, nodes,
        )  # fmt: skip
        print_line(msgspec.to_builtins(told))
        return
    if len(cluster.schedulers) == 1:
        schedulers = f"A scheduler on {cluster.url}"
    else:
        schedulers = f"{len(cluster.schedulers)} schedulers on {', '.join(cluster.urls)}, of which one leads,"
    click.echo(
        f"{schedulers} and {len(cluster.nodes)} nodes of {count_cores(cluster.cpu)} each.\n"
        f"Logs and configurations are in {cluster.directory}. In a browser:\n\n"
        f"{cluster.describe_pages()}\n\n"
        "In another terminal:\n\n"
        f"  export CPUMOND_SCHEDULER={','.join(cluster.urls)}\n"
        f"  export YT_PROXY={address}\n"
        f"  export CPUMOND_TOKEN={cluster.token} YT_TOKEN={cluster.token}\n"
        "  cpumond operation start --pool research --job-count 2 --cpu-limit 0.2 -- sleep 60\n"
        "  cpumond node list"
    )
    for node in cluster.nodes:
        click.echo(f"  cpumond top --config {node.config_path}      # the agent of {node.node_id}")
    if len(cluster.schedulers) > 1:
        leader = cluster.find_leader() or cluster.scheduler
        click.echo(f"  kill -9 {leader.pid}{' ' * 36}# the leader, {leader.url}; another one takes over")
    click.echo(f"\nCtrl-C ends it and removes everything{', except the files in that directory' if keep else ''}.")


def _clean_up(cluster: Cluster, keep: bool, as_json: bool) -> None:
    """Remove the files once the processes have ended. Raises UnavailableError if cgroups or processes are left."""
    import shutil

    if not keep:
        shutil.rmtree(cluster.directory, ignore_errors=True)
    if left := cluster.leftovers():
        raise UnavailableError(
            f"these could not be removed: {', '.join(left)}; end the processes in them and use rmdir"
        )
    if not as_json:
        click.echo(f"Everything is removed{f', except the files in {cluster.directory}' if keep else ''}.")
