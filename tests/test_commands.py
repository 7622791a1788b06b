"""The commands, as an operator types them, with the embedded model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from toolkit_lm import VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve_device
from toolkit_lm_cli import explanation
from toolkit_lm_cli.explain import table_of

TOOLKIT = Path(sys.executable).with_name("toolkit")
ROOT = Path(__file__).parents[1]


def toolkit(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(a) for a in (TOOLKIT, *arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def server():
    with subprocess.Popen(
        [TOOLKIT, "serve", "tiny", "--port", "0"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            found = None
            while not found:
                line = process.stdout.readline()
                assert line, "the server ended early"
                found = re.search(r"http://[^\s/]+", line)
            yield found.group()
        finally:
            process.terminate()
        assert process.wait(20) == 0


def test_the_demo():
    done = subprocess.run(
        [sys.executable, ROOT / "docs/examples/demo.py"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "12" in done.stdout and "cold" in done.stdout


@pytest.mark.parametrize("where", ["in-process", "url"])
def test_chat(where, request):
    target = ["tiny"] if where == "in-process" else ["--url", request.getfixturevalue("server")]
    done = toolkit(
        "chat",
        *target,
        "--message",
        "What is the capital of France?",
        "--temperature",
        "0",
        "--max-tokens",
        "40",
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_chat_reads_messages_from_stdin():
    done = toolkit(
        "chat",
        "tiny",
        "--temperature",
        "0",
        "--max-tokens",
        "40",
        stdin="What is the capital of Italy?\nWhat is 2 plus 3?\n",
    )
    assert done.returncode == 0, done.stderr
    assert "Rome" in done.stdout and "5" in done.stdout


@pytest.mark.parametrize("where", ["in-process", "url"])
def test_complete(where, request):
    target = ["tiny"] if where == "in-process" else ["--url", request.getfixturevalue("server")]
    done = toolkit(
        "complete",
        *target,
        "--prompt",
        "Once upon a time",
        "--temperature",
        "0",
        "--max-tokens",
        "30",
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 10


def test_complete_takes_a_text_after_the_model_and_standard_input():
    greedy = ("--temperature", "0", "--max-tokens", "8")
    whole = toolkit("complete", "tiny", "Once upon a time", *greedy)
    assert (whole.returncode, whole.stderr) == (0, "") and len(whole.stdout.split()) > 3
    assert toolkit("complete", "tiny", *greedy, stdin="Once upon a time\n").stdout == whole.stdout


def test_generate_keeps_order_and_survives_a_bad_line(tmp_path):
    lines = [
        {"messages": [{"role": "user", "content": "What is the capital of Japan?"}]},
        {"prompt_token_ids": [10**6]},
        {"prompt": "Once upon a time", "max_tokens": 5},
    ]
    prompts = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = toolkit(
        "generate",
        "tiny",
        "--prompts",
        prompts,
        "--out",
        out,
        "--temperature",
        "0",
        "--max-tokens",
        "32",
    )
    first, bad, last = (json.loads(line) for line in out.read_text().splitlines())
    assert done.returncode == 1 and "Tokyo" in first["outputs"][0]["text"]
    assert "1000000" in bad["error"] and last["outputs"][0]["num_tokens"] == 5


def test_generate_takes_both_prompts_of_an_encoder_decoder(tmp_path):
    lines = [
        {"prompt": "12 Nov 2024"},
        {"encoder_prompt": "12 Nov 2024", "decoder_prompt": "20"},
        {"encoder_prompt": [0, 19, 20, 1], "decoder_prompt": [1, 0], "max_tokens": 1},
        {"decoder_prompt": "20"},
        {"prompt": "12 Nov 2024", "encoder_prompt": "12 Nov 2024"},
        {"encoder_prompt": 7},
    ]
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = toolkit(
        "generate", "tiny-dates", "--prompts", prompts, "--out", out, "--temperature", "0"
    )
    assert done.returncode == 1, done.stderr
    whole, rest, tokens, *bad = map(json.loads, out.read_text().splitlines())
    assert [one["outputs"][0]["text"] for one in (whole, rest)] == ["2024-11-12", "24-11-12"]
    assert (rest["prompt"], tokens["num_prompt_tokens"], tokens["error"]) == (
        "12 Nov 2024",
        6,
        None,
    )
    for one, why in zip(
        bad,
        ("needs an encoder prompt beside it", "a line needs one of", "a prompt must be a text"),
        strict=True,
    ):
        assert why in one["error"] and not one["outputs"]


def test_generate_does_not_overwrite_its_input(tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text(json.dumps({"prompt": "Once", "logprobs": 2}) + "\n")
    done = toolkit("generate", "tiny", "--prompts", prompts, "--out", prompts)
    assert (
        done.returncode == 2
        and "would be overwritten" in done.stderr
        and "Once" in prompts.read_text()
    )
    toolkit(
        "generate",
        "tiny",
        "--prompts",
        prompts,
        "--out",
        tmp_path / "out.jsonl",
        "--max-tokens",
        "3",
    )
    (row,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(entries) >= 2 for entries in row["outputs"][0]["logprobs"]] == [True] * 3


@pytest.mark.parametrize("where", ["in-process", "url"])
def test_a_long_conversation_begins_anew(where, request):
    target = ["tiny"] if where == "in-process" else ["--url", request.getfixturevalue("server")]
    done = toolkit("chat", *target, "--temperature", "0", stdin="What is 3 plus 4?\n" * 40)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("7") >= 36 and "forgotten" in done.stderr


# xformers warns about itself where it is for another torch.
@pytest.mark.filterwarnings("ignore:plugin 'xformers'")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_explain_says_what_no_gpu_has_run(monkeypatch, device):
    """On a machine with a GPU, backends whose whole kit no GPU has run are not chosen, even if
    they are able."""
    monkeypatch.setattr(
        explanation, "resolve_device", lambda config: resolve_device(config).replace(device=device)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**32, 2**33))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    found = explanation.explain(VllmConfig.make(model="tiny"), Plugins.load())
    untried = "flashinfer, xformers and NCCL have run on no GPU yet, all others on one H100"
    told = untried if device == "cuda" else None
    assert found.untried == told
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table_of(found))
    assert (f"{told}: " in captured.get()) is (device == "cuda")
    if device == "cuda":
        assert {layer.backend for layer in found.layers} == {"sdpa"} and found.kernels == "torch"
        assert ("triton", None) in found.layers[0].candidates


def test_explain_names_every_choice():
    shown = json.loads(toolkit("explain", "tiny", "--attention-backend", "sdpa", "--json").stdout)
    assert shown["architecture"] == "LlamaForCausalLM" and shown["renderer"] == "hf"
    assert shown["plugin"] == "decoder" and shown["runner"] == "generate"
    assert {layer["backend"] for layer in shown["layers"]} == {"sdpa"}
    assert shown["kernels"] == "cpu" and shown["kernels_considered"][:2] == [
        ["cpu", None],
        ["torch", None],
    ]
    [[name, why]] = shown["kernels_considered"][2:]
    assert name == "triton" and "no kernel for device cpu" in why
    assert "sdpa" in toolkit("explain", "tiny").stdout


def test_env():
    shown = json.loads(toolkit("env", "--json").stdout)
    assert "torch" in json.dumps(shown)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from toolkit_lm_cli.app import run; run(['--help']); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "nowhere", "--prompts", "x.txt", "--out", "y.jsonl"], (1, 2), "x.txt"),
        (["chat", "tinny", "--message", "x"], (1,), "Did you mean 'tiny'?"),
        (["chat", "tiny", "--message", "x", "--block-size", "0"], (2,), "--block-size"),
        (["chat", "tiny", "--message", "x", "--plugins", "no_such"], (1,), "no_such"),
        (["chat", "tiny", "--message", "x", "--attention-backend", "flash"], (1, 2), "flash"),
        (["chat", "tiny", "--message", "x", "--max-model-len", "100000"], (2,), "100000"),
        (["chatt"], (2,), "chat"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_an_error_is_one_message(arguments, code, message):
    done = toolkit(*arguments)
    assert done.returncode in code
    assert message in done.stderr and "Traceback" not in done.stderr


def test_the_traceback_is_there_when_asked_for():
    assert "Traceback" in toolkit("chat", "tinny", "--message", "x", "--traceback").stderr


def test_flag_beats_environment_beats_file(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text("max-model-len: 100\nblock_size: 8\nnum_kv_blocks: 77\n")
    monkeypatch.setenv("TOOLKIT_LM_MAX_MODEL_LEN", "90")
    monkeypatch.setenv("TOOLKIT_LM_BLOCK_SIZE", "4")
    shown = json.loads(
        toolkit("explain", "tiny", "--json", "--config", file, "--max-model-len", "80").stdout
    )
    config = shown["config"]
    assert config["model"]["max_model_len"] == 80
    assert config["cache"]["block_size"] == 4
    assert config["cache"]["num_kv_blocks"] == 77
