"""``cpumond kubernetes publish``: offer the CPU that agents reclaimed as an extended resource of their nodes.

One instance runs in a cluster. It sends a request to each agent, in the agent's pod. If the agent does not answer, or
is not ready, its node offers nothing. No agent may change anything in the API server."""

from __future__ import annotations

import os
import re
import signal
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from cpumond.cli.options import DurationType
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import CpumondError, UnavailableError, UsageError, describe
from cpumond.host.engine.kubernetes import parse_cores
from cpumond.host.engine.token import read_token

if TYPE_CHECKING:
    import httpx2

RESOURCE: Final = "cpumond.io/reclaimed-cpu"
STEP: Final = 100
"""Figures change in steps of this many thousandths of a core: each new one is sent to all watchers of nodes."""
TIMEOUT_S: Final = 5.0
DEADLINE_S: Final = 20.0
MAX_BYTES: Final = 64 << 20
PAGE: Final = 200
AT_ONCE: Final = 16
HELD_ROUNDS: Final = 2
"""Rounds for which a figure falls only to the CPU that is really unused. A starting pod counts with its whole limit
until it is measured, and a restarting kubelet ends pods that asked for more than the new figure."""


class _Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    position: str = msgspec.field(name="continue", default="")


class _Spec(msgspec.Struct, frozen=True):
    node: str = msgspec.field(name="nodeName", default="")


class _Status(msgspec.Struct, frozen=True):
    address: str = msgspec.field(name="podIP", default="")
    capacity: dict[str, str] = {}


class Item(msgspec.Struct, frozen=True):
    """The fields of a pod or a node that are needed."""

    metadata: _Metadata = _Metadata()
    spec: _Spec = _Spec()
    status: _Status = _Status()


class _Page(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    items: list[Item] = []


def ask(client: httpx2.Client, method: str, url: str, **more: Any) -> bytes:
    """Return the body of an answer with status 200, bounded in time and size. Raises UnavailableError."""
    import httpx2

    end_s, body = time.monotonic() + DEADLINE_S, bytearray()
    try:
        with client.stream(method, url, **more) as answer:
            for chunk in answer.iter_bytes():
                body += chunk
                if len(body) > MAX_BYTES or time.monotonic() > end_s:
                    raise UnavailableError(f"{url}: its answer is too large or too slow")
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise UnavailableError(f"{url}: no answer ({describe(error) or type(error).__name__})") from error
    if answer.status_code != 200:
        raise UnavailableError(f"{method} {url} was answered with status {answer.status_code}")
    return bytes(body)


class Offer(msgspec.Struct, frozen=True):
    """The CPU that a node offers by its agent's metrics, and the unused part of it, in thousandths of a core, >= 0."""

    offered: int = 0
    unused: int = 0


def read_offer(metrics: bytes) -> Offer:
    """Read an offer; 0 if a metric is missing. Raises UnavailableError for a value that is no number."""
    return Offer(*(_read_figure(metrics, b"cpumond_node_%b_cores" % name) for name in (b"offered", b"unused")))


def _read_figure(metrics: bytes, name: bytes) -> int:
    found = re.search(rb"^%b (\S+)$" % name, metrics, re.MULTILINE)
    try:
        return max(int(float(found[1]) * 1000.0) // STEP * STEP, 0) if found else 0
    except (ValueError, OverflowError) as error:
        raise UnavailableError(f"its metrics cannot be parsed: {error}") from error


def choose_figure(before: str | None, offer: Offer, rounds: int) -> tuple[int, int]:
    """Return the next figure of a node, and for how many rounds the offer has been less than the figure. ``before``:
    the figure that the API server has; ``rounds``: the number of such rounds so far."""
    try:
        written = int(parse_cores(before or "0"))
    except ValueError:
        written = 0
    if offer.offered >= written or rounds >= HELD_ROUNDS:
        return offer.offered, 0
    return max(min(written, offer.unused), offer.offered), rounds + 1


def is_same(quantity: str | None, offer: int) -> bool:
    """Whether a quantity in the API server's notation ("2k") equals ``offer``."""
    try:
        return quantity is not None and parse_cores(quantity) == offer
    except ValueError:
        return False


class KubernetesApi:
    """Client of the cluster's API server: lists pods and nodes, writes a node's figure. Its methods raise CpumondError.

    ``account``: the folder with ``token`` and ``ca.crt`` of a service account."""

    def __init__(self, url: str, account: str) -> None:
        import httpx2

        self._token_file, ca_file = os.path.join(account, "token"), os.path.join(account, "ca.crt")
        try:
            verify = ssl.create_default_context(cafile=ca_file) if url.startswith("https:") else False
        except OSError as error:
            raise UnavailableError(f"{ca_file}: {describe(error)}") from error
        self._client = httpx2.Client(base_url=url, verify=verify, timeout=TIMEOUT_S, trust_env=False)

    def _ask(self, method: str, path: str, kind: str = "application/json", **more: Any) -> bytes:
        # The token's file is replaced before the token expires.
        headers = {"authorization": f"Bearer {read_token(self._token_file)}", "content-type": kind}
        return ask(self._client, method, path, headers=headers, **more)

    def list_all(self, path: str, **query: str) -> list[Item]:
        """List all pods or nodes, page by page."""
        found: list[Item] = []
        position: str | None = ""
        while position is not None:
            text = self._ask("GET", path, params={**query, "limit": str(PAGE), "continue": position})
            try:
                page = decode_json(text, _Page)
            except ContentError as error:
                raise UnavailableError(f"{path}: cannot be parsed: {error}") from error
            found += page.items
            position = page.metadata.position or None
        return found

    def write(self, node: str, thousandths: int) -> None:
        change = {"op": "add", "path": f"/status/capacity/{RESOURCE.replace('/', '~1')}", "value": str(thousandths)}
        body = msgspec.json.encode([change])
        self._ask("PATCH", f"/api/v1/nodes/{node}/status", "application/json-patch+json", content=body)


class OfferPublisher:
    """Keeps the figures of all nodes equal to the offers of their agents. Each method returns sentences about what was
    written and what was not, and raises CpumondError if the API server does not list pods or nodes."""

    def __init__(self, api: KubernetesApi, namespace: str, selector: str, port: int) -> None:
        import httpx2

        self._api, self._selector, self._port = api, selector, port
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._client = httpx2.Client(verify=False, timeout=TIMEOUT_S, trust_env=False)
        self._lower_rounds: dict[str, int] = {}
        """Node -> number of rounds for which the node's agent has offered less than the node's figure."""

    def publish(self) -> list[str]:
        pods = self._api.list_all(self._pods, labelSelector=self._selector)
        agents = {each.spec.node: each.status.address for each in pods if each.status.address}
        offers: dict[str, Offer] = {}
        said: list[str] = []

        def ask_one(node: str) -> None:
            try:
                offers[node] = self._ask_agent(agents[node])
            except CpumondError as error:
                said.append(f"{node}: {error}; it offers nothing")

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(ask_one, agents))
        return said + self._write(offers)

    def withdraw(self) -> list[str]:
        return self._write({})

    def _ask_agent(self, address: str) -> Offer:
        """Return the offer of an agent. The agent is ready if its last check was recent."""
        url = f"http://[{address}]:{self._port}" if ":" in address else f"http://{address}:{self._port}"
        ask(self._client, "GET", f"{url}/readyz")
        return read_offer(ask(self._client, "GET", f"{url}/metrics"))

    def _write(self, offers: dict[str, Offer]) -> list[str]:
        said = []
        known, self._lower_rounds = self._lower_rounds, {}
        for node in self._api.list_all("/api/v1/nodes"):
            name, before = node.metadata.name, node.status.capacity.get(RESOURCE)
            offer = 0
            if name in offers:
                offer, self._lower_rounds[name] = choose_figure(before, offers[name], known.get(name, 0))
            if is_same(before, offer) or (before is None and name not in offers):
                continue
            try:
                self._api.write(name, offer)
                said.append(f"{name}: {RESOURCE} {before or 'none'} -> {offer}")
            except CpumondError as error:
                said.append(f"{name}: {RESOURCE} stays {before or 'none'}: {error}")
        return said


@click.group("kubernetes", epilog="Example: cpumond kubernetes publish --withdraw")
def kubernetes_command() -> None:
    """Offer reclaimed CPU to pods as a resource of their node."""


@kubernetes_command.command("publish", epilog="Example: cpumond kubernetes publish --namespace cpumond --period 30s")
@click.option("--api", "url", default="", help="Address of the API server; known inside a pod.")
@click.option("--account", default="/var/run/secrets/kubernetes.io/serviceaccount", show_default=True,
              help="Folder with token and ca.crt of a service account.")  # fmt: skip
@click.option("--namespace", default="cpumond", show_default=True, help="Namespace of the agents' pods.")
@click.option(
    "--selector", default="app.kubernetes.io/component=agent", show_default=True, help="Labels of the agents' pods."
)
@click.option(
    "--port", default=9756, show_default=True, type=click.IntRange(1, 65535), help="Port of the agents' metrics."
)
@click.option(
    "--period", default="15s", show_default=True, type=DurationType(0.1, 3600.0), help="Time between two rounds."
)
@click.option("--withdraw", is_flag=True, help="Remove the offers of all nodes, and end.")
def publish_command(
    url: str, account: str, namespace: str, selector: str, port: int, period: float, withdraw: bool
) -> None:
    """Keep the extended resource cpumond.io/reclaimed-cpu of all nodes equal to the CPU that their agents reclaimed.

    It is in thousandths of a core. A node whose agent is not ready offers none, and after SIGTERM no node does."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    if not (url or host):
        raise UsageError(
            "this is not a pod, so the address of the API server is unknown; give it with --api https://HOST:6443"
        )
    inside = f"https://{f'[{host}]' if ':' in host else host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
    publisher = OfferPublisher(KubernetesApi(url or inside, account), namespace, selector, port)
    ending, before = threading.Event(), ""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    while not (withdraw or ending.is_set()):
        try:
            said, problem = publisher.publish(), ""
        except CpumondError as error:
            said, problem = [], f"{error}; the figures stay unchanged"
        for each in [*said, *([problem] if problem != before else [])]:
            click.echo(each)
        before = problem
        ending.wait(period)
    for each in publisher.withdraw():
        click.echo(each)
