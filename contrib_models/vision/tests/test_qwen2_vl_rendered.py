"""Models of Qwen-VL through renderer and engine: tokens are those that transformers'
processor and model make of pictures."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from qwen_harness import BEGIN, END, IMAGE, VIDEO, VOCAB, picture, random_qwen, rules_of
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError
from toolkit_lm_devkit import write_tokenizer
from transformers import AutoImageProcessor, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from vision_checkpoints import drawings

COUNT = 12
OPTIONS = {"device": "cpu", "max_model_len": 320, "num_kv_blocks": 200, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
MARKS = {
    "<|vision_start|>": BEGIN,
    "<|vision_end|>": END,
    "<|image_pad|>": IMAGE,
    "<|video_pad|>": VIDEO,
}
ITEM = "<|vision_start|><|image_pad|><|vision_end|>"
WATCHED = ITEM.replace("image", "video")
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ m['content'] }}{% "
    "else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}"
    + ITEM
    + "{% elif p['type'] == 'video' %}"
    + WATCHED
    + "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PROCESSOR = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 2048},
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}
TEXTS = [
    f"What is {ITEM} beside {ITEM}? And {ITEM}.",
    f"{ITEM}Say it.",
    "No picture here.",
    f"{ITEM}{ITEM}",
]


def write_checkpoint(theirs, folder):
    """Returns the path of its tokenizer."""
    theirs.save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**special, "id": number, "content": mark} for mark, number in MARKS.items()
    ]
    tokenizer["model"]["vocab"] |= MARKS
    path.write_text(json.dumps(tokenizer))
    kind = "Glm4v" if theirs.config.model_type == "glm4v" else "Qwen2VL"
    processor = {**PROCESSOR, "image_processor_type": f"{kind}ImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def subject(request, tmp_path_factory):
    """A folder, the model of transformers, and its processor."""
    theirs = random_qwen(request.param)
    folder = tmp_path_factory.mktemp("qwen")
    path = write_checkpoint(theirs, folder)
    read = PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token="<pad>")
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return theirs, folder, images, read


@torch.inference_mode()
def greedy(subject, text, pictures):
    """Tokens of the prompt, and those that transformers draws."""
    theirs, _, images, tokenizer = subject
    inputs = (
        dict(images(pictures, return_tensors="pt", input_data_format="channels_last"))
        if pictures
        else {}
    )
    counts = [int(grid.prod()) // 4 for grid in inputs.get("image_grid_thw", ())]
    parts = text.split("<|image_pad|>")
    expanded = parts[0] + "".join(
        "<|image_pad|>" * count + part for count, part in zip(counts, parts[1:], strict=True)
    )
    ids = tokenizer(expanded, return_tensors="pt", add_special_tokens=False)["input_ids"]
    theirs.model.rope_deltas = None
    drawn = theirs.generate(
        input_ids=ids,
        **inputs,
        mm_token_type_ids=(ids == IMAGE).long(),
        do_sample=False,
        max_new_tokens=COUNT,
        eos_token_id=None,
        pad_token_id=2,
    )
    return ids[0].tolist(), drawn[0, ids.shape[1] :].tolist()


def expected_of(subject, texts):
    pool = drawings(sum(text.count(ITEM) for text in texts), seed=3)
    found = []
    for text in texts:
        pictures, pool = pool[: text.count(ITEM)], pool[text.count(ITEM) :]
        found.append((text, pictures, *greedy(subject, text, pictures)))
    return found


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 37}], ids=["whole", "chunked"])
def test_texts_with_pictures(subject, options):
    expected = expected_of(subject, TEXTS)
    assert len({len(tokens) for _, _, tokens, _ in expected}) == len(TEXTS)
    prompts = [
        {"prompt": text} | ({"multi_modal_data": {"image": images}} if images else {})
        for text, images, *_ in expected
    ]
    with LLM(str(subject[1]), **OPTIONS, **options) as llm:
        for _ in range(2):
            for output, (_, _, tokens, drawn) in zip(
                llm.generate(prompts, GREEDY, use_tqdm=False), expected, strict=True
            ):
                assert output.prompt_token_ids == tokens
                assert list(output.outputs[0].token_ids) == drawn


def test_a_conversation(subject):
    [(_, [one, other], tokens, drawn)] = expected_of(
        subject, [f"[user]Look: {ITEM} and {ITEM}[assistant]"]
    )
    content = [
        {"type": "text", "text": "Look: "},
        {"type": "image", "image": one},
        {"type": "text", "text": " and "},
    ]
    with LLM(str(subject[1]), **OPTIONS) as llm:
        [output] = llm.chat(
            [{"role": "user", "content": [*content, {"type": "image", "image": other}]}],
            GREEDY,
            use_tqdm=False,
        )
    assert (output.prompt_token_ids, list(output.outputs[0].token_ids)) == (tokens, drawn)


def test_embeddings_in_the_place_of_a_picture(subject):
    """Embeddings are given as the tower would give them."""
    theirs, folder, *_ = subject
    item = picture(6, 4)
    with torch.inference_mode():
        found = theirs.get_image_features(
            torch.from_numpy(item.pixels), torch.from_numpy(item.grid), return_dict=True
        )
        deep = [states[0] for states in found.get("deepstack_features") or ()]
        embeds = torch.cat([found.pooler_output[0], *deep], dim=-1)
        ids = torch.tensor([[BEGIN, *[IMAGE] * 6, END, 60, 61]])
        theirs.model.rope_deltas = None
        drawn = theirs.generate(
            input_ids=ids,
            pixel_values=torch.from_numpy(item.pixels),
            image_grid_thw=torch.from_numpy(item.grid),
            mm_token_type_ids=(ids == IMAGE).long(),
            do_sample=False,
            max_new_tokens=COUNT,
            eos_token_id=None,
            pad_token_id=2,
        )[0, 10:].tolist()
    prompt = {"prompt_token_ids": [BEGIN, IMAGE, END, 60, 61]}
    with LLM(str(folder), **OPTIONS) as llm:
        given = {"image_embeds": embeds.numpy(), "image_grid_thw": item.grid}
        [output] = llm.generate(
            [{**prompt, "multi_modal_data": {"image": given}}], GREEDY, use_tqdm=False
        )
        assert output.prompt_token_ids == ids[0].tolist()
        assert list(output.outputs[0].token_ids) == drawn
        for changed in (
            {"image_grid_thw": np.array([[1, 6, 6]])},
            {"image_embeds": embeds[1:].numpy()},
        ):
            with pytest.raises(RequestError, match=r"embeds must be floats of shape"):
                llm.generate(
                    [{**prompt, "multi_modal_data": {"image": {**given, **changed}}}],
                    GREEDY,
                    use_tqdm=False,
                )


def test_what_stands_for_a_picture_is_that_of_transformers_processor(subject):
    theirs, _, images, _ = subject
    rules = rules_of(theirs)
    processor = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    processor.image_processor = images
    processor.image_token = "x"
    for pixels in drawings(5, seed=8):
        inputs = images([pixels], return_tensors="np", input_data_format="channels_last")
        made = rules.replacement("image", dict(inputs))
        assert made.token_ids == [IMAGE] * len(processor.replace_image_token(inputs, 0))
