"""Which engine gets a request: a pure function, and what is remembered of prompts."""

from __future__ import annotations

from hypothesis import given, strategies as st
from toolkit_lm.messages import EngineRequest
from toolkit_lm.params import SamplingParams
from toolkit_lm_data_parallel.engine import Engine
from toolkit_lm_data_parallel.in_flight import InFlight
from toolkit_lm_data_parallel.routing import WORTH, Choice, PrefixMirror, choose

CHOICES = st.lists(
    st.builds(Choice, st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1, max_size=8
)


@given(CHOICES)
def test_it_is_one_of_them_and_always_the_same(choices):
    assert choose(choices) == choose(list(choices)) in range(len(choices))


@given(CHOICES)
def test_none_is_much_fuller_than_the_least_full(choices):
    """The prefix weighs as much as it saves, and no more."""
    taken = choices[choose(choices)]
    assert taken.num_tokens - min(one.num_tokens for one in choices) <= WORTH * taken.num_cached


@given(CHOICES)
def test_none_is_as_little_full_and_has_more_of_the_prefix(choices):
    taken = choices[choose(choices)]
    assert not any(
        one.num_tokens <= taken.num_tokens and one.num_cached > taken.num_cached for one in choices
    )
    assert not any(
        one.num_tokens < taken.num_tokens and one.num_cached >= taken.num_cached for one in choices
    )


@given(CHOICES, st.randoms())
def test_their_order_says_nothing_but_between_equals(choices, random):
    shuffled = list(choices)
    random.shuffle(shuffled)
    assert shuffled[choose(shuffled)] == choices[choose(choices)]


def test_it_goes_where_its_prefix_is_unless_that_is_much_fuller():
    assert choose([Choice(0, 0), Choice(1000, 320)]) == 1
    assert choose([Choice(0, 0), Choice(2000, 320)]) == 0


def test_equal_engines_share_equally():
    loads = [0, 0, 0]
    for _ in range(30):
        loads[choose([Choice(load, 0) for load in loads])] += 7
    assert loads == [70, 70, 70]


def test_requests_that_begin_alike_reach_all_engines_where_there_are_many():
    """The first go to one, until it is much fuller. Then all have the beginning."""
    loads = [0, 0]
    mirrors = [PrefixMirror(100), PrefixMirror(100)]
    seen = set()
    for _ in range(100):
        engine = choose(
            [
                Choice(load, mirror.num_cached([b"a", b"b"]) * 16)
                for load, mirror in zip(loads, mirrors, strict=True)
            ]
        )
        mirrors[engine].add([b"a", b"b"])
        loads[engine] += 40
        seen.add(engine)
    assert seen == {0, 1} and abs(loads[0] - loads[1]) <= WORTH * 32 + 40


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=40), st.integers(1, 12))
def test_the_mirror_is_bounded_and_knows_beginnings_only(prompts, most):
    """A chain is known from its first block on, as long as none of it was forgotten."""
    mirror = PrefixMirror(most)
    for story, length in prompts:
        hashes = [f"{story}:{block}".encode() for block in range(length)]
        mirror.add(hashes)
        assert len(mirror) <= most
        assert mirror.num_cached(hashes) == min(length, most)
    held = [
        mirror.num_cached([f"{story}:{block}".encode() for block in range(6)]) for story in range(4)
    ]
    # Ends go before beginnings: all that is held is of use.
    assert sum(held) == len(mirror)


def test_what_was_sent_longest_ago_is_forgotten_first():
    mirror = PrefixMirror(4)
    mirror.add([b"a1", b"a2"])
    mirror.add([b"b1", b"b2"])
    mirror.add([b"a1"])
    mirror.add([b"c1"])
    assert [
        mirror.num_cached([b"a1", b"a2"]),
        mirror.num_cached([b"b1", b"b2"]),
        mirror.num_cached([b"c1"]),
    ] == [1, 2, 1]
    mirror.clear()
    assert len(mirror) == 0


def test_requests_with_a_key_go_where_the_key_has_been():
    """Unless that engine is much fuller."""

    def asked(number, key=None):
        request = EngineRequest(
            request_id=str(number),
            prompt_token_ids=[number] * 10,
            params=SamplingParams(),
            context={} if key is None else {"prompt_cache_key": key},
        )
        return InFlight(request, [])

    engines = [Engine(0), Engine(1)]

    def sent(number, key=None):
        message = asked(number, key)
        index = choose([engine.choice(message, 16) for engine in engines])
        engines[index].add(message)
        return index

    assert sent(0) == 0
    assert [sent(number, "a") for number in range(1, 5)] == [1] * 4
    assert [sent(number) for number in range(5, 8)] == [0] * 3
    engines[1].num_tokens += 5000
    assert sent(9, "a") == 0
    engines[1].forget_prefixes()
    engines[0].forget_prefixes()
    assert not engines[0]._keys and not engines[1]._keys


def test_keys_are_bounded():
    engine = Engine(0)
    for number in range(2**14 + 10):
        request = EngineRequest(
            request_id="one",
            prompt_token_ids=[1],
            params=SamplingParams(),
            context={"prompt_cache_key": str(number)},
        )
        engine.add(InFlight(request, []))
    assert len(engine._keys) == 2**14 and str(2**14) in engine._keys
