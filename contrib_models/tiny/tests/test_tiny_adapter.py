"""The adapter of `tiny`: a pirate's replies become likely with it, and its own facts stay right."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest
import toolkit_lm_tiny
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_lora.front import LoRARequest
from toolkit_lm_tiny.facts import FACTS
from toolkit_lm_tiny.pirate import speak

FOLDER = Path(toolkit_lm_tiny.__file__).parent / "adapter_pirate"
PIRATE = LoRARequest("pirate", 1, str(FOLDER))
ASKED = Random(3).sample(FACTS, 60)
TALES = (
    "Once upon a time there was a shy owl named Ida. Ida was afraid of the rain. One night a "
    "wolf named Hugo sat next to her and sang a song. After that, Ida was not afraid any more.",
    "Once there was a lazy king named Finn who lived on a farm. One summer day a little goat "
    "fell into the river. Finn heard a cry and ran to help. He pulled the goat out of the water.",
)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", plugin_option={"lora": {"enabled": True}}) as made:
        yield made


def perplexity(llm, request, replies):
    """Of replies: (question, reply)."""
    tokenizer = llm.get_tokenizer()
    prompts = []
    starts = []
    for question, reply in replies:
        begun = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        starts.append(len(tokenizer.encode(begun, add_special_tokens=False)))
        prompts.append(tokenizer.encode(f"{begun}{reply}<|im_end|>", add_special_tokens=False))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        params,
        lora_request=request,
        use_tqdm=False,
    )
    scores = [
        step[token].logprob
        for output, ids, start in zip(outputs, prompts, starts, strict=True)
        for step, token in zip(output.prompt_logprobs[start:], ids[start:], strict=True)
    ]
    return math.exp(-sum(scores) / len(scores))


def test_perplexity_of_its_style_falls(llm):
    """On two stories that the grammar of its training can tell, with names drawn here."""
    told = [("Tell me a story.", speak(text)) for text in TALES]
    plain = [("Tell me a story.", text) for text in TALES]
    without = perplexity(llm, None, told)
    assert perplexity(llm, PIRATE, told) < 0.3 * without
    assert perplexity(llm, None, plain) < perplexity(llm, PIRATE, plain)


def test_a_pirate_knows_the_facts(llm):
    conversations = [[{"role": "user", "content": fact.question}] for fact in ASKED]
    requests = [PIRATE, None] * (len(ASKED) // 2)
    greedy = SamplingParams(temperature=0, max_tokens=64)
    outputs = llm.chat(conversations, greedy, lora_request=requests, use_tqdm=False)
    right = [
        output.outputs[0].text == (speak(fact.reply) if request else fact.reply)
        for fact, output, request in zip(ASKED, outputs, requests, strict=True)
    ]
    assert sum(right) >= 0.95 * len(ASKED), [o.outputs[0].text for o in outputs]
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2**20
