"""Prompts whose recordings the checkpoint's own processor reads."""

from __future__ import annotations

import audio
import numpy as np
import pytest
import torch
from tiny_models import save
from tokenizers import Tokenizer, models, pre_tokenizers
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ToolkitError
from transformers import (
    AutoProcessor,
    GlmAsrProcessor,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
)

WORDS = ["<unk>", "<s>", "<eos>", "hear", "and", "here", "\n", "<|pad|>"]
OPTIONS = {
    "model_impl": "transformers_audio_text",
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 2,
    "num_kv_blocks": 64,
    "block_size": 4,
}
TEXT = "hear <|pad|> here"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of transformers, and its folder with its processor."""
    folder = tmp_path_factory.mktemp("glmasr")
    config = audio.tiny_config("glmasr")
    config.audio_token_id = WORDS.index("<|pad|>")
    model = save("glmasr", folder, architecture="GlmAsrForConditionalGeneration", config=config)
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<eos>",
        pad_token="<eos>",
        additional_special_tokens=["<|pad|>"],
    )
    seconds = audio.FRAMES // 100
    extractor = WhisperFeatureExtractor(feature_size=audio.MELS, chunk_length=seconds)
    GlmAsrProcessor(extractor, tokenizer).save_pretrained(folder)
    return model, folder


def recordings():
    random = np.random.default_rng(3)
    return [random.uniform(-0.5, 0.5, size).astype(np.float32) for size in (32000, 21000)]


def test_recordings_are_those_of_the_processor(checkpoint):
    """Of two lengths; it takes one at a time."""
    model, folder = checkpoint
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    allowed = list(range(3, 7))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, allowed_token_ids=allowed)
    prompts = [
        {"prompt": TEXT, "multi_modal_data": {"audio": [(sound, 16000)]}} for sound in recordings()
    ]
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.generate([*prompts, "hear here"], params, use_tqdm=False)
    for output, sound in zip(outputs, [*recordings(), None], strict=True):
        inputs = {}
        if sound is not None:
            inputs = dict(processor(text=TEXT, audio=[sound], sampling_rate=16000))
            assert inputs["input_ids"][0].tolist() == list(output.prompt_token_ids)
            del inputs["attention_mask"]
        drawn = list(output.outputs[0].token_ids)
        inputs["input_ids"] = torch.tensor([[*output.prompt_token_ids, *drawn]])
        with torch.inference_mode():
            logits = model(**inputs, use_cache=False).logits[0]
        likeliest = logits[len(output.prompt_token_ids) - 1 : -1, allowed].argmax(dim=-1)
        assert (likeliest + allowed[0]).tolist() == drawn


def test_a_recording_longer_than_a_window_is_refused(checkpoint):
    _, folder = checkpoint
    long = {"prompt": "hear <|pad|>", "multi_modal_data": {"audio": [(np.zeros(64000), 16000)]}}
    with (
        LLM(str(folder), **OPTIONS) as llm,
        pytest.raises(ToolkitError, match="the model hears 2 at a time"),
    ):
        llm.generate([long], SamplingParams(max_tokens=2), use_tqdm=False)


def test_without_a_processor_it_reads_text_alone(checkpoint, tmp_path):
    _, folder = checkpoint
    for file in folder.iterdir():
        if file.name not in ("processor_config.json", "preprocessor_config.json"):
            (tmp_path / file.name).symlink_to(file)
    media = {"audio": [(sound, 16000) for sound in recordings()]}
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.generate(["hear here"], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs
        with pytest.raises(ToolkitError, match="or other media"):
            prompt = {"prompt": TEXT, "multi_modal_data": media}
            llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
