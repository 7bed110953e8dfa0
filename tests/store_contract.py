"""What every store does, whichever engine keeps its records and its log: tests over a ``make_opener`` fixture, for
classes that inherit them. The fixture makes an empty place for a store, and gives what opens the store there."""

import contextlib
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from memory_log import MemoryLog

from cpumond.core.errors import EXIT_UNAVAILABLE, CpumondError
from cpumond.scheduler.store import Change, Entry, Store, StoreError
from cpumond.scheduler.store.entries import CUT_ENTRIES, measure

Opener = Callable[[], Store]
"""Opens one and the same store, again after each close."""
MakeOpener = Callable[[], Opener]

Records = dict[tuple[str, str], bytes]

NAMES = st.sampled_from(["a", "b", "operation"]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
CHANGES = st.builds(Change, NAMES, NAMES, st.none() | st.binary(max_size=40))
SUBJECTS = st.lists(NAMES, max_size=4).map(tuple)
TIMES = st.integers(0, 20).map(float)
ENTRIES = st.builds(Entry, TIMES, SUBJECTS, st.binary(max_size=40), st.just(0))
BOUNDS = st.fixed_dictionaries({"before": st.none() | st.integers(0, 30), "since": TIMES, "limit": st.integers(0, 10)})
LOG_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reopen")),
        st.tuples(st.just("write"), st.lists(ENTRIES, max_size=8)),
        st.tuples(st.just("read"), st.lists(NAMES, max_size=3), BOUNDS),
        st.tuples(st.just("cut"), TIMES, st.integers(0, 2000)),
    ),
    max_size=12,
)
STEPS = st.lists(st.one_of(st.just("reopen"), st.lists(CHANGES, max_size=8)), max_size=12)


def content(store: Store) -> Records:
    return {(kind, key): value for kind, key, value in store.load()}


def log_of(store: Store, *subjects: str, **bounds: int | float) -> list[bytes]:
    """The values of the entries about ``subjects``, the newest first."""
    return [entry.value for _, entry in store.read_log(subjects, **{"limit": 10_000, **bounds})]  # type: ignore[arg-type]


def entry(number: int, *subjects: str, at: float | None = None) -> Entry:
    return Entry(float(number if at is None else at), subjects, b"%d" % number)


class StoreContract:
    @pytest.fixture
    def opener(self, make_opener: MakeOpener) -> Opener:
        return make_opener()

    @pytest.fixture
    def store(self, opener: Opener) -> Iterator[Store]:
        with contextlib.closing(opener()) as opened:
            yield opened

    def test_records_come_by_kind_and_key_in_the_order_of_code_points(self, store: Store) -> None:
        names = ["", "A", "Z", "a", "a\0", "a\0b", "aa", "b", "é", "\uffff", "\U0001f600", "10", "9", " ", "a b"]
        places = [(kind, key) for kind in names for key in names]
        random.Random(1).shuffle(places)
        store.write([Change(kind, key, b"") for kind, key in places])
        assert [(kind, key) for kind, key, _ in store.load()] == sorted(places)

    @pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)) * 10, b"\xff\xfe", b"x" * 3_000_000])
    def test_values_are_kept_byte_for_byte(self, opener: Opener, value: bytes) -> None:
        with contextlib.closing(opener()) as store:
            store.write([Change("k", "a", value)])
        with contextlib.closing(opener()) as store:
            ((_, _, read),) = store.load()
            assert read == value
            assert type(read) is bytes

    def test_a_load_may_be_left_half_way(self, store: Store) -> None:
        store.write([Change("k", str(number), b"1") for number in range(1000)])
        records = store.load()
        next(records)
        store.write([Change("k", "0", None)])
        assert len(list(store.load())) == 999

    def test_a_closed_store_is_refused_and_may_be_closed_again(self, opener: Opener) -> None:
        store = opener()
        store.write([], [entry(1)])
        assert len(store.read_log()) == 1
        store.close()
        store.close()
        for use in (
            lambda: store.write([Change("k", "a", b"1")]),
            lambda: store.write([], [entry(1)]),
            lambda: list(store.load()),
            store.read_log,
            lambda: store.cut_log(0.0, 0),
        ):
            with pytest.raises(StoreError, match="closed"):
                use()

    def test_it_has_one_writer(self, opener: Opener) -> None:
        with contextlib.closing(opener()), pytest.raises(StoreError, match="in use by"):
            opener()
        opener().close()

    def test_its_errors_end_the_program_as_unavailable(self) -> None:
        assert issubclass(StoreError, CpumondError)
        assert StoreError("x").exit_code == EXIT_UNAVAILABLE

    @examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors])
    @given(steps=STEPS)
    def test_it_is_a_mapping_that_lasts(self, make_opener: MakeOpener, steps: list[str | list[Change]]) -> None:
        opener = make_opener()
        expected: Records = {}
        store = opener()
        try:
            for step in steps:
                if isinstance(step, str):
                    store.close()
                    store = opener()
                else:
                    store.write(step)
                    for kind, key, value in step:
                        expected.pop((kind, key), None)
                        if value is not None:
                            expected[kind, key] = value
                assert list(store.load()) == [(*place, expected[place]) for place in sorted(expected)]
        finally:
            store.close()

    # ---- the log

    def test_entries_are_there_at_once_and_after_opening_newest_first(self, opener: Opener) -> None:
        first, second = Entry(1.5, ("b", "a", "é\0"), b"\0\xff"), Entry(1.25, (), b"")
        with contextlib.closing(opener()) as store:
            store.write([Change("k", "a", b"1")], [first])
            store.write([], [second])
            read = store.read_log()
            assert [entry for _, entry in read] == [second, first]
            numbers = [number for number, _ in read]
            assert numbers[0] > numbers[1] > 0
        with contextlib.closing(opener()) as store:
            assert store.read_log() == read
            store.write([], [entry(3)])
            (number, _), *older = store.read_log()
            assert older == read
            assert number > numbers[0]
            assert content(store) == {("k", "a"): b"1"}

    def test_subjects_that_meet_only_once_are_found_far_back(self, store: Store) -> None:
        entries = [entry(number, f"p{number % 2}", f"half{number // 1000}", "all") for number in range(2000)]
        entries[3] = entry(3, "p0", "p1", "all", "half0", "rare")
        entries[1999] = entry(1999, "rare", "all")
        store.write([], entries)
        assert log_of(store, "p0", "p1") == log_of(store, "rare", "p1") == log_of(store, "p0", "rare", "all") == [b"3"]
        assert log_of(store, "half0", "half1") == log_of(store, "p0", "p1", since=4.0) == []
        assert log_of(store, "rare", "all") == log_of(store, "rare", "rare") == [b"1999", b"3"]
        assert log_of(store, "rare", "nobody") == log_of(store, "") == log_of(store, "rar") == []
        evens = [b"%d" % number for number in reversed(range(4, 2000, 2))]
        assert log_of(store, "p0", "all") == [*evens, b"3", b"2", b"0"]

    def test_times_may_step_back(self, store: Store) -> None:
        store.write([], [entry(number, "a", at=at) for number, at in enumerate([5.0, 9.0, 2.0, 9.5, 3.0])])
        assert log_of(store, since=5.0) == [b"3", b"1", b"0"]
        assert log_of(store, "a", since=9.5) == [b"3"]
        assert log_of(store, "a", since=9.6) == []
        assert store.cut_log(5.0, 10**9) == 2
        assert log_of(store) == log_of(store, "a") == [b"3", b"1", b"0"]

    def test_a_batch_is_stored_with_its_entries_or_nothing_of_it(self, opener: Opener) -> None:
        good, bad = Change("k", "a", b"9"), [Change(*place, b"9") for place in (("k", "\ud800"), ("\udfff", "k"))]
        with contextlib.closing(opener()) as store:
            store.write([Change("k", "a", b"1"), Change("k", "b", b"2")], [entry(1, "a")])
            before = content(store)
            for changes, entries in (
                ([good], [entry(9, "a"), entry(9, "b", "\ud800")]),
                *(([good, Change("k", "b", None), each], [entry(9, "a")]) for each in bad),
                ([Change("k", "\ud800", None), good], []),
            ):
                with pytest.raises(StoreError, match="lone surrogate") as caught:
                    store.write(changes, entries)
                str(caught.value).encode()
                assert content(store) == before
                assert log_of(store) == log_of(store, "a") == [b"1"]
            store.write([Change("k", "c", b"3")], [entry(2, "a")])
        with contextlib.closing(opener()) as store:
            assert content(store) == {**before, ("k", "c"): b"3"}
            assert log_of(store, "a") == [b"2", b"1"]
            assert len(store.read_log(before=2**70, limit=2**40)) == 2

    def test_an_entry_of_many_subjects_and_a_long_one(self, store: Store) -> None:
        many = [f"pool:default/{number}" for number in range(1200)]
        store.write([], [entry(1, *many), Entry(1.0, ("long",), b"x" * 3_000_000)])
        assert log_of(store, many[0], many[-1]) == log_of(store, *many[:40]) == [b"1"]
        assert log_of(store, "long") == [b"x" * 3_000_000]
        assert store.cut_log(math.inf, 10**9) == 2
        assert log_of(store, many[7]) == []

    def test_the_oldest_are_dropped_until_the_log_is_small_enough(self, opener: Opener) -> None:
        entries = [Entry(float(number), ("a", f"s{number}"), bytes(100 + number)) for number in range(50)]
        sizes = [measure(len(msgspec.json.encode(each.subjects)), len(each.value)) for each in entries]
        with contextlib.closing(opener()) as store:
            for each in entries[:30]:
                store.write([], [each])
            assert store.cut_log(0.0, sum(sizes[:30])) == 0
        with contextlib.closing(opener()) as store:
            store.write([], entries[30:])
            assert store.cut_log(3.0, 10**9) == 3
            assert store.cut_log(0.0, sum(sizes[10:])) == 7
            assert store.cut_log(0.0, sum(sizes[10:]) - 1) == 1
            assert log_of(store) == log_of(store, "a") == [each.value for each in reversed(entries[11:])]
            assert log_of(store, "s10") == []
            assert store.cut_log(0.0, sum(sizes[11:])) == 0

    def test_a_number_is_given_once_also_after_all_were_dropped(self, opener: Opener) -> None:
        with contextlib.closing(opener()) as store:
            store.write([], [entry(number, "a") for number in range(2 * CUT_ENTRIES + 1)])
            ((last, _),) = store.read_log(limit=1)
            assert [store.cut_log(math.inf, 0) for _ in range(4)] == [CUT_ENTRIES, CUT_ENTRIES, 1, 0]
        with contextlib.closing(opener()) as store:
            assert store.read_log() == store.read_log(["a"]) == []
            store.write([], [entry(1, "a")])
            ((number, _),) = store.read_log(["a"])
            assert number > last
            assert store.cut_log(0.0, 10**6) == 0

    def test_a_copy_keeps_numbers(self, opener: Opener) -> None:
        with contextlib.closing(opener()) as store:
            store.write([], [entry(1, "a")._replace(number=41), entry(2)._replace(number=50), entry(3)])
            store.write([], [entry(4, "a")])
            assert [number for number, _ in store.read_log()] == [52, 51, 50, 41]
            assert store.read_log(["a"]) == [(52, entry(4, "a")), (41, entry(1, "a"))]

    def test_the_log_is_read_while_another_thread_writes(self, store: Store) -> None:
        """Each batch is seen as a whole, and none that was acknowledged is missing."""
        acknowledged = 0
        problems: list[str] = []

        def work() -> None:
            nonlocal acknowledged
            for number in range(1, 101):
                store.write([], [entry(number, "first"), entry(number, "second")])
                acknowledged = number
                if number % 20 == 0:
                    store.cut_log(number - 10.0, 10**9)

        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            before = acknowledged
            values = [entry.value for _, entry in store.read_log(limit=4)]
            newest = int(values[0]) if values else 0
            if newest < before or values[:2] != [b"%d" % newest] * len(values[:2]):
                problems.append(f"{values} after {before}")
        thread.join()
        assert problems == []
        assert log_of(store, "second", limit=11) == [b"%d" % number for number in range(100, 89, -1)]

    @examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors])
    @given(steps=LOG_STEPS)
    def test_the_log_is_what_was_written_without_what_was_cut(
        self, make_opener: MakeOpener, steps: list[tuple[Any, ...]]
    ) -> None:
        opener, expected = make_opener(), MemoryLog()
        store = opener()
        try:
            for what, *facts in steps:
                if what == "reopen":
                    store.close()
                    store = opener()
                    expected.reopen()
                elif what == "write":
                    store.write([], *facts)
                    expected.add(expected.make(*facts))
                elif what == "cut":
                    assert store.cut_log(*facts) == expected.cut(*facts)
                else:
                    subjects, bounds = facts
                    assert store.read_log(subjects, **bounds) == expected.read(subjects, **bounds)
                assert store.read_log(limit=1000) == expected.read(limit=1000)
        finally:
            store.close()
