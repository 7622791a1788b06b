"""Weights that are quantized while they are loaded: each kind of layer, what the options say of
layers, and the cache."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.model import LinearBase, UnquantizedMethod
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import (
    LinearMethodConformance,
    assert_same_logits,
    load_checkpoint,
    logits_of,
    make_checkpoint,
)
from toolkit_lm_moe.mixtral import MixtralForCausalLM
from toolkit_lm_quantize.at_load import Fp8, Int4, Int8
from toolkit_lm_quantize.cache import Cache
from toolkit_lm_quantize.schemes import SCHEMES, Fp8Scheme, Int4Scheme, Int8Scheme

KINDS = ("linear", "lm_head", "experts", "embedding")
TOKENS = torch.arange(3, 40)
SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
}


class TestInt8(LinearMethodConformance):
    quantization = Int8
    kinds = KINDS

    def dequantized(self, weight):
        return Int8Scheme().round_trip(weight)


class TestFp8(LinearMethodConformance):
    quantization = Fp8
    kinds = KINDS

    def dequantized(self, weight):
        return Fp8Scheme().round_trip(weight)


class TestInt4(LinearMethodConformance):
    quantization = Int4
    kinds = ("linear", "experts")
    # "...mlp.gate" chooses experts.
    names = {"replicated": "model.layers.0.mlp.dense"}

    def dequantized(self, weight):
        # Embeddings and heads, of 96 outputs, are in int8.
        scheme = Int8Scheme() if len(weight) == 96 else Int4Scheme()
        return scheme.round_trip(weight)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache folder of quantized weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "toolkit_lm" / "quantized"


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A function (name, **fields) -> (folder, transformers model)."""

    def make(name, **fields):
        torch.manual_seed(0)
        if name == "mixtral":
            kind = transformers.MixtralForCausalLM
            config = transformers.MixtralConfig(**SHAPE | {"num_local_experts": 4} | fields)
        else:
            kind = transformers.LlamaForCausalLM
            config = transformers.LlamaConfig(**SHAPE | fields)
        model = kind(config).eval()
        return make_checkpoint(tmp_path_factory.mktemp(name), model), model

    return make


@pytest.fixture(scope="module")
def llama(make):
    return make("llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tied(make):
    return make("tied", tie_word_embeddings=True)


CLASSES = {"llama": LlamaForCausalLM, "tied": LlamaForCausalLM, "mixtral": MixtralForCausalLM}


def load(folder, name, model_class=LlamaForCausalLM, **options):
    # load_checkpoint reads the folder, and so do the names of files in the cache's key.
    # These kernels multiply by what codes stand for, and round no inputs.
    plain = {"dtype": "float32", "kernels": "torch", "quantization": f"{name} at load"}
    options = plain | options
    return load_checkpoint(model_class, folder, **options)


def reference(model, scheme_of):
    """Logits of the transformers model with the weights that the quantized ones stand for.
    `scheme_of`: name -> Scheme or None."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scheme = scheme_of(name) if parameter.ndim > 1 else None
            if scheme is not None:
                flat = parameter.reshape(-1, parameter.shape[-1])
                parameter.copy_(scheme.round_trip(flat).reshape(parameter.shape))
        logits = model(TOKENS[None]).logits[0]
        model.load_state_dict(before)
    return logits


def scheme_of(name):
    """The scheme of each weight of a quantization."""

    def find(parameter):
        is_fine = re.search(r"embed_tokens|lm_head|mlp\.gate\.", parameter)
        return Int8Scheme() if name == "int4" and is_fine else SCHEMES[name]()

    return find


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("family", CLASSES)
def test_all_layers_compute_with_what_their_codes_stand_for(make, family, name):
    fields = {"tied": {"tie_word_embeddings": True}, "llama": {"tie_word_embeddings": False}}
    folder, model = make(family, **fields.get(family, {}))
    made = load(folder, name, CLASSES[family])
    layers = [one for one in made.modules() if isinstance(one, LinearBase)]
    plain = [one.prefix for one in layers if isinstance(one.method, UnquantizedMethod)]
    assert layers and not plain
    assert not [one for one in made.parameters() if one.ndim > 1], "floats are left"
    assert_same_logits(logits_of([made], TOKENS), reference(model, scheme_of(name)))


def test_the_engine_quantizes_by_the_option(llama, cache):
    """The name alone is enough, and the second start reads the first one's file."""
    from toolkit_lm import LLM, SamplingParams

    folder, model = llama
    options = {"device": "cpu", "dtype": "float32", "max_logprobs": 272, "num_kv_blocks": 32}
    options["kernels"] = "torch"
    found = []
    for _ in range(2):
        with LLM(str(folder), quantization="int4", **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=272)
            [output] = llm.generate([{"prompt_token_ids": TOKENS.tolist()}], params, use_tqdm=False)
        entries = output.outputs[0].logprobs[0]
        found.append(torch.tensor([entries[token].logprob for token in range(272)]))
        assert len(list(cache.iterdir())) == 1
    assert torch.equal(*found)
    expected = reference(model, scheme_of("int4"))[-1:].log_softmax(-1)
    assert_same_logits(found[0][None], expected)


# Options


def test_skipped_layers_and_others_in_other_bits(llama):
    folder, model = llama
    made = load(
        folder,
        "int4",
        quantization_skip=["lm_head", "re:.*layers\\.1\\.self_attn\\..*"],
        quantization_override=["*.0.mlp.down_proj=fp8", "model.layers.0.mlp.gate_up_proj=int8"],
        quantization_group_size=32,
    )

    def find(name):
        if "lm_head" in name or "layers.1.self_attn" in name:
            return None
        if "layers.0.mlp" in name:
            return Fp8Scheme() if "down_proj" in name else Int8Scheme()
        return scheme_of("int4")(name)

    assert_same_logits(logits_of([made], TOKENS), reference(model, find))


def test_a_tied_head_that_is_skipped_needs_its_embedding_skipped(tied):
    folder, model = tied
    with pytest.raises(UnsupportedError, match=r"lm_head shares .* Name the embedding, too"):
        load(folder, "int8", quantization_skip=["lm_head"])
    made = load(folder, "int8", quantization_skip=["lm_head", "*embed_tokens"])

    def find(name):
        return None if "embed" in name else Int8Scheme()

    assert_same_logits(logits_of([made], TOKENS), reference(model, find))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"quantization_skip": ["*.q_proj"]}, UnsupportedError, r"part of .*qkv_proj.*k_proj"),
        ({"quantization_skip": ["down_proj"]}, ConfigError, r"'down_proj' names no layer.*lm_head"),
        ({"quantization_skip": ["re:("]}, ConfigError, r"'re:\(' is no regular expression"),
        ({"quantization_override": ["lm_head"]}, ConfigError, r"write PATTERN=NAME with one of"),
        ({"quantization_override": ["lm_head=int2"]}, ConfigError, r"int8, int4, fp8, not"),
        ({"quantization_group_size": 48}, UnsupportedError, r"one of 32, 64, 128, not 48"),
        ({"quantization_group_size": 64}, ConfigError, r"down_proj has 96 inputs.*=int8' stores"),
        ({"tensor_parallel_size": 2}, ConfigError, r"share of 48 from 0 on cuts .*=int8' stores"),
        (
            {"quantization_skip": ["lm_head"], "quantization_override": ["lm_head=int8"]},
            ConfigError,
            r"lm_head: quantization_skip 'lm_head' and quantization_override 'lm_head' both",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(llama, options, error, words):
    with pytest.raises(error, match=words):
        load(llama[0], "int4", **options)


def test_a_group_size_is_for_groups(llama):
    with pytest.raises(UnsupportedError, match="quantization_group_size' is for int4"):
        load(llama[0], "int8", quantization_group_size=32)
    load(
        llama[0],
        "int8",
        quantization_group_size=64,
        quantization_override=["*.qkv_proj=int4"],
    )


def test_a_checkpoint_of_codes_and_one_with_nan_are_refused(llama, tmp_path):
    folder, _ = llama
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    for kind in (Int8, Int4, Fp8):
        assert kind.refuses(VllmConfig.default(config)) == "its weights are quantized already"
    stated = tmp_path / "stated"
    stated.mkdir()
    (stated / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"'int8' is for .* are quantized already \('awq'\)"):
        resolve(
            VllmConfig.make(model=str(stated), quantization="int8", renderer="tokens"),
            Plugins.load(),
        )
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    for name in SCHEMES:
        with pytest.raises(CheckpointError, match=r"1\.mlp\.up_proj\.weight .* not finite"):
            load(broken, name)


def test_a_head_that_is_not_the_embedding_is_its_own(tied, tmp_path, caplog):
    """Twice the embedding has the same codes, and other scales."""
    folder, _ = tied
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    copy = tmp_path / "untied"
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    once = logits_of([load(folder, "int8")], TOKENS)
    for start in ("first", "from the cache"):
        twice = logits_of([load(copy, "int8")], TOKENS)
        torch.testing.assert_close(twice, 2 * once, msg=start)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    for _ in range(2):
        assert torch.equal(logits_of([load(copy, "int8")], TOKENS), once)


# The cache


def damage(path, kind):
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif kind == "no header":
        path.write_bytes(b"\xff" * 64)
    elif kind in HEADERS:
        header = HEADERS[kind]
        path.write_bytes(len(header).to_bytes(8, "little") + header)
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        content = path.read_bytes()
        at = content.index(b'"F32"')
        path.write_bytes(content[:at] + b'"F33"' + content[at + 5 :])


METADATA = b'"__metadata__": {"format": "toolkit_lm quantized 1"}'
HEADERS = {
    "a list": b"[1]",
    "a number": b"7",
    "nested deep": b"[" * 100_000,
    "no metadata": b"{}",
    "metadata of another kind": b'{"__metadata__": 1}',
    "a tensor of another kind": b'{%s, "a": 1}' % METADATA,
    "fractions": b'{%s, "a": {"dtype": "I8", "shape": [2], "data_offsets": [0.5, 2.5]}}' % METADATA,
    "below 0": b'{%s, "a": {"dtype": "I8", "shape": [2], "data_offsets": [-2, 0]}}' % METADATA,
    "three offsets": b'{%s, "a": {"dtype": "I8", "shape": [], "data_offsets": [0, 1, 1]}}'
    % METADATA,
}


@pytest.mark.parametrize("kind", ["truncated", "no header", "other dtype", "empty", *HEADERS])
def test_a_damaged_file_is_made_anew_with_one_warning(llama, cache, caplog, kind):
    folder, _ = llama
    expected = logits_of([load(folder, "int4")], TOKENS)
    [path] = cache.iterdir()
    whole = path.read_bytes()
    damage(path, kind)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits_of([load(folder, "int4")], TOKENS), expected)
    warnings = [one for one in caplog.messages if "damaged" in one]
    assert len(warnings) == 1
    assert path.read_bytes() == whole
    caplog.clear()
    assert torch.equal(logits_of([load(folder, "int4")], TOKENS), expected)
    assert not caplog.messages


def test_what_changes_the_weights_changes_the_file(llama, cache):
    folder, _ = llama
    starts = [
        {},
        {"quantization_skip": ["lm_head"]},
        {"quantization_override": ["lm_head=fp8"]},
        {"quantization_group_size": 32},
        {"quantization_override": ["*.down_proj=int8"], "tensor_parallel_size": 2},
        {"quantization_override": ["*.down_proj=int8"], "tensor_parallel_size": 2, "rank": 1},
    ]
    for count, options in enumerate(starts, 1):
        load(folder, "int4", **options)
        assert len(list(cache.iterdir())) == count, options
    load(folder, "int8")
    assert len(list(cache.iterdir())) == len(starts) + 1
    os.utime(folder / "model.safetensors")
    load(folder, "int8")
    assert len(list(cache.iterdir())) == len(starts) + 2


def test_the_second_start_reads_no_weight_of_the_checkpoint(llama, monkeypatch):
    folder, _ = llama
    expected = logits_of([load(folder, "int4")], TOKENS)

    def fail(*arguments):
        raise AssertionError("a weight is quantized again")

    for scheme in SCHEMES.values():
        monkeypatch.setattr(scheme, "quantize", fail)
    assert torch.equal(logits_of([load(folder, "int4")], TOKENS), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is mapped")
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_nothing_of_the_file_stays_mapped_once_kernels_have_packed_it(llama, cache, name):
    folder, _ = llama
    for _ in range(2):
        model = load(folder, name, dtype="bfloat16", kernels="cpu")
        assert str(cache) not in Path("/proc/self/maps").read_text()
    assert logits_of([model], TOKENS).isfinite().all()


def test_the_cache_is_bounded_and_can_be_off(llama, cache):
    folder, _ = llama
    for options in ({"cache": "false"}, {"cache_gib": "0"}):
        load(folder, "int8", plugin_option={"quantize": options})
        assert not cache.exists()
    load(folder, "int8", load_format="dummy")
    assert not cache.exists()
    load(folder, "int8")
    [old] = cache.iterdir()
    limit = old.stat().st_size * 1.5 / 2**30
    load(folder, "fp8", plugin_option={"quantize": {"cache_gib": str(limit)}})
    [new] = cache.iterdir()
    assert new != old
    elsewhere = cache.parent / "elsewhere"
    load(folder, "int8", plugin_option={"quantize": {"cache_dir": str(elsewhere)}})
    assert len(list(elsewhere.iterdir())) == 1


def test_a_folder_that_cannot_be_written_costs_a_warning(llama, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    load(llama[0], "int8", plugin_option={"quantize": {"cache_dir": str(tmp_path / "file")}})
    assert "are not kept for the next start" in caplog.text


@pytest.mark.parametrize("most", [16, 4096, 2**16])
def test_a_full_disk_costs_a_warning_and_leaves_nothing(llama, cache, caplog, most):
    """In the header, and where its size is set."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        made = load(llama[0], "int8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.messages) == 1 and "are not kept for the next start" in caplog.text
    assert not list(cache.iterdir())
    assert_same_logits(logits_of([made], TOKENS), logits_of([load(llama[0], "int8")], TOKENS))


def test_a_folder_where_the_file_should_be(llama, cache, caplog):
    load(llama[0], "int8")
    [path] = cache.iterdir()
    path.unlink()
    path.mkdir()
    load(llama[0], "int8")
    assert "damaged" in caplog.text and "are not kept for the next start" in caplog.text
    assert list(cache.iterdir()) == [path]


def test_a_file_of_another_user_is_read(llama, cache, caplog, monkeypatch):
    """Its time of use cannot be set then."""
    expected = logits_of([load(llama[0], "int8")], TOKENS)

    def refuse(*arguments):
        raise PermissionError("not the owner")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Int8Scheme, "quantize", refuse)
    assert torch.equal(logits_of([load(llama[0], "int8")], TOKENS), expected)
    assert not caplog.messages


def test_a_folder_of_nobody_is_refused(llama):
    with pytest.raises(ConfigError, match=r"quantize\.cache_dir: '~nobody_here/x' is no folder"):
        load(llama[0], "int8", plugin_option={"quantize": {"cache_dir": "~nobody_here/x"}})


def test_starts_at_once_leave_one_whole_file(tmp_path):
    """One begins before the other has ended, and a third reads what is there."""
    layout = {"a.weight": (torch.int8, (2, 3)), "a.scales": (torch.float32, (2, 1))}
    path = tmp_path / "key.safetensors"
    first = Cache(path, 2**20)
    second = Cache(path, 2**20)
    values = {
        "a.weight": torch.arange(6, dtype=torch.int8).view(2, 3),
        "a.scales": torch.tensor([[0.5], [2.0]]),
    }
    for one in (first, second):
        one.begin(layout)
    for name in layout:
        first.write(name, values[name])
        assert not (path.exists() and name == "a.weight")
        second.write(name, values[name])
    found = Cache(path, 2**20).find("a", {name[2:]: one for name, one in layout.items()})
    assert all(torch.equal(found[name[2:]], values[name]) for name in layout)
    assert [one.name for one in tmp_path.iterdir()] == ["key.safetensors"]
    assert {name: torch.equal(values[name], one) for name, one in load_file(path).items()} == {
        "a.weight": True,
        "a.scales": True,
    }


PEAK = """
import re, sys
from pathlib import Path
import torch
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import load_checkpoint
def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
torch.ones(1024, 1024, dtype=torch.bfloat16).float() @ torch.ones(1024, 1024)
for _ in range(2):
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmHWM")
    load_checkpoint(
        LlamaForCausalLM, Path(sys.argv[1]), dtype="bfloat16", quantization=sys.argv[2]
    )
    print(memory("VmHWM") - before)
"""
MAPPED = 2**27 + 2**25
"""Bytes of the checkpoint that are mapped at a time, and the largest tensor."""
WORK = 100e6
"""Bytes to quantize, unpack and rearrange one layer."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
def test_the_peak_is_that_of_the_codes_and_one_layer(tmp_path):
    """While the cache is filled, and from it."""
    config = transformers.LlamaConfig(
        **SHAPE
        | {
            "vocab_size": 8192,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "dtype": "bfloat16",
        },
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    folder = make_checkpoint(tmp_path / "model", model)
    del model

    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), "int4 at load"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # 4 bits and a float32 scale of 32: 5 of 16; the embedding has 8.
    expected = 0.33 * num_bytes
    assert expected + MAPPED + WORK < num_bytes
    for found in map(int, done.stdout.split()):
        assert found < expected + MAPPED + WORK, (
            f"{(found - expected) / 2**20:.0f} MiB beside the codes"
        )
