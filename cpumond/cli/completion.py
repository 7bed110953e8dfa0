"""``cpumond completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion", epilog="Example: cpumond completion fish >~/.config/fish/completions/cpumond.fish")
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> None:
    """Print the shell code that completes commands, options, and the names of pools, operations and nodes.

    \b
    bash  eval "$(cpumond completion bash)" in ~/.bashrc
    zsh   eval "$(cpumond completion zsh)" in ~/.zshrc, after compinit
    fish  cpumond completion fish >~/.config/fish/completions/cpumond.fish

    The Debian package installs it. Names come from the scheduler of CPUMOND_SCHEDULER, which has one second to answer.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    completion = kind(click.get_current_context().find_root().command, {}, "cpumond", "_CPUMOND_COMPLETE")
    # Not `source`, which runs the shell to find its version.
    click.echo(completion.source_template % completion.source_vars())
