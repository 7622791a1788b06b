"""Videos of Qwen3-VL, GLM and InternVL, whose frames stand apart in a prompt, through renderer and
engine: tokens of the prompt are those of transformers' processor, and those drawn its model's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from picture_subjects import write_marks
from qwen_harness import IMAGE, VIDEO, picture, prompt_of, random_qwen, rules_of, timed_video
from test_internvl import made as made_internvl
from test_qwen2_vl_rendered import (
    COUNT,
    GREEDY,
    OPTIONS,
    PROCESSOR,
    WATCHED,
    write_checkpoint,
)
from test_qwen2_vl_watched import arrays_of, clip, frames_of_gif, gif
from toolkit_lm import LLM
from toolkit_lm.errors import RequestError
from toolkit_lm_devkit import write_tokenizer
from transformers import AutoImageProcessor, PreTrainedTokenizerFast
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

MARKS = {"<img>": 5, "</img>": 6, "<IMG_CONTEXT>": 7, "<video>": 9}
VIDEOS = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 512, "longest_edge": 2**16},
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}


def read(folder):
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="<pad>")


@torch.inference_mode()
def drawn_by(theirs, ids, **inputs):
    out = theirs.generate(
        input_ids=ids,
        **inputs,
        do_sample=False,
        max_new_tokens=COUNT,
        eos_token_id=None,
        pad_token_id=2,
    )
    return ids[0].tolist(), out[0, ids.shape[1] :].tolist()


def said(output):
    return output.prompt_token_ids, list(output.outputs[0].token_ids)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def qwen(request, tmp_path_factory):
    theirs = random_qwen(request.param)
    folder = tmp_path_factory.mktemp("qwen")
    write_checkpoint(theirs, folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    return theirs, folder


def of_qwen(qwen, text, clips):
    """Tokens of a text with videos (frames, indices, frames per second), and those that
    transformers draws."""
    theirs, folder = qwen
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    processor.vision_start_token = "<|vision_start|>"
    processor.video_token = "<|video_pad|>"
    processor.vision_end_token = "<|vision_end|>"
    pixels = []
    grids = []
    parts = text.split("<|video_pad|>")
    text = parts[0]
    for (frames, indices, fps), part in zip(clips, parts[1:], strict=True):
        values, grid = arrays_of(images, frames)
        pixels.append(torch.from_numpy(values))
        grids.append(torch.from_numpy(grid))
        metadata = VideoMetadata(total_num_frames=99, fps=fps, frames_indices=list(indices))
        inputs = {"video_grid_thw": grids[-1], "video_metadata": [metadata]}
        text += processor.replace_video_token(inputs, 0) + part
    ids = read(folder)(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    theirs.model.rope_deltas = None
    return drawn_by(
        theirs,
        ids,
        pixel_values_videos=torch.cat(pixels),
        video_grid_thw=torch.cat(grids),
        mm_token_type_ids=(ids == VIDEO).long() * 2,
    )


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 19}], ids=["whole", "chunked"])
def test_frames_after_their_times(qwen, options):
    """Five decoded frames, all of them; and of a file of four frames a second, two."""
    one = clip(5)
    file = gif(clip(12, seed=3))
    content = [
        {"type": "text", "text": "Look: "},
        {"type": "video", "video": (one, {"fps": 3})},
        {"type": "text", "text": " and "},
        {"type": "video", "video": file},
    ]
    taken = np.linspace(0, 11, 6).round().astype(int).tolist()
    expected = of_qwen(
        qwen,
        f"[user]Look: {WATCHED} and {WATCHED}[assistant]",
        [
            (one[[0, 1, 3, 4]], [0, 1, 3, 4], 3.0),
            (frames_of_gif(file)[taken], taken, 4.0),
        ],
    )
    with LLM(str(qwen[1]), **OPTIONS, **options) as llm:
        for _ in range(2):
            [output] = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
            assert said(output) == expected
        [fewer] = llm.chat(
            [{"role": "user", "content": content[2:]}],
            GREEDY,
            use_tqdm=False,
            mm_processor_kwargs={"num_frames": 2},
        )
    ends = frames_of_gif(file)[[0, 11]]
    assert said(fewer) == of_qwen(qwen, f"[user] and {WATCHED}[assistant]", [(ends, [0, 11], 4.0)])


GLM_MARKS = {"<|begin_of_image|>": 5, "<|end_of_image|>": 6, "<|image|>": IMAGE, "<|video|>": VIDEO}
GLM_MARKS |= {"<|begin_of_video|>": 9, "<|end_of_video|>": 10}
FILM = "<|begin_of_video|><|video|><|end_of_video|>"


@pytest.fixture(scope="module", params=["glm4v", "glm46v", "glm4v_moe", "glm_ocr"])
def glm(request, tmp_path_factory):
    theirs = random_qwen(request.param)
    folder = tmp_path_factory.mktemp("glm")
    # The larger GLM-4.6V is GLM-4.5V by its config.json.
    kind = "Glm4v" if request.param == "glm4v" else "Glm46V"
    theirs.config.video_start_token_id = 9
    theirs.config.video_end_token_id = 10
    theirs.save_pretrained(folder)
    write_marks(folder, GLM_MARKS)
    stated = {**VIDEOS, "video_processor_type": f"{kind}VideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(stated))
    images = {
        **PROCESSOR,
        "image_processor_type": f"{kind}ImageProcessor",
        "processor_class": f"{kind}Processor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return theirs, folder


def of_glm(glm, text, frames, indices, fps):
    """Tokens of a text with a video, and those that transformers draws."""
    theirs, folder = glm
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    is_41 = theirs.config.model_type == "glm4v"
    kind = Glm4vProcessor if is_41 else Glm46VProcessor
    processor = kind.__new__(kind)
    processor.video_processor = SimpleNamespace(merge_size=2)
    processor.image_token = "<|image|>"
    processor.image_token_id = IMAGE
    processor.video_start_id = 9
    processor.video_end_id = 10
    values, grid = arrays_of(images, frames)
    metadata = VideoMetadata(total_num_frames=99, fps=fps, frames_indices=np.array(indices))
    made = {"video_grid_thw": torch.from_numpy(grid), "video_metadata": [metadata]}
    text = text.replace("<|video|>", processor.replace_video_token(made, 0))
    ids = read(folder)(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    theirs.model.rope_deltas = None
    return drawn_by(
        theirs,
        ids,
        pixel_values_videos=torch.from_numpy(values),
        video_grid_thw=torch.from_numpy(grid),
        mm_token_type_ids=torch.tensor(processor.create_mm_token_type_ids(ids.tolist())),
    )


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 19}], ids=["whole", "chunked"])
def test_frames_before_their_times(glm, options):
    """Decoded frames, all of them; and of a file of four frames a second, some of them twice."""
    one = clip(5)
    file = gif(clip(9, seed=3))
    is_41 = glm[0].config.model_type == "glm4v"
    # Two frames of a second; or of two seconds, three pairs of each.
    taken = [0, 2, 4, 6] if is_41 else np.linspace(0, 8, 13, dtype=int).tolist()
    taken = list(dict.fromkeys(taken))
    taken += taken[-1:] * (len(taken) % 2)
    text = f"See: {FILM}."
    expected = [
        of_glm(glm, text, one[[0, 1, 2, 3, 4, 4]], [0, 1, 2, 3, 4, 4], 2.0),
        of_glm(glm, text, frames_of_gif(file)[taken], taken, 4.0),
    ]
    prompts = [
        {"prompt": text, "multi_modal_data": {"video": video}, "mm_processor_kwargs": options}
        for video, options in (((one, {"fps": 2}), {"do_sample_frames": False}), (file, {}))
    ]
    with LLM(str(glm[1]), **OPTIONS, **options) as llm:
        for _ in range(2):
            found = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [said(output) for output in found] == expected


def test_times_of_glm_without_a_processor():
    """By the architecture: GLM-4.5V has whole seconds."""
    texts = {
        name: rules_of(random_qwen(name)).texts("video", {"timestamps": np.array([0.0, 1.96])})
        for name in ("glm4v_moe", "glm_ocr")
    }
    assert texts == {
        "glm4v_moe": {"timestamp_ids": ["0", "1"]},
        "glm_ocr": {"timestamp_ids": ["0.0 seconds", "2.0 seconds"]},
    }


BAD = {
    "no times": ({"timestamps": None}, "must have timestamps"),
    "texts in the place of times": ({"timestamps": np.array(["a"] * 3)}, "must have timestamps"),
    "before the start": ({"timestamps": np.array([-1.0, 0, 1])}, "from 0 to"),
    "a frame without a time": ({"timestamp_ids": np.zeros((2, 2), int)}, "as many timestamps"),
    "a token of pictures": ({"timestamp_ids": np.full((3, 2), IMAGE)}, "tokens of text"),
    "no token": ({"timestamp_ids": np.full((3, 2), 2**20)}, "tokens of text"),
}


@pytest.mark.parametrize("name", BAD)
def test_times_of_no_sense_are_refused(name):
    changed, reason = BAD[name]
    data = {**timed_video(3, 4, 4).data, **changed}
    data = {name: array for name, array in data.items() if array is not None}
    rules = rules_of(random_qwen("qwen3_vl"))
    with pytest.raises(RequestError, match=reason):
        if "timestamp_ids" not in changed:
            rules.texts("video", data)
        rules.replacement("video", data)


def test_positions_go_on_after_each_frame():
    """Each frame of 2 x 3 tokens moves what follows by 3."""
    theirs = random_qwen("qwen3_vl")
    rules = rules_of(theirs)
    prompt = prompt_of(rules, [11, 12], timed_video(2, 4, 6), [13], picture(2, 2))
    ids = torch.tensor([prompt.token_ids])
    expected, _ = theirs.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == IMAGE).long() + (ids == VIDEO).long() * 2,
        image_grid_thw=torch.tensor([[1, 2, 2]]),
        video_grid_thw=torch.tensor([[2, 4, 6]]),
    )
    from toolkit_lm_vision.qwen3_vl import Qwen3VLForConditionalGeneration as Ours

    ours = Ours.__new__(Ours)
    object.__setattr__(ours, "shape", rules.shape)
    found = ours.prompt_positions(np.array(prompt.token_ids), prompt.features)
    assert found.tolist() == expected[:, 0].tolist()


@pytest.fixture(scope="module")
def internvl(tmp_path_factory):
    theirs = made_internvl("biases")
    folder = tmp_path_factory.mktemp("internvl")
    theirs.save_pretrained(folder)
    write_tokenizer(folder, 300)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**special, "id": number, "content": mark} for mark, number in MARKS.items()
    ]
    tokenizer["model"]["vocab"] |= MARKS
    path.write_text(json.dumps(tokenizer))
    sizes = {"size": {"height": 28, "width": 28}}
    images = {"image_processor_type": "GotOcr2ImageProcessor", **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    videos = {"video_processor_type": "InternVLVideoProcessor", **sizes}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return theirs, folder


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 19}], ids=["whole", "chunked"])
def test_frames_after_their_numbers(internvl, options):
    theirs, folder = internvl
    frames = clip(6, height=28, width=28)
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    processor = InternVLProcessor.__new__(InternVLProcessor)
    processor.start_image_token = "<img>"
    processor.end_image_token = "</img>"
    processor.image_token = "<IMG_CONTEXT>"
    processor.image_seq_length = 4
    # All six frames, and the middles of three parts.
    expected = []
    for taken in (frames, frames[[1, 3, 5]]):
        pixels = images(list(taken), return_tensors="pt", input_data_format="channels_last")
        videos = {"pixel_values_videos": pixels["pixel_values"][None]}
        text = f"See: {processor.replace_video_token(videos, 0)}."
        ids = read(folder)(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        expected.append(
            drawn_by(
                theirs,
                ids,
                attention_mask=torch.ones_like(ids),
                pixel_values=pixels["pixel_values"],
            )
        )
    prompt = {"prompt": "See: <video>.", "multi_modal_data": {"video": frames}}
    with LLM(str(folder), **{**OPTIONS, "max_model_len": 256}, **options) as llm:
        for _ in range(2):
            [whole] = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert said(whole) == expected[0]
        [fewer] = llm.generate(
            [{**prompt, "mm_processor_kwargs": {"num_frames": 3}}], GREEDY, use_tqdm=False
        )
        assert said(fewer) == expected[1]
        [embedded] = llm.generate(
            [
                {
                    **prompt,
                    "multi_modal_data": {
                        "video": {
                            "video_embeds": embeds_of(theirs, images, frames).numpy(),
                        }
                    },
                }
            ],
            GREEDY,
            use_tqdm=False,
        )
        assert said(embedded) == expected[0]


@torch.inference_mode()
def embeds_of(theirs, images, frames):
    pixels = images(list(frames), return_tensors="pt", input_data_format="channels_last")
    found = theirs.get_image_features(pixels["pixel_values"], return_dict=True).pooler_output
    return found.flatten(0, 1)
