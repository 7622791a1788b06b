"""Videos through renderer and engine: tokens are those that transformers' model draws, given the
same arrays; offline and over HTTP."""

from __future__ import annotations

import io
from base64 import b64encode
from contextlib import AsyncExitStack

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from qwen_harness import BEGIN, END, IMAGE, VIDEO, random_qwen
from test_qwen2_vl_rendered import COUNT, GREEDY, OPTIONS, PROCESSOR, write_checkpoint
from toolkit_lm import LLM, AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from transformers import AutoImageProcessor

FPS = 4
"""Frames per second of the videos."""
TAKEN = 2
"""Frames of a second that are taken of a file."""


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def subject(request, tmp_path_factory):
    """A folder, the model of transformers, and its image processor."""
    theirs = random_qwen(request.param)
    folder = tmp_path_factory.mktemp("qwen")
    write_checkpoint(theirs, folder)
    return theirs, folder, AutoImageProcessor.from_pretrained(folder, backend="pil")


def clip(count, seed=0, height=24, width=32):
    """A square that wanders."""
    frames = np.full(
        (count, height, width, 3), np.random.default_rng(seed).integers(0, 120, 3), np.uint8
    )
    for number in range(count):
        frames[number, 4 : 4 + 8, number * 2 : number * 2 + 8] = (200 + seed, 30 * seed, 90)
    return frames


def gif(frames):
    first, *rest = [Image.fromarray(one) for one in frames]
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=rest, duration=1000 // FPS)
    return file.getvalue()


def frames_of_gif(data):
    with Image.open(io.BytesIO(data)) as image:
        found = []
        for number in range(image.n_frames):
            image.seek(number)
            found.append(np.asarray(image.convert("RGB")))
    return np.stack(found)


def arrays_of(images, frames):
    """Arrays of transformers for a video, from its image processor: each picture twice, of which
    one is taken."""
    if len(frames) % 2:
        frames = np.concatenate([frames, frames[-1:]])
    made = images(list(frames), return_tensors="np", input_data_format="channels_last")
    values = made["pixel_values"].reshape(len(frames), -1, 3, 2, 16)[:, :, :, 0]
    pairs = np.stack([values[::2], values[1::2]], axis=3)
    _, height, width = made["image_grid_thw"][0]
    return pairs.reshape(-1, 96), np.array([[len(frames) // 2, height, width]])


@torch.inference_mode()
def greedy(subject, parts, fps):
    """Tokens of a prompt of tokens and videos, and those that transformers draws. `fps`: of each
    video."""
    theirs, _, images = subject
    ids = []
    made = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        made.append(arrays_of(images, part))
        ids += [BEGIN, *[VIDEO] * (int(made[-1][1].prod()) // 4), END]
    prompt = torch.tensor([ids])
    timed = (
        {"second_per_grid_ts": [2 / one for one in fps]}
        if "Qwen2_5" in type(theirs).__name__
        else {}
    )
    theirs.model.rope_deltas = None
    drawn = theirs.generate(
        input_ids=prompt,
        pixel_values_videos=torch.from_numpy(np.concatenate([values for values, _ in made])),
        video_grid_thw=torch.from_numpy(np.concatenate([grid for _, grid in made])),
        mm_token_type_ids=(prompt == VIDEO).long() * 2,
        **timed,
        do_sample=False,
        max_new_tokens=COUNT,
        eos_token_id=None,
        pad_token_id=2,
    )
    return ids, drawn[0, len(ids) :].tolist()


def said(output):
    return output.prompt_token_ids, list(output.outputs[0].token_ids)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 19}], ids=["whole", "chunked"])
def test_frames_and_files_in_a_conversation(subject, options):
    one = clip(5)
    other = gif(clip(12, seed=3))
    content = [
        {"type": "text", "text": "Look: "},
        {"type": "video", "video": (one, {"fps": 1})},
        {"type": "text", "text": " and "},
        {"type": "video", "video": other},
    ]
    with LLM(str(subject[1]), **OPTIONS, **options) as llm:
        [first] = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
        # From the engine's cache of what it has encoded.
        [second] = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
        prompt = first.prompt_token_ids
        begins = [place for place, token in enumerate(prompt) if token == BEGIN]
        ends = [place for place, token in enumerate(prompt) if token == END]
        words = [prompt[: begins[0]], prompt[ends[0] + 1 : begins[1]], prompt[ends[1] + 1 :]]
        assert all(words) and IMAGE not in prompt
        expected = greedy(
            subject, [words[0], one, words[1], frames_of_gif(other)[::2], words[2]], [1, TAKEN]
        )
        assert expected[0] == prompt
        assert said(first) == said(second) == expected


def test_beside_a_prompt(subject):
    frames = clip(5, seed=2)
    prompt = {
        "prompt": "What is <|vision_start|><|video_pad|><|vision_end|>?",
        "multi_modal_data": {"video": (frames, {"fps": 3})},
    }
    with LLM(str(subject[1]), **OPTIONS) as llm:
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    found = output.prompt_token_ids
    before = found[: found.index(BEGIN)]
    after = found[found.index(END) + 1 :]
    assert said(output) == greedy(subject, [before, frames, after], [3])


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_over_http(subject):
    data = gif(clip(8, seed=1))
    video = {
        "type": "video_url",
        "video_url": {"url": f"data:image/gif;base64,{b64encode(data).decode()}"},
    }
    asked = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def body(*content, **more):
        return {
            "messages": [
                {"role": "user", "content": [*content, {"type": "text", "text": "What is it?"}]}
            ],
            **asked,
            **more,
        }

    async with AsyncExitStack() as stack:
        llm = await stack.enter_async_context(
            AsyncLLM(VllmConfig.make(model=str(subject[1]), **OPTIONS, engine_process=False))
        )
        transport = httpx.ASGITransport(create_app(llm))
        client = await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://server", timeout=120)
        )
        answer = await client.post("/v1/chat/completions", json=body(video))
        assert answer.status_code == 200, answer.text
        found = answer.json()["prompt_token_ids"]
        drawn = answer.json()["choices"][0]["token_ids"]
        before = found[: found.index(BEGIN)]
        after = found[found.index(END) + 1 :]
        assert (found, drawn) == greedy(subject, [before, frames_of_gif(data)[::2], after], [TAKEN])
        fewer = await client.post(
            "/v1/chat/completions", json=body(video, mm_processor_kwargs={"num_frames": 2})
        )
        assert fewer.json()["prompt_token_ids"].count(VIDEO) == found.count(VIDEO) // 2
        broken = {
            "type": "video_url",
            "video_url": {"url": f"data:image/gif;base64,{b64encode(data[:-50]).decode()}"},
        }
        for wrong, message in (
            (body(video, broken), "video 2: "),
            (body(*[video] * 17), "limit_mm_per_prompt|MiB"),
        ):
            refused = await client.post("/v1/chat/completions", json=wrong)
            assert refused.status_code == 400
            assert any(one in refused.json()["error"]["message"] for one in message.split("|")), (
                refused.text
            )


def test_the_processor_of_the_checkpoint_leaves_frames_as_they_are():
    """Else these tests would say nothing of sizes."""
    edge = PROCESSOR["size"]
    frame = clip(1)[0]
    assert edge["shortest_edge"] <= frame.shape[0] * frame.shape[1] <= edge["longest_edge"]
