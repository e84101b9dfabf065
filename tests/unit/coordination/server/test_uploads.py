"""Contributions on their way in: their parts, the room they take, and the queue for it."""

import pytest

from outerstep.coordination.server.turns import QUEUE_PATIENCE_S
from outerstep.coordination.server.uploads import Upload, Uploads
from outerstep.digest import payload_hash
from outerstep.errors import BadRequest, MissingParts
from outerstep.types import Offer
from unit.coordination.builders import PART_BYTES, contribution_hashes, make_key, make_offer

CAPACITY = 100


def offer_of(worker_id: str, size_bytes: int = 60) -> Offer:
    return make_offer(worker_id, size_bytes=size_bytes)


def pool(*holders: Offer) -> Uploads:
    uploads = Uploads(capacity_bytes=CAPACITY, part_size_bytes=PART_BYTES)
    for offer in holders:
        assert uploads.request(offer, 0.0) is not None
    return uploads


class TestParts:
    @pytest.mark.parametrize(("size_bytes", "parts"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
    def test_the_last_part_may_be_short(self, size_bytes: int, parts: int) -> None:
        assert Upload(make_offer(size_bytes=size_bytes), PART_BYTES).missing == tuple(range(parts))

    def test_missing_is_what_has_not_arrived(self) -> None:
        upload = Upload(make_offer(size_bytes=32), PART_BYTES)
        upload.part_hashes.update({2: "f" * 16, 0: "0" * 16})
        assert upload.missing == (1, 3)

    @pytest.mark.parametrize("part", [2, 3, 10**9])
    def test_a_part_out_of_range_is_refused_with_the_number_of_parts(self, part: int) -> None:
        with pytest.raises(BadRequest, match=f"part {part} is out of range.*has 2 parts"):
            Upload(make_offer(size_bytes=16), PART_BYTES).check_part(part)

    def test_the_payload_hash_does_not_depend_on_the_order_of_arrival(self) -> None:
        hashes = contribution_hashes(make_key(), 24)
        upload = Upload(make_offer(size_bytes=24), PART_BYTES)
        for part in (2, 0, 1):
            upload.part_hashes[part] = hashes[part]
        assert upload.payload_hash() == payload_hash(hashes)

    def test_an_incomplete_payload_has_no_hash_and_lists_what_is_missing(self) -> None:
        upload = Upload(make_offer(size_bytes=24), PART_BYTES)
        upload.part_hashes[1] = "0" * 16
        with pytest.raises(MissingParts, match=r"misses 2 of 3 parts: \[0, 2\].*send them"):
            upload.payload_hash()

    def test_a_long_list_of_missing_parts_is_cut(self) -> None:
        with pytest.raises(MissingParts, match=r"misses 100 of 100 parts: \[0, 1, .*15\]"):
            Upload(make_offer(size_bytes=800), PART_BYTES).payload_hash()


class TestRoom:
    def test_room_is_granted_for_a_whole_contribution_or_not_at_all(self) -> None:
        uploads = pool(offer_of("a", 60))
        assert uploads.request(offer_of("b", 41), 0.0) is None
        assert (uploads.held_bytes, uploads.queued) == (60, 1)

    def test_the_pool_may_be_filled_to_the_last_byte(self) -> None:
        assert pool(offer_of("a", 60), offer_of("b", 40)).held_bytes == CAPACITY

    def test_an_accepted_contribution_holds_its_room_until_it_is_freed(self) -> None:
        uploads = pool(offer_of("a"))
        del uploads.by_key[make_key("a")]
        assert (uploads.by_key.get(make_key("a")), uploads.held_bytes) == (None, 60)
        uploads.drop(make_key("a"))
        assert uploads.held_bytes == 0

    def test_a_dropped_contribution_frees_its_room_at_once(self) -> None:
        uploads = pool(offer_of("a"))
        uploads.drop(make_key("a"))
        assert (uploads.by_key.get(make_key("a")), uploads.held_bytes) == (None, 0)

    def test_an_oversized_contribution_gets_in_when_it_is_alone(self) -> None:
        uploads = pool(offer_of("a", 1))
        assert uploads.request(offer_of("big", CAPACITY + 1), 0.0) is None
        uploads.drop(make_key("a"))
        assert uploads.request(offer_of("big", CAPACITY + 1), 1.0) is not None

    def test_nobody_gets_in_beside_an_oversized_contribution(self) -> None:
        assert pool(offer_of("big", CAPACITY + 1)).request(offer_of("a", 1), 0.0) is None


class TestQueue:
    def test_room_goes_to_who_asked_first_not_to_who_asks_next(self) -> None:
        uploads = pool(offer_of("a"))
        uploads.request(offer_of("b"), 1.0)
        uploads.request(offer_of("c"), 2.0)
        uploads.drop(make_key("a"))
        assert uploads.request(offer_of("c"), 3.0) is None
        assert uploads.request(offer_of("b"), 4.0) is not None

    def test_a_small_one_does_not_overtake_a_large_one(self) -> None:
        uploads = pool(offer_of("a", 60))
        uploads.request(offer_of("large", 60), 1.0)
        assert uploads.request(offer_of("small", 1), 2.0) is None

    def test_who_stands_behind_gets_in_if_there_is_room_for_those_before_it_too(self) -> None:
        uploads = pool(offer_of("a", 100))
        for worker in "bcd":
            assert uploads.request(offer_of(worker, 40), 1.0) is None
        uploads.drop(make_key("a"))
        assert uploads.request(offer_of("d", 40), 2.0) is None  # 40 + 40 for b and c, and then 20 are left
        assert uploads.request(offer_of("c", 40), 2.0) is not None
        assert uploads.request(offer_of("b", 40), 2.0) is not None
        assert uploads.held_bytes == 80

    def test_whose_turn_comes_next_is_known(self) -> None:
        uploads = pool(offer_of("a", 100))
        for worker in "bcd":
            uploads.request(offer_of(worker, 40), 1.0)
        assert [worker for worker in "abcd" if uploads.is_near(make_key(worker))] == ["b", "c"]

    def test_asking_again_keeps_the_place(self) -> None:
        uploads = pool(offer_of("a"))
        for moment, worker in enumerate("bcbb"):
            uploads.request(offer_of(worker), float(moment))
        assert uploads.queued == 2
        uploads.drop(make_key("a"))
        assert uploads.request(offer_of("c"), 4.0) is None
        assert uploads.request(offer_of("b"), 5.0) is not None

    def test_who_was_served_has_left_the_queue(self) -> None:
        uploads = pool(offer_of("a"))
        uploads.request(offer_of("b"), 1.0)
        uploads.drop(make_key("a"))
        uploads.request(offer_of("b"), 2.0)
        assert uploads.queued == 0

    @pytest.mark.parametrize(("silent_s", "served"), [(QUEUE_PATIENCE_S, False), (QUEUE_PATIENCE_S + 0.1, True)])
    def test_a_waiter_that_stops_asking_loses_its_place(self, silent_s: float, served: bool) -> None:
        uploads = pool(offer_of("a"))
        uploads.request(offer_of("b"), 0.0)
        uploads.drop(make_key("a"))
        assert (uploads.request(offer_of("c"), silent_s) is not None) is served

    def test_a_worker_that_is_gone_stands_in_no_queue(self) -> None:
        uploads = pool(offer_of("a"))
        uploads.request(offer_of("b"), 0.0)
        uploads.request(make_offer("b", fragment=1, size_bytes=60), 0.0)
        uploads.request(offer_of("c"), 0.0)
        uploads.unqueue("b")
        uploads.drop(make_key("a"))
        assert uploads.queued == 1
        assert uploads.request(offer_of("c"), 1.0) is not None

    def test_a_refused_offer_leaves_the_queue_of_its_fragment_only(self) -> None:
        uploads = pool(offer_of("a"))
        uploads.request(offer_of("b"), 0.0)
        uploads.request(make_offer("b", fragment=1, size_bytes=60), 0.0)
        uploads.unqueue("b", 0)
        uploads.drop(make_key("a"))
        assert uploads.request(make_offer("b", fragment=1, size_bytes=60), 1.0) is not None


class TestLooking:
    def test_uploads_are_found_by_fragment_and_by_worker(self) -> None:
        uploads = pool(
            make_offer("a", size_bytes=8),
            make_offer("a", fragment=1, size_bytes=8),
            make_offer("b", fragment=1, size_bytes=8),
        )
        assert [u.key for u in uploads.of(fragment=1)] == [make_key("a", fragment=1), make_key("b", fragment=1)]
        assert [u.key for u in uploads.of("a")] == [make_key("a"), make_key("a", fragment=1)]


@pytest.mark.parametrize(("ahead", "near"), [(40, True), (41, False)])
def test_its_turn_is_near_if_it_fits_beside_those_before_it_once_the_pool_is_empty(ahead: int, near: bool) -> None:
    uploads = pool(offer_of("holder", CAPACITY))
    for worker_id, size_bytes in (("first", ahead), ("second", 60)):
        assert uploads.request(offer_of(worker_id, size_bytes), 0.0) is None
    assert uploads.is_near(make_key("first"))
    assert uploads.is_near(make_key("second")) is near
    assert not uploads.is_near(make_key("nobody"))


def test_a_new_sequence_takes_the_place_of_the_old_in_its_own_fragment_only() -> None:
    uploads = pool(offer_of("holder", CAPACITY))
    for fragment in (0, 1):
        assert uploads.request(make_offer("a", 1, fragment=fragment, size_bytes=60), 0.0) is None
    assert uploads.request(make_offer("a", 2, fragment=0, size_bytes=60), 0.0) is None
    assert uploads.queued == 2


def test_what_is_not_there_may_be_dropped() -> None:
    uploads = pool()
    uploads.drop(make_key("nobody"))
    assert uploads.held_bytes == 0
