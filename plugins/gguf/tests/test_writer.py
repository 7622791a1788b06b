"""Files that `toolkit quantize --format gguf` writes: they are those of llama.cpp's converter, and
llama.cpp and we read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import toolkit_lm_tiny
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf
from gguf_models import CASES, assert_parity, checkpoint, load, reference
from gguf_tokenizers import TEXTS, sentencepiece, write_tokenizer
from safetensors.torch import load_file, save_file
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_gguf.file import GGUFFile
from toolkit_lm_gguf.output import Output
from toolkit_lm_gguf.tokenizer import SPLITS, tokenizer, tokenizer_config
from toolkit_lm_gguf.tokenizer_metadata import tokenizer_metadata

TINY = Path(toolkit_lm_tiny.__file__).parent / "checkpoint"
PROMPTS = ["Tom", "1, 2, 3", "The capital of France is"]


@pytest.fixture
def quantize(toolkit):
    """A function that runs `toolkit quantize` and gives its answer."""

    def run(folder, out, *flags):
        return toolkit("quantize", str(folder), *flags, "--format", "gguf", "--out", str(out))

    return run


@pytest.fixture
def written(quantize):
    """A function that writes a file."""

    def run(folder, out, *flags):
        done = quantize(folder, out, *flags)
        assert done.code == 0, done.err
        return out

    return run


def tensors(path):
    """Type and bytes of each tensor, by the package gguf."""
    found = gguf.GGUFReader(path).tensors
    return {one.name: (one.tensor_type.name, np.array(one.data).tobytes()) for one in found}


def metadata(path):
    fields = gguf.GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items()}


@pytest.mark.parametrize("name", CASES)
def test_each_family_is_written_as_by_llama_cpps_converter(tmp_path, written, name):
    model_type, fields = CASES[name]
    folder = checkpoint(tmp_path / "plain", model_type, **fields)
    path = written(folder, tmp_path / "ours.gguf", "--quantization", "int8")
    held = write_gguf(tmp_path / "theirs.gguf", folder, Type.Q8_0)
    ours = tensors(path)
    theirs = tensors(tmp_path / "theirs.gguf")
    # Factors of frequencies have been computed in another order.
    factors = {name for name in theirs if name.startswith("rope_f")}
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if name not in factors and ours[name] != theirs[name]} == set()
    stated = metadata(path)
    expected = metadata(tmp_path / "theirs.gguf")
    left = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    if model_type in ("mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"):
        left |= {key for key in expected if key.endswith("sliding_window")}
    for key in expected.keys() - left:
        assert stated[key] == pytest.approx(expected[key]), key
    # LongRoPE has a set of factors for short contexts, and one for long ones.
    assert_parity(load(path), reference(folder, held), 200 if "longrope" in name else 60)


def weights_of(model):
    """Weights of its layers, by name."""
    return {
        module.prefix: module.method.dequantized()
        for module in model.modules()
        if hasattr(module, "method")
    }


def test_int4_has_the_scales_of_quantization_at_load(tmp_path, written):
    """They are rounded to float16, and codes are the nearest for them. Embeddings and heads are in
    groups of 32 in the file."""
    folder = checkpoint(tmp_path / "plain", "llama")
    path = written(folder, tmp_path / "model.gguf", "--quantization", "int4")
    types = {name: kind for name, (kind, _) in tensors(path).items()}
    assert (types["blk.0.attn_q.weight"], types["token_embd.weight"]) == ("Q4_0", "Q8_0")
    assert types["output.weight"] == "Q8_0"
    models = load(path), load(folder, quantization="int4"), load(folder)
    ours, theirs, exact = map(weights_of, models)
    for name, weight in ours.items():
        if name not in ("model.embed_tokens", "lm_head"):
            differing = (weight - theirs[name]).abs() > 1e-3 * weight.abs() + 1e-6
            assert differing.float().mean() < 0.03
            off, before = ((one - exact[name]).abs() for one in (weight, theirs[name]))
            assert (off <= before + 1e-3)[differing].all()
    # ggml's own Q4_0 is farther from the original.
    down = "model.layers.0.mlp.down_proj"
    of_ggml = gguf.dequantize(gguf.quantize(exact[down].numpy(), Type.Q4_0), Type.Q4_0)
    off = (ours[down] - exact[down]).square().mean()
    assert off < 0.95 * (torch.from_numpy(of_ggml) - exact[down]).square().mean()


def answers(model):
    """Token ids of prompts, and of greedy answers, and their texts. Other kernels may round the
    inputs of products to 8 bits."""
    params = SamplingParams(temperature=0, max_tokens=16)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"device": "cpu", "kernels": "torch", "dtype": "float32", "engine_process": False}
    with LLM(str(model), **options) as llm:
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        found += llm.chat(chat, params, use_tqdm=False)
        ends = [one.outputs[0] for one in found]
        return [
            (one.prompt_token_ids, list(end.token_ids), end.text)
            for one, end in zip(found, ends, strict=True)
        ]


def test_the_trained_model_answers_as_its_folder(tmp_path, written):
    """Without --quantization it is converted alone. A folder gets a file."""
    written(TINY, tmp_path / "plain")
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["model.gguf"]
    plain = answers(tmp_path / "plain")
    assert plain == answers(TINY)
    found = answers(written(TINY, tmp_path / "m.gguf", "--quantization", "int8"))
    assert [ids for ids, *_ in found] == [ids for ids, *_ in plain]
    assert "Paris" in found[-1][-1]


def test_options_choose_the_type_of_each_layer(tmp_path, written):
    flags = [
        "--quantization", "int4",
        "--quantization-override", "*.down_proj=int8",
        "--quantization-skip", "*.o_proj",
        "--dtype", "float16",
    ]  # fmt: skip
    path = written(TINY, tmp_path / "m.gguf", *flags)
    types = {name: kind for name, (kind, _) in tensors(path).items()}
    assert types["blk.3.attn_q.weight"] == "Q4_0"
    assert types["blk.3.ffn_down.weight"] == "Q8_0"
    assert types["blk.3.attn_output.weight"] == "F16"
    assert types["blk.3.attn_norm.weight"] == "F32"
    assert metadata(path)["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_0


def folder_with(tmp_path, source=None, weights=None, **fields):
    """A checkpoint, with fields of config.json changed."""
    folder = tmp_path / "folder"
    shutil.copytree(source or checkpoint(tmp_path / "plain", "llama"), folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        held = load_file(folder / "model.safetensors")
        weights(held)
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refused(tmp_path, quantize, folder, *flags, out="model.gguf"):
    """The error, in one line."""
    before = {path.name for path in tmp_path.iterdir()} | {"cache"}
    done = quantize(folder, tmp_path / out, *flags)
    assert done.code != 0
    assert {path.name for path in tmp_path.iterdir()} | {"cache"} == before
    return " ".join(done.err.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--quantization", "fp8"], "no type of a GGUF file holds fp8. Able: int8"),
        (
            ["--quantization", "int4", "--quantization-group-size", "64"],
            "no type of a GGUF file holds int4 in groups of 64. Able: int8, which becomes Q8_0",
        ),
    ],
)
def test_a_scheme_that_no_type_holds_is_refused_with_those_that_one_does(
    tmp_path, quantize, flags, words
):
    assert words in refused(tmp_path, quantize, TINY, *flags)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act of config.json is 'gelu' and not 'silu'"),
        (
            {
                "model_type": "mistral",
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 16,
            },
            "sliding_window of config.json is 16",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary embeddings of the kind dynamic are not written to GGUF files. Able: default",
        ),
    ],
)
def test_a_model_that_files_cannot_state_is_refused_by_the_field(tmp_path, quantize, fields, words):
    assert words in refused(tmp_path, quantize, folder_with(tmp_path, **fields))


def test_an_architecture_without_files_is_refused_by_name(tmp_path, quantize):
    import transformers
    from toolkit_lm_devkit import make_checkpoint

    config = transformers.GPT2Config(vocab_size=272, n_embd=32, n_layer=1, n_head=2)
    make_checkpoint(tmp_path / "gpt2", transformers.GPT2LMHeadModel(config))
    found = refused(tmp_path, quantize, tmp_path / "gpt2")
    assert "models of the type 'gpt2' are not written to GGUF files" in found


def test_weights_that_no_block_holds_are_refused_and_leave_nothing(tmp_path, quantize):
    def broken(weights):
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")

    folder = folder_with(tmp_path, weights=broken)
    found = refused(tmp_path, quantize, folder, "--quantization", "int8")
    assert "model.layers.1.mlp.up_proj.weight holds values that are not finite" in found


def test_sizes_that_no_block_divides_are_refused_with_the_way_out(tmp_path, quantize, written):
    folder = checkpoint(tmp_path / "plain", "llama", intermediate_size=80)
    found = refused(tmp_path, quantize, folder, "--quantization", "int8")
    assert "mlp.down_proj has 80 inputs, and Q8_0 holds groups of 32" in found
    written(
        folder, tmp_path / "m.gguf", "--quantization", "int8", "--quantization-skip", "*.down_proj"
    )


def test_what_is_there_is_left_alone(tmp_path, quantize):
    (tmp_path / "model.gguf").write_text("mine")
    assert "is there" in refused(tmp_path, quantize, TINY)
    assert (tmp_path / "model.gguf").read_text() == "mine"


TOKENIZERS = {
    "WordPiece": ({"model": {"type": "WordPiece", "vocab": {}}}, "a model of the kind 'WordPiece'"),
    "words": (
        {"pre_tokenizer": {"type": "Whitespace"}},
        "cuts text into words in a way that llama.cpp has no name for (Whitespace). Able: what it "
        "calls gpt-2",
    ),
    "normalizer": (
        {"normalizer": {"type": "Lowercase"}},
        "changes text before it is cut (Lowercase)",
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_files_cannot_state_is_refused(tmp_path, quantize, name):
    changed, words = TOKENIZERS[name]
    folder = folder_with(tmp_path)
    stated = json.loads((folder / "tokenizer.json").read_text()) | changed
    (folder / "tokenizer.json").write_text(json.dumps(stated))
    assert words in refused(tmp_path, quantize, folder)


def rewritten(tmp_path, file):
    """The tokenizer of a file, through a folder, in another file."""
    folder = tmp_path / "unpacked"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer(file).to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(file)))
    size = len(file.require("tokenizer.ggml.tokens", list))
    stated = tokenizer_metadata(folder, {"vocab_size": size})
    arch = file.require("general.architecture", str)
    Output(tmp_path / "again.gguf", {"general.architecture": arch, **stated}, {}).close()
    return GGUFFile(tmp_path / "again.gguf")


def same(first, second):
    both = [tokenizer(first), tokenizer(second)]
    for text in TEXTS:
        found = [one.encode(text).ids for one in both]
        assert found[0] == found[1]
    assert tokenizer_config(first) == tokenizer_config(second)


@pytest.mark.parametrize("pre", SPLITS)
def test_each_byte_level_tokenizer_is_written_as_it_is_read(tmp_path, byte_level, pre):
    file = write_tokenizer(tmp_path / "m.gguf", model="gpt2", pre=pre, **byte_level)
    again = rewritten(tmp_path, file)
    assert SPLITS[again.require("tokenizer.ggml.pre", str)] == SPLITS[pre]
    same(file, again)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_is_written_as_it_is_read(tmp_path, prefix):
    file = sentencepiece(tmp_path / "m.gguf", add_space_prefix=prefix)
    same(file, rewritten(tmp_path, file))


@pytest.fixture
def llama_cpp():
    return pytest.importorskip(
        "llama_cpp", reason="llama.cpp is not here: pip install llama-cpp-python"
    )


def quantized_by(llama_cpp, source, target, kind):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{kind}")
    params.allow_requantize = True
    encoded = str(source).encode(), str(target).encode()
    assert llama_cpp.llama_model_quantize(*encoded, params) == 0
    return target


def same_tokens(llama_cpp, path):
    """llama.cpp computes with the weights that it reads, in float32: otherwise it rounds the inputs
    of products."""
    exact = quantized_by(llama_cpp, path, path.with_suffix(".exact"), "ALL_F32")
    theirs = llama_cpp.Llama(str(exact), n_ctx=256, logits_all=True, n_threads=1, verbose=False)
    for text, (ids, tokens, _) in zip(PROMPTS, answers(path), strict=False):
        assert theirs.tokenize(text.encode(), add_bos=False) == ids
        theirs.reset()
        theirs.eval(ids)
        for token in tokens:
            assert int(np.argmax(theirs.scores[theirs.n_tokens - 1])) == token
            theirs.eval([token])


@pytest.mark.parametrize("flags", [[], ["--quantization", "int8"], ["--quantization", "int4"]])
def test_llama_cpp_gives_the_same_tokens(tmp_path, written, llama_cpp, flags):
    same_tokens(llama_cpp, written(TINY, tmp_path / "m.gguf", *flags))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS"])
def test_files_of_llama_cpps_quantizer_give_the_same_tokens(tmp_path, written, llama_cpp, kind):
    plain = written(TINY, tmp_path / "m.gguf")
    path = quantized_by(llama_cpp, plain, tmp_path / "q.gguf", f"MOSTLY_{kind}")
    same_tokens(llama_cpp, path)
