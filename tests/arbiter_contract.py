"""What every arbiter does, whichever engine decides: tests over a ``rig`` fixture, for classes that inherit them."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

import pytest
from store_contract import content

from cpumond.scheduler.store import Arbiter, Change, FencedError, Lease, StoreError


class Rig(Protocol):
    """An engine with nothing on it. ``lease_s``: a lease that is long enough for what a test does within one."""

    lease_s: float

    def make(self) -> Arbiter:
        """Another scheduler's arbiter on the same engine."""

    def wait(self, seconds: float) -> None:
        """Let so much time pass by the engine's clock."""

    def end_sessions(self, arbiter: Arbiter) -> None:
        """End this arbiter's sessions at the engine; it does not know until it uses them."""

    def end_store_sessions(self) -> None:
        """The same for the sessions of all stores."""


class ArbiterContract:
    @pytest.fixture
    def one(self, rig: Rig) -> Iterator[Arbiter]:
        with contextlib.closing(rig.make()) as arbiter:
            yield arbiter

    @pytest.fixture
    def other(self, rig: Rig) -> Iterator[Arbiter]:
        with contextlib.closing(rig.make()) as arbiter:
            yield arbiter

    def test_the_first_one_leads_with_term_1(self, rig: Rig, one: Arbiter, other: Arbiter) -> None:
        assert one.look() is None
        lease = one.take("a:1", rig.lease_s)
        assert lease is not None
        assert lease[:2] == (1, "a:1")
        for arbiter in (one, other):
            seen = arbiter.look()
            assert seen is not None
            assert seen[:2] == (1, "a:1")
            assert 0 < seen.left_s <= rig.lease_s
        assert other.take("b:1", rig.lease_s) is None

    def test_a_renewed_lease_does_not_end(self, rig: Rig, one: Arbiter, other: Arbiter) -> None:
        assert one.take("a:1", rig.lease_s)
        for _ in range(3):
            rig.wait(rig.lease_s * 0.5)
            assert one.renew(1, rig.lease_s)
            assert other.take("b:1", rig.lease_s) is None

    def test_a_lease_that_ended_is_taken_with_the_next_term(self, rig: Rig, one: Arbiter, other: Arbiter) -> None:
        assert one.take("a:1", rig.lease_s)
        rig.wait(rig.lease_s * 1.1)
        seen = other.look()
        assert seen is not None
        assert seen.left_s <= 0
        assert other.take("b:1", rig.lease_s) == Lease(2, "b:1", rig.lease_s)
        # The sessions of the first one have been ended: it may notice so by an error, once.
        with contextlib.suppress(StoreError):
            assert not one.renew(1, rig.lease_s)
        assert not one.renew(1, rig.lease_s)
        assert one.take("a:1", rig.lease_s) is None
        seen = one.look()
        assert seen is not None
        assert seen[:2] == (2, "b:1")

    def test_a_lease_that_ended_may_be_renewed_while_nobody_took_it(self, rig: Rig, one: Arbiter) -> None:
        assert one.take("a:1", rig.lease_s)
        rig.wait(rig.lease_s * 1.1)
        assert one.renew(1, rig.lease_s)

    @pytest.mark.parametrize("how", ["give_up", "close", "end_sessions"])
    def test_the_lead_is_free_at_once_when_the_leader(self, rig: Rig, one: Arbiter, other: Arbiter, how: str) -> None:
        assert one.take("a:1", rig.lease_s * 1000)
        if how == "give_up":
            one.give_up(1)
        elif how == "close":
            one.close()
        else:
            rig.end_sessions(one)
        assert other.take("b:1", rig.lease_s) == Lease(2, "b:1", rig.lease_s)

    def test_a_leader_whose_session_ended_leads_on_where_nobody_was_faster(
        self, rig: Rig, one: Arbiter, other: Arbiter
    ) -> None:
        assert one.take("a:1", rig.lease_s)
        rig.end_sessions(one)
        with contextlib.suppress(StoreError):
            one.renew(1, rig.lease_s)
        assert one.renew(1, rig.lease_s)
        assert other.take("b:1", rig.lease_s) is None
        assert one.renew(1, rig.lease_s)

    def test_who_gave_up_what_another_has_takes_nothing_from_it(self, rig: Rig, one: Arbiter, other: Arbiter) -> None:
        assert one.take("a:1", rig.lease_s)
        one.give_up(1)
        assert other.take("b:1", rig.lease_s)
        one.give_up(1)
        assert one.take("a:1", rig.lease_s) is None
        assert other.renew(2, rig.lease_s)

    @pytest.mark.parametrize("how", ["ended", "given up"])
    def test_a_leader_of_the_past_writes_nothing(self, rig: Rig, one: Arbiter, other: Arbiter, how: str) -> None:
        assert one.take("a:1", rig.lease_s)
        with contextlib.closing(one.open_store(1)) as old:
            old.write([Change("k", "a", b"1")])
            if how == "ended":
                rig.wait(rig.lease_s * 1.1)
            else:
                one.give_up(1)
            assert other.take("b:1", rig.lease_s)
            with contextlib.closing(other.open_store(2)) as new:
                for batch in ([Change("k", "a", b"old")], [Change("k", "a", None)], [Change("k", "a", b"old")]):
                    with pytest.raises(FencedError):
                        old.write(batch)
                assert content(new) == {("k", "a"): b"1"}
                new.write([Change("k", "b", b"2")])
                assert content(new) == {("k", "a"): b"1", ("k", "b"): b"2"}

    def test_an_empty_batch_tells_a_leader_of_the_past(self, rig: Rig, one: Arbiter, other: Arbiter) -> None:
        assert one.take("a:1", rig.lease_s)
        with contextlib.closing(one.open_store(1)) as store:
            store.write([])
            one.give_up(1)
            store.write([])
            assert other.take("b:1", rig.lease_s)
            # The first may be told that its session has ended.
            for _ in range(2):
                with pytest.raises(StoreError) as told:
                    store.write([])
            assert isinstance(told.value, FencedError)

    def test_a_store_is_for_the_leader(self, rig: Rig, one: Arbiter, other: Arbiter) -> None:
        assert one.take("a:1", rig.lease_s)
        one.give_up(1)
        assert other.take("b:1", rig.lease_s)
        with pytest.raises(FencedError):
            one.open_store(1)

    def test_a_store_whose_session_ended_writes_on(self, rig: Rig, one: Arbiter) -> None:
        assert one.take("a:1", rig.lease_s)
        with contextlib.closing(one.open_store(1)) as store:
            for number in range(3):
                rig.end_store_sessions()
                store.write([Change("k", str(number), b"1")])
            assert len(content(store)) == 3

    def test_a_closed_arbiter_is_refused_and_may_be_closed_again(self, rig: Rig, one: Arbiter) -> None:
        assert one.take("a:1", rig.lease_s)
        one.close()
        one.close()
        with pytest.raises(StoreError, match="closed"):
            one.look()
