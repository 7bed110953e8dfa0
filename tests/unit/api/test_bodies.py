"""Bodies of requests: their limits, the room of each user and of all, and who has to go."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable

import pytest
from starlette.requests import ClientDisconnect, Request

from cpumond.api.bodies import LARGE_AT_ONCE, LARGE_BYTES, Bodies, BodyError, weigh
from cpumond.api.yt.values import MAX_VALUES

LIMIT = 1000


class Peer:
    """A client whose pieces come when the test says so."""

    def __init__(self, headers: dict[str, str] | None = None) -> None:
        self.pieces: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        named = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.request = Request({"type": "http", "headers": named}, self.receive)
        self.is_whole = False

    async def receive(self) -> dict[str, object]:
        assert not self.is_whole, "after the last piece nothing comes until the client goes"
        piece = await self.pieces.get()
        self.is_whole = not piece.get("more_body", False)
        return piece

    def send(self, piece: bytes, more: bool = False) -> Peer:
        self.pieces.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        return self

    def go(self) -> Peer:
        self.pieces.put_nowait({"type": "http.disconnect"})
        return self


async def read(bodies: Bodies, peer: Peer, user: str = "ann", limit: int = LIMIT, unpack: bool = False) -> bytes:
    with bodies.hold(user) as held:
        data = await held.read(peer.request, limit, unpack)
        await held.work_on(data)
        return data


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_body_in_pieces_is_put_together_and_then_forgotten():
    bodies = Bodies()
    whole = b"a" + b"b" * 998 + b"c"
    assert await read(bodies, Peer().send(b"a", more=True).send(b"b" * 998, more=True).send(b"c")) == whole
    assert await read(bodies, Peer().send(b"whole")) == b"whole"
    assert (bodies.held_bytes, bodies.of_user, bodies.arriving) == (0, {}, {})


@pytest.mark.parametrize(
    ("peer", "unpack", "status", "sentence"),
    [
        (lambda: Peer().send(b"a" * 1001), False, 413, "larger than the limit of 1000 bytes"),
        (lambda: Peer().send(b"a" * 600, more=True).send(b"a" * 600), False, 413, "larger than the limit"),
        (lambda: Peer({"content-length": "1001"}).send(b"a"), False, 413, "larger than the limit"),
        (lambda: Peer().send(gzip.compress(b"a" * 1001)), True, 413, "larger than the limit"),
        (lambda: Peer().send(gzip.compress(b"a" * 100)[:-3]), True, 400, "not one complete gzip stream"),
        (lambda: Peer().send(b"text"), True, 400, "not gzip"),
    ],
)
async def test_what_is_refused(peer: Callable[[], Peer], unpack: bool, status: int, sentence: str):
    bodies = Bodies()
    with pytest.raises(BodyError, match=sentence, check=lambda error: error.status == status):
        await read(bodies, peer(), unpack=unpack)
    assert (bodies.held_bytes, bodies.of_user, bodies.arriving) == (0, {}, {})


async def test_who_goes_away_in_the_middle_leaves_nothing():
    bodies = Bodies()
    with pytest.raises(ClientDisconnect):
        await read(bodies, Peer().send(b"a", more=True).go())
    assert (bodies.held_bytes, bodies.arriving) == (0, {})


async def test_a_body_that_does_not_come_is_not_waited_for():
    bodies = Bodies(read_s=0.01)
    with pytest.raises(BodyError, match=r"did not arrive within 0\.01 s", check=lambda error: error.status == 408):
        await read(bodies, Peer().send(b"a", more=True))


@pytest.mark.parametrize(
    ("limits", "users"),
    [({"max_user_bytes": 1500}, ("ann", "ann", "ann")), ({"max_bytes": 1500}, ("ann", "bob", "eve"))],
)
async def test_the_oldest_unfinished_body_goes_first(limits: dict[str, int], users: tuple[str, str, str]):
    bodies = Bodies(**limits)
    peers = [Peer().send(b"a" * 700, more=True) for _ in users]
    tasks = [asyncio.ensure_future(read(bodies, *each)) for each in zip(peers, users, strict=True)]
    await settle()
    with pytest.raises(BodyError, match="other requests needed its memory"):
        await tasks[0]
    for peer in peers:
        peer.send(b"b")
    assert [len(data) for data in await asyncio.gather(*tasks[1:])] == [701, 701]
    assert bodies.held_bytes == 0


@pytest.mark.parametrize(("limits", "status"), [({"max_user_bytes": 1500}, 429), ({"max_bytes": 1500}, 503)])
async def test_whole_bodies_are_worked_on_and_new_ones_refused(limits: dict[str, int], status: int):
    bodies = Bodies(**limits)
    with bodies.hold("ann") as held:
        await held.work_on(b"a" * 1400)
        with pytest.raises(BodyError, match="try again", check=lambda error: error.status == status):
            await read(bodies, Peer().send(b"a" * 200))
    assert len(await read(bodies, Peer().send(b"a" * 200))) == 200


async def test_another_user_and_nodes_have_room_of_their_own():
    bodies = Bodies(max_user_bytes=1500)
    with bodies.hold("ann") as held:
        await held.work_on(b"a" * 1400)
        assert len(await read(bodies, Peer().send(b"a" * 900), "bob")) == 900
        with bodies.hold("ann", of_node=True) as beat:
            await beat.work_on(b"a" * 5000)
            assert bodies.held_bytes == 6400


async def test_large_bodies_wait_for_each_other():
    bodies, large = Bodies(max_user_bytes=2**30), b"a" * (LARGE_BYTES + 1)
    held = [bodies.hold("ann").__enter__() for _ in range(LARGE_AT_ONCE)]
    for each in held:
        await each.work_on(large)
    waiting = asyncio.ensure_future(read(bodies, Peer().send(large), limit=2**30))
    assert await read(bodies, Peer().send(b"small")) == b"small"
    await settle()
    assert not waiting.done()
    held[0].__exit__(None, None, None)
    assert await waiting == large


def test_small_values_weigh_more_than_their_text():
    assert weigh(b"a" * 100) == 100
    assert weigh(b"[[],[]]") > 7 + 2 * 64
    assert weigh(b"," * 10_000_000) < 10_000_000 + 64 * MAX_VALUES + 1, "more are refused in any case"
