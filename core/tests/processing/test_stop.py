from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st
from toolkit_lm.processing.stop import StopFinder

texts = st.text(alphabet="ab", max_size=30)


@given(texts, st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3), st.lists(st.integers(0, 30), max_size=4))
def test_it_finds_what_a_search_finds(text, stops, cuts):
    """However the text is cut, the stop text that ends first is found, and what is held back is a beginning of one."""
    finder, found, start = StopFinder(stops), None, 0
    bounds = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    for a, b in pairwise(bounds):
        if hit := finder.find(text[a:b]):
            found = (a + hit[0], hit[1])
            break
        start = b
        longest = max((n for s in stops for n in range(len(s)) if text[:start].endswith(s[:n])), default=0)
        assert finder.num_held_back == longest
    ends = {text.find(s) + len(s): s for s in sorted(stops, key=len) if s in text}
    expected = min(ends, default=None)
    assert (found and found[0]) == expected
    if found:
        assert found[1] == max((s for s in stops if text[:expected].endswith(s)), key=len)
