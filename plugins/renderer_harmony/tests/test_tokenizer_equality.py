"""The engine's tokenizer and that of `get_tokenizer` give equal ids, over real vocabularies and
configs as checkpoints have them."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from functools import cache
from pathlib import Path

import pytest
from toolkit_lm_renderer_hf.pieces import Cutter
from toolkit_lm_renderer_hf.renderer import HfRenderer
from toolkit_lm_renderer_hf.tokenizer import load_tokenizer

TIKTOKEN = {
    "cl100k": "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
    "o200k": "fb374d419588a4632f3f557e76b4b70aebbca790",
}
VOCABULARIES = ["anthropic", "deepseek", *TIKTOKEN, "tekken", "tiny"]
ADDED = {
    "content": "<|extra|>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
    "special": True,
}
CONFIGS = {
    "no config": None,
    "no class": {},
    "fast": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "bos and eos": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": True,
    },
    "llama": {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "legacy": True},
    "gpt 2": {
        "tokenizer_class": "GPT2Tokenizer",
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    },
    "qwen 2": {
        "tokenizer_class": "Qwen2Tokenizer",
        **dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>"),
    },
    "llama 3": {"tokenizer_class": "PreTrainedTokenizer", "clean_up_tokenization_spaces": True},
    "more tokens": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|extra|>"],
    },
    "other tokens": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {"300000": ADDED},
    },
    "named tokens": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|extra|>",
        "pad_token": "<|pad|>",
    },
}
FEW = {
    "anthropic": ("no class", "bos and eos", "llama", "named tokens"),
    "cl100k": ("gpt 2", "qwen 2"),
    "deepseek": ("llama", "other tokens"),
    "o200k": ("gpt 2", "other tokens"),
    "tekken": ("llama", "qwen 2"),
    "tiny": tuple(CONFIGS),
}
"""Configs that a vocabulary is loaded with: it takes seconds for a large one. Each config that
changes how texts are cut has two large vocabularies, and the other pairs are nightly."""
PARTS = [
    "Paris",
    " the",
    "  ",
    "\n",
    "\r\n\n",
    "\t",
    "don't",
    "DON'T",
    "123456",
    "3.14",
    "São",
    "e\u0301",
    "москва",
    "北京大学",
    "서울",
    "😀",
    "\u200d",
]
PARTS += [
    "ﷺ",
    "﷽",
    "\u00a0",
    "\ufeff",
    "x=y+1;",
    "http://a.b/c?d=e",
    "_",
    "▁",
    "Ġ",
    "<|extra|>",
    "<|endoftext|>",
    "<s>",
    "İ",
    "ſ",
    "\x00",
    "\u3000",
]


@pytest.fixture(scope="module")
def save(vocabulary, tmp_path_factory):
    """save(name): a folder with the tokenizer.json of a real vocabulary."""
    pytest.importorskip("mistral_common")

    @cache
    def saved(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        if name in TIKTOKEN:
            from transformers.convert_slow_tokenizer import TikTokenConverter

            converter = TikTokenConverter(
                str(vocabulary.parent / TIKTOKEN[name]), extra_special_tokens=["<|endoftext|>"]
            )
            converter.converted().save(str(folder / "tokenizer.json"))
        elif name == "tekken":
            from transformers.convert_slow_tokenizer import TikTokenConverter

            found = importlib.util.find_spec("mistral_common")
            tekken = json.loads(
                (Path(found.origin).parent / "data" / "tekken_240718.json").read_text()
            )
            lines = [f"{one['token_bytes']} {one['rank']}" for one in tekken["vocab"]]
            (folder / "tekken.tiktoken").write_text(
                "\n".join(lines[: tekken["config"]["default_vocab_size"] - 1000])
            )
            converter = TikTokenConverter(
                str(folder / "tekken.tiktoken"),
                tekken["config"]["pattern"],
                extra_special_tokens=["<s>"],
            )
            converter.converted().save(str(folder / "tokenizer.json"))
        elif name == "tiny":
            import toolkit_lm_tiny

            shutil.copy(
                Path(toolkit_lm_tiny.__file__).parent / "checkpoint" / "tokenizer.json", folder
            )
        else:
            shutil.copy(vocabulary.parent / f"{name}_tokenizer.json", folder / "tokenizer.json")
        return folder

    return saved


@pytest.mark.parametrize(
    ("name", "titles"),
    [pytest.param(name, FEW[name], id=name) for name in VOCABULARIES]
    + [
        pytest.param(
            name,
            [title for title in CONFIGS if title not in FEW[name]],
            marks=pytest.mark.nightly,
            id=f"{name} with others",
        )
        for name in VOCABULARIES
        if name != "tiny"
    ],
)
def test_ids_are_equal(save, resolved, name, titles):
    folder = save(name)
    chosen = random.Random(5)
    texts = ["".join(chosen.choices(PARTS, k=chosen.randrange(1, 12))) for _ in range(40)]
    for title in titles:
        config = CONFIGS[title]
        path = folder / "tokenizer_config.json"
        path.unlink(missing_ok=True)
        if config is not None:
            path.write_text(json.dumps(config))
        renderer = HfRenderer(resolved(folder))
        tokenizer = renderer.get_tokenizer()
        for text in texts:
            for special in (True, False):
                ours = renderer.render_prompt(text, add_special_tokens=special).token_ids
                theirs = tokenizer(text, add_special_tokens=special)["input_ids"]
                assert ours == theirs, (title, text, special)


LONG = {
    "spaces": "a" + " " * 3000 + "b c" * 500,
    "one word": "x" * 3000,
    "two words": "x" * 2000 + " " + "y" * 2000 + " z",
    "no spaces": "北京大学。москва，" * 400,
    "emoji": "😀\u200d🔥 é" * 500,
    "marks": "e\u0301 o\u0308 n\u0303a " * 400,
    "lines": "Some words,\r\nand more \r\n\r\n of them\t\n" * 100,
    "special": "a<|endoftext|> b <s> c</s> <|extra|> d<EOT> <｜▁pad▁｜>e " * 100,
    "digits": "1234567 89 a1 2b " * 300,
    "code": "def f(x):\n    return x + 1  # don't\n\n" * 150,
    "thai": "กิน ข้าว " * 400,
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_pieces_have_the_ids_of_the_whole(save, name):
    """Real vocabularies, all of which split words."""
    folder = save(name)
    chosen = random.Random(7)
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    tokenizer = load_tokenizer(folder).tokenizer
    texts = [
        "".join(part + chosen.choice(" " * 9 + "\n") for part in chosen.choices(PARTS, k=400))
        for _ in range(10)
    ]
    numbers = []
    for text in (*texts, *LONG.values()):
        pieces = list(Cutter(tokenizer, 64).pieces(text))
        parts, [whole] = [
            tokenizer.encode_batch_fast(one, add_special_tokens=False) for one in (pieces, [text])
        ]
        assert [token for part in parts for token in part.ids] == whole.ids, text[:100]
        numbers.append(len(pieces))
    assert min(numbers[: len(texts)]) > 5 and numbers[len(texts)] > 10, numbers
