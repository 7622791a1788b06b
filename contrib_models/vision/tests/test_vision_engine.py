"""Vision models through renderer and engine: tokens are those that transformers' processor and model make of the same pictures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ToolkitError
from toolkit_lm.events import RequestEvent
from toolkit_lm.plugin import hookimpl
from vision_checkpoints import drawings, make_subject
from vision_families import BEGIN, IMAGE

OPTIONS = {"device": "cpu", "max_model_len": 192, "num_kv_blocks": 200, "max_num_seqs": 8}
COUNT = 12
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
FAMILIES = [
    "llava",
    "llava, SigLIP and Qwen2",
    "llava, Mistral",
    "gemma3",
    "gemma3, a token for each patch",
    "gemma3, spans wider than windows",
]
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


class Preemptions:
    """A plugin that counts them."""

    name = "preemptions"

    def __init__(self):
        self.count = 0

    @hookimpl
    def toolkit_event(self, event):
        self.count += isinstance(event, RequestEvent) and event.kind == "preempted"


def prompt_of(text, images) -> dict:
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 29},
        {"max_num_batched_tokens": 29, "enable_prefix_caching": False, "block_size": 8},
        {"block_size": 4},
    ],
    ids=["whole", "chunked", "chunked and uncached", "small blocks"],
)
def test_greedy_tokens(subject, expected, options):
    with LLM(str(subject.folder), **OPTIONS, **options) as llm:
        for _ in range(2):  # again, from the prefix cache
            outputs = llm.generate([prompt_of(text, images) for text, images, *_ in expected], GREEDY)
            for output, (_, _, prompt, drawn) in zip(outputs, expected, strict=True):
                assert output.prompt_token_ids == prompt
                assert list(output.outputs[0].token_ids) == drawn


def drawn(llm, prompts, params=GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module", params=["llava", "gemma3, a token for each patch"])
def other(request, tmp_path_factory):
    return make_subject(tmp_path_factory.mktemp("vision"), request.param)


def test_a_prefix_that_ends_inside_a_picture(other):
    """Blocks of 8: what two prompts share ends inside their last picture, or the picture is not the same."""
    a, b = drawings(2, seed=5)
    with LLM(str(other.folder), **{**OPTIONS, "num_kv_blocks": 2000}, block_size=8) as llm:
        for images, ending in (([a, b], " x"), ([a, b], " y"), ([a, a], " x"), ([b, b], " x"), ([a, b], "")):
            for num_letters in (0, 2, 5):
                text = f"{'p' * num_letters}{other.mark} and {other.mark}{ending}"
                output = llm.generate([prompt_of(text, images)], GREEDY)[0]
                prompt, tokens = other.greedy(text, images, COUNT)
                assert output.prompt_token_ids == prompt
                assert list(output.outputs[0].token_ids) == tokens
                if images[0] is a and ending in (" y", ""):
                    assert output.num_cached_tokens >= len(prompt) - 16


def test_preempted_prompts(other):
    """More prompts than blocks have room for, computed again where they are thrown out."""
    images, count = drawings(8, seed=9), 30
    texts = [f"{i} {other.mark} is? {'o' * i}{other.mark}" for i in range(4)]
    prompts = [prompt_of(text, images[2 * i : 2 * i + 2]) for i, text in enumerate(texts)]
    expected = [other.greedy(text, prompt["multi_modal_data"]["image"], count)[1] for text, prompt in zip(texts, prompts, strict=True)]
    preemptions = Preemptions()
    blocks = 48 if other.is_gemma else 26
    with LLM(str(other.folder), **{**OPTIONS, "num_kv_blocks": blocks, "max_model_len": 96}, block_size=4, plugins=[preemptions]) as llm:
        assert drawn(llm, prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)) == expected
    assert preemptions.count


def test_embeddings_in_the_place_of_a_picture(other):
    (image,) = drawings(1, seed=3)
    text = f"see {other.mark} there"
    pixels = other.inputs(text, [image])["pixel_values"]
    config = other.model.config
    selection = {
        name: getattr(config, name) for name in ("vision_feature_layer", "vision_feature_select_strategy") if hasattr(config, name)
    }
    with torch.inference_mode():
        embeds = other.model.get_image_features(pixels, return_dict=True, **selection).pooler_output[0].numpy()
    with LLM(str(other.folder), **OPTIONS) as llm:
        pictured, given = drawn(llm, [prompt_of(text, [image]), {"prompt": text, "multi_modal_data": {"image": [embeds]}}])
    assert pictured == given == other.greedy(text, [image], COUNT)[1]


def test_in_a_process_of_its_own(other):
    images = drawings(2, seed=4)
    text = f"{other.mark} or {other.mark}?"
    expected = other.greedy(text, images, COUNT)[1]
    with LLM(str(other.folder), **OPTIONS, engine_process=True) as llm:
        for _ in range(2):  # again, without the pictures' data
            assert drawn(llm, [prompt_of(text, images), prompt_of(text, images)]) == [expected] * 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"image": drawings(1)}, "placeholders"),
        ({"image": [np.zeros((3, 64), np.float32)] * 2}, r"image 1: .*must have the shape \[\d+, 64\], not \[3, 64\]"),
        ({"video": drawings(2)}, "takes no video"),
    ],
)
def test_what_is_refused(other, data, message):
    good = prompt_of(f"{other.mark}{other.mark}", drawings(2))
    with LLM(str(other.folder), **OPTIONS) as llm:
        with pytest.raises(ToolkitError, match=message):
            llm.generate([{"prompt": f"{other.mark}{other.mark}", "multi_modal_data": data}], GREEDY)
        assert len(drawn(llm, [good])[0]) == COUNT


def test_placeholders_without_an_item_are_refused(other):
    """In a prompt of text or of tokens. Such tokens can be asked for as any others elsewhere."""
    text, token = f"a{other.mark}b", BEGIN if other.is_gemma else IMAGE
    with LLM(str(other.folder), **OPTIONS) as llm:
        for given in (text, {"prompt": text}, {"prompt": text, "multi_modal_data": {"image": []}}, {"prompt_token_ids": [5, token]}):
            with pytest.raises(ToolkitError, match="1 placeholders of modality 'image'"):
                llm.generate([given], GREEDY)
        assert llm.generate(["a b"], SamplingParams(max_tokens=2, bad_words=[other.mark]))[0].outputs


def test_a_picture_that_no_step_has_room_for(other):
    """Gemma 3's are computed whole; LLaVA's in parts."""
    options = {**OPTIONS, "max_num_batched_tokens": 12}
    (image,) = drawings(1)
    text = f"see {other.mark}"
    if other.is_gemma:
        with pytest.raises(ToolkitError, match="max_num_batched_tokens"), LLM(str(other.folder), **options) as llm:
            drawn(llm, [prompt_of(text, [image])])
    else:
        with LLM(str(other.folder), **options) as llm:
            assert drawn(llm, [prompt_of(text, [image])]) == [other.greedy(text, [image], COUNT)[1]]


def test_logprobs_of_prompts(other):
    """At every token, those of pictures too: in steps that end anywhere."""
    (a, b), params = drawings(2, seed=6), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    text = f"first {other.mark} then {other.mark} and the rest of it"
    inputs = other.inputs(text, [a, b])
    with torch.inference_mode():
        logprobs = other.model(**inputs).logits[0].log_softmax(-1)
    tokens = inputs["input_ids"][0]
    expected = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].tolist()
    for budget in (1024, 23):
        with LLM(str(other.folder), **OPTIONS, max_num_batched_tokens=budget) as llm:
            found = llm.generate([prompt_of(text, [a, b])], params)[0].prompt_logprobs
        assert [one[token].logprob for one, token in zip(found[1:], tokens[1:].tolist(), strict=True)] == pytest.approx(expected, abs=1e-3)


def test_several_sequences_of_a_prompt(other):
    images = drawings(2, seed=8)
    text = f"{other.mark}, {other.mark}!"
    expected = other.greedy(text, images, COUNT)[1]
    with LLM(str(other.folder), **OPTIONS, max_num_batched_tokens=25) as llm:
        drawn = SamplingParams(temperature=1e-6, n=3, max_tokens=COUNT, ignore_eos=True, seed=0)
        outputs = llm.generate([prompt_of(text, images)], drawn)[0].outputs
    assert [list(output.token_ids) for output in outputs] == [expected] * 3


def test_conversations(other):
    """Pictures stand where the template has them; what a user types is text."""
    a, b = drawings(2, seed=7)
    parts = [
        {"type": "image", "image": a},
        {"type": "text", "text": "is it\n"},
        {"type": "image", "image": b},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": parts}]
    typed = [{"role": "user", "content": [*parts[:1], {"type": "text", "text": f"what does {other.mark} mean?"}]}]
    text = other.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt, expected = other.greedy(text, [a, b], COUNT)
    with LLM(str(other.folder), **OPTIONS) as llm:
        found, of_typed = llm.chat([messages, typed], GREEDY)
    assert (found.prompt_token_ids, list(found.outputs[0].token_ids)) == (prompt, expected)
    assert of_typed.prompt_token_ids.count(prompt[prompt.index(BEGIN if other.is_gemma else IMAGE)]) == (1 if other.is_gemma else 16)
