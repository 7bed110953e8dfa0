"""Commands on nodes: for maintenance (semantics.md 2.11), and their tags (2.1). Pure."""

from __future__ import annotations

import msgspec

from cpumond.core.words import escape, quoted
from cpumond.scheduler.model import Cordon, Why


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of the commands: the name of the type is the tag ``type`` in JSON."""

    node: str
    why: Why = ""


class CordonNode(_Command, frozen=True):
    """Cordon a node: it gets no new jobs, and its present jobs continue. A drain of the node ends."""


class UncordonNode(_Command, frozen=True):
    """Let a node get jobs again."""


class DrainNode(_Command, frozen=True):
    """Stop the jobs of a node and start them on other nodes. The node gets no new jobs. ``graceful``: the jobs have
    the longer time-out to end."""

    graceful: bool = False


class SetNodeTags(_Command, frozen=True):
    """Set the tags that an administrator gives to a node. They are in addition to its agent's tags and its address."""

    tags: tuple[str, ...] = ()


class ChangeNodeTags(_Command, frozen=True):
    """Add and remove an administrator's tags of a node."""

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


Maintenance = CordonNode | UncordonNode | DrainNode
NodeCommand = Maintenance | SetNodeTags | ChangeNodeTags


def make_cordon(command: Maintenance, user: str, now: float) -> Cordon | None:
    """Return the cordon that the node has after the command; None if it has none."""
    if isinstance(command, UncordonNode):
        return None
    if isinstance(command, CordonNode):
        return Cordon(user, now, command.why)
    return Cordon(user, now, command.why, "graceful" if command.graceful else "usual")


def describe_node_command(command: NodeCommand) -> str:
    """Return a command as text, such as ``drained node "n1": new disks``."""
    if isinstance(command, SetNodeTags):
        what = f"gave node {quoted(command.node)} the tags {', '.join(map(escape, command.tags))}"
        return f"{what if command.tags else f'took the tags of node {quoted(command.node)}'}{format_why(command.why)}"
    if isinstance(command, ChangeNodeTags):
        signed = [f"+{escape(tag)}" for tag in command.add] + [f"-{escape(tag)}" for tag in command.remove]
        return f"changed the tags of node {quoted(command.node)}: {' '.join(signed)}{format_why(command.why)}"
    verb = {CordonNode: "cordoned", UncordonNode: "uncordoned", DrainNode: "drained"}[type(command)]
    return f"{verb} node {quoted(command.node)}{format_why(command.why)}"


def format_why(why: str) -> str:
    """Return a colon and the reason, such as ``: new disks``; "" if there is no reason."""
    return f": {escape(why)}" if why else ""
