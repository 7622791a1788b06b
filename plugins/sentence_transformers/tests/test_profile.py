"""The pooling profiles of checkpoints, and how an engine gets them."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
from toolkit_lm.config import Checkpoint, PluginsConfig, PoolingProfile, VllmConfig
from toolkit_lm.errors import CheckpointError, PluginError
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.resolution.checkpoint import read_checkpoint
from toolkit_lm_poolers.details import (
    Dense,
    LayerNorm,
    Marker,
    Normalize,
    Pooling,
    PoolingDetails,
    RoleProfile,
    details_of,
)
from toolkit_lm_sentence_transformers.profile import read_pooling_profile

MODELS = "sentence_transformers.models"
POOLING = {"embedding_dimension": 8, "pooling_mode": "mean", "include_prompt": False}
IDENTITY = "torch.nn.modules.linear.Identity"
DENSE = {"in_features": 8, "out_features": 4, "bias": False, "activation_function": IDENTITY}


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def listing(*modules: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(modules)
    ]


EMBEDDER = {
    "modules.json": listing(
        ("", f"{MODELS}.Transformer"),
        ("1", f"{MODELS}.Pooling"),
        ("2", f"{MODELS}.Dense"),
        ("3", f"{MODELS}.LayerNorm"),
        ("4", f"{MODELS}.Normalize"),
    ),
    "1/config.json": POOLING,
    "2/config.json": DENSE,
    "3/config.json": {"dimension": 4},
    "config_sentence_transformers.json": {
        "prompts": {"query": "q: "},
        "default_prompt_name": "query",
        "truncate_dim": 2,
    },
    "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": True},
}
COLBERT = {
    "modules.json": listing(
        ("", f"{MODELS}.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")
    ),
    "1_Dense/config.json": DENSE,
    "config_sentence_transformers.json": {
        "model_type": "ColBERT",
        "query_prefix": "[Q] ",
        "document_prefix": "[D]",
        "document_length": 40,
        "skiplist_words": ["!"],
        "similarity_fn_name": "MaxSim",
    },
    "tokenizer.json": {"model": {"vocab": {"[MASK]": 0, "!": 1, "[Q] ": 2}}},
}


def read(folder: Path) -> PoolingProfile | None:
    return read_pooling_profile(folder, {}, folder)


def test_an_embedder(tmp_path):
    profile = read(write(tmp_path, EMBEDDER))
    assert (profile.is_complete, profile.max_tokens, profile.scores) == (True, 64, False)
    details = details_of(profile)
    assert details == PoolingDetails(
        folder=str(tmp_path),
        is_complete=True,
        lower_case=True,
        prompts={"query": "q: "},
        default_prompt_name="query",
        pooling=Pooling(size=8, methods=("MEAN",), include_prompt=False),
        heads=(
            Dense(
                folder=str(tmp_path / "2"),
                in_features=8,
                out_features=4,
                bias=False,
                activation="Identity",
            ),
            LayerNorm(folder=str(tmp_path / "3"), size=4),
            Normalize(),
        ),
        embedding_size=4,
        truncate_dim=2,
    )
    assert details.ends_normalized


def test_late_interaction(tmp_path):
    details = details_of(read(write(tmp_path, COLBERT)))
    assert details.roles == {
        "query": RoleProfile(
            prompt="[Q] ",
            marker=Marker(text="[Q] ", token_id=2),
            max_tokens=32,
            filler=0,
            filled=32,
            attend=False,
        ),
        # A marker that is no token is text.
        "document": RoleProfile(prompt="[D]", max_tokens=40, left_out=frozenset({1})),
    }
    assert (details.similarity, details.token_heads[-1], details.refusal) == (
        "maxsim",
        Normalize(),
        None,
    )


def test_tokens_are_those_of_the_tokenizer_that_is_used(tmp_path):
    write(tmp_path, COLBERT)
    other = write(
        tmp_path / "other",
        {"tokenizer.json": {"model": {"vocab": {"[MASK]": 7, "!": 8, "[Q] ": 9}}}},
    )
    roles = details_of(read_pooling_profile(tmp_path, {}, other)).roles
    assert (roles["query"].filler, roles["query"].marker.token_id, roles["document"].left_out) == (
        7,
        9,
        {8},
    )


@pytest.mark.parametrize("files", [EMBEDDER, COLBERT], ids=["embedder", "late interaction"])
def test_profiles_cross_the_wire(tmp_path, files):
    checkpoint = Checkpoint(
        path="", architecture="", hf_config={}, pooling_profile=read(write(tmp_path, files))
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(checkpoint), type=Checkpoint) == checkpoint


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"model_max_length": 77}, 77),
        ({"model_max_length": int(1e30)}, None),
        ({"model_max_length": "many"}, None),
        ({}, None),
    ],
)
def test_the_longest_input_that_only_the_tokenizer_says(tmp_path, said, expected):
    without = {
        name: content for name, content in EMBEDDER.items() if name != "sentence_bert_config.json"
    }
    assert read(write(tmp_path, without | {"tokenizer_config.json": said})).max_tokens == expected


@pytest.mark.parametrize(
    ("files", "refusal"),
    [
        (
            EMBEDDER
            | {
                "sentence_bert_config.json": {
                    "processing_kwargs": {"text": {}, "chat_template": {}}
                }
            },
            "has processing_kwargs for 'text', which",
        ),
        (
            COLBERT | {"tokenizer.json": {"model": {"vocab": {}}}},
            "pads queries with the mask token, which .* does not have",
        ),
        (
            COLBERT | {"sentence_bert_config.json": {"query_length": 5}},
            "pads queries to 32 tokens, but cuts them to 5",
        ),
    ],
)
def test_what_only_an_engine_that_pools_cannot_do_is_no_error_of_reading(tmp_path, files, refusal):
    assert re.search(refusal, details_of(read(write(tmp_path, files))).refusal)


def test_no_files(tmp_path):
    assert read(tmp_path) is None


class Brings:
    """A plugin with a reader."""

    def __init__(self, name: str, target: str) -> None:
        self.name = name
        self.target = target

    @hookimpl
    def toolkit_register_pooling_profiles(self, profiles):
        profiles.add(self.name, self.target)


@pytest.fixture
def readers(monkeypatch):
    module = types.ModuleType("readers_of_a_test")

    def fails(folder, hf_config, tokenizer):
        raise KeyError("longest")

    module.nothing = lambda folder, hf_config, tokenizer: None
    module.own = lambda folder, hf_config, tokenizer: PoolingProfile(max_tokens=7)
    module.fails = fails
    module.wrong = lambda folder, hf_config, tokenizer: {"folder": "wrong"}
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def load(*names):
        return Plugins.load(
            extra=[Brings(name, f"readers_of_a_test:{name}") for name in names]
        ).pooling_profiles

    return load


def test_third_parties_are_asked_first(readers, tmp_path):
    write(tmp_path, EMBEDDER)
    assert readers("nothing").read(tmp_path, {}, tmp_path).max_tokens == 64
    assert readers("own", "nothing").read(tmp_path, {}, tmp_path) == PoolingProfile(max_tokens=7)


def test_readers_that_fail(readers, tmp_path):
    with pytest.raises(
        PluginError,
        match=r"'fails' .*failed in reader of pooling profiles 'fails': KeyError: 'longest'",
    ):
        readers("fails").read(tmp_path, {}, tmp_path)
    with pytest.raises(
        PluginError, match=r"'wrong' must return a PoolingProfile or None, not a dict"
    ):
        readers("wrong").read(tmp_path, {}, tmp_path)


class Registers:
    @hookimpl
    def toolkit_register_models(self, models):
        models.add("KnownModel", "known:KnownModel", runner="pooling")


@pytest.mark.parametrize(
    "name", ["modules.json", "config_sentence_transformers.json", "artifact.metadata"]
)
def test_files_that_no_plugin_reads_are_an_error(tmp_path, name):
    write(tmp_path, {"config.json": {"architectures": ["KnownModel"]}, name: COLBERT.get(name, {})})
    plugins = Plugins.load(PluginsConfig(plugins=[]), extra=[Registers()])
    with pytest.raises(
        CheckpointError, match=rf"{name}' says how the model pools, and no loaded plugin reads it"
    ) as caught:
        read_checkpoint(VllmConfig.make(model=str(tmp_path)), plugins)
    # Installed, and not in use.
    assert "sentence_transformers" in str(caught.value).partition("Plugins that are not in use")[2]
