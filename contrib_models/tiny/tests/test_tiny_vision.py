"""The embedded model that looks at pictures: it answers questions about drawings that it has not
seen in training."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from random import Random

import numpy as np
import pytest
import toolkit_lm_tiny
import torch
from PIL import Image, ImageDraw
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_tiny.drawing_questions import TALK, ask, ask_blind, ask_pair, exam
from toolkit_lm_tiny.drawings import COLOURS, KINDS, MOST, Drawing, Shape, draw
from transformers import AutoTokenizer, LlavaForConditionalGeneration, LlavaProcessor

FOLDER = Path(toolkit_lm_tiny.__file__).parent / "checkpoint_vision"
JUDGE = Path(__file__).parents[1] / "train" / "judge_vision.py"
MIB = 2**20
SIDE = 48
GREEDY = SamplingParams(temperature=0, max_tokens=30)


@pytest.fixture(scope="module")
def judge():
    """The script that judges a checkpoint, as a module."""
    spec = importlib.util.spec_from_file_location("judge_vision", JUDGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model():
    return LlavaForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor():
    return LlavaProcessor.from_pretrained(FOLDER)


def test_it_answers_about_held_out_drawings(judge, model, processor):
    tasks = exam(200, seed=7)
    assert all(drawing.is_held_out for task in tasks for drawing in task.drawings)
    verdict = judge.judge(model, processor, tasks)
    assert verdict.accuracy >= 0.9, verdict.wrong


def test_it_knows_what_it_can_do_without_a_picture(judge, model, processor):
    tasks = [task for task in exam(1000, seed=8) if not task.drawings]
    assert {task.question.kind for task in tasks} == {"talk", "no picture"}
    verdict = judge.judge(model, processor, tasks)
    assert verdict.accuracy >= 0.95, verdict.wrong


def chat_of(task) -> list[dict]:
    """A task as `LLM.chat` takes it, pictures first."""
    parts = [
        {"type": "image", "image": Image.fromarray(drawing.pixels())} for drawing in task.drawings
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": task.question.text}]}]


def test_the_engine_answers_as_transformers_does(judge, model, processor):
    tasks = exam(100, seed=9)
    expected = judge.answers(model, processor, tasks)
    with LLM("tiny-vision", dtype="float32") as llm:
        outputs = llm.chat([chat_of(task) for task in tasks], GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == expected
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-vision") as llm:
        yield llm


def test_the_engine_answers_in_bfloat16(llm):
    tasks = exam(200, seed=7)
    outputs = llm.chat([chat_of(task) for task in tasks], GREEDY, use_tqdm=False)
    wrong = [
        (task.question, output.outputs[0].text) for task, output in zip(tasks, outputs, strict=True)
    ]
    wrong = [(question, answer) for question, answer in wrong if question.answer != answer]
    assert len(wrong) <= 0.1 * len(tasks), wrong
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)


def test_a_conversation_about_a_picture(llm):
    """The text before the picture, two turns, and a picture as a program with Pillow would draw
    it."""
    picture = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(picture).ellipse((60, 60, 140, 140), fill="red")
    ImageDraw.Draw(picture).ellipse((190, 110, 270, 190), fill="red")
    content = [
        {"type": "text", "text": "What is in this picture?"},
        {"type": "image", "image": picture},
    ]
    messages = [{"role": "user", "content": content}]
    (first,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert first.outputs[0].text == "Two red circles."
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "How many circles are there?"},
    ]
    (second,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert second.outputs[0].text == "There are two circles."


def test_it_takes_little_memory(llm):
    assert llm.config.cache.kv_cache_memory == "64MiB"
    assert llm.config.model.dtype == "bfloat16"


def test_its_files():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sizes.pop("model.safetensors") <= 4 * MIB
    assert set(sizes) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert max(sizes.values()) <= MIB


def test_its_chat_template_takes_parts_and_strings():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<image>What is "
        "this?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": parts[::-1]}], tokenize=False
    ).endswith("?<image><|im_end|>\n")


def test_pictures_of_any_shape_are_taken_whole(processor):
    pixels = draw(Random(3)).pixels()
    tall = np.repeat(np.repeat(pixels, 6, axis=0), 2, axis=1)
    for picture in (Image.fromarray(tall), tall):
        found = processor.image_processor(picture, return_tensors="np").pixel_values
        assert found.shape == (1, 3, SIDE, SIDE) and found.dtype == np.float32
        expected = (
            np.asarray(
                Image.fromarray(tall).resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float32
            )
            / 127.5
            - 1
        )
        assert np.abs(found[0] - expected.transpose(2, 0, 1)).max() < 1e-5


def test_drawings_are_the_same_again():
    first, second = ([draw(random) for _ in range(50)] for random in (Random(5), Random(5)))
    assert first == second
    assert all(np.array_equal(a.pixels(), b.pixels()) for a, b in zip(first, second, strict=True))
    assert exam(20) == exam(20) != exam(20, seed=1)


def test_what_is_drawn_is_what_is_said():
    blue = (0, 0, 255)
    red = (255, 0, 0)
    shapes = (
        Shape("square", "blue", blue, 60, 20, 10, 0.0),
        Shape("circle", "red", red, 20, 20, 10, 0.0),
        Shape("circle", "red", red, 20, 50, 10, 0.0),
    )
    drawing = Drawing(80, 70, ((250, 250, 250), (250, 250, 250)), shapes)
    assert drawing.content == "Two red circles and one blue square."
    assert drawing._replace(shapes=()).content == "No shapes."
    pixels = drawing.pixels()
    assert pixels.shape == (70, 80, 3) and pixels.dtype == np.uint8
    reds, blues = (int((pixels == colour).all(-1).sum()) for colour in (red, blue))
    assert abs(reds - 2 * math.pi * 100) < 30
    assert abs(blues - 2 * 11.5**2) < 30
    assert (
        (pixels[20, 60] == blue).all()
        and (pixels[50, 20] == red).all()
        and (pixels[69, 79] == 250).all()
    )


def test_shapes_do_not_touch_and_stand_out():
    random = Random(6)
    for _ in range(300):
        drawing = draw(random)
        assert len(drawing.shapes) <= MOST
        for i, shape in enumerate(drawing.shapes):
            assert 0 < shape.x < drawing.width and 0 < shape.y < drawing.height
            assert all(math.dist(shape.rgb, colour) > 100 for colour in drawing.background)
            for other in drawing.shapes[:i]:
                assert math.dist((shape.x, shape.y), (other.x, other.y)) > 1.2 * (
                    shape.radius + other.radius
                )


def test_every_twentieth_content_is_held_out():
    random = Random(7)
    assert all(
        not draw(random, held_out=False).is_held_out and draw(random, held_out=True).is_held_out
        for _ in range(100)
    )
    contents = {
        drawing.content: drawing.is_held_out for drawing in (draw(random) for _ in range(3000))
    }
    assert 0.03 < sum(contents.values()) / len(contents) < 0.07


def test_answers_follow_from_drawings():
    random = Random(8)
    for _ in range(500):
        first = draw(random)
        second = draw(random)
        one = ask(random, first)
        two = ask_pair(random, first, second)
        none = ask_blind(random, first)
        counts = [len(drawing.shapes) for drawing in (first, second)]
        if one.kind == "count":
            assert one.answer.split()[2] == ("no", "one", "two", "three", "four", "five")[counts[0]]
        if one.kind == "yes or no":
            looks = [
                colour + " " + kind
                for colour in COLOURS
                for kind in KINDS
                if first.count(colour, kind)
            ]
            assert one.answer == ("Yes." if any(look in one.text for look in looks) else "No.")
        if two.kind == "more of two":
            assert two.answer == f"The {'first' if counts[0] > counts[1] else 'second'} picture."
        assert none.answer == TALK.get(none.text, "I see no picture. Please show me one.")
