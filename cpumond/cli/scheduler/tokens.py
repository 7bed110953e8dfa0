"""The command ``token``: access to the scheduler by tokens that are created and revoked while it runs."""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from cpumond.api.token_views import NewToken, TokenList, TokenView
from cpumond.cli.options import DurationType, quote_name
from cpumond.cli.output import error_width, print_items, print_json, warn
from cpumond.cli.render.grid import Cell, Column, column, fold
from cpumond.cli.scheduler.client import scheduler_options
from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.core.words import escape, format_time
from cpumond.scheduler.rights.users import ROLES
from cpumond.scheduler.state.token_commands import MAX_LIFE_S, MIN_LIFE_S


@click.group("token", epilog="Example: cpumond token create alice --expires 90d")
def token_command() -> None:
    """Tokens of users, nodes and proxies: create, list, revoke. Changes apply at once, also in a running scheduler.

    An administrator creates and revokes any token; other users only their own, in their own name and with no more
    rights than they have. The scheduler stores only hashes."""


@token_command.command("create", epilog="Example: cpumond token create n17 --role node --node-pattern n17 >token")
@click.argument("user", required=False, default="")
@click.option(
    "--role", type=click.Choice(ROLES), default="user", show_default=True,
    help="user: what access lists allow; admin: all; node: registers nodes; proxy: names the users it sends for.",
)  # fmt: skip
@click.option("--group", "groups", metavar="GROUP", multiple=True, help="The user is in this group; may be repeated.")
@click.option(
    "--expires", "expires_s", metavar="DURATION", type=DurationType(MIN_LIFE_S, MAX_LIFE_S),
    help="Time for which it is valid, for example 90d; default: until it is revoked.",
)  # fmt: skip
@click.option("--node-pattern", "pattern", default="", metavar="PATTERN", help="node_ids, for example n17 or rack1-*.")
@click.option("--note", default="", metavar="TEXT", help="Purpose, shown in lists.")
@scheduler_options
def token_create_command(client: SchedulerClient, /, **body: Any) -> None:
    """Create a token of USER (default: yourself) and print it. It is shown only once.

    Groups in a token that you create for yourself are valid while you are in them, by the scheduler's [groups] or by
    the token with which you create it. If an account or a proxy identifies you, other groups cannot be checked later: a
    token with such groups ends after 30 days."""
    content = client.request("POST", "/tokens", body)
    made = client.decode(content, NewToken)
    end = "until it is revoked" if made.expires_at is None else f"until {format_time(made.expires_at)}"
    client.print_done(content, made.token)
    if not client.as_json:
        told = f"token {made.id} of {escape(made.user)}, role {made.role}, valid {end}"
        click.echo(fold(told, error_width()), err=True)


def _format_state(token: TokenView) -> Cell:
    ended = f"revoked {format_time(token.revoked_at)}" if token.revoked_at is not None else token.state
    return ended, "" if token.state == "valid" else "dim"


TOKENS: Final[tuple[Column[TokenView], ...]] = (
    column("id", 0, lambda token: token.id),
    column("user", 0, lambda token: escape(token.user)),
    column("role", 2, lambda token: token.role),
    column("state", 1, _format_state),
    column("expires", 3, lambda token: "" if token.expires_at is None else format_time(token.expires_at)),
    column("made", 7, lambda token: "tokens_file" if token.created_at is None else format_time(token.created_at)),
    column("by", 8, lambda token: escape(token.created_by)),
    column("groups", 6, lambda token: escape(", ".join(token.groups))),
    column("node_ids", 5, lambda token: escape(token.pattern)),
    column("note", 4, lambda token: escape(token.note)),
)


@token_command.command("list", epilog="Example: cpumond token list --user alice")
@click.option("--user", metavar="USER", help="Only those of this user.")
@click.option("--all", "shows_all", is_flag=True, help="Include tokens that are no longer valid.")
@scheduler_options
def token_list_command(client: SchedulerClient, user: str | None, shows_all: bool) -> None:
    """Print one line per token: your own, or all for an administrator. The tokens themselves are not stored."""
    found = client.get("/tokens", TokenList).tokens
    shown = [each for each in found if user in (None, each.user) and (shows_all or each.state == "valid")]
    if client.as_json:
        print_json(msgspec.json.encode(TokenList(shown)), TokenList)
        return
    print_items(TOKENS, shown, "no token; create one with `cpumond token create`")
    hidden = 0 if shows_all else sum(each.state != "valid" for each in found)
    if shown and hidden:
        warn(f"{hidden} that are no longer valid are not shown; --all shows them")


@token_command.command("revoke", epilog="Example: cpumond token revoke 1f2e3d4c5b6a")
@click.argument("tokens", metavar="ID...", nargs=-1, required=True)
@scheduler_options
def token_revoke_command(client: SchedulerClient, tokens: tuple[str, ...]) -> None:
    """Revoke tokens by their ids, from now on; tokens that were created with them end, too."""
    for token in tokens:
        client.change(f"token {escape(token)} revoked", "DELETE", f"/tokens/{quote_name(token)}")
