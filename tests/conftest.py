"""Small random checkpoints that transformers writes, for tests that span distributions."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import faulty_server
import pytest
from toolkit_lm.events import Event, LoadEvent, RequestEvent, StepEvent
from toolkit_lm.outputs import RequestOutput
from toolkit_lm.plugin import hookimpl
from toolkit_lm_devkit import assert_same_logits, assert_same_tokens, make_checkpoint


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function (name), after which a plugin of tests/plugins is there in other processes too, as
    if pip had installed it."""

    def installed(name: str) -> None:
        folder = Path(__file__).parent / "plugins" / name
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        site = tmp_path / "site" / name
        info = site / f"{project['name'].replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n"
        )
        entries = [f"{one} = {two}\n" for one, two in project["entry-points"]["toolkit_lm"].items()]
        (info / "entry_points.txt").write_text("[toolkit_lm]\n" + "".join(entries))
        for path in (folder, site):
            monkeypatch.syspath_prepend(path)
            monkeypatch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)

    return installed


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory):
    """A function (name, **LlamaConfig fields) -> (folder, transformers model in eval mode)."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(
        name: str, save_options: dict[str, Any] | None = None, **fields: Any
    ) -> tuple[Path, Any]:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        key = json.dumps([name, save_options, fields], sort_keys=True)
        if key not in made:
            shape = {
                "vocab_size": 272,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 256,
                "bos_token_id": 0,
                "eos_token_id": 1,
                "pad_token_id": 2,
                "initializer_range": 0.2,
                "dtype": "float32",
            } | fields
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**shape)).to(getattr(torch, shape["dtype"])).eval()
            made[key] = (
                make_checkpoint(tmp_path_factory.mktemp(name), model, **(save_options or {})),
                model,
            )
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_windowed(tmp_path_factory):
    """A function () -> (folder, transformers model in eval mode) of a Gemma 3 whose layers have a
    window of 12 tokens, but for one."""
    made: list[tuple[Path, Any]] = []

    def make() -> tuple[Path, Any]:
        import torch
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        if not made:
            config = Gemma3TextConfig(
                vocab_size=272,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                max_position_embeddings=256,
                sliding_window=12,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=2,
                initializer_range=0.2,
                dtype="float32",
            )
            torch.manual_seed(0)
            model = Gemma3ForCausalLM(config).eval()
            made.append((make_checkpoint(tmp_path_factory.mktemp("windowed"), model), model))
        return made[0]

    return make


class Watch:
    """A plugin that remembers the engine's events."""

    name = "watch"

    def __init__(self) -> None:
        self.events: list[Event] = []

    @hookimpl
    def toolkit_event(self, event: Event) -> None:
        self.events.append(event)

    @property
    def num_tokens(self) -> int:
        """Computed in all steps so far."""
        return sum(event.num_tokens for event in self.events if isinstance(event, StepEvent))

    def count(self, kind: str) -> int:
        """Events in the lives of requests."""
        return sum(isinstance(event, RequestEvent) and event.kind == kind for event in self.events)

    def most(self, name: str) -> int:
        """The greatest value of a field of the load."""
        return max(getattr(event, name) for event in self.events if isinstance(event, LoadEvent))

    def last(self, name: str) -> int:
        """The last value of a field of the load."""
        return next(
            getattr(event, name) for event in reversed(self.events) if isinstance(event, LoadEvent)
        )


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="session")
def assert_parity():
    """A function (transformers model, RequestOutputs): greedy tokens, and logprobs of the whole
    vocabulary, are the model's own."""

    def check(model: Any, outputs: list[RequestOutput]) -> None:
        import torch

        for output in outputs:
            for completion in output.outputs:
                tokens = list(completion.token_ids)
                prompt = output.prompt_token_ids
                with torch.inference_mode():
                    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
                reference = torch.log_softmax(logits, dim=-1)
                assert_same_tokens(tokens, reference)
                for row, entries in enumerate(completion.logprobs or ()):
                    ours = torch.tensor(
                        [[entries[token].logprob for token in range(reference.shape[1])]]
                    )
                    assert_same_logits(ours, reference[row : row + 1])

    return check


@pytest.fixture(scope="session")
def faulty(tmp_path_factory) -> Path:
    """A folder with the plugin that fails on demand."""
    folder = tmp_path_factory.mktemp("faulty")
    faulty_server.install(folder)
    return folder


@pytest.fixture
def serve(faulty, tmp_path):
    """serve(*flags, **options): a `Server` that is killed at the end of the test."""
    servers = []

    def start(*arguments: str, **options: Any) -> faulty_server.Server:
        servers.append(
            faulty_server.Server(faulty, tmp_path / f"{len(servers)}", *arguments, **options)
        )
        return servers[-1]

    yield start
    for one in servers:
        one.kill()
