"""A model that sees, by a third party's distribution (tests/plugins/glance): its tower, its rules
and its renderer are its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError
from toolkit_lm_devkit import (
    ModelConformance,
    assert_same_logits,
    assert_same_tokens,
    randomize,
    write_checkpoint,
)
from toolkit_lm_devkit.generation import logprobs_of
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "plugins" / "glance"
VOCAB = 300
SIZE = 64
HEADS = 4
HEAD_SIZE = 16
TILE = 3
TILE_TOKEN = 290
ROW_TOKEN = 291
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIG = {
    "architectures": ["GlanceForConditionalGeneration"],
    "vocab_size": VOCAB,
    "text_config": {**LLAMA, "architectures": ["LlamaForCausalLM"]},
    "tile_size": TILE,
    "tile_heads": HEADS,
    "tile_token_id": TILE_TOKEN,
    "row_token_id": ROW_TOKEN,
}
COUNT = 10
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=VOCAB)


class Reference:
    """The same model, written down again, around transformers' Llama."""

    def __init__(self) -> None:
        self.language = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
        randomize(self.language)
        generator = torch.Generator().manual_seed(3)
        inner = HEADS * HEAD_SIZE
        shapes = {
            "tile": (SIZE, TILE**2),
            "query": (inner, SIZE),
            "key": (inner, SIZE),
            "value": (inner, SIZE),
            "out": (SIZE, inner),
        }
        self.eye = {
            name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()
        }

    def weights(self) -> dict[str, torch.Tensor]:
        own = {f"eye.{name}.weight": tensor for name, tensor in self.eye.items()}
        return own | {
            f"language.{name}": tensor for name, tensor in self.language.state_dict().items()
        }

    def __call__(self, token_ids) -> torch.Tensor:
        return self.see(token_ids, [])

    @torch.inference_mode()
    def see(self, token_ids, images) -> torch.Tensor:
        ids = torch.tensor(list(token_ids))
        embeds = self.language.model.embed_tokens(ids)
        if images:
            embeds[ids == TILE_TOKEN] = torch.cat([self.look(image) for image in images])
        return self.language(inputs_embeds=embeds[None]).logits[0]

    def look(self, image) -> torch.Tensor:
        rows, columns = (side // TILE for side in image.shape)
        cut = [
            image[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE].ravel()
            for i in range(rows)
            for j in range(columns)
        ]
        x = torch.from_numpy(np.stack(cut)) @ self.eye["tile"].T
        q, k, v = (
            (x @ self.eye[name].T).view(len(x), HEADS, HEAD_SIZE).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        return (
            x
            + F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1) @ self.eye["out"].T
        )


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """The plugin in pip's layout."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(FOLDER / "toolkit_lm_glance", site / "toolkit_lm_glance")
    info = site / "toolkit_lm_glance-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toolkit-lm-glance\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[toolkit_lm]\nglance = toolkit_lm_glance\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield


class TestGlance(ModelConformance):
    """Text without images goes through any decoder."""

    max_tokens = 12
    placeholder_ids = (TILE_TOKEN,)
    tensor_parallel_sizes = (2,)

    def make_checkpoint(self, folder, **variant):
        reference = Reference()
        write_checkpoint(folder, CONFIG, reference.weights())
        return reference


def image(height: int, width: int, seed: int = 0) -> np.ndarray:
    return (
        np.random.default_rng([height, width, seed])
        .standard_normal((height, width))
        .astype(np.float32)
    )


PROMPTS = [
    ("in \0, beside \0 and \0", [image(6, 9), image(3, 3), image(13, 30)]),
    ("\0", [image(9, 9)]),
    ("no image here", []),
    ("\0\0 twice, and once \0!", [image(6, 9), image(6, 9, seed=1), image(6, 9)]),
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 30, "max_num_seqs": 8},
    ],
    ids=["whole", "chunked", "uncached"],
)
def test_prompts_with_images(tmp_path, options):
    reference = Reference()
    write_checkpoint(tmp_path, CONFIG, reference.weights())
    prompts = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in PROMPTS]
    with LLM(
        str(tmp_path),
        max_model_len=128,
        max_logprobs=VOCAB,
        device="cpu",
        num_kv_blocks=64,
        **options,
    ) as llm:
        for _ in range(2):
            for output, (_, images) in zip(
                llm.generate(prompts, GREEDY, use_tqdm=False), PROMPTS, strict=True
            ):
                [completion] = output.outputs
                drawn = list(completion.token_ids)
                prompt = output.prompt_token_ids
                assert prompt.count(TILE_TOKEN) == sum(
                    one.shape[0] // TILE * (one.shape[1] // TILE) for one in images
                )
                assert TILE_TOKEN not in drawn, "the reference would take it for an image's"
                logits = reference.see([*prompt, *drawn], images)[len(prompt) - 1 : -1].log_softmax(
                    -1
                )
                assert_same_logits(logprobs_of(completion, VOCAB), logits)
                assert_same_tokens(drawn, logits)


def test_what_it_does_not_take(tmp_path):
    write_checkpoint(tmp_path, CONFIG, Reference().weights())
    with LLM(str(tmp_path), max_model_len=64, device="cpu", num_kv_blocks=16) as llm:
        for given, reason in (
            ({"image": [image(2, 9)]}, "image|tiles must have the shape"),
            ({"image": [image(6, 6), image(3, 3)]}, "more images than places"),
            ({"image": [image(60, 60)]}, "64"),
        ):
            with pytest.raises(RequestError, match=reason):
                llm.generate(
                    [{"prompt": "a\0b", "multi_modal_data": given}],
                    GREEDY.replace(logprobs=None),
                    use_tqdm=False,
                )


def test_it_is_small():
    lines = [
        line
        for path in FOLDER.rglob("*.py")
        for line in path.read_text().splitlines()
        if line.strip()
    ]
    assert len(lines) < 220
