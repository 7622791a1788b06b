"""Vision models through renderer and engine: tokens are those that transformers' processor and
model make of the same pictures."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ToolkitError
from toolkit_lm_devkit import MultimodalConformance
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


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request, tmp_path_factory):
    return make_subject(tmp_path_factory.mktemp("vision"), request.param)


class TestVision(MultimodalConformance):
    modality = "image"

    def num_scarce_blocks(self, reference):
        # A window of Gemma's is wider than a prompt, but in one family.
        return {"llava, Mistral": None, "gemma3, spans wider than windows": None}.get(
            reference.family, 48 if reference.is_gemma else 26
        )


def prompt_of(text, images) -> dict:
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}


def drawn(llm, prompts, params=GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module", params=["llava", "gemma3, a token for each patch"])
def other(request, tmp_path_factory):
    return make_subject(tmp_path_factory.mktemp("vision"), request.param)


def test_embeddings_in_the_place_of_a_picture(other):
    (image,) = drawings(1, seed=3)
    text = f"see {other.mark} there"
    pixels = other.inputs(text, [image])["pixel_values"]
    config = other.model.config
    selection = {
        name: getattr(config, name)
        for name in ("vision_feature_layer", "vision_feature_select_strategy")
        if hasattr(config, name)
    }
    with torch.inference_mode():
        embeds = (
            other.model.get_image_features(pixels, return_dict=True, **selection)
            .pooler_output[0]
            .numpy()
        )
    with LLM(str(other.folder), **OPTIONS) as llm:
        pictured, given = drawn(
            llm,
            [prompt_of(text, [image]), {"prompt": text, "multi_modal_data": {"image": [embeds]}}],
        )
    assert pictured == given == other.greedy(text, [image], COUNT)[1]


def test_placeholders_among_tokens_are_refused(other):
    """Such tokens can be asked for as any others elsewhere."""
    token = BEGIN if other.is_gemma else IMAGE
    with LLM(str(other.folder), **OPTIONS) as llm:
        with pytest.raises(ToolkitError, match="1 placeholders of modality 'image'"):
            llm.generate([{"prompt_token_ids": [5, token]}], GREEDY)
        assert llm.generate(["a b"], SamplingParams(max_tokens=2, bad_words=[other.mark]))[
            0
        ].outputs


def test_a_picture_that_no_step_has_room_for(other):
    """Gemma 3's are computed whole; LLaVA's in parts."""
    options = {**OPTIONS, "max_num_batched_tokens": 12}
    (image,) = drawings(1)
    text = f"see {other.mark}"
    if other.is_gemma:
        with (
            pytest.raises(ToolkitError, match="max_num_batched_tokens"),
            LLM(str(other.folder), **options) as llm,
        ):
            drawn(llm, [prompt_of(text, [image])])
    else:
        with LLM(str(other.folder), **options) as llm:
            assert drawn(llm, [prompt_of(text, [image])]) == [other.greedy(text, [image], COUNT)[1]]


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
    typed = [
        {
            "role": "user",
            "content": [*parts[:1], {"type": "text", "text": f"what does {other.mark} mean?"}],
        }
    ]
    text = other.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt, expected = other.greedy(text, [a, b], COUNT)
    with LLM(str(other.folder), **OPTIONS) as llm:
        found, of_typed = llm.chat([messages, typed], GREEDY)
    assert (found.prompt_token_ids, list(found.outputs[0].token_ids)) == (prompt, expected)
    assert of_typed.prompt_token_ids.count(
        prompt[prompt.index(BEGIN if other.is_gemma else IMAGE)]
    ) == (1 if other.is_gemma else 16)
