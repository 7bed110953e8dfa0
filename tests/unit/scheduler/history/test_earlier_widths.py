"""Points of earlier versions, whose pools and operations had fewer columns: read, with "not known" in their places."""

from __future__ import annotations

import math
import zlib
from array import array

import pytest
from scheduler_world import World

from cpumond.scheduler.history import chunks
from cpumond.scheduler.history.collector import Collector
from cpumond.scheduler.history.model import COLUMNS, EARLIER_WIDTHS, INNER_COLUMNS, KINDS, OPERATION, POOL, WIDTHS

CORES = ("waiting_cores", "idle_cores", "held_cores")
VERSIONS = [(0, INNER_COLUMNS), (1, (*CORES, *INNER_COLUMNS))]
"""The number of a version in EARLIER_WIDTHS, and the columns that its pools did not have."""


@pytest.mark.parametrize(("version", "new"), VERSIONS)
def test_a_stored_row_of_before_is_read_with_its_rates_in_their_places(version, new):
    width, length = EARLIER_WIDTHS[version][POOL], 2
    columns = [array("f", [float(n), float(n) + 0.5]) for n in range(width)]
    chunk = chunks.Chunk(1, 0, False, array("d", [10.0, 20.0]), array("d", [10.0, 10.0]), 0)
    read = dict(zip(COLUMNS["pool"], chunks.unpack(chunks.pack(columns), POOL, chunk), strict=True))
    assert all(math.isnan(value) for name in new for value in read[name])
    assert len(read["early_s"]) == length
    old = [name for name in COLUMNS["pool"] if name not in new]
    assert [list(read[name]) for name in old] == [list(column) for column in columns]


@pytest.mark.parametrize(("version", "new"), VERSIONS)
def test_a_tick_of_before_is_read_from_the_journal(version, new):
    world = World()
    world.node("n0", 4.0)
    world.create_pool("a")
    world.start("a")
    world.settle_down()
    tick = Collector(world.now - 10.0, 100).collect(world.state, world.now)
    assert tick is not None
    assert tick.ids[OPERATION]
    kept = [[number for number, name in enumerate(COLUMNS[kind]) if name not in new] for kind in KINDS]
    assert tuple(map(len, kept)) == EARLIER_WIDTHS[version]
    old = [
        array("f", [values[start + number] for start in range(0, len(values), width) for number in places])
        for values, width, places in zip(tick.values, WIDTHS, kept, strict=True)
    ]
    raw = [
        chunks._HEAD.pack(tick.at, tick.interval_s, tick.left_out, *map(len, tick.ids)),
        *(ids.tobytes() for ids in tick.ids),
        *(values.tobytes() for values in old),
    ]
    read = chunks.decode_tick(zlib.compress(b"".join(raw)))
    for values, before, width, places in zip(read.values, old, WIDTHS, kept, strict=True):
        assert len(values) == len(before) // len(places) * width
        found = [values[start + number] for start in range(0, len(values), width) for number in places]
        assert array("f", found).tobytes() == before.tobytes()
        absent = {*range(width)} - {*places}
        assert all(math.isnan(values[start + n]) for start in range(0, len(values), width) for n in absent)


def test_a_tick_of_now_is_read_as_it_is():
    world = World()
    world.create_pool("a")
    world.update()
    tick = Collector(world.now - 10.0, 100).collect(world.state, world.now)
    assert tick is not None
    read = chunks.decode_tick(chunks.encode_tick(tick))
    assert [values.tobytes() for values in read.values] == [values.tobytes() for values in tick.values]
