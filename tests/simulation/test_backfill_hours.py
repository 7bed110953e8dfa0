"""Some hours of the backfill week (tests/bench/backfill.py has all of it)."""

from played_backfill import HOUR_S, PlayedBackfill


def test_room_of_gangs_is_used_meanwhile_and_none_of_them_starts_later() -> None:
    plain = PlayedBackfill(1, 9 * HOUR_S).play()
    filled = PlayedBackfill(1, 9 * HOUR_S, enable_backfill=True).play(compares=True)
    assert plain.backfilled == 0 < filled.backfilled
    assert 0.0 < filled.idle_beside_work_hours < 0.5 * plain.idle_beside_work_hours
    assert len(filled.waits) > 2
    assert all(waited <= filled.alone[number] for number, waited in filled.waits.items())
