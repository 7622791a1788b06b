"""Small models that hear: their tokenizer, their chat template, and their rules."""

from __future__ import annotations

from seeing import CHAT, SPECIAL
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toolkit_lm.errors import RequestError
from toolkit_lm.renderer import MultiModalRules, Replacement

MARKS = [*SPECIAL, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
ITEM = "<|audio_bos|><|AUDIO|><|audio_eos|>"
TEMPLATE = CHAT.replace("p['type'] == 'image'", "p['type'] == 'audio'").replace("IMAGE", ITEM)
MELS = 16
SECONDS = 2
EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": MELS,
    "sampling_rate": 16000,
    "chunk_length": SECONDS,
}
"""Values of preprocessor_config.json."""
AUDIO = MARKS.index("<|AUDIO|>")


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["user\nWhat is this sound? It is a dog."] * 10, trainer)
    return tokenizer


class HearingRules(MultiModalRules):
    """A token for each four frames of sound."""

    modalities = ("audio",)

    def placeholder_id(self, modality):
        return AUDIO

    def placeholder_text(self, modality, token):
        return f"<|audio_bos|>{token}<|audio_eos|>"

    def replacement(self, modality, data):
        if "embeds" in data:
            return Replacement([AUDIO] * len(data["embeds"]))
        frames = data["feature_attention_mask"].shape[1]
        if data["input_features"].shape != (1, MELS, frames):
            raise RequestError(f"input_features must have the shape {[1, MELS, frames]}.")
        return Replacement([AUDIO] * (int(data["feature_attention_mask"].sum()) // 4))
