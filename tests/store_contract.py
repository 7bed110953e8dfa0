"""What every store does, whichever engine keeps its records: tests over a ``make_opener`` fixture, for classes that
inherit them. The fixture makes an empty place for a store, and gives what opens the store there."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import pytest
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from cpumond.core.errors import EXIT_UNAVAILABLE, CpumondError
from cpumond.scheduler.store import Change, Store, StoreError

Opener = Callable[[], Store]
"""Opens one and the same store, again after each close."""

Records = dict[tuple[str, str], bytes]

NAMES = st.one_of(
    st.sampled_from(["a", "b", "operation"]), st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
)
CHANGES = st.builds(Change, NAMES, NAMES, st.one_of(st.none(), st.binary(max_size=40)))
STEPS = st.lists(st.one_of(st.just("reopen"), st.lists(CHANGES, max_size=8)), max_size=12)


def content(store: Store) -> Records:
    return {(kind, key): value for kind, key, value in store.load()}


class StoreContract:
    @pytest.fixture
    def opener(self, make_opener: Callable[[], Opener]) -> Opener:
        return make_opener()

    @pytest.fixture
    def store(self, opener: Opener) -> Iterator[Store]:
        with contextlib.closing(opener()) as opened:
            yield opened

    def test_a_new_store_is_empty(self, store: Store) -> None:
        assert list(store.load()) == []

    def test_changes_are_there_at_once_and_after_opening_again(self, opener: Opener) -> None:
        with contextlib.closing(opener()) as store:
            store.write([Change("pool", "a", b"1"), Change("pool", "b", b"2"), Change("tree", "a", b"3")])
            store.write([Change("pool", "a", None), Change("pool", "b", b"4")])
            expected = [("pool", "b", b"4"), ("tree", "a", b"3")]
            assert list(store.load()) == expected
        with contextlib.closing(opener()) as store:
            assert list(store.load()) == expected

    def test_records_come_by_kind_and_key_in_the_order_of_code_points(self, store: Store) -> None:
        names = ["", "A", "Z", "a", "a\0", "a\0b", "aa", "b", "é", "\uffff", "\U0001f600", "10", "9", " ", "a b"]
        places = [(kind, key) for kind in names for key in names]
        random.Random(1).shuffle(places)
        store.write([Change(kind, key, b"") for kind, key in places])
        assert [(kind, key) for kind, key, _ in store.load()] == sorted(places)

    def test_of_several_changes_of_one_record_the_last_wins(self, store: Store) -> None:
        store.write([Change("k", "a", b"1"), Change("k", "a", None), Change("k", "a", b"2"), Change("k", "b", b"3")])
        assert content(store) == {("k", "a"): b"2", ("k", "b"): b"3"}
        store.write([Change("k", "a", b"4"), Change("k", "a", None), Change("k", "b", None), Change("k", "b", b"")])
        assert content(store) == {("k", "b"): b""}

    def test_taking_away_what_is_not_there_is_no_error(self, store: Store) -> None:
        store.write([Change("k", "a", None)])
        store.write([])
        assert content(store) == {}

    @pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)) * 10, b"\xff\xfe", b"x" * 3_000_000])
    def test_values_are_kept_byte_for_byte(self, opener: Opener, value: bytes) -> None:
        with contextlib.closing(opener()) as store:
            store.write([Change("k", "a", value)])
        with contextlib.closing(opener()) as store:
            ((_, _, read),) = store.load()
            assert read == value
            assert type(read) is bytes

    @pytest.mark.parametrize(
        "bad", [Change("k", "\ud800", b"1"), Change("\udfff", "k", b"1"), Change("k", "\ud800", None)]
    )
    def test_a_batch_that_cannot_be_written_changes_nothing(self, opener: Opener, bad: Change) -> None:
        with contextlib.closing(opener()) as store:
            store.write([Change("k", "a", b"1"), Change("k", "b", b"2")])
            for batch in ([Change("k", "a", b"9"), Change("k", "b", None), bad], [bad, Change("k", "c", b"9")]):
                with pytest.raises(StoreError, match="lone surrogate") as caught:
                    store.write(batch)
                str(caught.value).encode()
                assert content(store) == {("k", "a"): b"1", ("k", "b"): b"2"}
            store.write([Change("k", "c", b"3")])
        with contextlib.closing(opener()) as store:
            assert content(store) == {("k", "a"): b"1", ("k", "b"): b"2", ("k", "c"): b"3"}

    def test_a_load_may_be_left_half_way(self, store: Store) -> None:
        store.write([Change("k", str(number), b"1") for number in range(1000)])
        records = store.load()
        next(records)
        store.write([Change("k", "0", None)])
        assert len(list(store.load())) == 999

    def test_another_thread_may_go_on(self, opener: Opener) -> None:
        store = opener()
        seen: list[Records] = []

        def work() -> None:
            store.write([Change("k", "a", b"1")])
            seen.append(content(store))
            store.close()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [{("k", "a"): b"1"}]
        with contextlib.closing(opener()) as again:
            assert content(again) == {("k", "a"): b"1"}

    def test_a_closed_store_is_refused_and_may_be_closed_again(self, opener: Opener) -> None:
        store = opener()
        store.close()
        store.close()
        with pytest.raises(StoreError, match="closed"):
            store.write([Change("k", "a", b"1")])
        with pytest.raises(StoreError, match="closed"):
            list(store.load())

    def test_it_has_one_writer(self, opener: Opener) -> None:
        with contextlib.closing(opener()), pytest.raises(StoreError, match="in use by"):
            opener()
        opener().close()

    def test_its_errors_end_the_program_as_unavailable(self) -> None:
        assert issubclass(StoreError, CpumondError)
        assert StoreError("x").exit_code == EXIT_UNAVAILABLE

    @examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors])
    @given(steps=STEPS)
    def test_it_is_a_mapping_that_lasts(
        self, make_opener: Callable[[], Opener], steps: list[str | list[Change]]
    ) -> None:
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
