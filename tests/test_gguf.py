"""GGUF files, by a third party's distribution (tests/plugins/gguf): a checkpoint in one file, with
its config and tokenizer."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import gguf
import httpx
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from toolkit_lm import LLM, SamplingParams, VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
from toolkit_lm_devkit import CheckpointLoaderConformance

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "gguf"))

import toolkit_lm_gguf
from toolkit_lm_gguf.file import GGUFFile
from toolkit_lm_gguf.loader import GGUFLoader
from toolkit_lm_gguf.tokenizer import tokenizer

SOURCE = Path(__file__).parent / "plugins" / "gguf"
HEADS = 4
KV_HEADS = 2
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", stem)
    return f"blk.{layer[1]}.{NAMES[layer[2]]}.{suffix}" if layer else f"{NAMES[stem]}.{suffix}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As convert_hf_to_gguf.py of llama.cpp does to Llama's queries and keys."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write_gguf(
    path: Path, folder: Path, kind: Type = Type.F32, **changes
) -> dict[str, torch.Tensor]:
    """Converts a Llama's folder; gives its weights as the file holds them. `changes` are of the
    metadata."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if "scaling" in changes:
        writer.add_rope_scaling_type(changes["scaling"])
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    texts = {index: text for text, index in vocab.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "default"))
    writer.add_token_list([texts.get(i, f"<unused{i}>") for i in range(config["vocab_size"])])
    writer.add_token_types(
        [3] * 3 + [1 if i in texts else 5 for i in range(3, config["vocab_size"])]
    )
    writer.add_token_merges([])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template(
        json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    )
    held = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        array = tensor.float().numpy()
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = array if heads is None else permuted(array, heads)
        # Norms stay floats, as llama.cpp leaves them.
        of = kind if array.ndim > 1 else Type.F32
        packed = gguf.quantize(np.ascontiguousarray(stored), of)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=of)
        values = gguf.dequantize(gguf.quantize(array, of), of)
        held[name] = torch.from_numpy(np.array(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.fixture
def llama(make_llama):
    """A function (tied) -> (folder, transformers model)."""
    return lambda tied=False: make_llama("gguf", tie_word_embeddings=tied)


class TestGGUFLoader(CheckpointLoaderConformance):
    loader = GGUFLoader

    @pytest.fixture(autouse=True)
    def folder_of_llama(self, llama):
        self.folder, _ = llama()

    def write(self, folder):
        return folder / "model.gguf", write_gguf(folder / "model.gguf", self.folder)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q8_0], ids=lambda kind: kind.name)
def test_a_file_runs_as_the_weights_that_it_holds(llama, assert_parity, tmp_path, kind, tied):
    folder, model = llama(tied)
    held = write_gguf(tmp_path / "model.gguf", folder, kind)
    model = copy.deepcopy(model)
    model.load_state_dict(held, strict=not tied)
    with LLM(
        str(tmp_path / "model.gguf"),
        device="cpu",
        dtype="float32",
        max_logprobs=272,
        plugins=[toolkit_lm_gguf],
    ) as llm:
        assert (llm.config.load.load_format, llm.config.max_model_len) == ("gguf", 256)
        assert llm.config.served_model_name == "model"
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=272, ignore_eos=True)
        outputs = llm.generate(
            ["The cat sat.", "héllo 😀", {"prompt_token_ids": list(range(3, 40))}],
            params,
            use_tqdm=False,
        )
        with LLM(str(folder), device="cpu", dtype="float32", max_logprobs=272) as other:
            plain = other.generate(["The cat sat.", "héllo 😀"], params, use_tqdm=False)
            chat = [{"role": "user", "content": "Hello"}]
            assert (
                llm.chat(chat, use_tqdm=False)[0].prompt_token_ids
                == other.chat(chat, use_tqdm=False)[0].prompt_token_ids
            )
    assert_parity(model, outputs)
    assert [output.prompt_token_ids for output in outputs[:2]] == [
        output.prompt_token_ids for output in plain
    ]
    if kind is Type.F32:
        assert [output.outputs[0].text for output in outputs[:2]] == [
            output.outputs[0].text for output in plain
        ]


def test_what_cannot_be_read_is_refused_by_name(llama, tmp_path):
    folder, _ = llama()
    plugins = Plugins.load(extra=[toolkit_lm_gguf])

    def error(kind, name="model.gguf", with_plugins=plugins, **changes):
        write_gguf(tmp_path / name, folder, **changes)
        with pytest.raises(kind) as caught:
            resolve(VllmConfig.make(model=str(tmp_path / name), device="cpu"), with_plugins)
        return str(caught.value)

    assert re.search(
        r"model\.gguf has the architecture 'falcon'. Able: llama",
        error(UnsupportedError, architecture="falcon"),
    )
    assert "scales its rotary embeddings (yarn)" in error(
        UnsupportedError, scaling=gguf.RopeScalingType.YARN
    )
    assert "cuts text into words as 'tekken' does. Able: default" in error(
        UnsupportedError, pre="tekken"
    )
    assert "is a file that no load format reads" in error(CheckpointError, name="model.bin")
    assert "is a file that no load format reads" in error(
        CheckpointError, with_plugins=Plugins.load()
    )
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.gguf is no readable GGUF file"):
        resolve(VllmConfig.make(model=str(tmp_path / "model.gguf")), plugins)
    with pytest.raises(CheckpointError, match=r"absent\.gguf' is neither a folder nor a file"):
        resolve(VllmConfig.make(model=str(tmp_path / "absent.gguf")), plugins)


def test_a_changed_file_is_unpacked_anew(llama, tmp_path):
    folder, _ = llama()
    file = tmp_path / "model.gguf"
    write_gguf(file, folder)
    first = GGUFLoader.unpack(file, None)
    write_gguf(file, folder, Type.Q8_0)
    second = GGUFLoader.unpack(file, None)
    assert first != second
    assert [json.loads((f / "config.json").read_text())["dtype"] for f in (first, second)] == [
        "float32",
        "bfloat16",
    ]


def test_a_file_is_unpacked_by_the_options_of_its_plugin(llama, tmp_path, monkeypatch):
    """A name that the option gives stays; else the file is served by its stem."""

    class Options(msgspec.Struct):
        keep: int = 3

    folder, _ = llama()
    given = []

    def unpack(file, options):
        given.append(options)
        return folder

    monkeypatch.setattr(toolkit_lm_gguf, "Options", Options, raising=False)
    monkeypatch.setattr(GGUFLoader, "unpack", unpack)
    file = tmp_path / "mine.Q8_0.gguf"
    file.touch()
    plugins = Plugins.load(extra=[toolkit_lm_gguf])
    assert resolve(VllmConfig.make(model=str(file)), plugins).served_model_names == ["mine.Q8_0"]
    named = VllmConfig.make(model=str(file), served_model_name=["a", "b"])
    assert resolve(named, plugins).served_model_names == ["a", "b"]
    assert [options.keep for options in given] == [3, 3]


def write_sentencepiece(path: Path) -> None:
    """Llama 2's kind of tokenizer: bytes, letters, and a few merges with scores."""
    pieces = [
        ("<unk>", 0.0, 2),
        ("<s>", 0.0, 3),
        ("</s>", 0.0, 3),
        *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    ]
    words = ["▁t", "he", "▁the", "in", "▁c", "at", "▁cat", "er", "▁a", "nd", "▁and", "th"]
    pieces += [(word, -float(i), 1) for i, word in enumerate(words)]
    pieces += [(letter, -100.0 - i, 1) for i, letter in enumerate("▁etaoinshrdlucmfwypvbgkqjxz.,")]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _, _ in pieces])
    writer.add_token_scores([score for _, score, _ in pieces])
    writer.add_token_types([kind for _, _, kind in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "text", ["the cat and the hat", " leading", "then, other", "naïve 😀", "a\nb  c"]
)
def test_a_sentencepiece_tokenizer_merges_by_score(tmp_path, text):
    write_sentencepiece(tmp_path / "model.gguf")
    made = tokenizer(GGUFFile(tmp_path / "model.gguf"))
    encoded = made.encode(text)
    assert encoded.ids[0] == 1
    assert made.decode(encoded.ids, skip_special_tokens=False).removeprefix("<s>").strip(
        " "
    ) == text.strip(" ")
    assert encoded.ids[1:] == merged_by_score(tmp_path / "model.gguf", text)


def merged_by_score(path: Path, text: str) -> list[int]:
    """As SentencePiece's BPE is defined: the neighbours whose token has the highest score are
    merged first, the leftmost of equals."""
    file = GGUFFile(path)
    tokens = file.require("tokenizer.ggml.tokens")
    scores = file.require("tokenizer.ggml.scores")
    ids = {token: index for index, token in enumerate(tokens)}
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        found = [
            (scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids
        ]
        if not found:
            break
        place = -max(found)[1]
        pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
    return [
        i
        for piece in pieces
        for i in (
            [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        )
    ]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The plugin as pip installs it."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, "--target", folder, SOURCE], check=True)
    return folder


def test_toolkit_serves_a_file(installed, llama, tmp_path, cache):
    folder, model = llama()
    write_gguf(tmp_path / "model.gguf", folder)
    environ = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(cache),
    }
    toolkit = [sys.executable, "-c", "from toolkit_lm_cli import main; main()"]
    done = subprocess.run(
        [*toolkit, "plugins", "check", "toolkit-lm-gguf"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    options = [
        "--port",
        "0",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--log-level",
        "error",
        "--served-model-name",
        "mine",
    ]
    command = [*toolkit, "serve", str(tmp_path / "model.gguf"), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        found = next(
            (at for line in process.stdout if (at := re.search(r"Serving mine at (\S+)", line))),
            None,
        )
        assert found, f"the server ended with exit code {process.wait()}"
        body = {
            "model": "mine",
            "prompt": list(range(3, 23)),
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = (
            httpx.post(f"{found[1]}/v1/completions", json=body, timeout=60)
            .raise_for_status()
            .json()
        )
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
    prompt = torch.tensor([body["prompt"]])
    expected = model.generate(
        prompt,
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=2,
    )
    assert answer["usage"]["completion_tokens"] == 8
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(expected[0, 20:].tolist())
    assert answer["choices"][0]["text"] == theirs
