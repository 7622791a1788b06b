"""Small models that see: their tokenizer, their chat templates, and their rules, as transformers
has them."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toolkit_lm.errors import RequestError
from toolkit_lm.renderer import MultiModalRules, Replacement

SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
]
SPECIAL += ["<|video_pad|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ "
    "m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% elif p['type'] == 'video' "
    "%}VIDEO"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAVA = CHAT.replace("IMAGE", "<image>\n")
GEMMA = CHAT.replace("IMAGE", "<start_of_image>")
QWEN = CHAT.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>").replace(
    "VIDEO", "<|vision_start|><|video_pad|><|vision_end|>"
)
HIDDEN = 6


def train_newlines() -> Tokenizer:
    """Several newlines are one token, as in Gemma's tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["user\n\n\nWhat is this? a\n\nb\n\n\nc\n\n\n\nd"] * 10, trainer)
    return tokenizer


def token(text: str) -> int:
    return SPECIAL.index(text)


class Rules(MultiModalRules):
    """Rules of a model; the classes below have these embeddings."""

    def embeds(self, data, count):
        if "embeds" in data and data["embeds"].shape != (count, HIDDEN):
            raise RequestError(
                f"embeds must have the shape {[count, HIDDEN]}, not {list(data['embeds'].shape)}."
            )


class LlavaRules(Rules):
    """Patches of 14 x 14 pixels of an image of 28 x 28."""

    def placeholder_id(self, modality):
        return token("<image>")

    def replacement(self, modality, data):
        if "embeds" not in data and data["pixel_values"].shape != (1, 3, 28, 28):
            raise RequestError("pixel_values must have the shape [1, 3, 28, 28].")
        self.embeds(data, 4)
        return Replacement([token("<image>")] * 4)


class GemmaRules(Rules):
    """Four soft tokens, with newlines around."""

    surround = {"image": ("\n\n", "<end_of_image>\n\n")}

    def placeholder_id(self, modality):
        return token("<start_of_image>")

    def replacement(self, modality, data):
        self.embeds(data, 4)
        return Replacement(
            [token("<start_of_image>"), *[token("<image_soft_token>")] * 4], [False, *[True] * 4]
        )


class QwenRules(Rules):
    """A token for each 2 x 2 patches."""

    modalities = ("image", "video")

    def placeholder_id(self, modality):
        return token(f"<|{modality}_pad|>")

    def placeholder_text(self, modality, token):
        return f"<|vision_start|>{token}<|vision_end|>"

    def replacement(self, modality, data):
        if f"{modality}_grid_thw" not in data:
            raise RequestError(f"{modality}_grid_thw is missing.")
        (grid,) = data[f"{modality}_grid_thw"].tolist()
        count = grid[0] * grid[1] * grid[2] // 4
        self.embeds(data, count)
        return Replacement(
            [self.placeholder_id(modality)] * count,
            None,
            {"grid_thw": [float(number) for number in grid]},
        )
