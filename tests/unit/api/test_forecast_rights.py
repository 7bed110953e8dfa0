"""What a simulation says of operations that the asker may not read."""

from __future__ import annotations

import msgspec
from scheduler_world import World

from cpumond.api.json.forecasts import hide_unreadable
from cpumond.scheduler.access import Rights
from cpumond.scheduler.forecast.model import ForetoldStart, ForetoldStop, Simulation
from cpumond.scheduler.users import User


def test_what_may_not_be_read_or_is_not_known_any_more_is_left_out_and_counted():
    world = World()
    world.create_pool("p")
    deny = [{"action": "deny", "subjects": ["spy"], "permissions": ["read"]}]
    seen, hidden = world.start("p", user="ann"), world.start("p", user="ann", acl=deny)
    ids = [seen, hidden, "1-2-3-4", "foretold-1"]  # the third was forgotten since the run began
    starts = [ForetoldStart(each, "title", "default", "p", 1.0, 2.0, None, None) for each in ids]
    stops = [
        ForetoldStop("job", each, "default", "p", "n0", 1.0, "preempted", 0.5, victim, f"for {each}")
        for each in ids for victim in ("", hidden)
    ]  # fmt: skip
    whole = Simulation(0.0, 9.0, "foretold-1", starts, stops, [], [], 3)

    of_spy = hide_unreadable(whole, Rights(world.state, User("spy")))
    assert [each.operation_id for each in of_spy.starts] == [seen, "foretold-1"]
    assert of_spy.left_out == 5
    assert [each.operation_id for each in of_spy.stops if each.operation_id] == [seen, "foretold-1"]
    told = msgspec.json.encode(of_spy).decode()
    assert hidden not in told
    assert "1-2-3-4" not in told
    assert len(of_spy.stops) == len(stops)

    of_admin = hide_unreadable(whole, Rights(world.state, User("root", admin=True)))
    assert [each.operation_id for each in of_admin.starts] == ids
