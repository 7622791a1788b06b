"""Checkpoint folders of small models that hear, with all that a renderer reads, and transformers'
processor of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from toolkit_lm_devkit import randomize, write_tokenizer
from transformers import (
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2Config,
    WhisperFeatureExtractor,
)

VOCAB = 300
AUDIO = 7
BEGIN = 8
END = 9
MARKS = {"<|AUDIO|>": AUDIO, "<|audio_bos|>": BEGIN, "<|audio_eos|>": END}
ITEM = "<|audio_bos|><|AUDIO|><|audio_eos|>"
RATE = 16000
MELS = 16
STATES = 50
"""A window is a second: 100 frames, 25 tokens."""
TOWER = {
    "num_mel_bins": MELS,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "d_model": 32,
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ "
    "m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'audio' %}"
    + ITEM
    + "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
FAMILIES = {
    "Qwen2": lambda: Qwen2Config(**TEXT, tie_word_embeddings=False),
    "Qwen2 with sliding windows": lambda: Qwen2Config(
        **TEXT, use_sliding_window=True, sliding_window=13, max_window_layers=1
    ),
    "Llama": lambda: LlamaConfig(**TEXT),
}
"""Configs of the language part by name."""


def random_model(family: str = "Qwen2", states: int = STATES) -> Any:
    tower = Qwen2AudioEncoderConfig(**TOWER, max_source_positions=states)
    model = Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(
            audio_config=tower, text_config=FAMILIES[family](), audio_token_index=AUDIO
        )
    )
    randomize(model)
    return model.eval()


@dataclass
class Subject:
    """A checkpoint, and what transformers makes of it."""

    folder: Path
    model: Any
    processor: Any
    mark = ITEM
    """Text of a recording's placeholder."""

    def items(self, count: int, *, seed: int = 0) -> list[np.ndarray]:
        """Recordings of three tokens or more: transformers takes a prompt with one for one that is
        not rendered."""
        return recordings(*np.random.default_rng(seed).uniform(0.1, 1, count), seed=seed)

    def inputs(self, text: str, recordings: list[np.ndarray]) -> dict[str, torch.Tensor]:
        """Inputs of transformers' model for recordings [N], 16,000 samples a second."""
        given = {"audio": recordings, "sampling_rate": RATE} if recordings else {}
        return dict(self.processor(text=text, return_tensors="pt", **given))

    @torch.inference_mode()
    def greedy(
        self, text: str, recordings: list[np.ndarray], count: int
    ) -> tuple[list[int], list[int]]:
        """Tokens of a prompt, and those that transformers draws after it."""
        inputs = self.inputs(text, recordings)
        drawn = self.model.generate(
            **inputs, do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=2
        )
        length = inputs["input_ids"].shape[1]
        return drawn[0, :length].tolist(), drawn[0, length:].tolist()


def make_subject(folder: Path, family: str = "Qwen2", seconds: int = 1) -> Subject:
    """`seconds`: of a window."""
    model = random_model(family, STATES * seconds)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**special, "id": number, "content": mark} for mark, number in MARKS.items()
    ]
    tokenizer["model"]["vocab"] |= MARKS
    path.write_text(json.dumps(tokenizer))
    extractor = WhisperFeatureExtractor(feature_size=MELS, sampling_rate=RATE, chunk_length=seconds)
    extractor.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    read = PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<s>", pad_token="<pad>")
    return Subject(folder, model, Qwen2AudioProcessor(extractor, read, chat_template=TEMPLATE))


def recordings(*seconds: float, seed: int = 0) -> list[np.ndarray]:
    """Samples [N] float32 of each: tones and noise."""
    random = np.random.default_rng(seed)
    found = []
    for one in seconds:
        time = np.arange(int(one * RATE)) / RATE
        tone = np.sin(
            2 * np.pi * random.uniform(100, 2000) * time * (1 + random.uniform(0, 1) * time)
        )
        found.append((0.4 * tone + 0.05 * random.standard_normal(len(time))).astype(np.float32))
    return found
