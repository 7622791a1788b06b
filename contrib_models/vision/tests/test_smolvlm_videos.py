"""Videos of SmolVLM: tokens of the prompt are those of transformers' processor, and those drawn its
model's."""

from __future__ import annotations

import json
from base64 import b64encode
from contextlib import AsyncExitStack

import numpy as np
import pytest
import torch
from httpx import ASGITransport, AsyncClient
from test_qwen2_vl_rendered import GREEDY, OPTIONS
from test_qwen2_vl_watched import clip, frames_of_gif, gif
from test_timed_videos import drawn_by, read, said
from tile_checkpoints import TILE_MARKS, random_tiled
from toolkit_lm import LLM, AsyncLLM, VllmConfig
from toolkit_lm.errors import RequestError, ToolkitError
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import checkpoint_config, load_checkpoint, run_ranks
from toolkit_lm_server.app import create_app
from toolkit_lm_vision.smolvlm_rules import in_words
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from transformers.video_utils import VideoMetadata
from vision_checkpoints import write_template, write_vision_tokenizer
from vision_families import IMAGE
from vision_harness import Prompt, logits_of_prompts, sequences

NAME = "SmolVLMForConditionalGeneration"
LONG = {**OPTIONS, "max_model_len": 1024}
STATED = {
    "size": {"longest_edge": 28},
    "max_image_size": {"longest_edge": 28},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
WORDS = {1: "one", 3: "three", 4: "four", 5: "five"}


def write_processors(folder):
    images = {"image_processor_type": "SmolVLMImageProcessor", **STATED}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    sampling = {"fps": 1, "max_frames": 4, "video_size": STATED["size"]}
    videos = {"video_processor_type": "SmolVLMVideoProcessor", **STATED, "video_sampling": sampling}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))


@pytest.fixture(scope="module", params=[False, True], ids=["text", "token"])
def subject(request, tmp_path_factory):
    """The text `<video>` is a token of the tokenizer, or it is not."""
    theirs = random_tiled("smolvlm")
    theirs.config.text_config.max_position_embeddings = 1024
    folder = tmp_path_factory.mktemp("smolvlm")
    theirs.save_pretrained(folder)
    write_vision_tokenizer(folder, {**TILE_MARKS, **({"<video>": 14} if request.param else {})})
    write_template(folder, "<image>")
    write_processors(folder)
    return theirs, folder


def pixels_of(frames):
    """Arrays [1, n, channels, S, S] of frames that are as large as the tower's tiles."""
    values = torch.from_numpy(frames.astype(np.float32)) / 255
    return ((values - 0.5) / 0.5).permute(0, 3, 1, 2)[None]


def of_transformers(monkeypatch, subject, text, clips):
    """Tokens of a text with videos (frames, indices, rate, seconds), and those drawn."""
    theirs, folder = subject
    monkeypatch.setattr(processing_smolvlm, "num2words", WORDS.__getitem__)
    processor = SmolVLMProcessor.__new__(SmolVLMProcessor)
    processor.image_seq_len = 1
    processor.image_token = "<image>"
    processor.fake_image_token = "<fake_token_around_image>"
    processor.global_image_token = "<global-img>"
    values = []
    for frames, indices, fps, seconds in clips:
        metadata = VideoMetadata(99, fps=fps, frames_indices=list(indices), duration=seconds)
        values.append(pixels_of(frames))
        made = {"pixel_values": values[-1], "video_metadata": [metadata]}
        text = text.replace("<video>", processor.replace_video_token(made, 0), 1)
    ids = read(folder)(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    pixels = torch.cat(values, 1)
    return drawn_by(theirs, ids, pixel_values=pixels, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 50}], ids=["whole", "chunked"])
def test_frames_after_their_times(subject, monkeypatch, options):
    """Decoded frames of a known rate and of none; a file of four frames a second, of which one a
    second is taken; embeddings; and two videos in a prompt. Cold, and with a warm cache."""
    theirs, folder = subject
    one = clip(5, height=28, width=28)
    file = gif(clip(9, seed=3, height=28, width=28))
    text = "see: <video>what?"
    late = (one[:3], [0, 1, 2], 0.02, 3 / 0.02)
    taken = (frames_of_gif(file)[[0, 8]], [0, 8], 4.0, 2.25)
    monkeypatch.setitem(WORDS, 2, "two")
    expected = [
        of_transformers(monkeypatch, subject, text, [late]),
        of_transformers(monkeypatch, subject, text, [(one, range(5), None, None)]),
        of_transformers(monkeypatch, subject, text, [taken]),
        of_transformers(monkeypatch, subject, f"{text}{text}", [taken, late]),
    ]
    with torch.inference_mode():
        [embeds] = theirs.model.get_image_features(pixels_of(one[:3]), return_dict=True)[
            "pooler_output"
        ]
    given = {
        "video_embeds": embeds.numpy(),
        "timestamps": np.array([0.0, 50.0, 100.0]),
        "duration": np.array([150.0]),
    }
    slow = (one[:3], {"fps": 0.02})
    videos = [slow, one, file, [file, slow], given]
    texts = [text, text, text, f"{text}{text}", text]
    prompts = [
        {"prompt": some, "multi_modal_data": {"video": video}}
        for some, video in zip(texts, videos, strict=True)
    ]
    with LLM(str(folder), **LONG, **options) as llm:
        for _ in range(2):
            found = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [said(output) for output in found] == [*expected, expected[0]]


def test_logits_are_those_of_transformers(subject):
    """Of two prompts with videos in one batch, within 1e-4; on two ranks, the same embeddings."""
    theirs, folder = subject
    plugins = Plugins.load()
    rules = plugins.models.load_multimodal(NAME)(checkpoint_config(folder))
    model = load_checkpoint(plugins.models.load(NAME), folder, plugins=plugins)
    prompts = []
    expected = []
    for count in (3, 1):
        pixels = pixels_of(clip(count, seed=count, height=28, width=28))
        data = {
            "pixel_values": pixels.numpy(),
            "timestamps": np.arange(count),
            "timestamp_ids": np.arange(50, 50 + 2 * count).reshape(count, 2),
        }
        found = rules.replacement("video", data)
        ids = [60, *found.token_ids, 61, 62]
        mask = [False, *found.mask, False, False]
        prompts.append(Prompt(ids, [pixels], [], mask))
        with torch.inference_mode():
            expected.append(theirs(torch.tensor([ids]), pixel_values=pixels).logits[0])
    for logits, other in zip(logits_of_prompts(model, prompts), expected, strict=True):
        assert (logits - other).abs().max() < 1e-4
    videos = [prompt.pictures[0] for prompt in prompts]

    @torch.inference_mode()
    def encoded(rank):
        part = load_checkpoint(
            plugins.models.load(NAME), folder, rank=rank, plugins=plugins, tensor_parallel_size=2
        )
        items = [{"pixel_values": video} for video in videos]
        return part.encode_items("video", items, lambda lengths: sequences(part, lengths))

    with torch.inference_mode():
        wanted = [theirs.model.get_image_features(video).pooler_output[0] for video in videos]
    for some in run_ranks(encoded, 2):
        for one, other in zip(some, wanted, strict=True):
            assert (one - other).abs().max() < 1e-4 * max(1.0, float(other.abs().max()))


def test_what_a_user_types_is_text(subject, monkeypatch):
    """The template writes no placeholder of a video; `<video>` of a user stands for none."""
    _, folder = subject
    one = clip(1, height=28, width=28)
    parts = [{"type": "video", "video": (one, {"fps": 1})}, {"type": "text", "text": "is <video>?"}]
    with LLM(str(folder), **LONG) as llm:
        [found] = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
        [plain] = llm.chat([{"role": "user", "content": "is <video>?"}], GREEDY, use_tqdm=False)
        prompt = {"prompt": "<video>?", "multi_modal_data": {"video": [(one, {"fps": 1})] * 2}}
        with pytest.raises(ToolkitError, match="1 placeholders '<video>' for 2 items"):
            llm.generate([prompt], GREEDY, use_tqdm=False)
    text = "<s>[user]\n<video>is @?[assistant]\n"
    expected, _ = of_transformers(monkeypatch, subject, text, [(one, [0], 1.0, 1.0)])
    at = expected.index(read(folder)("@", add_special_tokens=False)["input_ids"][0])
    typed = [
        token
        for letter in "<video>"
        for token in read(folder)(letter, add_special_tokens=False)["input_ids"]
    ]
    assert found.prompt_token_ids == [*expected[:at], *typed, *expected[at + 1 :]]
    assert IMAGE not in plain.prompt_token_ids


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_over_http(subject, monkeypatch):
    data = gif(clip(9, seed=1, height=28, width=28))
    url = f"data:image/gif;base64,{b64encode(data).decode()}"
    content = [
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "text", "text": "what?"},
    ]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    monkeypatch.setitem(WORDS, 2, "two")
    clips = [(frames_of_gif(data)[[0, 8]], [0, 8], 4.0, 2.25)]
    text = "<s>[user]\n<video>what?[assistant]\n"
    expected = of_transformers(monkeypatch, subject, text, clips)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            AsyncLLM(VllmConfig.make(model=str(subject[1]), **LONG, engine_process=False))
        )
        transport = ASGITransport(create_app(engine))
        client = await stack.enter_async_context(
            AsyncClient(transport=transport, base_url="http://server", timeout=120)
        )
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["prompt_token_ids"], found["choices"][0]["token_ids"]) == expected
        broken = url[:-100]
        content[0]["video_url"]["url"] = broken
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "video 1: " in refused.json()["error"]["message"]


def test_what_is_no_video_is_refused(subject):
    rules = Plugins.load().models.load_multimodal(NAME)(checkpoint_config(subject[1]))
    good = {
        "pixel_values": pixels_of(clip(2, height=28, width=28)).numpy(),
        "timestamps": np.array([0.0, 61.0]),
        "duration": np.array([3700.2]),
    }
    assert rules.texts("video", good) == {
        "timestamp_ids": [
            " two frames from a 1:01:40 [H:MM:SS] video.\n\nFrame from 00:00:",
            "\nFrame from 01:01:",
        ]
    }
    assert rules.texts("image", good) == {}
    without = {name: good[name] for name in ("pixel_values", "timestamps")}
    assert "a 0:01:01 [H" in rules.texts("video", without)["timestamp_ids"][0]
    good["timestamp_ids"] = np.array([[40, 41], [42, -1]])
    found = rules.replacement("video", good)
    assert found.token_ids == [40, 41, 8, 9, IMAGE, 8, 42, 8, 9, IMAGE, 8]
    video = rules.placeholder_id("video")
    for changed, reason in (
        ({"timestamps": np.array([0.0])}, "of a video of 2 frames are 1"),
        ({"timestamps": np.array([-1.0, 0])}, "must have timestamps"),
        ({"timestamp_ids": np.array([[40]])}, "as many timestamps"),
        ({"timestamp_ids": np.array([[video], [40]])}, "tokens of text"),
        ({"duration": np.array([-1.0])}, "one number of seconds"),
        ({"pixel_values": good["pixel_values"][:, :, :2]}, "floats of shape"),
        ({"rows": np.array([1])}, "one video must have pixel_values or embeds"),
    ):
        with pytest.raises(RequestError, match=reason):
            rules.replacement("video", {**good, **changed})


def test_there_are_no_videos_without_a_tokenizer(subject, tmp_path):
    for file in subject[1].iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    rules = Plugins.load().models.load_multimodal(NAME)(checkpoint_config(tmp_path))
    assert rules.modalities == ("image",)


def test_numbers_in_words():
    """As num2words 0.5.14 writes them."""
    expected = {
        0: "zero",
        11: "eleven",
        20: "twenty",
        64: "sixty-four",
        100: "one hundred",
        101: "one hundred and one",
        128: "one hundred and twenty-eight",
        999: "nine hundred and ninety-nine",
        1000: "one thousand",
        1001: "one thousand and one",
        1100: "one thousand, one hundred",
        65536: "sixty-five thousand, five hundred and thirty-six",
        101_001: "one hundred and one thousand and one",
    }
    assert {number: in_words(number) for number in expected} == expected
