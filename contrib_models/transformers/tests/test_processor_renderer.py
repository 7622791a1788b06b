"""Prompts whose pictures the checkpoint's own processor reads."""

from __future__ import annotations

import image_text
import numpy as np
import pytest
import torch
from tiny_models import save
from tokenizers import Tokenizer, models, pre_tokenizers
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ToolkitError
from transformers import AutoProcessor, Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

MARKS = [
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
]
WORDS = ["<unk>", "<s>", "<pad>", "see", "and", "here", "\n"]
OPTIONS = {
    "model_impl": "transformers_image_text",
    "dtype": "float32",
    "max_model_len": 300,
    "max_num_seqs": 2,
}
TEXT = "see <image> and <image> here"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of transformers, its folder and its processor."""
    folder = tmp_path_factory.mktemp("idefics3")
    config = image_text.tiny_config("idefics3")
    config.image_token_id = len(WORDS)
    model = save("idefics3", folder, architecture="Idefics3ForConditionalGeneration", config=config)
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*WORDS, *MARKS])}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        pad_token="<pad>",
        additional_special_tokens=MARKS,
    )
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(folder)
    return model, folder


def drawings(count):
    random = np.random.default_rng(3)
    return [
        random.integers(0, 256, (*random.integers(12, 90, 2), 3), np.uint8) for _ in range(count)
    ]


def test_pictures_are_those_of_the_processor(checkpoint):
    model, folder = checkpoint
    processor = AutoProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    pictures = drawings(2)
    allowed = list(range(3, 7))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, allowed_token_ids=allowed)
    with LLM(str(folder), **OPTIONS) as llm:
        seeing, blind = llm.generate(
            [{"prompt": TEXT, "multi_modal_data": {"image": pictures}}, "see here"],
            params,
            use_tqdm=False,
        )
    given = processor(
        text=TEXT, images=pictures, return_tensors="pt", input_data_format="channels_last"
    )
    assert given["input_ids"][0].tolist() == list(seeing.prompt_token_ids)
    forbidden = [[token] for token in range(150) if token not in allowed]
    for output, inputs in (
        (seeing, given),
        (blind, {"input_ids": torch.tensor([blind.prompt_token_ids])}),
    ):
        drawn = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=6,
            min_new_tokens=6,
            bad_words_ids=forbidden,
            pad_token_id=2,
            eos_token_id=None,
        )
        assert drawn[0, inputs["input_ids"].shape[1] :].tolist() == list(
            output.outputs[0].token_ids
        )


def test_without_a_processor_it_reads_text_alone(checkpoint, tmp_path):
    _, folder = checkpoint
    for file in folder.iterdir():
        if file.name != "processor_config.json":
            (tmp_path / file.name).symlink_to(file)
    prompt = {"prompt": TEXT, "multi_modal_data": {"image": drawings(2)}}
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.generate(["see here"], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs
        with pytest.raises(ToolkitError, match="image"):
            llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
