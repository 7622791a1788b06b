"""Images in conversations: the same tokens and arrays as transformers' own processors make of
them."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from seeing import GEMMA, LLAVA, QWEN, GemmaRules, LlavaRules, QwenRules, train_newlines
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor


class ImagesOnly(Qwen2VLProcessor):
    """Its part for videos needs torchvision."""

    def check_argument_for_proper_class(self, name, argument):
        return (
            None
            if name == "video_processor"
            else super().check_argument_for_proper_class(name, argument)
        )


def llava(tokenizer):
    images = CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    reference = fast(tokenizer, LLAVA, image_token="<image>")
    strategy = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(
        images, reference, patch_size=14, chat_template=LLAVA, **strategy
    ), LlavaRules


def gemma(tokenizer):
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    reference = fast(
        tokenizer,
        GEMMA,
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )
    return Gemma3Processor(images, reference, image_seq_length=4, chat_template=GEMMA), GemmaRules


def qwen(tokenizer):
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16})
    tokens = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    reference = fast(
        tokenizer,
        QWEN,
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        **tokens,
    )
    return ImagesOnly(images, reference, video_processor=None, chat_template=QWEN), QwenRules


def fast(tokenizer, template, **tokens):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        extra_special_tokens=tokens,
    )


@pytest.fixture(scope="module")
def tokenizer():
    return train_newlines()


@pytest.fixture(params=[llava, gemma, qwen], ids=lambda make: make.__name__)
def both(request, tokenizer, tmp_path, make_renderer):
    """Our renderer, and transformers' processor of the same checkpoint."""
    processor, rules = request.param(tokenizer)
    return seeing(processor, rules, tokenizer, tmp_path, make_renderer), processor


def seeing(processor, rules, tokenizer, folder, make_renderer):
    processor.image_processor.save_pretrained(folder)
    renderer = make_renderer(
        tokenizer,
        files={"chat_template.jinja": processor.chat_template},
        hf_config={"vocab_size": 400},
    )
    renderer.set_rules(rules(renderer.config))
    return renderer


def image(seed, width=70, height=50):
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    )


def picture(seed, *size):
    return {"type": "image", "image": image(seed, *size)}


def text(words):
    return {"type": "text", "text": words}


CHATS = {
    "one": [{"role": "user", "content": [text("What is this?"), picture(0)]}],
    "first": [{"role": "user", "content": [picture(0), text("\nWhat is this?\n\n")]}],
    "between": [
        {
            "role": "user",
            "content": [
                text("a\n"),
                picture(0),
                text("\nb"),
                picture(1, 40, 90),
                picture(2, 28, 28),
                text("c\n\n"),
            ],
        }
    ],
    "turns": [
        {"role": "system", "content": "user"},
        {"role": "user", "content": [picture(3), text("a"), text("b")]},
        {"role": "assistant", "content": [text("c\n")]},
        {"role": "user", "content": [text("d"), picture(0), picture(0)]},
    ],
    "none": [
        {"role": "user", "content": [text("What is"), text(" this?")]},
        {"role": "assistant", "content": "a"},
    ],
}


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_a_conversation(both, chat):
    renderer, processor = both
    expected = processor.apply_chat_template(
        chat, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="np"
    )
    rendered = renderer.render_conversation(chat)
    assert rendered.token_ids == expected["input_ids"][0].tolist()
    features = rendered.features or []
    for name in ("pixel_values", "image_grid_thw"):
        arrays = [feature.data[name].to_numpy() for feature in features if name in feature.data]
        assert (name in expected) == bool(arrays)
        if arrays:
            np.testing.assert_array_equal(np.concatenate(arrays), expected[name])
    check(renderer, rendered)


def check(renderer, rendered):
    """Check against the processor."""
    end = 0
    for feature in rendered.features or []:
        assert feature.mm_position.offset >= end
        end = feature.mm_position.end
        renderer.rules.check(feature, rendered.token_ids)


def test_prompts_of_text_and_of_tokens(both):
    renderer, processor = both
    token = renderer.rules.placeholder_text(
        "image", renderer._tokenizer.id_to_token(renderer.rules.placeholder_id("image"))
    )
    words = f"a\n{token}b{token}\n"
    pictures = [image(0), image(1, 30, 90)]
    expected = processor(images=[pictures], text=[words], return_tensors="np")
    rendered = renderer.render_prompt({"prompt": words, "multi_modal_data": {"image": pictures}})
    assert rendered.token_ids == expected["input_ids"][0].tolist()
    np.testing.assert_array_equal(
        np.concatenate([one.data["pixel_values"].to_numpy() for one in rendered.features]),
        expected["pixel_values"],
    )
    check(renderer, rendered)
    # Around each placeholder stand the same tokens, but newlines do not merge with the caller's.
    token_ids = renderer.render_prompt(words).token_ids
    given = renderer.render_prompt(
        {"prompt_token_ids": token_ids, "multi_modal_data": {"image": pictures}}
    )
    check(renderer, given)
    assert [one.data for one in given.features] == [one.data for one in rendered.features]
    assert renderer.decode(given.token_ids) == renderer.decode(rendered.token_ids)


def test_a_processor_in_one_file_with_others(tokenizer, tmp_path, make_renderer):
    """Newer checkpoints have processor_config.json, with the image processor's settings in it, and
    another backend's class."""
    processor, rules = gemma(tokenizer)
    ours = seeing(processor, rules, tokenizer, tmp_path, make_renderer).render_conversation(
        CHATS["one"]
    )
    path = tmp_path / "preprocessor_config.json"
    stated = json.loads(path.read_text()) | {"image_processor_type": "Gemma3ImageProcessorFast"}
    path.unlink()
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"processor_class": "Gemma3Processor", "image_processor": stated})
    )
    renderer = make_renderer(
        tokenizer, files={"chat_template.jinja": GEMMA}, hf_config={"vocab_size": 400}
    )
    renderer.set_rules(rules(renderer.config))
    again = renderer.render_conversation(CHATS["one"])
    assert again.token_ids == ours.token_ids
    np.testing.assert_array_equal(
        again.features[0].data["pixel_values"].to_numpy(),
        ours.features[0].data["pixel_values"].to_numpy(),
    )


ALONE = """
import sys, json
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from seeing import LlavaRules
from toolkit_lm_devkit.renderer import config_of
from toolkit_lm_renderer_hf.renderer import HfRenderer
renderer = HfRenderer(config_of(sys.argv[1]))
renderer.set_rules(LlavaRules(renderer.config))
message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
ids = renderer.render_conversation([message]).token_ids
assert ids == renderer.render_conversation([{"role": "user", "content": "a"}]).token_ids
names = ("torch", "transformers", "httpx", "httpcore")
sys.exit(" ".join(name for name in names if name in sys.modules) or 0)
"""


def test_a_text_imports_neither_torch_nor_transformers(
    tokenizer, tmp_path, make_renderer, pytestconfig
):
    processor, rules = llava(tokenizer)
    seeing(processor, rules, tokenizer, tmp_path, make_renderer)
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["none"], "vocab_size": 400})
    )
    folder = str(pytestconfig.rootpath / "plugins" / "renderer_hf" / "tests")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path), folder],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
