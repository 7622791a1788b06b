"""Deltas and snapshots of one request say the same, however its tokens come and whenever its caller
looks."""

from __future__ import annotations

import gc
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from toolkit_lm.messages import EngineOutput, EngineRequest, TokenLogprobs
from toolkit_lm.outputs import CompletionOutput
from toolkit_lm.params import RequestOutputKind, SamplingParams
from toolkit_lm.processing import request_state
from toolkit_lm.processing.request_state import RequestState, SequenceState
from toolkit_lm.processing.requests import PreparedRequest
from toolkit_lm.renderer import DecodeStream, StopScope

LETTERS = "ab c"


class Letters(DecodeStream):
    """One letter per token; a "b" is held back until the next token, as a renderer does with half a
    character."""

    def __init__(self):
        self.held = ""

    def push(self, token_ids):
        text = self.held + "".join(LETTERS[token] for token in token_ids)
        self.held = "b" if text.endswith("b") else ""
        return text.removesuffix(self.held) if self.held else text

    def flush(self):
        held, self.held = self.held, ""
        return held


class LetterRenderer:
    num_streams = 0

    def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
        self.num_streams += 1
        return Letters()

    def token_texts(self, token_ids):
        return [LETTERS[token] for token in token_ids]

    def decode(self, token_ids):
        return "".join(self.token_texts(token_ids))


class AfterSpace(StopScope):
    """Stop texts count after the first space. It tells of two letters at a time."""

    def __init__(self, prompt_end=""):
        self.prompt_end = prompt_end
        self.text = ""
        self.told = 0

    def push(self, text):
        self.text += text
        return self._parts(len(self.text) // 2 * 2)

    def finish(self):
        return self._parts(len(self.text))

    def _parts(self, end):
        begin, self.told = self.told, end
        return [(1, " " in self.text[:at]) for at in range(begin, end)]


def make_state(kind=RequestOutputKind.DELTA, scope=None, **params) -> RequestState:
    request = EngineRequest(
        request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(output_kind=kind, **params)
    )
    return RequestState(PreparedRequest(request, "ab", stop_scope=scope), LetterRenderer())


def step(index: int, tokens: list[int], reason=None, **more) -> EngineOutput:
    return EngineOutput(request_id="r", index=index, token_ids=tokens, finish_reason=reason, **more)


def joined(before: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    """A delta on top of what was there."""
    result = CompletionOutput(**{field.name: getattr(new, field.name) for field in fields(new)})
    result.text = before.text + new.text
    result.token_ids = before.token_ids + new.token_ids
    if new.logprobs is not None:
        result.logprobs = (before.logprobs or []) + new.logprobs
    return result


# A machine with other work on it is slow at times.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(0, 3), min_size=1, max_size=3)),
        max_size=20,
    ),
    st.lists(st.booleans(), min_size=20, max_size=20),
    st.sampled_from([None, "ab", ["a c", "bb"]]),
    st.booleans(),
    st.integers(0, 4),
)
def test_deltas_add_up_to_the_snapshot(steps, looks, stop, include, min_tokens):
    options = {
        "n": 2,
        "stop": stop,
        "include_stop_str_in_output": include,
        "min_tokens": min_tokens,
        "max_tokens": 99,
    }
    state = make_state(**options)
    ended = set()
    so_far = [CompletionOutput(0, "", []), CompletionOutput(1, "", [])]

    def look() -> None:
        output = state.next_output()
        for one in output.outputs if output is not None else ():
            so_far[one.index] = joined(so_far[one.index], one)
        assert [(one.text, one.token_ids) for one in so_far] == [
            (one.text, one.token_ids) for one in state.snapshot().outputs
        ]

    for (index, tokens), looking in zip(steps, looks, strict=False):
        if index not in ended and state.apply(step(index, tokens)):
            ended.add(index)
        if looking:
            look()
    for index in {0, 1} - ended:
        state.apply(step(index, [0], "length"))
    look()
    assert so_far == state.snapshot().outputs and state.finished
    assert state.next_output() is None


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.sampled_from(["a", "ab", "b c", "cc"]),
    st.integers(1, 4),
)
def test_a_stop_text_counts_where_its_scope_says(tokens, stop, size):
    state, made = (
        make_state(
            stop=stop,
            max_tokens=99,
            scope=lambda prompt_end: made.append(prompt_end) or AfterSpace(),
        ),
        [],
    )
    for at in range(0, len(tokens), size):
        state.apply(step(0, tokens[at : at + size], "length" if at + size >= len(tokens) else None))
        if state.finished:
            break
    text = "".join(LETTERS[token] for token in tokens)
    before, space, counting = text.partition(" ")
    [one] = state.snapshot().outputs
    assert (one.text, one.stop_reason) == (
        before + space + counting.partition(stop)[0],
        stop if stop in counting else None,
    )
    assert made == ["b "]


def test_what_a_scope_does_not_know_yet_is_no_less_shown_when_the_request_ends():
    for end in (
        lambda state: state.end("timeout"),
        lambda state: state.apply(step(0, [3], "length")),
    ):
        state = make_state(stop="c", max_tokens=9, scope=AfterSpace)
        state.apply(step(0, [0, 3, 0]))
        assert state.next_output().outputs[0].text == "ac"
        end(state)
        assert state.next_output().outputs[0].text.startswith("a")


class Later(StopScope):
    """Knows of a text once the next has come. Stop texts count everywhere."""

    def __init__(self, prompt_end):
        self._last = 0

    def push(self, text):
        known, self._last = self._last, len(text)
        return [(known, True)]

    def finish(self):
        return [(self._last, True)]


def test_what_came_before_a_sequence_may_stop_ends_it_no_later_either():
    state = make_state(stop="a", max_tokens=9, min_tokens=1, scope=Later)
    for tokens, reason in (([0], None), ([3], None), ([3], "length")):
        state.apply(step(0, tokens, reason))
    assert [(one.text, one.finish_reason) for one in state.snapshot().outputs] == [
        ("acc", "length")
    ]


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_what_is_known_when_a_request_fails_is_no_end_of_its_own(reason):
    state = make_state(stop="a", max_tokens=9, scope=Later)
    state.apply(step(0, [3]))
    state.apply(step(0, [0]))
    state.apply(step(0, [], reason))
    assert [(one.text, one.finish_reason) for one in state.snapshot().outputs] == [("ca", reason)]


def test_log_probabilities_are_nothing_to_the_garbage_collector():
    """It would stop everybody while it looks through millions of them."""
    state = make_state(max_tokens=3, logprobs=2)
    state.apply(step(0, [0], logprobs=[TokenLogprobs([0, 0, 3], [-0.5, -0.5, -1.0], 1)]))
    [table] = state.next_output().outputs[0].logprobs
    assert len(table) == 2 and not any(map(gc.is_tracked, (table, *table.values())))


def test_each_kind_gives_what_it_says():
    states = {kind: make_state(kind, max_tokens=3, logprobs=0) for kind in RequestOutputKind}
    seen = {kind: [] for kind in RequestOutputKind}
    for token, reason in ((0, None), (3, None), (0, "length")):
        for kind, state in states.items():
            state.apply(step(0, [token], reason, logprobs=[TokenLogprobs([token], [-1.0], 1)]))
            if (output := state.next_output()) is not None:
                seen[kind].append(
                    (output.outputs[0].text, len(output.outputs[0].logprobs), output.finished)
                )
            assert state.next_output() is None
    assert seen == {
        RequestOutputKind.CUMULATIVE: [("a", 1, False), ("ac", 2, False), ("aca", 3, True)],
        RequestOutputKind.DELTA: [("a", 1, False), ("c", 1, False), ("a", 1, True)],
        RequestOutputKind.FINAL_ONLY: [("aca", 3, True)],
    }


def test_what_a_slow_caller_missed_comes_as_one_delta():
    state = make_state(max_tokens=9)
    for token in (0, 3, 0):
        state.apply(step(0, [token]))
    assert state.next_output().outputs[0].text == "aca"


def test_the_best_of_several_come_at_the_end_only():
    state = make_state(n=1, best_of=2, max_tokens=2)
    for index, logprob in ((0, -2.0), (1, -1.0)):
        state.apply(step(index, [0], logprobs=[TokenLogprobs([0], [logprob], 1)]))
        assert state.next_output() is None
    for index in (0, 1):
        state.apply(step(index, [3], "length", logprobs=[TokenLogprobs([3], [-1.0], 1)]))
    (best,) = state.next_output().outputs
    assert (best.index, best.text, best.cumulative_logprob) == (0, "ac", -2.0)


def test_a_request_that_waits_holds_no_decode_stream():
    state = make_state(n=2)
    assert state.renderer.num_streams == 0
    state.apply(step(1, [0]))
    assert state.renderer.num_streams == 1


def test_sequences_are_made_with_their_first_output(monkeypatch):
    made = []
    monkeypatch.setattr(
        request_state,
        "SequenceState",
        lambda index, *how: made.append(index) or SequenceState(index, *how),
    )
    state = make_state(n=128)
    assert not made
    state.apply(step(7, [0]))
    state.apply(step(2, [0]))
    assert made == [7, 2] and [one.index for one in state.delta().outputs] == [2, 7]
    state.end("abort")
    assert [one.index for one in state.snapshot().outputs] == list(range(128)) and state.finished


def test_an_end_from_outside_shows_what_was_held_back():
    state = make_state(stop="ab", max_tokens=9)
    state.apply(step(0, [0]))
    assert state.next_output().outputs[0].text == ""
    state.end("abort")
    assert (state.next_output().outputs[0].text, state.finished) == ("a", True)


def test_a_renderer_that_fails_on_the_last_token_ends_the_request():
    """Nothing would tell its caller otherwise: there is no output to come."""
    state = make_state(max_tokens=1)
    state.renderer.decode_stream = lambda *args, **options: Broken()
    with pytest.raises(ValueError, match="broken"):
        state.apply(step(0, [0], "length"))
    assert not state.finished
    state.end("error", "it is broken")
    assert state.finished
    [output] = state.next_output().outputs
    assert (output.finish_reason, output.token_ids) == ("error", [0])


class Broken(Letters):
    def push(self, token_ids):
        raise ValueError("broken")
