"""Greedy requests with the answers that each gets alone: one engine, one sequence at a time,
nothing cached, float32."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from toolkit_lm import LLM, SamplingParams
from toolkit_lm_devkit.equality import SURE_MARGIN
from toolkit_lm_tiny.facts import FACTS

HEROES = ("dog", "cat", "fox", "owl", "robot", "dragon", "queen", "boy")
NAMES = ("Max", "Anna", "Leo", "Mia", "Tom", "Zoe")
LONG_AGO = (
    "Once upon a time there was a small dog named Max. One day Max lost his red ball. He looked "
    "everywhere but could not find it. "
    "Then a friend named Mia came to help. They found the red ball under a tree, and Max was "
    "happy again. "
)
"""Common beginning of many prompts."""
MAX_MODEL_LEN = 256
MOST_TOKENS = 280
"""Tokens of all sequences of a request together; a little less than the pool holds."""


@dataclass(frozen=True)
class Job:
    """A request, and what its answer must be."""

    path: str
    body: dict[str, Any]
    size: int
    """Most tokens of prompt and output."""
    text: str
    """The certain part of the text: up to the first token whose choice is not clear (the two best
    logits are closer than the margin)."""
    whole: bool
    """Every choice was clear: `text`, `num_tokens` and `finish_reason` are the whole answer's."""
    num_tokens: int
    finish_reason: str

    def complaint(self, text: str, finish_reason: str | None) -> str | None:
        """Fault of an answer; None: it is right."""
        if not (text == self.text if self.whole else text.startswith(self.text)):
            return f"{self.body} gave {text!r}, not {self.text!r}"
        if self.whole and finish_reason != self.finish_reason:
            return f"{self.body} ended with {finish_reason!r}, not {self.finish_reason!r}"
        return None


def make_jobs(count: int, seed: int) -> list[Job]:
    """Chats, texts and token ids; long and short, with ends of every kind, many with one prefix."""
    rng = Random(seed)
    with LLM(
        "tiny",
        dtype="float32",
        max_num_seqs=1,
        enable_prefix_caching=False,
        max_model_len=MAX_MODEL_LEN,
    ) as llm:
        return [_job(llm, rng) for _ in range(count)]


def _job(llm: LLM, rng: Random) -> Job:
    asked: dict[str, Any]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": rng.randint(1, 100)}
    if rng.random() < 0.3:
        fields["stop"] = rng.choice([".", " the", "friend", "\n"])
    if rng.random() < 0.4:
        fields["ignore_eos"] = True
    if rng.random() < 0.4:
        messages = [{"role": "user", "content": rng.choice(FACTS).question}]
        path = "/v1/chat/completions"
        asked = {"messages": messages}
        token_ids = llm.engine.renderer.render_conversation(messages).token_ids
    else:
        text = (
            LONG_AGO * rng.randint(0, 2)
            + f"Once upon a time there was a {rng.choice(HEROES)} named {rng.choice(NAMES)}."
        )
        token_ids = llm.engine.renderer.render_prompt(text[: rng.randint(5, len(text))]).token_ids
        path = "/v1/completions"
        asked = {"prompt": token_ids}
    [output] = llm.generate(
        {"prompt_token_ids": token_ids}, SamplingParams(**fields, logprobs=2), use_tqdm=False
    )
    [answer] = output.outputs
    assert answer.logprobs is not None and answer.finish_reason is not None
    clear = [
        _margin([one.logprob for one in entries.values()]) > SURE_MARGIN
        for entries in answer.logprobs
    ]
    whole = all(clear)
    sure = (
        answer.text
        if whole
        else llm.engine.renderer.decode(
            answer.token_ids[: clear.index(False)], skip_special_tokens=True
        )
    )
    # A stop text may have cut it.
    text = min(sure, answer.text, key=len)
    return Job(
        path,
        {**asked, **fields},
        len(token_ids) + fields["max_tokens"],
        text,
        whole,
        len(answer.token_ids),
        answer.finish_reason,
    )


def _margin(logprobs: list[float]) -> float:
    """Between the two best: differences of log probabilities are those of logits."""
    best, second, *_ = sorted(logprobs, reverse=True)
    return best - second
