"""generation_config.json gives the sampling defaults of each face: LLM, the server and the command
line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import toolkit_lm_tiny
from fastapi.testclient import TestClient
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm_cli.explanation import explain
from toolkit_lm_server.app import create_app
from toolkit_lm_server.report import summary

SMALL = {"num_kv_blocks": 64, "max_model_len": 256, "max_num_seqs": 8}
STATED = {
    "temperature": 0.0,
    "repetition_penalty": 1.5,
    "max_new_tokens": 5,
    "top_k": None,
    "do_sample": False,
    "eos_token_id": 3,
}
TOLD = {"temperature": 0.0, "repetition_penalty": 1.5, "max_tokens": 5}
PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """The model `tiny`, whose author would have its tokens drawn in a way of his own."""
    folder = tmp_path_factory.mktemp("opinionated") / "model"
    shutil.copytree(Path(toolkit_lm_tiny.__file__).parent / "checkpoint", folder)
    (folder / "generation_config.json").write_text(json.dumps(STATED))
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint) -> str:
    """Output for PROMPT with the defaults."""
    with LLM(model=str(checkpoint), **SMALL) as llm:
        params = SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=5)
        assert llm.get_default_sampling_params() == params
        [stated] = llm.generate(PROMPT, params, use_tqdm=False)
        [by_default] = llm.generate(PROMPT, use_tqdm=False)
        assert (
            by_default.outputs[0].token_ids == stated.outputs[0].token_ids
            and len(stated.outputs[0].token_ids) == 5
        )
        [by_default] = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
        assert len(by_default.outputs[0].token_ids) <= 5
        return stated.outputs[0].text


def test_the_server_and_a_render_server_take_them(checkpoint, expected):
    """The default length of a completion is OpenAI's, and a beam search draws nothing."""
    engine = AsyncLLM(VllmConfig.make(model=str(checkpoint), engine_process=False, **SMALL))
    try:
        client = TestClient(create_app(engine))
        reply = client.post("/v1/completions", json={"prompt": PROMPT, "ignore_eos": True}).json()
        assert (
            reply["choices"][0]["text"].startswith(expected)
            and reply["usage"]["completion_tokens"] == 16
        )
        again = client.post(
            "/v1/completions", json={"prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": 5}
        ).json()
        assert again["choices"][0]["text"] != expected
        messages = [{"role": "user", "content": "hi"}]
        chat = client.post(
            "/v1/chat/completions", json={"messages": messages, "ignore_eos": True}
        ).json()
        assert chat["usage"]["completion_tokens"] == 5
        beams = client.post(
            "/v1/completions",
            json={"prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 3},
        )
        assert beams.status_code == 200, beams.text
        [card] = client.get("/v1/models").json()["data"]
        assert card["sampling_defaults"] == TOLD
        [line] = [line for line in summary(engine) if "generation_config" in line]
        assert "temperature 0.0, repetition_penalty 1.5, max_tokens 5" in line
    finally:
        engine.close()


def test_they_are_explained(checkpoint):
    assert explain(VllmConfig.make(model=str(checkpoint))).sampling_defaults == TOLD
    assert (
        explain(VllmConfig.make(model=str(checkpoint), generation_config="none")).sampling_defaults
        == {}
    )
    command = [
        sys.executable,
        "-c",
        "from toolkit_lm_cli import main; main()",
        "explain",
        str(checkpoint),
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "temperature 0.0, repetition_penalty 1.5, max_tokens 5" in " ".join(printed.split())


def test_the_command_line_takes_them(checkpoint, expected):
    command = [
        sys.executable,
        "-c",
        "from toolkit_lm_cli import main; main()",
        "complete",
        str(checkpoint),
        "--prompt",
        PROMPT,
    ]
    done = subprocess.run(
        [*command, "--num-kv-blocks", "64"], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.rstrip("\n") == expected


def test_none_and_a_folder_of_its_own(checkpoint, tmp_path):
    assert defaults(checkpoint, "none") == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5}')
    assert defaults(checkpoint, str(tmp_path)) == SamplingParams(top_p=0.5)
    with pytest.raises(CheckpointError, match=r"has no generation_config\.json"):
        defaults(checkpoint, str(tmp_path / "absent"))


def test_a_value_out_of_range_names_the_file(checkpoint, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(
        CheckpointError,
        match=r"^generation_config\.json: temperature must be .* generation_config='none' leaves "
        r"it out",
    ):
        defaults(checkpoint, str(tmp_path))


def defaults(checkpoint: Path, option: str) -> SamplingParams:
    with LLM(model=str(checkpoint), generation_config=option, load_format="dummy", **SMALL) as llm:
        return llm.get_default_sampling_params()
