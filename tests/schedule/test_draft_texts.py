"""Where drafts come from: the index of a text, and places that follow it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.drafts.drafter import Acceptance, Drafter
from penstock.schedule.drafts.index import CANDIDATES, GRAM, LONGEST, PAIR, TokenIndex
from penstock.schedule.drafts.texts import OUTPUT_TOKENS, SEPARATOR, TENANT_TOKENS, DraftCursor, RecentOutputs

tokens = st.lists(st.integers(0, 4), max_size=300)


def matched(text: list[int], position: int, other: list[int]) -> int:
    length = 0
    while length < min(position, len(other), LONGEST) and text[position - 1 - length] == other[len(other) - 1 - length]:
        length += 1
    return length


@given(text=tokens, query=tokens, cuts=st.lists(st.integers(0, 300), max_size=4))
@settings(max_examples=200)
def test_a_search_gives_the_longest_of_the_latest_matches(text: list[int], query: list[int], cuts: list[int]) -> None:
    """Whether the index grew by single tokens or in bulk."""
    index = TokenIndex(1 << 16)  # a table in which these hashes do not collide
    for end in (*sorted(min(cut, len(text)) for cut in cuts), len(text)):
        index.extend(text, end)
        assert index.end == max(end, GRAM - 1)
    latest = [i for i in range(len(text), GRAM - 1, -1) if matched(text, i, query) >= GRAM][:CANDIDATES]
    found = index.find(text, query, after=len(text) + 1)
    pairs = [i for i in range(len(text), GRAM - 1, -1) if len(query) >= GRAM and matched(text, i, query) >= PAIR]
    if not latest:
        assert found == ((pairs[0], PAIR) if pairs else None)
    else:
        assert found is not None
        assert found.length == matched(text, found.position, query) == max(matched(text, i, query) for i in latest)


@given(text=tokens, query=tokens)
@settings(max_examples=100)
def test_a_small_table_gives_no_false_match(text: list[int], query: list[int]) -> None:
    index = TokenIndex(1)
    index.extend(text, len(text))
    found = index.find(text, query, after=0)
    assert found is None or PAIR <= found.length <= matched(text, found.position, query)
    assert found is None or found.length in (PAIR, matched(text, found.position, query))


def test_of_equal_matches_the_next_one_is_preferred() -> None:
    """After a change, a copy goes on where it was, not where the same words came last."""
    text = [1, 2, 3, 10, 1, 2, 3, 20, 1, 2, 3, 30]
    index = TokenIndex(len(text))
    index.extend(text, len(text))
    assert [index.find(text, [9, 1, 2, 3], after) for after in (0, 4, 8, 20)] == [(3, 3), (7, 3), (11, 3), (11, 3)]


def test_a_prediction_is_taken_up_again_after_a_change() -> None:
    prediction = list(range(100, 160))
    cursor = DraftCursor(prediction, TokenIndex(60), 0)
    cursor.index.extend(prediction, 60)
    sequence: list[int] = []
    foretold = []
    # Parts as predicted, and between them one token replaced, one inserted, three inserted.
    for token in (*range(100, 120), 7, *range(121, 130), 9, *range(130, 140), 8, 8, 8, *range(140, 160)):
        cursor.search(sequence)
        foretold.append(cursor.drafts(1) == [token] and cursor.position >= 0)
        sequence.append(token)
        cursor.follow(token, len(sequence) - 1)
    assert foretold[:20] == [True] * 20
    assert foretold[20:30] == [False] + [True] * 9, "a replaced token costs one draft"
    assert foretold[30:41] == [False] * 2 + [True] * 9, "an inserted token costs two"
    assert foretold[41:] == [False] * 5 + [True] * 18, "after more insertions, two tokens find the place"


def test_what_a_copy_leaves_out_costs_one_draft() -> None:
    """A clause that is left out, and a comma that is put in."""
    prediction = list(range(100, 160))
    cursor = DraftCursor(prediction, TokenIndex(60), 0)
    cursor.index.extend(prediction, 60)
    sequence: list[int] = []
    foretold, matched = [], []
    for token in (*range(100, 120), *range(128, 140), 7, *range(140, 160)):
        cursor.search(sequence)
        foretold.append(cursor.drafts(1) == [token])
        matched.append(cursor.matched)
        sequence.append(token)
        cursor.follow(token, len(sequence) - 1)
    assert foretold[20:32] == [False] + [True] * 11
    assert foretold[32:] == [False] * 2 + [True] * 19
    assert matched[20:23] == [20, 0, 11], "half of the match counts once a token after the change confirms the place"


def test_a_sequence_never_follows_itself() -> None:
    """Its last token, which differs from the one at the place, is among the next 16 of the text: it is the text."""
    sequence = [*range(12), 30, *range(9)]
    drafter = Drafter(sequence, 13, (), None)
    for token in (9, 10, 50, 51, 52, 53, 54, 55):
        drafter.catch_up(100)
        drafter.candidate(Acceptance())
        sequence.append(token)
    drafter.catch_up(100)
    candidate = drafter.candidate(Acceptance())
    assert candidate is None or candidate.source.drafts(1), "a place that is the end has no drafts"


def test_a_loop_goes_on() -> None:
    sequence = [5, 1, 2, 3, 1, 2, 3, 1, 2]
    drafter = Drafter(sequence, 1, (), None)
    drafter.catch_up(100)
    assert not drafter.behind()
    candidate = drafter.candidate(Acceptance())
    assert candidate is not None
    assert candidate.source.drafts(7) == [3, 1, 2, 3, 1, 2, 3]


def test_recent_outputs_are_bounded_and_end_at_their_ends() -> None:
    recent = RecentOutputs()
    for number in range(40):
        recent.add([number] * (OUTPUT_TOKENS // 2))
        assert len(recent.tokens) <= TENANT_TOKENS
        assert recent.index.end == len(recent.tokens)
    assert recent.epoch > 1
    cursor = DraftCursor(recent.tokens, recent.index)
    cursor.search([39, 39, 39])
    drafts = cursor.drafts(OUTPUT_TOKENS)
    assert drafts == [39] * len(drafts) and SEPARATOR not in drafts


def test_indexing_is_bounded_in_a_step() -> None:
    sequence = [i * 7919 % 50021 for i in range(3000)]
    drafter = Drafter(sequence, 3000, tuple(range(2000)), None)
    assert drafter.behind() == 2999 - 2 + 2000 - 2
    drafter.catch_up(2990)
    assert drafter.behind() == 2999 - 2 + 2000 - 2 - 2990
    drafter.catch_up(2005)
    assert drafter.behind() == 0


def test_a_sequence_whose_drafts_are_wrong_gets_fewer() -> None:
    acceptance = Acceptance()
    drafter = Drafter([1, 2, 3] * 5, 1, (), None)
    drafter.catch_up(100)
    first = drafter.candidate(acceptance)
    assert first is not None
    for _ in range(6):
        drafter.note(first.kind, 4, 0, acceptance)
    later = drafter.candidate(acceptance)
    assert later is not None and later.probability < first.probability / 2
