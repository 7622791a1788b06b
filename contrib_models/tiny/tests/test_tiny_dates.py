"""The embedded encoder-decoder model, through the whole engine: it reads dates that it has not seen
in training."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from random import Random

import pytest
import toolkit_lm_tiny
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_tiny.dates import forms, held_out, is_held_out

GREEDY = SamplingParams(temperature=0, max_tokens=20)
FOLDER = Path(toolkit_lm_tiny.__file__).parent / "checkpoint_dates"


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-dates") as llm:
        yield llm


def test_it_reads_dates_that_it_has_not_seen(llm):
    asked = Random(4).sample(
        [(text, day.isoformat()) for day in held_out() for text in forms(day)], 800
    )
    outputs = llm.generate([text for text, _ in asked], GREEDY, use_tqdm=False)
    wrong = [
        (text, output.outputs[0].text)
        for (text, iso), output in zip(asked, outputs, strict=True)
        if output.outputs[0].text != iso
    ]
    assert len(wrong) <= 0.05 * len(asked), wrong
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)


def test_the_forms_of_a_date():
    assert forms(date(1905, 3, 22))[4:7] == [
        "the twenty-second of March, nineteen oh five",
        "the twenty-second of March 1905",
        "March the twenty-second, nineteen oh five",
    ]
    years = {
        2000: "two thousand",
        2009: "two thousand nine",
        2010: "twenty ten",
        1800: "eighteen hundred",
        1999: "nineteen ninety-nine",
    }
    for year, words in years.items():
        assert forms(date(year, 1, 11))[4] == f"the eleventh of January, {words}"
    assert [
        form.split()[0]
        for form in (forms(date(2001, 1, day))[2] for day in (1, 2, 3, 11, 12, 13, 21, 30))
    ] == (["1st", "2nd", "3rd", "11th", "12th", "13th", "21st", "30th"])
    assert all(map(is_held_out, held_out()))


def test_it_gives_the_tokens_of_transformers(llm):
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    texts = ["July 4, 1776", "the first of January, two thousand", "31 dec 1999", "no date at all"]
    with LLM("tiny-dates", dtype="float32") as exact:
        outputs = exact.generate(texts, GREEDY, use_tqdm=False)
    for output in outputs:
        ids = torch.tensor([output.encoder_prompt_token_ids])
        found = model.generate(
            ids,
            decoder_input_ids=torch.tensor([output.prompt_token_ids]),
            max_new_tokens=20,
            do_sample=False,
        )
        assert output.outputs[0].token_ids == found[0, len(output.prompt_token_ids) :].tolist()


def test_beams_and_a_decoder_that_was_begun(llm):
    beams = SamplingParams(use_beam_search=True, beam_width=4, n=2, max_tokens=20)
    given = {"encoder_prompt": "July 4, 1776", "decoder_prompt": "17"}
    found, begun = llm.generate(["July 4, 1776", given], [beams, GREEDY], use_tqdm=False)
    assert found.outputs[0].text == "1776-07-04"
    assert begun.outputs[0].text == "76-07-04"


def test_it_takes_little_memory(llm):
    assert (FOLDER / "model.safetensors").stat().st_size <= 4 * 2**20
    assert llm.config.cache.kv_cache_memory == "64MiB"
