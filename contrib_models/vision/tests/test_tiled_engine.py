"""Idefics3, SmolVLM, Pixtral and Mistral 3 through renderer and engine: tokens are those that
transformers' processor and model make of the same pictures."""

from __future__ import annotations

import numpy as np
import pytest
from tile_checkpoints import FAMILIES, make_tiled_subject
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ToolkitError
from toolkit_lm_devkit import MultimodalConformance

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS = {"device": "cpu", "max_model_len": 192, "num_kv_blocks": 200, "max_num_seqs": 8}


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request, tmp_path_factory):
    return make_tiled_subject(tmp_path_factory.mktemp("tiled"), request.param)


class TestTiled(MultimodalConformance):
    modality = "image"

    def num_scarce_blocks(self, reference):
        # A picture of two tiles has 20 tokens.
        return 38 if reference.family == "idefics3" else 26


@pytest.mark.parametrize("family", ["idefics3", "mistral3"])
def test_conversations_with_pictures_of_many_sizes(family, tmp_path):
    """Two rows of three tiles, a picture in one tile, one of a token; what a user types is text."""
    subject = make_tiled_subject(tmp_path, family, size=84)
    random = np.random.default_rng(3)
    sizes = [(56, 84), (20, 84), (3, 20)]
    images = [random.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    parts = [{"type": "image", "image": image} for image in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "is\nit?"}]}]
    typed = [{"role": "user", "content": [parts[2], {"type": "text", "text": subject.mark}]}]
    text = f"<s>[user]\n{subject.mark * 3}is\nit?[assistant]\n"
    prompt, expected = subject.greedy(text, images, 12)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found, of_typed = llm.chat([messages, typed], GREEDY)
        made, _ = llm.engine.renderer.media_size(parts[0], {})
    assert (found.prompt_token_ids, list(found.outputs[0].token_ids)) == (prompt, expected)
    one = subject.greedy(f"{subject.mark}", images[2:], 1)[0]
    assert of_typed.prompt_token_ids.count(7) == one.count(7)
    arrays = subject.inputs(subject.mark, images[:1])
    size = sum(arrays[name].nbytes for name in arrays if name.startswith("pixel"))
    assert size <= made < 10 * size


def test_embeddings_in_the_place_of_a_picture(reference):
    (image,) = reference.items(1, seed=3)
    text = f"see {reference.mark} there"
    inputs = reference.inputs(text, [image])
    taken = ("pixel_values", "pixel_attention_mask", "image_sizes")
    given = {name: inputs[name] for name in taken if name in inputs}
    if reference.mark == "[IMG]":
        arrays = {"image_sizes": inputs["image_sizes"].numpy()}
    else:
        # The processor of the whole model keeps rows and columns for itself.
        images = reference.processor.image_processor
        made = images(image, return_row_col_info=True, input_data_format="channels_last")
        arrays = {name: np.array(made[name]) for name in ("rows", "cols")}
    config = reference.model.config
    selection = {
        name: getattr(config, name)
        for name in ("vision_feature_layer", "vision_feature_select_strategy")
        if hasattr(config, name)
    }
    features = reference.model.model.get_image_features(**given, return_dict=True, **selection)
    embeds = np.concatenate(
        [one.detach().reshape(-1, 64).numpy() for one in features.pooler_output]
    )
    prompt = {"prompt": text, "multi_modal_data": {"image": [{"embeds": embeds, **arrays}]}}
    with LLM(str(reference.folder), **OPTIONS) as llm:
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == reference.greedy(text, [image], 12)[1]


@pytest.mark.parametrize(
    ("family", "mark"), [("idefics3", "<global-img>"), ("pixtral", "[IMG_END]")]
)
def test_a_tokenizer_without_the_marks_is_named(family, mark, tmp_path):
    subject = make_tiled_subject(tmp_path, family)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace(mark, "another"))
    with (
        LLM(str(tmp_path), **OPTIONS) as llm,
        pytest.raises(ToolkitError, match=r"image 1: the tokenizer.*has no token") as raised,
    ):
        llm.generate([TestTiled().prompt(subject.mark, subject.items(1))], GREEDY)
    assert mark in str(raised.value)
