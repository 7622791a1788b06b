"""Florence-2 through renderer and engine: tokens are those that transformers' processor and model
make of the same pictures."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from functools import partial

import httpx
import numpy as np
import pytest
import torch
from florence_checkpoints import (
    BEGIN,
    SIDE,
    START,
    TEXT,
    TOKENS,
    make_florence,
)
from PIL import Image
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError, ToolkitError
from toolkit_lm.messages import EncoderInput
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import (
    EncoderDecoderConformance,
    assert_bf16_error,
    checkpoint_config,
    load_checkpoint,
    run_ranks,
)
from toolkit_lm_devkit.forward import encoder_decoder_logits
from toolkit_lm_server.app import create_app
from toolkit_lm_vision import florence2_rules
from toolkit_lm_vision.florence2 import Florence2Model
from vision_checkpoints import drawings
from vision_families import IMAGE

NAME = "Florence2ForConditionalGeneration"
COUNT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
OPTIONS = {
    "max_encoder_len": 128,
    "device": "cpu",
    "num_kv_blocks": 300,
    "max_model_len": 64,
    "max_num_seqs": 8,
}
A, B, C = drawings(3, seed=3)
ASKED = [
    ("<CAPTION>", A),
    ("<OCR>", B),
    ("What is this, and why?", A),
    ("<CAPTION>", B),
    ("<REGION_TO_OCR> {loc}1<loc_2>", C),
    ("Nothing but text in this one.", None),
    ("<CAPTION>", A),
    ("", C),
]
"""Texts and pictures: some share the text, some the picture, some both."""


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return make_florence(tmp_path_factory.mktemp("florence"))


def engine(subject, **options):
    return LLM(str(subject.folder), **OPTIONS | options)


def prompt(text, picture=None):
    found = {"prompt": text}
    return found if picture is None else {**found, "multi_modal_data": {"image": picture}}


def check(outputs, subject, asked=ASKED):
    for output, (text, picture) in zip(outputs, asked, strict=True):
        encoder, decoder = subject.greedy(text, picture, COUNT)
        assert output.encoder_prompt_token_ids == encoder
        assert output.prompt_token_ids == decoder[:2] == [START, BEGIN]
        for completion in output.outputs:
            assert list(completion.token_ids) == decoder[2:]


# Parity


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 129},
        {"max_num_batched_tokens": 129, "enable_prefix_caching": False, "max_num_seqs": 2},
        {"block_size": 4, "engine_process": True},
    ],
    ids=["whole", "chunked", "uncached", "own process"],
)
def test_greedy_tokens(subject, options):
    with engine(subject, **options) as llm:
        asked = [prompt(*one) for one in ASKED]
        for _ in range(2):  # again, from the cache
            check(llm.generate(asked, GREEDY, use_tqdm=False), subject)


def test_pictures_of_one_text_are_told_apart(subject, monkeypatch):
    """An equal text and picture are encoded once; another picture is another prompt."""
    sizes = []
    embeddings = Florence2Model.embeddings

    def counted(self, pixels):
        sizes.append(len(pixels))
        return embeddings(self, pixels)

    with engine(subject, engine_process=False) as llm:
        monkeypatch.setattr(Florence2Model, "embeddings", counted)
        cached = []
        for picture in (A, B, A, B, C):
            asked = [("<CAPTION>", picture)]
            check(llm.generate([prompt(*asked[0])], GREEDY, use_tqdm=False), subject, asked)
            cached.append(sum(sizes))
    assert cached == [1, 2, 2, 2, 3]
    assert subject.greedy("<CAPTION>", A)[1] != subject.greedy("<CAPTION>", B)[1]


def test_several_sequences_share_the_picture(subject):
    params = SamplingParams(temperature=1e-6, n=2, max_tokens=COUNT, ignore_eos=True, seed=0)
    with engine(subject) as llm:
        outputs = llm.generate([prompt(*one) for one in ASKED[:3]], params, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [2] * 3
    check(outputs, subject, ASKED[:3])


def test_beams(subject):
    params = SamplingParams(
        use_beam_search=True, beam_width=3, n=1, max_tokens=6, length_penalty=1.0
    )
    with engine(subject) as llm:
        [output] = llm.generate([prompt("<OD>", A)], params, use_tqdm=False)
    inputs = subject.inputs("<OD>", A)
    found = subject.model.generate(
        **inputs,
        attention_mask=torch.ones_like(inputs["input_ids"]),
        max_new_tokens=7,
        num_beams=3,
    )[0, 2:].tolist()
    found = found[: found.index(START) + 1] if START in found else found
    assert list(output.outputs[0].token_ids) == found


def test_the_array_is_that_of_the_processor(subject, monkeypatch):
    seen = []
    made = florence2_rules.Florence2Rules._input

    def kept(self, *arguments):
        seen.append(made(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(florence2_rules.Florence2Rules, "_input", kept)
    with engine(subject) as llm:
        llm.generate([prompt(*one) for one in ASKED], GREEDY, use_tqdm=False)
    for found, (text, picture) in zip(seen, ASKED, strict=True):
        if picture is None:
            assert found.features is None
            continue
        expected = subject.inputs(text, picture)["pixel_values"].numpy()
        assert np.abs(found.features.to_numpy() - expected).max() <= 1 / 255


TASKS = {**florence2_rules._TASKS, **florence2_rules._TASKS_WITH_INPUT}


def test_every_task_is_the_sentence_of_the_processor(subject):
    assert set(TASKS) == {
        *subject.processor.task_prompts_without_inputs,
        *subject.processor.task_prompts_with_input,
    }
    for task in TASKS:
        text = task if task in florence2_rules._TASKS else f"{task} a {{}} cat "
        [expected] = subject.processor._construct_prompts(text)
        assert florence2_rules.sentence_of(text, "prompt") == expected
    for task in florence2_rules._TASKS:
        with pytest.raises(ValueError, match="only content"):
            subject.processor._construct_prompts(f"{task} x")
        with pytest.raises(RequestError, match=f"task {task} must be the only text"):
            florence2_rules.sentence_of(f"{task} x", "prompt")


# Prompts


def test_forms_of_a_prompt(subject):
    encoder = subject.greedy("<CAPTION>", A)[0]
    sentence = subject.processor.tokenizer(
        "What does the image describe?", add_special_tokens=False
    )["input_ids"]
    data = {"multi_modal_data": {"image": [A]}}
    forms = [
        {"prompt": "<CAPTION>", **data},
        {"prompt": "<image><CAPTION>", **data},
        {"prompt": "<image><s>What does the image describe?</s>", **data},
        {"prompt_token_ids": sentence, **data},
        {"prompt_token_ids": [IMAGE, *sentence], **data},
        {"prompt_token_ids": [IMAGE, BEGIN, *sentence, START], **data},
        {"encoder_prompt": {"prompt": "<CAPTION>", **data}},
        {
            "encoder_prompt": {"prompt": "<CAPTION>", **data},
            "decoder_prompt": {"prompt_token_ids": [START, BEGIN]},
        },
    ]
    with engine(subject) as llm:
        outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert [output.encoder_prompt_token_ids for output in outputs] == [encoder] * len(forms)
    check(outputs, subject, [("<CAPTION>", A)] * len(forms))


def test_embeddings_of_a_picture(subject):
    with torch.inference_mode():
        embeds = subject.model.get_image_features(
            subject.inputs("<OCR>", A)["pixel_values"]
        ).pooler_output[0]
    asked = [("<OCR>", A), ("<OCR>", B), ("<OCR>", A), ("text", None)]
    prompts = [prompt(*one) for one in asked]
    prompts[0] = prompt("<OCR>", embeds.numpy())
    with engine(subject) as llm:
        check(llm.generate(prompts, GREEDY, use_tqdm=False), subject, asked)


def test_a_picture_and_the_end_outlast_truncation(subject):
    whole = subject.greedy("What is this, and why?", A)[0]

    def read(**params):
        [output] = llm.generate(
            [prompt("What is this, and why?", A)], SamplingParams(max_tokens=1, **params)
        )
        return output.encoder_prompt_token_ids

    with engine(subject) as llm:
        assert read(truncate_prompt_tokens=-1) == whole
        for most in (TOKENS + 1, TOKENS + 7, len(whole) - 1, len(whole)):
            assert read(truncate_prompt_tokens=most) == [*whole[: most - 1], whole[-1]]
        for most in (1, TOKENS):
            with pytest.raises(RequestError, match=f"beside the {TOKENS} of the picture"):
                read(truncate_prompt_tokens=most)


def png(picture):
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def part(picture):
    return {"type": "image_url", "image_url": {"url": png(picture)}}


def text(value):
    return {"type": "text", "text": value}


CHATS = [
    ([("user", [text("<CAPTION>"), part(A)])], "<CAPTION>", A),
    ([("user", [part(A), text("<CAPTION>")])], "<CAPTION>", A),
    ([("user", [part(A)])], "", A),
    ([("user", "Only text.")], "Only text.", None),
    ([("system", "Say"), ("user", [part(B), text("what")])], "Say what", B),
    # A question on the picture of an earlier turn, and one on the latest of two.
    ([("user", [part(A), text("x")]), ("assistant", "y"), ("user", "<OCR>")], "<OCR>", A),
    ([("user", [part(A), text("x")]), ("user", [part(B), text("<OCR>")])], "<OCR>", B),
]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_chats_over_http(subject):
    config = VllmConfig.make(model=str(subject.folder), **OPTIONS, engine_process=False)
    body = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with (
        AsyncLLM(config) as llm,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(llm)),
            base_url="http://server",
            timeout=120,
        ) as client,
    ):
        for turns, task, picture in CHATS:
            messages = [{"role": role, "content": content} for role, content in turns]
            found = await client.post("/v1/chat/completions", json={"messages": messages, **body})
            assert found.status_code == 200, found.text
            assert found.json()["choices"][0]["token_ids"] == subject.greedy(task, picture)[1][2:]
        refused = {
            "one picture in a prompt, not 2": [part(A), part(B), text("<OCR>")],
            "must be the only text": [part(A), text("<OCR> of this")],
            "image 1: ": [{"type": "image_url", "image_url": {"url": png(A)[:-40]}}],
            "takes no audio": [
                {"type": "input_audio", "input_audio": {"data": "aaaa", "format": "wav"}}
            ],
            "not by a uuid": [{**part(A), "uuid": "mine"}],
        }
        for message, content in refused.items():
            wrong = {"messages": [{"role": "user", "content": content}], **body}
            answer = await client.post("/v1/chat/completions", json=wrong)
            assert answer.status_code == 400, answer.text
            assert message in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == "messages"
        typed = {"messages": [{"role": "user", "content": "<image> is typed"}], **body}
        found = await client.post("/v1/chat/completions", json=typed)
        assert found.status_code == 200, found.text


def test_a_chat_template_of_the_caller(subject):
    template = "{% for m in messages %}{% for p in m.content %}{{ '<image>' if p.type == 'image' "
    template += "else p.text }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": [part(A), text("What is this?")]}]
    with engine(subject) as llm:
        outputs = llm.chat(messages, GREEDY, chat_template=template, use_tqdm=False)
    check(outputs, subject, [("What is this?", A)])


# Refusals: the engine goes on

REFUSED = [
    ({"prompt": "<OCR>", "multi_modal_data": {"image": [A, B]}}, "one picture in a prompt, not 2"),
    ({"prompt": "<image><image>x", "multi_modal_data": {"image": A}}, "one picture in a prompt"),
    ({"prompt": "x <image>", "multi_modal_data": {"image": A}}, "must begin the prompt"),
    ({"prompt": "<image><OCR>"}, "1 placeholders '<image>' for 0 items"),
    ({"prompt": "<image><OCR>", "multi_modal_data": {"image": []}}, "for 0 items"),
    ({"prompt_token_ids": [IMAGE] * TOKENS + [5]}, f"{TOKENS} placeholders '<image>' for 0"),
    ({"prompt": "<OCR>", "multi_modal_data": {"video": [A]}}, "takes no video"),
    ({"prompt": "<OCR>", "multi_modal_data": [A]}, "must be a mapping"),
    ({"prompt": "<OCR> this", "multi_modal_data": {"image": A}}, "must be the only text"),
    (
        {"prompt": "<OCR>", "multi_modal_data": {"image": np.zeros((3, 63), np.float32)}},
        r"image 1: embeds .*\[1 to 65, 64\]",
    ),
    (
        {"prompt": "x", "multi_modal_data": {"image": A}, "multi_modal_uuids": {"image": ["a"]}},
        "not by a uuid",
    ),
    (
        {
            "encoder_prompt": "<OCR>",
            "decoder_prompt": {"prompt": "x", "multi_modal_data": {"image": A}},
        },
        "give multi_modal_data in encoder_prompt",
    ),
    ({"prompt": "x" * 200, "multi_modal_data": {"image": A}}, "max_encoder_len"),
]


def test_a_picture_longer_than_the_decoder_and_than_the_encoder(subject):
    """Only the encoder's length bounds it."""
    with engine(subject, max_model_len=16) as llm:
        check(llm.generate([prompt(*ASKED[0])], GREEDY, use_tqdm=False), subject, ASKED[:1])
    with (
        engine(subject, max_encoder_len=TOKENS, max_model_len=16) as llm,
        pytest.raises(RequestError, match=rf"image 1: .* length is {TOKENS} tokens \(max_enc"),
    ):
        llm.generate([prompt(*ASKED[0])], GREEDY, use_tqdm=False)


def test_what_does_not_fit_is_refused(subject):
    with engine(subject) as llm:
        for asked, message in REFUSED:
            with pytest.raises(ToolkitError, match=message):
                llm.generate([asked], GREEDY, use_tqdm=False)
        check(llm.generate([prompt(*ASKED[0])], GREEDY, use_tqdm=False), subject, ASKED[:1])


PIXELS = np.zeros((1, 3, SIDE, SIDE), np.float32)
ARRAYS = [
    ({}, "must have pixel_values, or embeds"),
    ({"pixel_values": PIXELS, "other": np.ones(1)}, "and nothing else"),
    ({"pixel_values": PIXELS[0]}, r"shape \[1, 3, height, width\]"),
    ({"pixel_values": PIXELS[:, :1]}, r"shape \[1, 3, height, width\]"),
    ({"pixel_values": np.zeros((1, 3, 72, 40), np.float32)}, "9 x 5 states"),
    ({"pixel_values": np.zeros((1, 3, 0, 40), np.float32)}, "positions of 1 to 8"),
    ({"pixel_values": PIXELS.astype(np.int64)}, "must be floats"),
    ({"pixel_values": PIXELS + np.inf}, "finite"),
    ({"embeds": np.zeros((66, 64), np.float32)}, r"\[1 to 65, 64\]"),
    ({"embeds": np.zeros((0, 64), np.float32)}, r"\[1 to 65, 64\]"),
]


def test_arrays_that_are_no_picture(subject):
    rules = Plugins.load().models.load_multimodal(NAME)(checkpoint_config(subject.folder))
    for data, message in ARRAYS:
        with pytest.raises(RequestError, match=message):
            rules.replacement("image", data)
    for height, width in ((8, 8), (40, 24), (64, 64)):
        data = {"pixel_values": np.zeros((1, 3, height, width), np.float32)}
        states = -(-height // 8) * -(-width // 8)
        assert rules.replacement("image", data).token_ids == [IMAGE] * (states + 1)


# The model alone


def load(subject, **options):
    return load_checkpoint(
        Plugins.load().models.load(NAME),
        subject.folder,
        plugins=Plugins.load(),
        **{"max_model_len": 128, "max_encoder_len": 128, **options},
    )


@pytest.mark.parametrize(
    "vision",
    [
        {},
        {"qkv_bias": False, "mlp_ratio": 2.0, "activation_function": "gelu_pytorch_tanh"},
        # One stage more, and a window that is larger than all states.
        {
            "depths": [1, 1, 1],
            "embed_dim": [8, 16, 32],
            "num_heads": [1, 2, 4],
            "num_groups": [2, 4, 8],
            "patch_size": [7, 3, 3],
            "patch_stride": [4, 2, 2],
            "patch_padding": [3, 1, 1],
            "patch_prenorm": [False, True, True],
            "window_size": 12,
        },
    ],
)
def test_embeddings_of_pictures_of_any_size(vision, tmp_path):
    subject = make_florence(tmp_path, vision=vision)
    images = load(subject).model
    generator = torch.Generator().manual_seed(0)
    sizes = [(40, 40), (40, 40), (24, 57), (9, 64), (40, 40)]
    pixels = [torch.randn(1, 3, *size, generator=generator) for size in sizes]
    with torch.inference_mode():
        for found, picture in zip(images.embeddings(pixels), pixels, strict=True):
            expected = subject.model.get_image_features(picture).pooler_output[0]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


DECODER = torch.tensor([START, BEGIN, 30, 41, 52, 63])


def logits_of(model, inputs):
    features = [inputs["pixel_values"]] if "pixel_values" in inputs else None
    model.encode = partial(type(model).encode, model, features=features)
    with torch.inference_mode():
        return encoder_decoder_logits(model, inputs["input_ids"][0], DECODER).float()


def test_logits_and_ranks(subject):
    inputs = [subject.inputs(*one) for one in ASKED[:6]]
    expected = [subject.logits(one, DECODER) for one in inputs]
    for one, logits in zip(inputs, expected, strict=True):
        assert logits.std() > 0.1
        torch.testing.assert_close(logits_of(load(subject), one), logits, atol=1e-4, rtol=1e-4)

    def compute(rank):
        return logits_of(load(subject, rank=rank, tensor_parallel_size=2), inputs[0])

    for found in run_ranks(compute, 2):
        torch.testing.assert_close(found, expected[0], atol=1e-4, rtol=1e-4)


def test_bfloat16(subject):
    inputs = [subject.inputs(*one) for one in ASKED[:5]]
    exact = [subject.logits(one, DECODER) for one in inputs]
    half = type(subject)(
        subject.folder,
        type(subject.model).from_pretrained(subject.folder, dtype=torch.bfloat16).eval(),
        subject.processor,
    )
    model = load(subject, dtype="bfloat16")
    ours = [logits_of(model, one) for one in inputs]
    assert_bf16_error(ours, [half.logits(one, DECODER) for one in inputs], exact)


def test_the_warm_up_has_a_picture_where_there_is_room(subject):
    model = load(subject)
    for num_tokens in (1, 2, 4, 26, 64, 65, 128):
        found: EncoderInput = model.example_input(num_tokens)
        assert found.num_tokens == len(found.token_ids) == num_tokens
        pictures = found.token_ids.count(IMAGE)
        assert (found.features is None) == (pictures == 0) == (num_tokens < 2)
        with torch.inference_mode():
            features = [torch.from_numpy(found.features.to_numpy().copy())] if pictures else []
            assert [len(embeds) for embeds in model.model.embeddings(features)] == (
                [pictures] if pictures else []
            )


CONFIGS = [
    ({"projection_dim": 32}, "'projection_dim' 32 .* must be 'd_model'"),
    ({"depths": [1]}, "unlike stages: depths 1, patch_size 2"),
    ({"embed_dim": [16, 33]}, "'embed_dim' 33 .* must be a multiple of 'num_heads' 8"),
    ({"num_groups": [4, 5]}, "'embed_dim' 32 .* must be a multiple of 'num_groups' 5"),
    ({"patch_stride": [4, 0]}, "'patch_stride' .* integers from 1"),
    ({"patch_prenorm": [0, 1]}, "'patch_prenorm' .* true or false"),
    ({"num_heads": "2"}, "'num_heads' .* must be a list"),
    ({"window_size": 0}, "'window_size' .* must be from 1"),
    ({"mlp_ratio": 0.0}, "'mlp_ratio' must be from 0"),
]


@pytest.mark.parametrize(("fields", "reason"), CONFIGS)
def test_configs_that_describe_no_tower(subject, tmp_path, fields, reason):
    config = json.loads((subject.folder / "config.json").read_text())
    config["vision_config"] |= fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=reason):
        type(load(subject))(vllm_config=checkpoint_config(tmp_path, max_model_len=128))


class TestText(EncoderDecoderConformance):
    """The contract of encoder-decoder models, with prompts of text alone."""

    variants = {"plain": {}}

    def make_checkpoint(self, folder, **variant):
        # Sharp attention makes more of the rounding of transformers than 1e-4.
        made = make_florence(folder, attention=1.0)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        # The kit reads them at the top.
        fields = {name: TEXT[name] for name in ("vocab_size", "decoder_start_token_id")}
        # It draws any tokens from 3 on.
        fields["image_token_id"] = 2
        path.write_text(json.dumps({**config, **fields}))
        (folder / "generation_config.json").unlink()

        @torch.inference_mode()
        def reference(encoder_ids, token_ids):
            return made.model(
                input_ids=torch.tensor([list(encoder_ids)]),
                decoder_input_ids=torch.tensor([list(token_ids)]),
            ).logits[0]

        return reference
