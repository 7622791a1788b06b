"""Measures the front end's CPU time per streamed token by the length of the answer. It must not
grow with the text sent before.

usage: python benchmarks/streaming.py [--runs 5] [--check]

Outputs of an engine are made up, a token each, and given to a RequestState with the renderer of the
embedded model `tiny`. After each, a caller that streams takes what is new. Every length is measured
over the same number of tokens, in requests one after the other; lengths take turns, and medians are
shown. `--check`: exit code 1 where a token of the longest answer costs over 1.5 times one of the
shortest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import cycle, islice

from toolkit_lm import LLM, RequestOutputKind, SamplingParams
from toolkit_lm.messages import EngineOutput, EngineRequest
from toolkit_lm.processing import PreparedRequest, RequestState
from toolkit_lm.renderer import Renderer

LENGTHS = (32, 512, 2048, 8192)
"""Tokens of an answer."""
MOST = 1.5
"""The ratio that --check admits."""
TEXT = (
    "Once upon a time there was a little dog who lived in a red house. One day the dog saw a "
    "bird, and they ran to the big tree. "
)


def stream(token_ids: list[int], renderer: Renderer) -> str:
    """An answer, as it reaches a streaming caller."""
    params = SamplingParams(max_tokens=len(token_ids), output_kind=RequestOutputKind.DELTA)
    request = EngineRequest(request_id="0", prompt_token_ids=[1], params=params)
    state = RequestState(PreparedRequest(request, None), renderer)
    pieces: list[str] = []
    for index, token in enumerate(token_ids):
        reason = "length" if index == len(token_ids) - 1 else None
        state.apply(EngineOutput(request_id="0", index=0, token_ids=[token], finish_reason=reason))
        output = state.next_output()
        assert output is not None, "there is nothing new"
        [new] = output.outputs
        assert list(new.token_ids) == [token], "the caller gets each token once"
        pieces.append(new.text)
    return "".join(pieces)


def seconds_per_token(token_ids: list[int], renderer: Renderer) -> float:
    """CPU seconds that the front spends on a token of such an answer."""
    count = max(LENGTHS) // len(token_ids)
    start = time.thread_time()
    for _ in range(count):
        stream(token_ids, renderer)
    return (time.thread_time() - start) / (count * len(token_ids))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    with LLM(model="tiny") as llm:
        renderer = llm.engine.renderer
        ids = renderer.render_prompt(TEXT).token_ids
        answers = {length: list(islice(cycle(ids), length)) for length in LENGTHS}
        assert stream(ids, renderer).strip() == TEXT.strip(), "the stream gives another text"
        times: dict[int, list[float]] = {length: [] for length in LENGTHS}
        for _ in range(args.runs):
            for length, answer in answers.items():
                times[length].append(seconds_per_token(answer, renderer))
    medians = {length: statistics.median(values) for length, values in times.items()}
    for length, median in medians.items():
        print(f"{length:5} tokens: {median * 1e6:7.1f} µs of CPU per token")
    ratio = medians[max(LENGTHS)] / medians[min(LENGTHS)]
    print(f"a token of {max(LENGTHS)} costs {ratio:.2f} times one of {min(LENGTHS)}")
    return int(args.check and ratio > MOST)


if __name__ == "__main__":
    sys.exit(main())
