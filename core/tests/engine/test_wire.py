"""Messages between a front and its engine process."""

from __future__ import annotations

import pytest
from toolkit_lm.engine import wire
from toolkit_lm.messages import EngineRequest, SequenceInputs
from toolkit_lm.params import SamplingParams


def request(number, params, inputs):
    return EngineRequest(
        request_id=str(number), prompt_token_ids=[number], params=params, inputs=inputs
    )


def sent(requests):
    message = wire.encode(wire.add(requests))
    return message, wire.added(wire.decode_command(message))


def test_what_requests_share_is_sent_once():
    params = SamplingParams(stop=["a stop text"])
    inputs = SequenceInputs(bad_words=[[1, 2]])
    requests = [request(number, params, inputs) for number in range(9)]
    message, arrived = sent(requests)
    assert arrived == requests == [request(number, params, inputs) for number in range(9)]
    assert message.count(b"a stop text") == 1
    assert len({id(one.params) for one in arrived}) == len({id(one.inputs) for one in arrived}) == 1


@pytest.mark.parametrize("count", [0, 1, 3])
def test_requests_of_their_own_stay_so(count):
    requests = [
        request(number, SamplingParams(seed=number), SequenceInputs(pooling_start=number))
        for number in range(count)
    ]
    assert sent(requests)[1] == requests
