"""An encoder-decoder model by a third party that reads images, too (tests/plugins/captioner): both
parts of a step at once."""

from __future__ import annotations

import shutil

import pytest
import test_glance
import test_scribe
import torch
from test_glance import TILE, image
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError
from toolkit_lm_devkit import assert_same_logits, assert_same_tokens, write_checkpoint
from toolkit_lm_devkit.generation import logprobs_of

PLUGINS = ("scribe", "glance", "captioner")
TILE_TOKEN = 260
VOCAB = test_scribe.VOCAB
CONFIG = test_scribe.CONFIG | {
    "architectures": ["CaptionerModel"],
    "tile_size": TILE,
    "tile_token_id": TILE_TOKEN,
    "row_token_id": 261,
}
PROMPTS = [
    ("what is there", "see \0 and \0:", [image(6, 9), image(3, 3)]),
    ("a text alone", "none:", []),
    ("another", "\0", [image(6, 9, seed=1)]),
]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=VOCAB)


class Reference(test_scribe.Reference):
    """The same model, written down again."""

    def __init__(self) -> None:
        eye = torch.randn(test_scribe.SIZE, TILE**2, generator=torch.Generator().manual_seed(8))
        super().__init__(test_scribe.make_weights() | {"eye.weight": eye * 0.3})
        self.images: list = []

    def embed(self, token_ids) -> torch.Tensor:
        x = super().embed(token_ids)
        places = torch.tensor(list(token_ids)) == TILE_TOKEN
        if places.any():
            tiles = [
                one[i : i + TILE, j : j + TILE].ravel()
                for one in self.images
                for i in range(0, one.shape[0], TILE)
                for j in range(0, one.shape[1], TILE)
            ]
            seen = torch.stack([torch.from_numpy(one) for one in tiles])
            positions = self.weights["positions.weight"][: len(x)]
            x[places] = seen @ self.weights["eye.weight"].T + positions[places]
        return x

    @torch.inference_mode()
    def logprobs(self, encoder: str, token_ids, images) -> torch.Tensor:
        """[T, V]."""
        self.images = images
        return self(encoder.encode(), token_ids).log_softmax(-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoint, with the plugins installed as pip would have it."""
    site = tmp_path_factory.mktemp("site")
    folder = tmp_path_factory.mktemp("captioner")
    write_checkpoint(folder, CONFIG, Reference().weights)
    for name in PLUGINS:
        package = f"toolkit_lm_{name}"
        shutil.copytree(test_glance.FOLDER.parent / name / package, site / package)
        info = site / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: toolkit-lm-{name}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[toolkit_lm]\n{name} = {package}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield str(folder)


def prompt_of(encoder: str, decoder: str, images: list) -> dict:
    media = {"multi_modal_data": {"image": images}} if images else {}
    return {"encoder_prompt": encoder, "decoder_prompt": {"prompt": decoder, **media}}


def test_the_decoder_reads_images_beside_the_encoders_text(folder):
    reference = Reference()
    with LLM(folder, dtype="float32", max_model_len=64, max_logprobs=VOCAB) as llm:
        outputs = llm.generate([prompt_of(*one) for one in PROMPTS], GREEDY, use_tqdm=False)
    for (encoder, _, images), output in zip(PROMPTS, outputs, strict=True):
        prompt = output.prompt_token_ids
        (completion,) = output.outputs
        assert prompt.count(TILE_TOKEN) == sum(one.size // TILE**2 for one in images)
        drawn = completion.token_ids
        expected = reference.logprobs(encoder, prompt + drawn[:-1], images)[len(prompt) - 1 :]
        assert_same_logits(logprobs_of(completion, VOCAB), expected)
        assert_same_tokens(drawn, expected)
        if images:
            blank = [torch.zeros(one.shape).numpy() for one in images]
            other = reference.logprobs(encoder, prompt + drawn[:-1], blank)[len(prompt) - 1 :]
            with pytest.raises(AssertionError, match="logits differ"):
                assert_same_logits(other, expected)


def test_an_image_too_many_is_refused(folder):
    with LLM(folder, dtype="float32", max_model_len=64) as llm:
        with pytest.raises(RequestError, match="more images than places"):
            llm.generate(prompt_of("a", "b", [image(3, 3)]), use_tqdm=False)
        with pytest.raises(RequestError, match="takes no images or other media here"):
            llm.generate(
                {"prompt": "a", "multi_modal_data": {"image": [image(3, 3)]}},
                use_tqdm=False,
            )
