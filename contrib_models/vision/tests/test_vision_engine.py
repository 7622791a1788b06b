"""Vision models through renderer and engine: tokens are those that transformers' processor and model make of the same pictures."""

from __future__ import annotations

import pytest
from toolkit_lm import LLM, SamplingParams
from vision_checkpoints import drawings, make_subject

OPTIONS = {"device": "cpu", "max_model_len": 192, "num_kv_blocks": 200, "max_num_seqs": 8}
COUNT = 12
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
FAMILIES = ["llava", "llava, SigLIP and Qwen2", "llava, Mistral", "gemma3", "gemma3, spans wider than windows"]
TEXTS = [
    "What is in these?\n{0}\nand {0}, or\n\n{0} together? Say it.",
    "{0}What is this?",
    "No picture in this one, only some text.",
    "user\n{0}{0}",
]
"""With as many pictures as places."""


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request, tmp_path_factory):
    return make_subject(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture(scope="module")
def expected(subject):
    """Text, pictures, and what transformers makes of them: tokens of the prompt, and drawn."""
    found, pool = [], drawings(6)
    for text in TEXTS:
        images, text = pool[: text.count("{0}")], text.format(subject.mark)
        pool = pool[len(images) :]
        found.append((text, images, *subject.greedy(text, images, COUNT)))
    return found


def prompt_of(text, images) -> dict:
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 29},
        {"max_num_batched_tokens": 29, "enable_prefix_caching": False, "block_size": 8},
        {"block_size": 4},
    ],
    ids=["whole", "uncached", "chunked", "chunked and uncached", "small blocks"],
)
def test_greedy_tokens(subject, expected, options):
    with LLM(str(subject.folder), **OPTIONS, **options) as llm:
        for _ in range(2):  # again, from the prefix cache
            outputs = llm.generate([prompt_of(text, images) for text, images, *_ in expected], GREEDY)
            for output, (_, _, prompt, drawn) in zip(outputs, expected, strict=True):
                assert output.prompt_token_ids == prompt
                assert list(output.outputs[0].token_ids) == drawn
