"""Decoders that attend by their own code: transformers' tokens through the whole engine, with
chunks, preemption and cached prefixes."""

import pytest
from fallback_harness import VOCAB_SIZE, check_parity, generate
from tiny_models import save
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm_devkit.kv_kind import KVKindConformance
from toolkit_lm_transformers.examine import examine
from toolkit_lm_transformers.spec import StatesSpec, TokensSpec

KINDS = {"bloom": "entries", "mamba2": "states", "jamba": "both", "openai-gpt": "ids"}
"""A type of each kind of cache: entries of tokens, states, both, ids of tokens."""
TOKENS = TokensSpec(block_size=4, widths=(("float32", 24),), token_bytes=96)


class TestTokens(KVKindConformance):
    spec = TOKENS


class TestStates(KVKindConformance):
    spec = StatesSpec(block_size=64, widths=(("float32", 24),), state_bytes=96)


@pytest.mark.parametrize("model_type", KINDS)
def test_fp32_parity(model_type, tmp_path):
    model = save(model_type, tmp_path)
    # States take a block of the longest sequence each.
    check_parity(
        model,
        generate(
            tmp_path,
            model_impl="transformers",
            num_kv_blocks=30 if KINDS[model_type] in ("entries", "ids") else 200,
            preempts=KINDS[model_type] in ("entries", "ids"),
        ),
    )


@pytest.mark.parametrize("model_type", KINDS)
def test_a_cached_prefix_changes_no_token(model_type, tmp_path):
    save(model_type, tmp_path)
    prompt = [3 + (7 * i) % (VOCAB_SIZE - 3) for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = {"block_size": 4, "num_kv_blocks": 64, "max_model_len": 64, "max_num_seqs": 2}
    with LLM(str(tmp_path), model_impl="transformers", renderer="tokens", **options) as llm:
        cold, warm = (
            llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
            for _ in range(2)
        )
    assert warm.num_cached_tokens > 0
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_what_is_kept_is_what_the_cache_holds(tmp_path):
    config = save("jamba", tmp_path).config
    hf_config = {**config.to_dict(), "architectures": ["JambaForCausalLM"]}
    layout = examine(VllmConfig.default(hf_config)).layout
    tokens = layout.entries_of(tokens=True)
    assert {entry.attribute for entry in tokens} == {"keys", "values"}
    assert {entry.width for entry in tokens} == {config.num_key_value_heads * 8}
    assert {entry.attribute for entry in layout.entries_of(tokens=False)} == {
        "conv_states",
        "recurrent_states",
    }
