"""Points of a version whose pools had no waiting, idle and held-back cores: read, with "not known" in their places."""

from __future__ import annotations

import math
import zlib
from array import array

from scheduler_world import World

from cpumond.scheduler.history import chunks
from cpumond.scheduler.history.collector import Collector
from cpumond.scheduler.history.model import COLUMNS, EARLIER_WIDTHS, NODE, POOL, WIDTHS

NEW = ("waiting_cores", "idle_cores", "held_cores")


def test_a_stored_row_of_before_is_read_with_its_rates_in_their_places():
    width, length = EARLIER_WIDTHS[POOL], 2
    columns = [array("f", [float(n), float(n) + 0.5]) for n in range(width)]
    chunk = chunks.Chunk(1, 0, False, array("d", [10.0, 20.0]), array("d", [10.0, 10.0]), 0)
    read = dict(zip(COLUMNS["pool"], chunks.unpack(chunks.pack(columns), POOL, chunk), strict=True))
    assert all(math.isnan(value) for name in NEW for value in read[name])
    assert len(read["waiting_cores"]) == length
    old = [name for name in COLUMNS["pool"] if name not in NEW]
    assert [list(read[name]) for name in old] == [list(column) for column in columns]


def test_a_tick_of_before_is_read_from_the_journal():
    world = World()
    world.node("n0", 4.0)
    world.create_pool("a")
    world.settle_down()
    tick = Collector(world.now - 10.0, 100).collect(world.state, world.now)
    assert tick is not None
    row = WIDTHS[POOL]
    first_new = COLUMNS["pool"].index(NEW[0])
    rows = [tick.values[POOL][n : n + row] for n in range(0, len(tick.values[POOL]), row)]
    pools = array("f")
    for each in rows:
        pools += each[:first_new] + each[first_new + len(NEW) :]
    raw = [
        chunks._HEAD.pack(tick.at, tick.interval_s, tick.left_out, *map(len, tick.ids)),
        *(ids.tobytes() for ids in tick.ids),
        pools.tobytes(),
        *(values.tobytes() for values in tick.values[NODE:]),
    ]
    read = chunks.decode_tick(zlib.compress(b"".join(raw)))
    assert read.values[NODE:] == tick.values[NODE:]
    for number, each in enumerate(rows):
        found = read.values[POOL][number * row : (number + 1) * row]
        assert all(math.isnan(value) for value in found[first_new : first_new + len(NEW)])
        assert found[:first_new].tobytes() == each[:first_new].tobytes()
        assert list(found[first_new + len(NEW) :]) == list(each[first_new + len(NEW) :])


def test_a_tick_of_now_is_read_as_it_is():
    world = World()
    world.create_pool("a")
    world.update()
    tick = Collector(world.now - 10.0, 100).collect(world.state, world.now)
    assert tick is not None
    read = chunks.decode_tick(chunks.encode_tick(tick))
    assert [values.tobytes() for values in read.values] == [values.tobytes() for values in tick.values]
