"""State of a request on one engine, and the message about it to another."""

from __future__ import annotations

from toolkit_lm.events import RequestEvent
from toolkit_lm.messages import EncoderInput, EngineOutput, EngineRequest, TokenLogprobs
from toolkit_lm.params import SamplingParams
from toolkit_lm_data_parallel.in_flight import InFlight


def in_flight(**fields) -> InFlight:
    params = fields.pop("params", SamplingParams(n=2, max_tokens=8))
    return InFlight(
        EngineRequest(
            request_id="r", prompt_token_ids=[1, 2, 3], params=params, max_output_tokens=8, **fields
        ),
        [],
    )


def output(index: int, token_ids: list[int], **fields) -> EngineOutput:
    return EngineOutput(request_id="r", index=index, token_ids=token_ids, **fields)


def event(kind: str, time: float, **fields) -> RequestEvent:
    return RequestEvent(
        kind=kind, request_id="r", time=time, arrival_time=0.0, num_prompt_tokens=3, **fields
    )


def test_tokens_in_flight_are_of_the_prompt_and_of_what_has_not_ended():
    one = in_flight(encoder=EncoderInput.of_tokens([1] * 5))
    counts = [one.num_tokens]
    for news in (
        output(0, [4, 5]),
        output(1, [4]),
        output(0, [6], finish_reason="length"),
        output(1, [7], finish_reason="stop"),
    ):
        one.update(news)
        counts.append(one.num_tokens)
    assert counts == [8, 10, 11, 9, 8] and one.has_ended


def test_it_goes_on_where_it_stood():
    one = in_flight()
    one.update(output(0, [4, 5], sampler_state={"mirostat": {"mu": 2.0}}))
    one.update(output(0, [6], finish_reason="stop", sampler_state={"mirostat": {"mu": 3.0}}))
    one.update(
        output(
            1,
            [7],
            prompt_logprobs=[TokenLogprobs([2], [-1.0], 1)],
            sampler_state={"mirostat": {"mu": 4.0}},
        )
    )
    message = one.message()
    assert [(b.token_ids, b.sampler_state, b.finish_reason) for b in message.begun] == [
        ([4, 5, 6], {"mirostat": {"mu": 3.0}}, "stop"),
        ([7], {"mirostat": {"mu": 4.0}}, None),
    ]
    assert message.num_prompt_logprobs == 1 and one.unfinished == [1]
    # Later tokens are not in the message that was sent.
    one.update(output(1, [8]))
    assert message.begun[1].token_ids == [7]


def test_what_ends_from_outside_stays_ended():
    one = in_flight()
    one.update(output(0, [4]))
    one.end("stop", 0)
    one.end("stop", 0)
    assert (
        one.message().begun[0].finish_reason == "stop" and not one.has_ended and one.num_tokens == 3
    )


def test_what_has_had_nothing_and_searches_and_pooling_begin_anew():
    assert in_flight().message().begun == []
    assert in_flight(params=SamplingParams(n=2, use_beam_search=True)).message().begun == []
    assert in_flight(params=SamplingParams(), draws_tokens=False).message().begun == []


def test_prefixes_that_another_engine_finds_are_not_told():
    one = in_flight()
    one.update(output(0, [4], num_cached_tokens=2))
    one.num_moves = 1
    later = output(0, [5], num_cached_tokens=64)
    one.update(later)
    assert later.num_cached_tokens == 2


def test_its_beginning_is_told_once():
    one = in_flight()
    forwarded = [
        one.forwarded(event("queued", 1.0)),
        one.forwarded(event("scheduled", 2.0, scheduled_time=2.0)),
    ]
    forwarded.append(
        one.forwarded(event("first_token", 3.0, scheduled_time=2.0, first_token_time=3.0))
    )
    assert [each.kind for each in forwarded] == ["queued", "scheduled", "first_token"]
    one.num_moves = 1
    assert [
        one.forwarded(event(kind, 5.0, scheduled_time=5.0))
        for kind in ("queued", "scheduled", "first_token")
    ] == [None] * 3
    end = one.forwarded(
        event("finished", 9.0, scheduled_time=5.0, first_token_time=6.0, num_output_tokens=7)
    )
    assert (end.scheduled_time, end.first_token_time, end.num_output_tokens) == (2.0, 3.0, 7)


def test_its_end_is_told_where_its_engine_has_not_lived_to():
    one = in_flight()
    assert one.untold("stop") is None
    one.forwarded(event("queued", 1.0))
    one.forwarded(event("first_token", 2.0, first_token_time=2.0))
    one.update(output(0, [7, 8]))
    end = one.untold("stop")
    assert (end.kind, end.num_output_tokens, end.first_token_time, end.finish_reason) == (
        "finished",
        2,
        2.0,
        "stop",
    )
    assert one.untold("abort").kind == "aborted"
