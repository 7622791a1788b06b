"""Poolers of checkpoints: options over the checkpoint over the model class; heads against plain
torch; what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from toolkit_lm.config import Checkpoint, VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_poolers import (
    classification_pooler,
    embedding_pooler,
    token_classification_pooler,
)
from torch import nn
from torch.nn import functional as F

SIZE = 6
MODELS = "sentence_transformers.models"


def config_of(
    folder: Path, hf_config: dict[str, object] | None = None, **options: object
) -> VllmConfig:
    hf_config = {"hidden_size": SIZE, **(hf_config or {})}
    (folder / "config.json").write_text(json.dumps(hf_config))
    profile = Plugins.load().pooling_profiles.read(folder, hf_config, folder)
    checkpoint = Checkpoint(
        path=str(folder), architecture="BertModel", hf_config=hf_config, pooling_profile=profile
    )
    return VllmConfig.default(**options).with_checkpoint(checkpoint)


def save_modules(folder: Path, *modules: tuple[str, dict[str, object]]) -> None:
    listing = [{"idx": 0, "name": "0", "path": "", "type": f"{MODELS}.Transformer"}]
    for index, (name, config) in enumerate(modules, 1):
        path = f"{index}_{name}"
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
        listing.append({"idx": index, "name": str(index), "path": path, "type": f"{MODELS}.{name}"})
    (folder / "modules.json").write_text(json.dumps(listing))


def pooling(*modes: str) -> tuple[str, dict[str, object]]:
    return "Pooling", {"embedding_dimension": SIZE, "pooling_mode": list(modes)}


def dense(
    takes: int, gives: int, activation: str = "activation.Tanh", bias: bool = True
) -> tuple[str, dict[str, object]]:
    path = f"torch.nn.modules.{activation}"
    return "Dense", {
        "in_features": takes,
        "out_features": gives,
        "bias": bias,
        "activation_function": path,
    }


def save_weights(
    folder: Path, dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    tensors = {
        name.replace("_", "."): torch.randn(shape).to(dtype) for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


def prompts() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(length, SIZE) for length in (4, 1, 9)]


@torch.inference_mode()
def one(run, pooler, task: str = "embed", **wishes: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The last prompt, and what is made of it."""
    return prompts()[-1], run(pooler, prompts(), PoolingParams(task=task, **wishes))[-1]


def test_default_of_the_model(tmp_path, run):
    x, result = one(run, embedding_pooler(config_of(tmp_path), "CLS"))
    torch.testing.assert_close(result, F.normalize(x[0], dim=0))
    x, result = one(run, embedding_pooler(config_of(tmp_path), "MAX", normalize=False))
    torch.testing.assert_close(result, x.amax(0))


def test_the_checkpoint_overrides_the_model(tmp_path, run):
    save_modules(tmp_path, pooling("mean"))
    x, result = one(run, embedding_pooler(config_of(tmp_path), "CLS"))
    torch.testing.assert_close(result, x.mean(0))


def test_options_override_the_checkpoint(tmp_path, run):
    save_modules(tmp_path, pooling("mean"))
    x, result = one(
        run, embedding_pooler(config_of(tmp_path, pooling_type="LAST", normalize=True), "CLS")
    )
    torch.testing.assert_close(result, F.normalize(x[-1], dim=0))


def test_a_request_overrides_options(tmp_path, run):
    x, result = one(
        run, embedding_pooler(config_of(tmp_path, normalize=True), "CLS"), normalize=False
    )
    torch.testing.assert_close(result, x[0])


def test_heads_in_order(tmp_path, run):
    save_modules(
        tmp_path,
        pooling("mean", "cls"),
        dense(2 * SIZE, 5, "activation.GELU"),
        ("LayerNorm", {"dimension": 5}),
        ("Dropout", {"dropout": 0.1}),
        dense(5, 4, "linear.Identity", bias=False),
        ("Normalize", {}),
    )
    first = save_weights(
        tmp_path / "2_Dense", torch.bfloat16, linear_weight=(5, 2 * SIZE), linear_bias=(5,)
    )
    norm = save_weights(tmp_path / "3_LayerNorm", norm_weight=(5,), norm_bias=(5,))
    last = save_weights(tmp_path / "5_Dense", linear_weight=(4, 5))
    pooler = embedding_pooler(config_of(tmp_path))
    assert (pooler.output_size("embed"), pooler.output_size("token_embed")) == (4, SIZE)
    x, result = one(run, pooler, normalize=False)
    y = torch.cat([x.mean(0), x[0]])
    y = F.gelu(F.linear(y, first["linear.weight"].float(), first["linear.bias"].float()))
    y = F.linear(
        F.layer_norm(y, (5,), norm["norm.weight"], norm["norm.bias"]), last["linear.weight"]
    )
    torch.testing.assert_close(result, y)
    torch.testing.assert_close(one(run, pooler)[1], F.normalize(y, dim=0))
    torch.testing.assert_close(one(run, pooler, dimensions=3)[1], F.normalize(y[:3], dim=0))
    torch.testing.assert_close(one(run, pooler, "token_embed")[1], x)


def test_normalize_in_the_middle_stays(tmp_path, run):
    save_modules(tmp_path, pooling("cls"), ("Normalize", {}), dense(SIZE, 3, bias=False))
    weights = save_weights(tmp_path / "3_Dense", linear_weight=(3, SIZE))
    x, result = one(run, embedding_pooler(config_of(tmp_path)))
    torch.testing.assert_close(
        result, F.linear(F.normalize(x[0], dim=0), weights["linear.weight"]).tanh()
    )


def test_heads_are_no_weights_of_the_model(tmp_path):
    save_modules(tmp_path, pooling("cls"), dense(SIZE, 3))
    save_weights(tmp_path / "2_Dense", linear_weight=(3, SIZE), linear_bias=(3,))
    pooler = embedding_pooler(config_of(tmp_path))
    assert list(pooler.state_dict()) == list(pooler.parameters()) == []
    assert {tensor.dtype for tensor in pooler.buffers()} == {torch.float32}


def test_dummy_weights_read_no_file(tmp_path, run):
    save_modules(tmp_path, pooling("cls"), dense(SIZE, 3))
    _, result = one(run, embedding_pooler(config_of(tmp_path, load_format="dummy")))
    assert result.shape == (3,)
    assert result.isfinite().all()


def test_residual(tmp_path, run):
    save_modules(tmp_path, pooling("cls"), dense(SIZE, 3), dense(3, 3))
    for number in (2, 3):
        path = tmp_path / f"{number}_Dense" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"use_residual": True}))
    a = save_weights(
        tmp_path / "2_Dense", linear_weight=(3, SIZE), linear_bias=(3,), residual_weight=(3, SIZE)
    )
    b = save_weights(tmp_path / "3_Dense", linear_weight=(3, 3), linear_bias=(3,))
    x, result = one(run, embedding_pooler(config_of(tmp_path)))
    y = F.linear(x[0], a["linear.weight"], a["linear.bias"]).tanh() + F.linear(
        x[0], a["residual.weight"]
    )
    torch.testing.assert_close(result, F.linear(y, b["linear.weight"], b["linear.bias"]).tanh() + y)


def test_truncate_dim_is_the_default(tmp_path, run):
    save_modules(tmp_path, pooling("cls"), ("Normalize", {}))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 2}))
    pooler = embedding_pooler(config_of(tmp_path))
    x, result = one(run, pooler)
    torch.testing.assert_close(result, F.normalize(x[0, :2], dim=0))
    torch.testing.assert_close(one(run, pooler, dimensions=5)[1], F.normalize(x[0, :5], dim=0))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 7}))
    with pytest.raises(CheckpointError, match="cuts embeddings to 7 dimensions, but they have 6"):
        embedding_pooler(config_of(tmp_path))


def save_late_interaction(folder: Path) -> torch.Tensor:
    save_modules(folder, dense(SIZE, 3, "linear.Identity", bias=False))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "ColBERT"}))
    return save_weights(folder / "1_Dense", linear_weight=(3, SIZE))["linear.weight"]


def test_late_interaction(tmp_path, run):
    weight = save_late_interaction(tmp_path)
    pooler = embedding_pooler(config_of(tmp_path))
    assert pooler.supported_tasks() == {"token_embed"}
    x, result = one(run, pooler, "token_embed")
    torch.testing.assert_close(result, F.normalize(x @ weight.T, dim=1))


def test_late_interaction_pooled_because_an_option_says_so(tmp_path, run):
    weight = save_late_interaction(tmp_path)
    x, result = one(run, embedding_pooler(config_of(tmp_path, pooling_type="MEAN")))
    torch.testing.assert_close(result, F.normalize(x @ weight.T, dim=1).mean(0))


def test_modules_that_do_not_fit(tmp_path):
    save_modules(tmp_path, pooling("mean", "cls"), dense(SIZE, 3))
    save_weights(tmp_path / "2_Dense", linear_weight=(3, SIZE), linear_bias=(3,))
    with pytest.raises(
        CheckpointError, match=r"2_Dense' takes vectors of 6, but is given vectors of 12"
    ):
        embedding_pooler(config_of(tmp_path))


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"linear_weight": (3, SIZE)}, "lack 'linear.bias'"),
        (
            {"linear_weight": (3, SIZE), "linear_bias": (3,), "extra": (1,)},
            "hold, unexpectedly, 'extra'",
        ),
        (
            {"linear_weight": (SIZE, 3), "linear_bias": (3,)},
            r"is float32 [6, 3]; its config.json asks for floats [3, 6]",
        ),
    ],
)
def test_weights_that_do_not_fit(shapes, said, tmp_path):
    save_modules(tmp_path, pooling("cls"), dense(SIZE, 3))
    save_weights(tmp_path / "2_Dense", **shapes)
    with pytest.raises(CheckpointError, match="2_Dense") as caught:
        embedding_pooler(config_of(tmp_path))
    assert said in str(caught.value)


def test_pickled_weights(tmp_path):
    save_modules(tmp_path, pooling("cls"), dense(SIZE, 3))
    (tmp_path / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError,
        match=r"pytorch_model.bin' is a pickle, which can run code .* sentence-transformers",
    ):
        embedding_pooler(config_of(tmp_path))


def test_prompts_that_are_not_pooled(tmp_path, run):
    save_modules(
        tmp_path,
        ("Pooling", {"embedding_dimension": SIZE, "pooling_mode": "mean", "include_prompt": False}),
    )
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "Represent: "}})
    )
    pooler = embedding_pooler(config_of(tmp_path))
    texts = prompts()
    starts = [3, 0, 8]
    results = run(pooler, texts, PoolingParams(), starts=starts)
    for text, start, result in zip(texts, starts, results, strict=True):
        torch.testing.assert_close(result, text[start:].mean(0))
    # Vectors of tokens are those of all tokens.
    for text, result in zip(
        texts, run(pooler, texts, PoolingParams(task="token_embed"), starts=starts), strict=True
    ):
        torch.testing.assert_close(result, text)


@pytest.mark.parametrize("method", ["ALL", "STEP"])
def test_methods_of_tokens_make_no_embedding(method, tmp_path):
    for make in (
        embedding_pooler,
        lambda config: classification_pooler(config, nn.Linear(SIZE, 2)),
    ):
        with pytest.raises(
            ConfigError, match=rf"pooling_type '{method}' gives no single vector of a prompt"
        ):
            make(config_of(tmp_path, pooling_type=method))


def test_methods_of_prompts_score_no_tokens(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"pooling_type 'MEAN' gives one vector for a prompt.*Supported: ALL, STEP",
    ):
        token_classification_pooler(config_of(tmp_path, pooling_type="MEAN"), nn.Linear(SIZE, 2))


@pytest.mark.parametrize("key", ["hidden_size", "n_embd", "d_model", "dim"])
def test_hidden_size_by_its_names(key):
    assert embedding_pooler(VllmConfig.default({key: 9})).output_size("embed") == 9
    assert embedding_pooler(VllmConfig.default({"text_config": {key: 9}})).output_size("embed") == 9


def test_hidden_size_unknown():
    with pytest.raises(CheckpointError, match=r"config.json has none of hidden_size, n_embd"):
        embedding_pooler(VllmConfig.default({"size": 9}))


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


ACTIVATIONS = [
    ({"num_labels": 1}, 1, None, torch.sigmoid),
    ({}, 2, None, lambda x: x.softmax(-1)),
    ({"id2label": {"0": "A", "1": "B", "2": "C"}}, 3, None, lambda x: x.softmax(-1)),
    ({"num_labels": 3, "problem_type": "multi_label_classification"}, 3, None, torch.sigmoid),
    ({"num_labels": 1, "problem_type": "regression"}, 1, None, identity),
    (
        {"num_labels": 3, "problem_type": "single_label_classification"},
        3,
        "identity",
        lambda x: x.softmax(-1),
    ),
    ({"num_labels": 1}, 1, "identity", identity),
    ({"num_labels": 2}, 2, "sigmoid", torch.sigmoid),
    (
        {
            "num_labels": 1,
            "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
        },
        1,
        None,
        identity,
    ),
    (
        {
            "num_labels": 3,
            "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"},
        },
        3,
        None,
        torch.tanh,
    ),
    (
        {
            "num_labels": 1,
            "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
        },
        1,
        "identity",
        torch.sigmoid,
    ),
]


@pytest.mark.parametrize(("hf_config", "labels", "default", "activation"), ACTIVATIONS)
def test_activations(hf_config, labels, default, activation, tmp_path, run):
    classifier = nn.Linear(SIZE, labels)
    pooler = classification_pooler(
        config_of(tmp_path, hf_config), classifier, "CLS", activation=default
    )
    x, result = one(run, pooler, "classify")
    with torch.inference_mode():
        torch.testing.assert_close(result, activation(classifier(x[0])))


def test_an_activation_that_is_asked_for(tmp_path, run):
    classifier = nn.Linear(SIZE, 1)
    hf_config = {
        "num_labels": 1,
        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
    }
    x, result = one(
        run,
        classification_pooler(config_of(tmp_path, hf_config), classifier, "CLS"),
        "score",
        use_activation=True,
    )
    with torch.inference_mode():
        torch.testing.assert_close(result, classifier(x[0]).sigmoid())
        _, result = one(
            run,
            classification_pooler(
                config_of(tmp_path, use_activation=False), classifier, "CLS", num_labels=1
            ),
            "score",
        )
        torch.testing.assert_close(result, classifier(x[0]))


def test_a_regression_of_sentence_transformers_is_a_sigmoid(tmp_path, run):
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"model_type": "CrossEncoder"})
    )
    for labels, activation in ((1, torch.sigmoid), (2, identity)):
        classifier = nn.Linear(SIZE, labels)
        config = config_of(tmp_path, {"num_labels": labels, "problem_type": "regression"})
        x, result = one(run, classification_pooler(config, classifier, "CLS"), "classify")
        with torch.inference_mode():
            torch.testing.assert_close(result, activation(classifier(x[0])))


def test_problem_type_that_is_not_understood(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"'problem_type' is 'ranking', which is not understood"
    ):
        classification_pooler(config_of(tmp_path, {"problem_type": "ranking"}), nn.Linear(SIZE, 2))


def test_sigma_must_be_positive():
    with pytest.raises(ConfigError, match="logit_sigma must be above 0, not 0"):
        VllmConfig.make(logit_sigma=0)


OF_LABELS = {"use_activation": True, "logit_mean": 1.0, "logit_sigma": 2.0}
OF_STEPS = {"step_tag_id": 3, "returned_token_ids": [0]}
OF_HEAD = {"classifier_method": "no_post_processing", "classifier_tokens": ["yes"]}
MEANINGLESS = [
    (
        "an embedding model",
        embedding_pooler,
        {},
        {**OF_LABELS, **OF_STEPS, **OF_HEAD, "score_template": "t"},
    ),
    (
        "a native classifier",
        classification_pooler,
        {"convert": "none"},
        {**OF_STEPS, **OF_HEAD, "normalize": True},
    ),
    (
        "a language model made into a classifier",
        classification_pooler,
        {"convert": "classify"},
        {**OF_STEPS, "normalize": False},
    ),
    (
        "a classifier or reward model of tokens",
        token_classification_pooler,
        {},
        {**OF_HEAD, "normalize": True, "score_template": "t"},
    ),
]


@pytest.mark.parametrize(
    ("model", "make", "options", "name", "value"),
    [
        (model, make, options, name, value)
        for model, make, options, names in MEANINGLESS
        for name, value in names.items()
    ],
)
def test_options_that_mean_nothing_are_refused(model, make, options, name, value, tmp_path):
    config = config_of(tmp_path, {"num_labels": 1}, **options, **{name: value})
    with pytest.raises(ConfigError, match=f"option {name!r} has no effect on {model}: it is for "):
        make(config, *([] if make is embedding_pooler else [nn.Linear(SIZE, 1)]))
