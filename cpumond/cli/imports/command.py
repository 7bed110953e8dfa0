"""``tree import``: convert the configuration of another scheduler to a file for ``tree plan`` and ``tree apply``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, get_args

import click

from cpumond.cli.replacement import Replacement
from cpumond.cli.scheduler.pool_file import read_text
from cpumond.cli.scheduler.tree_text import Form, write_tree
from cpumond.core.errors import ConfigError

if TYPE_CHECKING:
    from cpumond.cli.imports.making import Making

KINDS: Final = {
    "slurm": "slurm:read", "yarn": "yarn:read", "yunikorn": "manifests:read_yunikorn", "kueue": "manifests:read_kueue",
}  # fmt: skip
"""Kind -> the module that reads this kind, imported when needed, and the function in it."""


@click.command("import", epilog="Example: cpumond tree import yarn fair-scheduler.xml > default.toml")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--tree", default="default", show_default=True, help="Name of the tree that the file describes.")
@click.option(
    "--total", metavar="AMOUNTS", help="Total resources of the cluster, for percentages: cpu=1000,memory=4Ti,gpu=8."
)
@click.option("--format", "form", type=click.Choice(get_args(Form)), default="toml", show_default=True)
@click.option(
    "--output", metavar="FILE", help="Write to this file, completely or not at all.  [default: standard output]"
)
def import_command(
    kind: str, files: tuple[str, ...], tree: str, total: str | None, form: Form, output: str | None
) -> None:
    """Convert the queues of Slurm, YARN, YuniKorn or Kueue to a tree file; report options that it cannot express.

    The file is for `cpumond tree plan` and `apply`; this command changes nothing. Standard error lists the options that
    were changed or dropped, each with its place and the nearest equivalent (docs/coming-from.md has all options).

    \b
    slurm     output of `sacctmgr dump CLUSTER` or `sacctmgr -P show assoc tree`, slurm.conf, `sacctmgr -P show qos`
    yarn      fair-scheduler.xml or capacity-scheduler.xml, yarn-site.xml
    yunikorn  queues.yaml
    kueue     ClusterQueues, Cohorts, LocalQueues, ResourceFlavors: files, or `kubectl get ... -o yaml`"""
    from cpumond.cli.imports.making import read_total

    try:
        texts = {name: read_text(name, "a configuration to import") for name in files}
        making = find_reader(kind)(texts, read_total(total or ""))
        tables = making.finish(tree)
    except RecursionError:
        raise ConfigError(f"{', '.join(files)}: its queues are nested too deeply") from None
    text = write_tree(tree, tables, form)
    if output is None:
        click.echo(text, nl=False)
    else:
        with Replacement(output, "--output") as file:
            file.write(text)
    for line in making.report():
        click.echo(line, err=True)


def find_reader(kind: str) -> Callable[[Mapping[str, str], Mapping[str, float]], Making]:
    module, _, name = KINDS[kind].partition(":")
    found: Callable[[Mapping[str, str], Mapping[str, float]], Making]
    found = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return found
