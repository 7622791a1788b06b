"""A GGUF file as a checkpoint: `LLM` and `toolkit` take it, and answer as its weights do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import msgspec
import pytest
import toolkit_lm_gguf
import toolkit_lm_tiny
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf
from toolkit_lm import LLM, SamplingParams, VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
from toolkit_lm_devkit import CheckpointLoaderConformance
from toolkit_lm_gguf.loader import GGUFLoader

TINY = Path(toolkit_lm_tiny.__file__).parent / "checkpoint"
PROMPTS = ["Tom", "1, 2, 3"]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=16)


class TestGGUFLoader(CheckpointLoaderConformance):
    loader = GGUFLoader

    def write(self, folder):
        return folder / "model.gguf", write_gguf(folder / "model.gguf", TINY, Type.Q4_0)


def answers(model, **options):
    # Other kernels may round the inputs of products to 8 bits.
    with LLM(str(model), device="cpu", kernels="torch", **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        outputs += llm.chat(CHAT, GREEDY, use_tqdm=False)
        return llm, [(one.prompt_token_ids, one.outputs[0].text) for one in outputs]


@pytest.fixture(scope="module")
def plain():
    """Answers of the folder that files are written from."""
    return answers(TINY, dtype="float32")[1]


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0], ids=lambda kind: kind.name)
def test_the_trained_model_answers_as_its_dequantized_weights_do(tmp_path, plain, kind):
    file = tmp_path / "mine.gguf"
    write_gguf(file, TINY, kind, pre="smollm")
    llm, ours = answers(file, dtype="float32")
    load = llm.config.load
    assert (load.load_format, load.quantization) == ("gguf", "gguf")
    assert (llm.config.served_model_name, llm.config.max_model_len) == ("mine", 512)
    assert ours == answers(file, dtype="float32", quantization="none")[1]
    # Its tokenizer and chat template are those of the folder.
    assert [ids for ids, _ in ours] == [ids for ids, _ in plain]
    assert (ours == plain) or kind is Type.Q4_0
    assert "Paris" in ours[-1][1]


@pytest.mark.slow
def test_toolkit_serves_and_explains_a_file(tmp_path, cache):
    file = tmp_path / "mine.gguf"
    write_gguf(file, TINY, lambda name: Type.Q4_0 if "mlp" in name else Type.Q8_0, pre="smollm")
    toolkit = [sys.executable, "-c", "from toolkit_lm_cli import main; main()"]
    explained = subprocess.run(
        [*toolkit, "explain", str(file), "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert explained.returncode == 0, explained.stderr
    found = " ".join(explained.stdout.split())
    assert re.search(r"weights gguf, quantization: gguf .*linear: .*Q8_0.*Q4_0", found), found
    command = [*toolkit, "serve", str(file), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        found = next(
            (at for line in process.stdout if (at := re.search(r"Serving mine at (\S+)", line))),
            None,
        )
        assert found, f"the server ended with exit code {process.wait()}"
        body = {"model": "mine", "messages": CHAT, "temperature": 0}
        answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=60)
        assert "Paris" in answer.raise_for_status().json()["choices"][0]["message"]["content"]
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def test_a_changed_file_is_unpacked_anew(tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(file, TINY, Type.F32)
    first = GGUFLoader.unpack(file, None)
    assert GGUFLoader.unpack(file, None) == first
    time.sleep(0.01)
    write_gguf(file, TINY, Type.Q8_0)
    second = GGUFLoader.unpack(file, None)
    assert first != second
    assert [json.loads((f / "config.json").read_text())["dtype"] for f in (first, second)] == [
        "float32",
        "bfloat16",
    ]


def test_a_file_of_floats_runs(tmp_path, plain):
    write_gguf(tmp_path / "model.gguf", TINY, Type.F32, pre="smollm")
    llm, ours = answers(tmp_path / "model.gguf")
    assert llm.config.model.dtype == "float32"
    assert ours == plain


def test_a_file_is_unpacked_by_the_options_of_its_plugin(tmp_path, monkeypatch):
    """A name that the option gives stays; else the file is served by its stem."""

    class Options(msgspec.Struct):
        keep: int = 3

    given = []

    def unpack(file, options):
        given.append(options)
        return TINY

    monkeypatch.setattr(toolkit_lm_gguf, "Options", Options, raising=False)
    monkeypatch.setattr(GGUFLoader, "unpack", unpack)
    file = tmp_path / "mine.Q8_0.gguf"
    file.touch()
    plugins = Plugins.load()
    assert resolve(VllmConfig.make(model=str(file)), plugins).served_model_names == ["mine.Q8_0"]
    named = VllmConfig.make(model=str(file), served_model_name=["a", "b"])
    assert resolve(named, plugins).served_model_names == ["a", "b"]
    assert [options.keep for options in given] == [3, 3]


def test_a_folder_of_several_files_is_refused_by_their_names(tmp_path):
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(
        CheckpointError, match=r"holds 2 GGUF checkpoints, not one: .*a\.gguf, b-00001-of-00002"
    ):
        resolve(VllmConfig.make(model=str(tmp_path)), Plugins.load())
    with pytest.raises(CheckpointError, match=r"absent\.gguf' is neither a folder nor a file"):
        resolve(VllmConfig.make(model=str(tmp_path / "absent.gguf")), Plugins.load())
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve(VllmConfig.make(model=str(tmp_path / "empty")), Plugins.load())
