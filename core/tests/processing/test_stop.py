from __future__ import annotations

import tracemalloc
from itertools import pairwise

from hypothesis import given, strategies as st
from toolkit_lm.processing.stop import StopFinder, StopTexts

texts = st.text(alphabet="ab", max_size=30)


@given(
    texts,
    texts,
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_it_finds_what_a_search_finds(text, other, stops, cuts):
    """However the text is cut, the stop text that ends first is found, and what is held back is a
    beginning of one."""
    shared = StopTexts(stops)
    # Tokens of another sequence make no difference.
    StopFinder(shared).find(other)
    finder = StopFinder(shared)
    found = None
    start = 0
    bounds = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    for a, b in pairwise(bounds):
        if hit := finder.find(text[a:b]):
            found = (a + hit[0], hit[1])
            break
        start = b
        longest = max(
            (n for s in stops for n in range(len(s)) if text[:start].endswith(s[:n])), default=0
        )
        assert finder.num_held_back == longest
    ends = {text.find(s) + len(s): s for s in sorted(stops, key=len) if s in text}
    expected = min(ends, default=None)
    assert (found and found[0]) == expected
    if found:
        assert found[1] == max((s for s in stops if text[:expected].endswith(s)), key=len)


def test_sequences_share_the_stop_texts():
    """The largest that a request may ask for: 64 stop texts of 1,024 characters, 128 sequences, 16
    prompts."""
    stops = [f"{number:04}" * 256 for number in range(64)]
    tracemalloc.start()
    finders = []
    for _ in range(16):
        shared = StopTexts(stops)
        finders += [StopFinder(shared) for _ in range(128)]
    for finder in finders:
        finder.find("It has 0001 of them.")
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 2048 * 1024, f"{size} bytes for {len(finders)} sequences"
