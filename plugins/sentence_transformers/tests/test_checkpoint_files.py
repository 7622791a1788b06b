"""The files of sentence-transformers in the forms of its versions, written as those versions write
them; and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toolkit_lm.errors import CheckpointError
from toolkit_lm_poolers.details import Dense, LayerNorm, LogitScore, Normalize
from toolkit_lm_sentence_transformers.checkpoint_files import (
    SentenceTransformersConfig,
    read_sentence_transformers,
)
from toolkit_lm_sentence_transformers.json_file import MOST_BYTES
from toolkit_lm_sentence_transformers.module_config import PUNCTUATION, QueryExpansion, TokenMask
from toolkit_lm_sentence_transformers.profile import read_pooling_profile
from toolkit_lm_sentence_transformers.vocabulary import Vocabulary

OLD = "sentence_transformers.models"
NEW = "sentence_transformers.base.modules"
ALL_MINILM_POOLING = {
    "word_embedding_dimension": 384,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}
DENSE = {
    "in_features": 384,
    "out_features": 64,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")
    return folder


def read(folder: Path) -> SentenceTransformersConfig | None:
    path = folder / "config.json"
    return read_sentence_transformers(
        folder, json.loads(path.read_text()) if path.is_file() else {}
    )


def listing(*modules: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(modules)
    ]


def with_pooling(folder: Path, pooling: dict[str, Any], kind: str = f"{OLD}.Pooling") -> Path:
    modules = listing(("", f"{OLD}.Transformer"), ("1_Pooling", kind))
    return write(folder, {"modules.json": modules, "1_Pooling/config.json": pooling})


def test_nothing_there(tmp_path):
    assert read(tmp_path) is None
    assert read(write(tmp_path, {"config.json": {"architectures": ["BertModel"]}})) is None


def test_all_minilm_of_version_2(tmp_path):
    folder = write(
        tmp_path,
        {
            "modules.json": listing(
                ("", f"{OLD}.Transformer"),
                ("1_Pooling", f"{OLD}.Pooling"),
                ("2_Normalize", f"{OLD}.Normalize"),
            ),
            "1_Pooling/config.json": ALL_MINILM_POOLING,
            "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": False},
            "config_sentence_transformers.json": {
                "__version__": {
                    "sentence_transformers": "2.0.0",
                    "transformers": "4.6.1",
                    "pytorch": "1.8.1",
                }
            },
        },
    )
    config = read(folder)
    assert config.pooling.methods == ("MEAN",)
    assert (config.heads, config.token_heads, config.has_modules) == ((Normalize(),), (), True)
    assert (config.max_seq_length, config.transformer.do_lower_case, config.embedding_size) == (
        256,
        False,
        384,
    )
    assert (config.prompts, config.default_prompt_name, config.similarity) == ({}, None, None)


def test_general_file_of_version_5(tmp_path):
    folder = with_pooling(tmp_path, ALL_MINILM_POOLING)
    write(
        folder,
        {
            "config_sentence_transformers.json": {
                "model_type": "SentenceTransformer",
                "__version__": {"sentence_transformers": "5.1.0"},
                "prompts": {"query": "query: ", "document": "", "unset": None},
                "default_prompt_name": "query",
                "similarity_fn_name": "dot",
                "truncate_dim": 128,
            }
        },
    )
    config = read(folder)
    assert config.prompts == {"query": "query: ", "document": ""}
    assert (config.default_prompt_name, config.similarity, config.truncate_dim) == (
        "query",
        "dot",
        128,
    )


OLD_FLAGS = {
    "CLS": "pooling_mode_cls_token",
    "MAX": "pooling_mode_max_tokens",
    "MEAN": "pooling_mode_mean_tokens",
    "MEAN_SQRT_LEN": "pooling_mode_mean_sqrt_len_tokens",
    "WEIGHTED_MEAN": "pooling_mode_weightedmean_tokens",
    "LAST": "pooling_mode_lasttoken",
}


@pytest.mark.parametrize("method", OLD_FLAGS)
def test_old_pooling_flags(method, tmp_path):
    flags = {flag: name == method for name, flag in OLD_FLAGS.items()}
    config = read(
        with_pooling(tmp_path, {"word_embedding_dimension": 8, **flags, "include_prompt": True})
    )
    assert (config.pooling.methods, config.pooling.size, config.pooling.include_prompt) == (
        (method,),
        8,
        True,
    )


def test_old_flags_are_concatenated_in_their_order(tmp_path):
    flags = {flag: name in ("LAST", "CLS", "MEAN") for name, flag in reversed(OLD_FLAGS.items())}
    config = read(with_pooling(tmp_path, {"word_embedding_dimension": 8, **flags}))
    assert config.pooling.methods == ("CLS", "MEAN", "LAST")
    assert config.embedding_size == 24


@pytest.mark.parametrize(
    ("mode", "methods"),
    [
        ("lasttoken", ("LAST",)),
        ("weightedmean", ("WEIGHTED_MEAN",)),
        (["mean"], ("MEAN",)),
        (["mean_sqrt_len_tokens", "max", "cls"], ("MEAN_SQRT_LEN", "MAX", "CLS")),
    ],
)
def test_pooling_mode_since_version_5_4(mode, methods, tmp_path):
    pooling = {"embedding_dimension": 8, "pooling_mode": mode, "include_prompt": False}
    config = read(
        with_pooling(
            tmp_path, pooling, "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
        )
    )
    assert config.pooling.methods == methods
    assert not config.pooling.include_prompt


@pytest.mark.parametrize(
    ("pooling", "said"),
    [
        (
            {"embedding_dimension": 8, "pooling_mode": "meen"},
            "'pooling_mode' is 'meen', which is not understood. Did you mean 'mean'",
        ),
        (
            {"embedding_dimension": 8, "pooling_mode": ["mean", 3]},
            "'pooling_mode' is 3, which is not understood",
        ),
        ({"embedding_dimension": 8, "pooling_mode": []}, "turns no pooling mode on"),
        ({"embedding_dimension": 8}, "turns no pooling mode on"),
        (
            {"pooling_mode": "mean"},
            "says neither 'embedding_dimension' nor 'word_embedding_dimension'",
        ),
        (ALL_MINILM_POOLING | {"pooling_mode_mean_tokens": False}, "turns no pooling mode on"),
        (
            ALL_MINILM_POOLING | {"pooling_mode_mean_tokens": "yes"},
            "'pooling_mode_mean_tokens' must be true or false, not 'yes'",
        ),
        (
            ALL_MINILM_POOLING | {"pooling_mode_attention": True},
            "has the key 'pooling_mode_attention', which is not understood",
        ),
        (
            ALL_MINILM_POOLING | {"word_embedding_dimension": 0},
            "'word_embedding_dimension' must be at least 1, not 0",
        ),
        (["mean"], "must hold a JSON object, not"),
    ],
)
def test_pooling_that_is_not_understood(pooling, said, tmp_path):
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json") as caught:
        read(with_pooling(tmp_path, pooling))
    assert said in str(caught.value)


@pytest.mark.parametrize("form", ["old", "old with class", "new", "new, reexported"])
def test_module_types_of_all_versions(form, tmp_path):
    names = {
        "Transformer": "",
        "Pooling": "1",
        "Dense": "2",
        "LayerNorm": "3",
        "Dropout": "4",
        "Normalize": "5",
    }
    snake = {"LayerNorm": "layer_norm"}
    base = ("Transformer", "Dense", "Normalize")
    kinds = {
        "old": lambda n: f"{OLD}.{n}",
        "old with class": lambda n: f"{OLD}.{n}.{n}",
        "new": lambda n: (
            f"{NEW if n in base else 'sentence_transformers.sentence_transformer.modules'}"
            f".{snake.get(n, n.lower())}.{n}"
        ),
        "new, reexported": lambda n: f"sentence_transformers.sentence_transformer.modules.{n}",
    }
    modules = listing(*((path, kinds[form](name)) for name, path in names.items()))
    write(
        tmp_path,
        {
            "modules.json": modules,
            "1/config.json": ALL_MINILM_POOLING,
            "2/config.json": DENSE,
            "3/config.json": {"dimension": 64},
        },
    )
    config = read(tmp_path)
    dense, norm, last = config.heads
    assert dense == Dense(
        folder=str(tmp_path / "2"), in_features=384, out_features=64, bias=True, activation="Tanh"
    )
    assert norm == LayerNorm(folder=str(tmp_path / "3"), size=64)
    assert last == Normalize()
    assert config.embedding_size == 64


@pytest.mark.parametrize(
    "kind",
    [
        "sentence_transformers.models.WordWeights",
        "sentence_transformers.base.modules.router.Router",
        "sentence_transformers.sparse_encoder.modules.sparse_auto_encoder.SparseAutoEncoder",
        "sentence_transformers.evil.Pooling",
        "custom_st.Pooling",
        "Pooling",
    ],
)
def test_module_types_that_are_not_understood(kind, tmp_path):
    with pytest.raises(CheckpointError, match=r"modules\.json") as caught:
        read(with_pooling(tmp_path, ALL_MINILM_POOLING, kind))
    assert f"a module of type {kind!r}, which is not understood" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"activation_function": "torch.nn.modules.activation.Softshrink"},
            "'torch.nn.modules.activation.Softshrink', which is not understood",
        ),
        ({"activation_function": "os.system"}, "'os.system', which is not understood"),
        ({"use_bitfit": True}, "the key 'use_bitfit', which is not understood"),
        (
            {"module_input_name": "sentence_embedding", "module_output_name": "scores"},
            "'module_output_name' is 'scores'",
        ),
        ({"module_input_name": "cls"}, "'module_input_name' is 'cls', which is not understood"),
        ({"in_features": None}, "does not say 'in_features'"),
        ({"bias": None}, "'bias' must be true or false, not null"),
    ],
)
def test_dense_that_is_not_understood(changes, said, tmp_path):
    modules = listing(
        ("", f"{OLD}.Transformer"), ("1", f"{OLD}.Pooling"), ("2_Dense", f"{OLD}.Dense")
    )
    write(
        tmp_path,
        {
            "modules.json": modules,
            "1/config.json": ALL_MINILM_POOLING,
            "2_Dense/config.json": DENSE | changes,
        },
    )
    with pytest.raises(CheckpointError, match=r"2_Dense/config\.json") as caught:
        read(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ([], "must hold a list of modules"),
        ({"0": {}}, "must hold a list of modules"),
        (listing(("1", f"{OLD}.Pooling")), "the first module, and no other, must be a Transformer"),
        (
            listing(("", f"{OLD}.Transformer"), ("", f"{OLD}.Transformer")),
            "the first module, and no other",
        ),
        (
            listing(("", f"{OLD}.Transformer"), ("1", f"{OLD}.Pooling"), ("1", f"{OLD}.Pooling")),
            "more than one Pooling",
        ),
        (
            listing(("", f"{OLD}.Transformer"), ("2", f"{OLD}.Dense")),
            "a Dense of sentence vectors stands before the Pooling module",
        ),
        (listing(("1", f"{OLD}.Transformer")), "has the language model in the folder '1'"),
        (
            listing(("", f"{OLD}.Transformer"), ("../1", f"{OLD}.Pooling")),
            "the path '../1', which is outside",
        ),
        ([{"idx": 0, "name": "0", "path": ""}], "does not say 'type'"),
        (
            [{"idx": 0, "name": "0", "path": "", "type": f"{OLD}.Transformer", "when": 1}],
            "the key 'when'",
        ),
    ],
)
def test_chains_that_make_no_sense(modules, said, tmp_path):
    write(
        tmp_path,
        {"modules.json": modules, "1/config.json": ALL_MINILM_POOLING, "2/config.json": DENSE},
    )
    with pytest.raises(CheckpointError, match=r"modules\.json") as caught:
        read(tmp_path)
    assert said in str(caught.value)


def test_broken_file(tmp_path):
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"modules.json' cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "modules.json",
        "1_Pooling/config.json",
        "config_sentence_transformers.json",
        "tokenizer_config.json",
    ],
)
def test_files_have_a_bound(name, tmp_path):
    write(
        with_pooling(tmp_path, ALL_MINILM_POOLING),
        {"config_sentence_transformers.json": {}, "tokenizer_config.json": {}},
    )
    with (tmp_path / name).open("a") as file:
        file.write(" " * MOST_BYTES)
    with pytest.raises(
        CheckpointError, match=rf"{name}' is too large: it may have {MOST_BYTES} bytes"
    ):
        read_pooling_profile(tmp_path, {}, tmp_path)


def test_a_tokenizer_may_be_large(tmp_path):
    write(tmp_path, {"tokenizer.json": {"model": {"vocab": {"a": 3}}}})
    with (tmp_path / "tokenizer.json").open("a") as file:
        file.write(" " * MOST_BYTES)
    assert Vocabulary(tmp_path).id_of("a") == 3


@pytest.mark.parametrize(
    "name",
    [
        "sentence_bert_config.json",
        "sentence_roberta_config.json",
        "sentence_xlm-roberta_config.json",
    ],
)
def test_transformer_of_old_versions(name, tmp_path):
    write(
        with_pooling(tmp_path, ALL_MINILM_POOLING),
        {name: {"max_seq_length": 100, "do_lower_case": True}},
    )
    config = read(tmp_path)
    assert (config.max_seq_length, config.transformer.do_lower_case) == (100, True)


def test_transformer_of_new_versions(tmp_path):
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    transformer = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": text, "message": {**text, "format": "flat"}},
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        "unpad_inputs": False,
        "processor_kwargs": {"model_max_length": 99, "padding_side": "left"},
        "model_args": {"torch_dtype": "float16"},
    }
    config = read(
        write(
            with_pooling(tmp_path, ALL_MINILM_POOLING), {"sentence_bert_config.json": transformer}
        )
    )
    assert config.max_seq_length == 99
    assert config.transformer.processing_options == {
        "chat_template": {"add_generation_prompt": True}
    }


@pytest.mark.parametrize(
    ("transformer", "said"),
    [
        (
            {"transformer_task": "any-to-any"},
            "'transformer_task' is 'any-to-any', which is not understood",
        ),
        (
            {"module_output_name": "sentence_embedding"},
            "'module_output_name' is 'sentence_embedding'",
        ),
        (
            {
                "modality_config": {
                    "text": {"method": "get_text_features", "method_output_name": "pooler_output"}
                }
            },
            "'method' is 'get_text_features'",
        ),
        (
            {
                "modality_config": {
                    "text": {"method": "forward", "method_output_name": "hidden_states"}
                }
            },
            "'method_output_name' is 'hidden_states'",
        ),
        ({"modality_config": {"image": {}}}, "must hold a JSON object, not None"),
        ({"config_args": {"is_causal": False}}, "the key 'is_causal', which is not understood"),
        ({"max_seq_length": "512"}, "'max_seq_length' must be an integer, not '512'"),
        (
            {"max_seq_len": 512},
            "the key 'max_seq_len', which is not understood. Did you mean 'max_seq_length'",
        ),
    ],
)
def test_transformer_that_is_not_understood(transformer, said, tmp_path):
    with pytest.raises(CheckpointError, match=r"sentence_bert_config\.json") as caught:
        read(
            write(
                with_pooling(tmp_path, ALL_MINILM_POOLING),
                {"sentence_bert_config.json": transformer},
            )
        )
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("general", "said"),
    [
        (
            {"similarity_fn_name": "jaccard"},
            "'similarity_fn_name' is 'jaccard', which is not understood",
        ),
        (
            {"model_type": "Reranker"},
            "'model_type' is 'Reranker', which is not understood",
        ),
        ({"prompts": {"query": 3}}, "the prompt 'query' must be text, not 3"),
        (
            {"prompts": {"query": "q"}, "default_prompt_name": "passage"},
            "'default_prompt_name' is 'passage', which is not understood",
        ),
        ({"pooling": "mean"}, "the key 'pooling', which is not understood"),
        (
            {"activation_fn": "my.Activation"},
            "'activation_fn' is 'my.Activation', which is not understood",
        ),
    ],
)
def test_general_file_that_is_not_understood(general, said, tmp_path):
    with pytest.raises(CheckpointError, match=r"config_sentence_transformers\.json") as caught:
        read(write(tmp_path, {"config_sentence_transformers.json": general}))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("files", "activation"),
    [
        (
            {
                "config.json": {
                    "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"
                }
            },
            "Identity",
        ),
        (
            {
                "config.json": {
                    "sentence_transformers": {
                        "activation_fn": "torch.nn.modules.activation.Sigmoid",
                        "version": "4.0.1",
                    }
                }
            },
            "Sigmoid",
        ),
        (
            {
                "config_sentence_transformers.json": {
                    "model_type": "CrossEncoder",
                    "activation_fn": "torch.nn.modules.linear.Identity",
                }
            },
            "Identity",
        ),
        (
            {
                "config.json": {
                    "sentence_transformers": {
                        "activation_fn": "torch.nn.modules.activation.Sigmoid"
                    }
                },
                "config_sentence_transformers.json": {
                    "activation_fn": "torch.nn.modules.activation.Tanh"
                },
            },
            "Tanh",
        ),
    ],
)
def test_activation_of_cross_encoders(files, activation, tmp_path):
    assert read(write(tmp_path, files)).activation == activation


def test_activation_that_is_not_understood(tmp_path):
    write(tmp_path, {"config.json": {"sentence_transformers": {"activation_fn": "builtins.print"}}})
    with pytest.raises(
        CheckpointError,
        match=r"config.json', in sentence_transformers: 'activation_fn' is 'builtins.print'",
    ):
        read(tmp_path)


def test_cross_encoder_of_a_language_model(tmp_path):
    modules = listing(
        ("", f"{NEW}.transformer.Transformer"),
        ("1", "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"),
    )
    transformer = {"transformer_task": "text-generation", "module_output_name": "causal_logits"}
    score = {"true_token_id": 9693, "false_token_id": 2152, "module_input_name": "causal_logits"}
    write(
        tmp_path,
        {"modules.json": modules, "sentence_bert_config.json": transformer, "1/config.json": score},
    )
    config = read(tmp_path)
    assert config.logit_score == LogitScore(true_token_id=9693, false_token_id=2152)
    assert config.pooling is None


PYLATE_DENSE = {
    "in_features": 768,
    "out_features": 128,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
}


def test_late_interaction_of_pylate(tmp_path):
    general = {
        "model_type": "ColBERT",
        "__version__": {"sentence_transformers": "4.0.2"},
        "prompts": {},
        "similarity_fn_name": "cosine",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 48,
        "document_length": 300,
        "attend_to_expansion_tokens": True,
        "skiplist_words": ["!", "."],
        "do_query_expansion": True,
    }
    modules = listing(("", f"{OLD}.Transformer"), ("1_Dense", "pylate.models.Dense.Dense"))
    write(
        tmp_path,
        {
            "modules.json": modules,
            "1_Dense/config.json": PYLATE_DENSE,
            "config_sentence_transformers.json": general,
        },
    )
    config = read(tmp_path)
    assert config.token_mask is not None
    assert config.token_mask == TokenMask(skiplist_words=["!", "."], skiplist_tasks=["document"])
    assert [type(head) for head in config.token_heads] == [Dense, Normalize]
    assert config.heads == ()
    assert config.transformer.query_expansion == QueryExpansion(length=48, attend=True)
    assert config.transformer.document_length == 300
    assert (config.prompts, config.pooling, config.embedding_size) == (
        {"query": "[Q] ", "document": "[D] "},
        None,
        128,
    )


@pytest.mark.parametrize("model_type", [{"model_type": "ColBERT"}, {}])
def test_late_interaction_of_pylate_that_says_little(model_type, tmp_path):
    modules = listing(("", f"{OLD}.Transformer"), ("1_Dense", "pylate.models.Dense.Dense"))
    general = {
        **model_type,
        "query_prefix": "[Q] ",
        "prompts": {"query": "search: "},
        "similarity_fn_name": "MaxSim",
    }
    write(
        tmp_path,
        {
            "modules.json": modules,
            "1_Dense/config.json": PYLATE_DENSE,
            "config_sentence_transformers.json": general,
        },
    )
    config = read(tmp_path)
    assert config.token_mask == PUNCTUATION
    assert config.transformer.query_expansion == QueryExpansion(length=32)
    assert (config.prompts, config.similarity) == ({"query": "[Q] search: "}, "maxsim")


def test_late_interaction_of_sentence_transformers(tmp_path):
    modules = listing(
        ("", f"{NEW}.transformer.Transformer"),
        ("1_Dense", f"{NEW}.dense.Dense"),
        (
            "2_Mask",
            "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
        ),
        ("3_Normalize", f"{NEW}.normalize.Normalize"),
    )
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    write(
        tmp_path,
        {
            "modules.json": modules,
            "sentence_bert_config.json": {
                "document_length": 180,
                "query_expansion": {"strategy": "min", "length": 40, "token": "[MASK]"},
            },
            "1_Dense/config.json": PYLATE_DENSE | names | {"use_residual": True},
            "2_Mask/config.json": {
                "skiplist_words": ["?"],
                "skiplist_tasks": ["query", "document"],
                "keep_only_token_ids": None,
            },
            "3_Normalize/config.json": names,
            "config_sentence_transformers.json": {
                "model_type": "MultiVectorEncoder",
                "similarity_fn_name": "maxsim",
            },
        },
    )
    config = read(tmp_path)
    assert config.token_mask == TokenMask(
        skiplist_words=["?"], skiplist_tasks=["query", "document"]
    )
    assert config.transformer.query_expansion == QueryExpansion(
        length=40, strategy="min", token="[MASK]"
    )
    assert config.token_heads[0].residual
    assert (config.similarity, config.transformer.document_length) == ("maxsim", 180)


def test_reading_imports_no_torch(tmp_path):
    with_pooling(tmp_path, ALL_MINILM_POOLING)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from toolkit_lm.pooling import PoolingInputs\n"
        "from toolkit_lm_sentence_transformers.profile import read_pooling_profile\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "assert read_pooling_profile(folder, {}, folder).details['pooling']['methods'] == "
        "['MEAN']\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
