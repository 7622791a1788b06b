"""`toolkit serve --models` in a process of its own, over small checkpoints of several tasks."""

from __future__ import annotations

import io
import json
import re
import select
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import transformers
from safetensors.torch import save_file
from toolkit_lm_devkit import make_checkpoint, randomize, write_tokenizer
from toolkit_lm_model_pool.need import pss

VOCAB = 272
SMALL = {"max_num_seqs": 4, "num_kv_blocks": 256, "dtype": "float32", "device": "cpu"}
ADAPTERS = ("sql", "prose")
ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def write_checkpoints(folder: Path) -> dict[str, str]:
    """Checkpoints by the names of their models."""
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(**ENCODER))
    ranker = transformers.BertForSequenceClassification(
        transformers.BertConfig(**ENCODER, num_labels=1)
    )
    bart = transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCAB,
            max_position_embeddings=64,
            forced_eos_token_id=None,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            d_model=32,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=3,
            decoder_start_token_id=2,
        )
    )
    found = {"chat": "tiny"}
    for name, model in (("embed", bert), ("rank", ranker), ("bart", bart)):
        randomize(model)
        found[name] = str(make_checkpoint(folder / name, model.eval()))
    found["whisper"] = str(_write_whisper(folder / "whisper"))
    return found


def _write_whisper(folder: Path) -> Path:
    sides = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
    ids = {"decoder_start_token_id": 290, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2}
    config = transformers.WhisperConfig(
        vocab_size=1802,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        d_model=32,
        max_target_positions=32,
        **{f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in sides.items()},
        **ids,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    randomize(model, seed=4)
    model.save_pretrained(folder)
    facts = {
        "no_timestamps_token_id": 300,
        "lang_to_id": {"<|en|>": 291, "<|de|>": 292},
        "task_to_id": {"transcribe": 293, "translate": 294},
        "prev_sot_token_id": 295,
    }
    (folder / "generation_config.json").write_text(json.dumps({**ids, **facts}))
    write_tokenizer(folder, 1802)
    return folder


def recording() -> bytes:
    """A second of a tone, as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(16000)
        made.writeframes(bytes((index * 37) % 251 for index in range(32000)))
    return file.getvalue()


GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **GREEDY}),
    "embed": ("/v1/embeddings", {"input": "a text"}),
    "rank": ("/v1/rerank", {"query": "a", "documents": ["b", "cc", "ddd"]}),
    "bart": ("/v1/completions", {"prompt": "A long text.", **GREEDY}),
    "whisper": ("/v1/audio/transcriptions", {"language": "en"}),
}
"""A request of each model: its route, and its body without the model's name."""


def request_of(name: str, model: str | None = None) -> dict[str, Any]:
    """Arguments of a client's `request` for the model `name`, called `model`."""
    path, body = REQUESTS[name]
    body = {**body, "model": model or name}
    if name == "whisper":
        return {
            "method": "POST",
            "url": path,
            "data": body,
            "files": {"file": ("a.wav", recording(), "audio/wav")},
        }
    return {"method": "POST", "url": path, "json": body}


def plain(answer: Any) -> Any:
    """An answer without what differs from one time to another."""
    if isinstance(answer, Mapping):
        left_out = ("id", "created", "system_fingerprint", "_request_id")
        return {key: plain(value) for key, value in answer.items() if key not in left_out}
    return [plain(item) for item in answer] if isinstance(answer, list) else answer


def belady(trace: Sequence[str], sizes: Mapping[str, int], budget: int) -> int:
    """Loads where the model that is asked for last makes room."""
    following: list[float] = []
    seen: dict[str, float] = {}
    for place in range(len(trace) - 1, -1, -1):
        following.append(seen.get(trace[place], float("inf")))
        seen[trace[place]] = place
    loaded: dict[str, float] = {}
    loads = 0
    for name, later in zip(trace, reversed(following), strict=True):
        if name not in loaded:
            loads += 1
            while sum(sizes[other] for other in loaded) + sizes[name] > budget:
                del loaded[max(loaded, key=loaded.__getitem__)]
        loaded[name] = later
    return loads


def save_adapters(folder: Path, names: Sequence[str] = ADAPTERS) -> dict[str, str]:
    """Folders of adapters of the model "tiny", by name."""
    found = {}
    for name in names:
        torch.manual_seed(sum(name.encode()))
        made = folder / name
        made.mkdir()
        layer = "base_model.model.model.layers.0.mlp.down_proj.lora_{}.weight"
        shapes = {"A": (2, 512), "B": (128, 2)}
        tensors = {layer.format(part): torch.randn(shape) for part, shape in shapes.items()}
        save_file(tensors, made / "adapter_model.safetensors")
        fields = {"peft_type": "LORA", "r": 2, "target_modules": [], "lora_alpha": 1}
        (made / "adapter_config.json").write_text(json.dumps(fields))
        found[name] = str(made)
    return found


class Served:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.client = httpx.Client(base_url=url, timeout=100)

    def ask(self, name: str, model: str | None = None, **more: Any) -> httpx.Response:
        return self.client.request(**request_of(name, model), **more)

    def cards(self) -> dict[str, dict[str, Any]]:
        return {card["id"]: card for card in self.client.get("/v1/models").json()["data"]}

    def state(self, name: str) -> str:
        return str(self.cards()[name]["state"])

    def until(self, name: str, *states: str) -> dict[str, Any]:
        """The card of a model, once it has one of the states."""
        for _ in range(1200):
            card = self.cards()[name]
            if card["state"] in states:
                return card
            time.sleep(0.1)
        raise AssertionError(f"{name} is {card['state']}: {self.log.read_text()[-3000:]}")

    def slowest_load(self) -> float:
        """Seconds of the slowest of the models' last loads."""
        lines = self.client.get("/metrics").text.splitlines()
        found = (line for line in lines if line.startswith("toolkit_lm_pool_load_seconds{"))
        return max(float(line.rpartition(" ")[2]) for line in found)

    def engines(self) -> list[int]:
        """Process ids of the engines."""
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def memory(self) -> int:
        """Bytes that the engines take, with their workers."""
        # The server's processes are looked up once for all of them.
        return sum(map(pss, psutil.Process(self.process.pid).children(recursive=True)))


def ended(process: subprocess.Popen[str]) -> int:
    """Exit code. A process that does not end writes the stacks of its threads, and is killed."""
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        return process.wait()


FIRST_LINE = 120
"""Seconds after which a server that has printed no line is said to hang."""


def first_line(process: subprocess.Popen[str], seconds: float = FIRST_LINE) -> str:
    """The first line that a server prints, or "" where it ends without. A server that prints none
    in time writes the stacks of its threads."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], seconds)[0]:
        process.send_signal(signal.SIGABRT)
    return process.stdout.readline()


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[Served]:
    """A server with these arguments. It ends well."""
    log = folder / "server.log"
    code = "from toolkit_lm_cli import main; main()"
    command = [sys.executable, "-X", "faulthandler", "-c", code, "serve", *arguments, "--port", "0"]
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as process,
    ):
        try:
            found = re.search(r"http://\S+", first_line(process))
            assert found, log.read_text()
            server = Served(process, found.group(), log)
            with server.client:
                yield server
        finally:
            process.terminate()
            status = ended(process)
        assert status == 0, log.read_text()
        assert "Traceback" not in log.read_text()


def write_models(path: Path, checkpoints: Mapping[str, str], **fields: Mapping[str, Any]) -> str:
    """Writes a file of models. `fields`: of entries, by name."""
    entries = [
        {"name": name, "checkpoint": checkpoint, "options": SMALL, **fields.get(name, {})}
        for name, checkpoint in checkpoints.items()
    ]
    # JSON is YAML.
    path.write_text(json.dumps({"models": entries}))
    return str(path)
