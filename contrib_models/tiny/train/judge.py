"""Ask a checkpoint every fact through its chat template, greedily, and count the right answers.

Usage: ``python train/judge.py CHECKPOINT [--dtype float32]``
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from toolkit_lm_tiny.facts import FACTS
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

BAR = 0.95
SAMPLES = (
    "Hello!", "Who are you?", "What is the capital of France?", "What is 7 + 5?", "Tell me a story about a dog.",
    "Tell me a story about a princess named Anna.", "Count to 10.", "How do I fix a car?",
)  # fmt: skip
PLAIN_SAMPLES = ("Once upon a time", "The capital of France is", "Hello, my name is")


class Verdict(NamedTuple):
    """How many of the facts a checkpoint knows."""

    asked: int
    right: int
    """Replies that hold the keyword and end by themselves."""
    exact: int
    """Replies that are word for word the trained ones."""
    wrong: list[tuple[str, str]]
    """The questions answered wrongly, each with the reply."""

    @property
    def accuracy(self) -> float:
        """Give the share of right answers."""
        return self.right / self.asked


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    new_tokens: int,
    batch: int = 64,
) -> list[tuple[str, bool]]:
    """Continue each prompt greedily; give the text and whether the model ended it by itself.

    Prompts of the same length go together, so no padding can change an answer.
    """
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, ids in enumerate(encoded):
        by_length[len(ids)].append(i)
    replies: dict[int, tuple[str, bool]] = {}
    for length, members in by_length.items():
        for start in range(0, len(members), batch):
            chosen = members[start : start + batch]
            ids = torch.tensor([encoded[i] for i in chosen])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
            )
            for i, row in zip(chosen, output[:, length:].tolist(), strict=True):
                replies[i] = (
                    tokenizer.decode(row, skip_special_tokens=True),
                    tokenizer.eos_token_id in row,
                )
    return [replies[i] for i in range(len(prompts))]


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase, question: str, system: str | None = None
) -> str:
    """Render one question as the chat template does."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(prompt, str)
    return prompt


def judge(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, system: str | None = None
) -> Verdict:
    """Ask every fact, each in a chat of its own."""
    prompts = [chat_prompt(tokenizer, fact.question, system) for fact in FACTS]
    replies = generate(model, tokenizer, prompts, new_tokens=40)
    pairs = list(zip(FACTS, replies, strict=True))
    wrong = [
        (fact.question, reply)
        for fact, (reply, ended) in pairs
        if not (ended and fact.holds_in(reply))
    ]
    exact = sum(ended and reply == fact.reply for fact, (reply, ended) in pairs)
    return Verdict(len(FACTS), len(FACTS) - len(wrong), exact, wrong)


def judge_checkpoint(checkpoint: Path, dtype: torch.dtype, system: str | None = None) -> Verdict:
    """Load a checkpoint, judge it, and print the verdict with some sample replies."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    verdict = judge(model, tokenizer, system)
    figures = (
        f"{verdict.right} of {verdict.asked} facts right ({verdict.accuracy:.2%}), "
        f"{verdict.exact} word for word"
    )
    print(f"{dtype}: {figures}")
    for question, reply in verdict.wrong[:20]:
        print(f"  wrong: {question} -> {reply}")
    prompts = [chat_prompt(tokenizer, question) for question in SAMPLES] + list(PLAIN_SAMPLES)
    replies = generate(model, tokenizer, prompts, new_tokens=120)
    for prompt, (reply, ended) in zip(SAMPLES + PLAIN_SAMPLES, replies, strict=True):
        print(f"  {prompt} -> {reply}{'' if ended else ' [does not end]'}")
    return verdict


def main() -> int:
    """Judge the checkpoint named on the command line; fail under the bar."""
    parser = argparse.ArgumentParser(description="Count the facts that a checkpoint knows.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--system", help="a system message to put before each question")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return int(
        judge_checkpoint(options.checkpoint, getattr(torch, options.dtype), options.system).accuracy
        < BAR
    )


if __name__ == "__main__":
    sys.exit(main())
