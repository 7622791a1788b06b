"""Pixtral and Mistral 3 in Mistral's own layout (params.json, consolidated.safetensors): the same
tokens as transformers' model and processor, of whose files they are written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tile_checkpoints import make_tiled_subject
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import CheckpointError
from torch import Tensor
from vision_families import IMAGE, TEXT, TOWER

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS = {"dtype": "float32", "max_model_len": 192, "num_kv_blocks": 64, "max_num_seqs": 4}
PARAMS = {
    "dim": TEXT["hidden_size"],
    "n_layers": TEXT["num_hidden_layers"],
    "head_dim": 16,
    "hidden_dim": TEXT["intermediate_size"],
    "n_heads": TEXT["num_attention_heads"],
    "n_kv_heads": TEXT["num_key_value_heads"],
    "norm_eps": 1e-6,
    "vocab_size": TEXT["vocab_size"],
    "rope_theta": 10000.0,
    "max_seq_len": 256,
}
VISION = {**TOWER, "num_channels": 3, "image_size": 56, "patch_size": 7, "rope_theta": 10000.0}
PIXTRAL = {**VISION, "image_token_id": IMAGE, "max_image_size": 35}
MISTRAL3 = {
    **VISION,
    "num_attention_heads": 2,
    "image_token_id": IMAGE,
    "image_break_token_id": 8,
    "image_end_token_id": 9,
    "adapter_bias": False,
    "max_image_size": 56,
    "mm_projector_id": "patch_merge",
    "spatial_merge_size": 2,
    "add_pre_mm_projector_layer_norm": True,
}
FAMILIES = {"pixtral": ({}, PIXTRAL), "mistral3": ({"hidden_act": "silu"}, MISTRAL3)}
"""Fields of transformers' model, which is else another than Mistral's, and params.json."""
WORDS = (
    (r"^(model\.)?language_model\.(model\.)?", ""),
    (r"^(model\.)?vision_tower", "vision_encoder"),
    (r"^(model\.)?multi_modal_projector\.norm", "pre_mm_projector_norm"),
    (r"^(model\.)?multi_modal_projector\.patch_merger", "patch_merger"),
    (r"^(model\.)?multi_modal_projector\.linear_1", "vision_language_adapter.w_in"),
    (r"^(model\.)?multi_modal_projector\.linear_2", "vision_language_adapter.w_out"),
    ("^lm_head", "output"),
    ("embed_tokens", "tok_embeddings"),
    ("self_attn", "attention"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp", "feed_forward"),
    ("gate_proj", "w1"),
    ("down_proj", "w2"),
    ("up_proj", "w3"),
    (r"([qkvo])_proj", r"w\1"),
)


def native(tensors: dict[str, Tensor], vision: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors under Mistral's names. A rotation turns neighbours there, and in transformers'
    numbers half a head apart."""
    found = {}
    for name, tensor in tensors.items():
        tower = "vision_tower" in name
        for pattern, word in WORDS:
            name = re.sub(pattern, word, name)
        if match := re.search(r"attention\.w([qk])\.", name):
            key = "n_heads" if match[1] == "q" else "n_kv_heads"
            heads = vision["num_attention_heads"] if tower else PARAMS[key]
            halves = tensor.view(heads, 2, -1, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        found[name] = tensor.contiguous()
    return found


def write(family: str, folder: Path, **params: Any):
    """A subject in the layout of transformers, and the folder of it in Mistral's."""
    fields, vision = FAMILIES[family]
    subject = make_tiled_subject(folder / "hf", family, **fields)
    own = folder / "own"
    own.mkdir()
    tensors = native(load_file(folder / "hf/model.safetensors"), vision)
    save_file(tensors, own / "consolidated.safetensors")
    (own / "params.json").write_text(json.dumps({**PARAMS, "vision_encoder": vision} | params))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (own / name).write_bytes((folder / "hf" / name).read_bytes())
    return subject, own


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_transformers(family, tmp_path):
    subject, own = write(family, tmp_path)
    random = np.random.default_rng(3)
    images = [random.integers(0, 256, (*size, 3), np.uint8) for size in [(30, 50), (3, 20)]]
    text = "see [IMG] and [IMG] there"
    prompt, expected = subject.greedy(text, images, 12)
    alone = subject.greedy("hello", [], 12)
    prompts = [{"prompt": text, "multi_modal_data": {"image": images}}, "hello"]
    with LLM(str(own), **OPTIONS) as llm:
        found = [
            (out.prompt_token_ids, list(out.outputs[0].token_ids))
            for out in llm.generate(prompts, GREEDY, use_tqdm=False)
        ]
    assert found == [(prompt, expected), alone]
    assert subject.greedy(text, images[::-1], 12)[1] != expected, "it sees nothing"


def test_files_of_both_layouts(tmp_path):
    """config.json counts, and consolidated.safetensors is read."""
    subject, own = write("pixtral", tmp_path)
    for name in ("params.json", "consolidated.safetensors"):
        (subject.folder / name).write_bytes((own / name).read_bytes())
    (subject.folder / "model.safetensors").unlink()
    image = subject.items(1)
    prompt = {"prompt": "[IMG]", "multi_modal_data": {"image": image}}
    with LLM(str(subject.folder), **OPTIONS) as llm:
        [out] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert list(out.outputs[0].token_ids) == subject.greedy("[IMG]", image, 12)[1]
    (subject.folder / "params.json").write_text(json.dumps(PARAMS))
    with pytest.raises(CheckpointError, match="only one of them reads pictures"):
        LLM(str(subject.folder), **OPTIONS)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"mm_projector_id": "another"}, "either all of them are there"),
        ({"spatial_merge_size": 2}, "either all of them are there"),
        ({"add_pre_mm_projector_layer_norm": True}, "either all of them are there"),
        ({"patch_size": None}, "lacks patch_size"),
        ({"window": 3}, "window of vision_encoder is 3"),
    ],
)
def test_another_tower_is_refused_by_key(vision, message, tmp_path):
    _, own = write("pixtral", tmp_path, vision_encoder=PIXTRAL | vision)
    with pytest.raises(CheckpointError, match=message):
        LLM(str(own), **OPTIONS)


def test_a_tower_that_is_no_object(tmp_path):
    _, own = write("pixtral", tmp_path, vision_encoder=[3])
    with pytest.raises(CheckpointError, match="must be an object"):
        LLM(str(own), **OPTIONS)
