"""The finder of shared prefixes: what it chooses saves most, it forgets only where it must, and it keeps no requests."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as draw

from h2o_flexgen.core.prefix_groups import Beginnings, PrefixFinder, PrefixGroups, SharedPrefix

TEXTS = draw.lists(draw.tuples(draw.lists(draw.integers(0, 1), min_size=1, max_size=7), draw.integers(1, 3)), max_size=7)


def found(texts: Sequence[tuple[Sequence[int], int]], least: int = 1, room: int = 1 << 20) -> PrefixGroups:
    finder = PrefixFinder(least, room=room)
    for ids, rows in texts:
        finder.add(ids, rows)
    return finder.groups()


def saved_by(chosen: Sequence[tuple[int, ...]], texts: Sequence[tuple[Sequence[int], int]]) -> int:
    spared = sum(rows * max([0, *(len(one) for one in chosen if tuple(ids[:-1][: len(one)]) == one)]) for ids, rows in texts)
    return spared - sum(map(len, chosen))


@given(TEXTS, draw.integers(1, 3))
def test_no_other_choice_of_prefixes_saves_more(texts: list[tuple[list[int], int]], least: int) -> None:
    groups = found(texts, least)
    starts = {tuple(ids[:end]) for ids, _ in texts for end in range(least, len(ids))}
    # each chosen prefix saves at least one token, so there are fewer than rows
    most = max(saved_by(chosen, texts) for count in range(min(4, len(starts)) + 1) for chosen in combinations(starts, count))
    assert groups.saved_tokens >= most


@given(TEXTS, draw.integers(1, 3))
def test_requests_of_a_group_begin_with_its_tokens_and_keep_their_last_one(
    texts: list[tuple[list[int], int]], least: int
) -> None:
    groups = found(texts, least)
    of_group: dict[int, list[tuple[list[int], int]]] = {}
    for place, (ids, rows) in enumerate(texts):
        if (shared := groups.of(place)) is not None:
            assert least <= shared.tokens == groups.lengths[shared.group] < len(ids)
            of_group.setdefault(shared.group, []).append((ids[: shared.tokens], rows))
    assert sorted(of_group) == list(range(len(groups.lengths)))
    for group, members in of_group.items():
        assert all(start == members[0][0] for start, _ in members)
        assert sum(rows for _, rows in members) == groups.rows[group] > 1


def test_headers_within_headers_are_told_apart() -> None:
    head, one, other = list(range(40)), [50] * 30, [60] * 30
    texts = [[*head, *(one if place % 2 else other), 100 + place, 7] for place in range(20)] + [
        [*head, 99, place] for place in range(9)
    ]
    groups = found([(text, 1) for text in texts], least=32)
    assert sorted(groups.lengths) == [41, 70, 70] and sorted(groups.rows) == [9, 10, 10]
    assert groups.of(0) == groups.of(18) != groups.of(1) and groups.of(20) == groups.of(28)


def test_completions_of_one_prompt_share_all_of_it_but_the_last_token() -> None:
    groups = found([(list(range(50)), 4), (list(range(50, 90)), 1)], least=32)
    assert groups.of(0) == SharedPrefix(0, 49) and groups.of(1) is None and groups.saved_tokens == 3 * 49


def test_a_header_is_found_among_more_requests_than_there_is_room_for() -> None:
    header = list(range(500))
    finder = PrefixFinder(room=1 << 18)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for place in range(3000):
        own = [place * 7 + step for step in range(300)]
        finder.add([*(header if place % 3 == 0 else ()), *own])
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    groups = finder.groups()
    assert groups.lengths == (500,) and groups.rows[0] >= 990
    assert all((groups.of(place) is None) == (place % 3 > 0) for place in range(1000, 3000))
    assert grown < 1 << 19


# -- of requests that arrive --------------------------------------------------------------------------------------------------


@given(TEXTS)
def test_a_request_begins_like_the_one_that_is_most_like_it(texts: list[tuple[list[int], int]]) -> None:
    beginnings = Beginnings()
    for place, (ids, rows) in enumerate(texts):
        beginnings.add(ids, rows)
        others = [other for other, count in texts[: place + 1] for _ in range(count)]
        others.remove(ids)
        assert beginnings.common(ids) == max((_alike(ids, other) for other in others), default=0)


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    return next((place for place, both in enumerate(zip(one, other)) if both[0] != both[1]), min(len(one), len(other)))


def test_what_was_not_asked_for_longest_is_forgotten_first() -> None:
    asked_for_again, once = list(range(500)), list(range(1000, 1500))
    beginnings = Beginnings(room=1 << 15)
    for text in (asked_for_again, once):
        beginnings.add([*text, 1])
    for place in range(2000):
        beginnings.add([5000 + place, *range(place, place + 20)])
        if place % 10 == 0:
            beginnings.add([*asked_for_again, 10 + place])
    assert beginnings._tree.nbytes <= 1 << 15
    beginnings.add([*asked_for_again, 2])
    beginnings.add([*once, 2])
    assert beginnings.common([*asked_for_again, 2]) == 500 and beginnings.common([*once, 2]) == 0
