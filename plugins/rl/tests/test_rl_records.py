"""Hidden states and routed experts of requests, as transformers computes them."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from toolkit_lm import LLM, AsyncLLM, SamplingParams
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import RequestError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import randomize
from toolkit_lm_rl.control import Control
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    Qwen3MoeConfig,
)

ENGINE = {
    "max_model_len": 64,
    "num_kv_blocks": 48,
    "block_size": 16,
    "dtype": "float32",
    "renderer": "tokens",
}
LAYERS = {"rl": {"hidden_states": "0,model.layers.1,last"}}
ALWAYS = {"rl": {"routed_experts": "always"}}
PROMPT = [(3 * k) % 90 + 5 for k in range(37)]
TOLERANCE = 1e-4
"""States are of the order of 1, in float32."""
SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
    ),
    "deepseek_v3": DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    ),
}


def asked(**more):
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 6, "ignore_eos": True, **more.pop("params", {})},
        extra_args=more,
    )


STATES = asked(return_hidden_states=True)


def prompt(token_ids):
    return {"prompt_token_ids": token_ids}


@pytest.fixture(scope="module")
def reference(policies):
    """Hidden states [tokens, 3, H] of transformers, by a policy's name and tokens."""
    models = {}

    def states(token_ids, name="old"):
        if name not in models:
            models[name] = AutoModelForCausalLM.from_pretrained(policies / name).eval()
        with torch.no_grad():
            out = models[name](torch.tensor([token_ids]), output_hidden_states=True)
        # The output of the last layer is only shown after the norm; that of the layer itself is
        # caught by a hook.
        caught = []
        hook = (
            models[name]
            .model.layers[1]
            .register_forward_hook(
                lambda layer, args, out: caught.append(out[0] if isinstance(out, tuple) else out)
            )
        )
        with torch.no_grad():
            models[name](torch.tensor([token_ids]))
        hook.remove()
        found = [out.hidden_states[1], caught[0], out.hidden_states[-1]]
        return torch.stack([x.reshape(len(token_ids), -1) for x in found], 1).numpy()

    return states


def check_states(output, reference, begin=0, end=None):
    """All answers of an output have the states of their tokens but the last."""
    for answer in output.outputs:
        tokens = [*output.prompt_token_ids, *answer.token_ids]
        wanted = reference(tokens)[:-1][begin:end]
        assert answer.hidden_states.dtype == np.float32
        assert answer.hidden_states.shape == wanted.shape
        assert np.abs(answer.hidden_states - wanted).max() < TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"kernels": "cpu"},
        {"optimization_level": 1, "compilation_config": {"backend": "eager"}},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"engine_process": True},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_hidden_states_are_those_of_transformers(policies, reference, options):
    """Also where the prompt is cached, and is computed in chunks."""
    with LLM(str(policies / "old"), plugin_option=LAYERS, **ENGINE, **options) as llm:
        plain = llm.generate([prompt(PROMPT)], asked())[0]
        assert not plain.outputs[0].arrays
        [first, second] = llm.generate([prompt(PROMPT), prompt(PROMPT[:20])], STATES)
        check_states(first, reference)
        check_states(second, reference)
        [again] = llm.generate([prompt(PROMPT)], STATES)
        assert again.num_cached_tokens == 0
        check_states(again, reference)


@pytest.fixture(scope="module")
def llm(policies):
    with LLM(str(policies / "old"), plugin_option=LAYERS, **ENGINE) as llm:
        yield llm


def test_tokens_of_the_prompt_or_the_output(llm, reference):
    """Those of the output read a cached prompt."""
    [whole] = llm.generate([prompt(PROMPT)], asked())
    [output] = llm.generate(
        [prompt(PROMPT)], asked(return_hidden_states=True, hidden_states_of="output")
    )
    assert output.num_cached_tokens == 32
    check_states(output, reference, begin=len(PROMPT))
    [of_prompt] = llm.generate(
        [prompt(PROMPT)], asked(return_hidden_states=True, hidden_states_of="prompt")
    )
    check_states(of_prompt, reference, end=len(PROMPT))
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids
    [scored] = llm.generate(
        [prompt(PROMPT)],
        asked(return_hidden_states=True, params={"max_tokens": 0, "prompt_logprobs": 0}),
    )
    assert scored.outputs[0].hidden_states.shape == (len(PROMPT), 3, 64)


def test_several_answers_share_the_prompt(llm, reference):
    params = {"n": 3, "temperature": 1.0, "seed": 5}
    [output] = llm.generate([prompt(PROMPT)], asked(return_hidden_states=True, params=params))
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    check_states(output, reference)


def test_rows_survive_a_preemption(policies, reference):
    """Blocks for one sequence and a half: requests give way to each other."""
    options = {**ENGINE, "num_kv_blocks": 6, "max_num_seqs": 4}
    params = asked(return_hidden_states=True, params={"max_tokens": 24})
    preempted = []
    with LLM(str(policies / "old"), plugin_option=LAYERS, **options) as llm:
        scheduler = llm.engine.client.core.scheduler
        before = scheduler._preempt
        scheduler._preempt = lambda plan, victim: (preempted.append(victim), before(plan, victim))
        for output in llm.generate([prompt(PROMPT), prompt(PROMPT[:30])], params):
            check_states(output, reference)
    assert preempted


def test_rows_of_drafts_that_were_rejected_are_replaced(policies, reference):
    """Another model drafts, which is mostly wrong."""
    options = {
        "drafter": "draft_model",
        "draft_budget": "all",
        "plugin_option": {**LAYERS, "drafters": {"model": str(policies / "new")}},
    }
    with LLM(str(policies / "old"), **{**ENGINE, "num_kv_blocks": 64}, **options) as llm:
        params = asked(return_hidden_states=True, params={"max_tokens": 20})
        [output] = llm.generate([prompt(PROMPT)], params)
        assert output.metrics.num_draft_tokens > output.metrics.num_accepted_tokens
        check_states(output, reference)


def test_new_weights_compute_the_rows_again(policies, reference):
    with LLM(str(policies / "old"), plugin_option=LAYERS, **ENGINE) as llm:
        Control(llm).update_weights(str(policies / "new"))
        [output] = llm.generate([prompt(PROMPT)], STATES)
        check_states(output, lambda tokens: reference(tokens, "new"))


def test_a_stop_text_is_refused(llm):
    """The front finds it, when the engine has computed further tokens perhaps."""
    params = {"stop": ["x"], "detokenize": True}
    with pytest.raises(RequestError, match="use stop_token_ids") as raised:
        llm.generate([prompt(PROMPT)], asked(return_hidden_states=True, params=params))
    assert raised.value.param == "stop"


def test_memory_is_bounded(policies, reference):
    """A request that needs more is refused, and requests that fit alone wait for each other."""
    options = {"rl": {**LAYERS["rl"], "recorded_mib": 0.05}}
    with LLM(str(policies / "old"), plugin_option=options, **ENGINE) as llm:
        with pytest.raises(RequestError, match=r"rl\.recorded_mib allows 0\.05"):
            llm.generate(
                [prompt(PROMPT)],
                asked(return_hidden_states=True, params={"max_tokens": 27, "n": 2}),
            )
        for output in llm.generate([prompt(PROMPT)] * 3, STATES):
            check_states(output, reference)
        planner = llm.engine.client.core.scheduler.planners.by_name["hidden_states"]
        assert planner._held == 0
        assert not planner._kept


def test_an_engine_without_the_option_refuses(policies):
    with LLM(str(policies / "old"), **ENGINE) as llm:
        with pytest.raises(RequestError, match="records no hidden states"):
            llm.generate([prompt(PROMPT)], STATES)
        with pytest.raises(RequestError, match="records no routed experts"):
            llm.generate([prompt(PROMPT)], asked(return_routed_experts=True))
    with pytest.raises(UnsupportedError, match="no routed experts that can be recorded"):
        LLM(str(policies / "old"), plugin_option=ALWAYS, **ENGINE)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """Folders of checkpoints of mixtures of experts, by family."""
    folder = tmp_path_factory.mktemp("mixtures")
    for name, config in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        randomize(model, 3)
        model.save_pretrained(folder / name)
    return folder


def chosen(path, token_ids):
    """Experts [tokens, layers, K] that transformers' blocks of experts are called with."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda module, args: found.append(args[1].clone()))
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    return torch.stack([ids.view(len(token_ids), -1) for ids in found], 1).numpy()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8, "kernels": "cpu"},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"optimization_level": 1, "compilation_config": {"backend": "eager"}},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_routed_experts_are_those_of_transformers(mixtures, family, options):
    with LLM(str(mixtures / family), plugin_option=ALWAYS, **ENGINE, **options) as llm:
        [first] = llm.generate([prompt(PROMPT)], asked())
        late = asked(routed_experts_prompt_start=20)
        _, [again] = (llm.generate([prompt(PROMPT)], late) for _ in range(2))
    answer = first.outputs[0]
    wanted = chosen(mixtures / family, [*PROMPT, *answer.token_ids])[:-1]
    assert answer.routed_experts.shape == wanted.shape
    assert (np.sort(answer.routed_experts, -1) == np.sort(wanted, -1)).all()
    # Tokens before the first one that is asked for may be cached.
    assert again.num_cached_tokens == 16
    assert (np.sort(again.outputs[0].routed_experts, -1) == np.sort(wanted[20:], -1)).all()


def decoded(text):
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


@pytest.fixture(scope="module")
def client(mixtures):
    own = {"rl": {"hidden_states": "last", "routed_experts": "asked"}}
    config = VllmConfig.make(
        model=str(mixtures / "mixtral"), plugin_option=own, engine_process=False, **ENGINE
    )
    llm = AsyncLLM(config, plugins=Plugins.load(PluginsConfig(plugin_option=own)))
    yield TestClient(create_app(llm, ServerOptions(routes=("sglang", "llama_cpp"))))
    llm.close()


BODY = {"temperature": 0, "ignore_eos": True}
BOTH = {"return_hidden_states": True, "return_routed_experts": True}


def posted(client, path, status=200, **body):
    answer = client.post(path, json=BODY | body)
    assert answer.status_code == status, answer.text
    return answer


def check_rows(mixtures, states, experts, tokens):
    wanted = chosen(mixtures / "mixtral", tokens)[:-1]
    assert (np.sort(experts, -1) == np.sort(wanted, -1)).all()
    model = AutoModelForCausalLM.from_pretrained(mixtures / "mixtral", dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    assert np.abs(states - out.hidden_states[-1][0, :-1].numpy()).max() < TOLERANCE


def test_completions_and_streams_have_rows(client, mixtures):
    asked_for = {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True}
    [plain] = posted(client, "/v1/completions", **asked_for).json()["choices"]
    assert "hidden_states" not in plain
    [choice] = posted(client, "/v1/completions", **asked_for, **BOTH).json()["choices"]
    tokens = PROMPT + choice["token_ids"]
    states = decoded(choice["hidden_states"])
    experts = decoded(choice["routed_experts"])
    check_rows(mixtures, states[:, 0], experts, tokens)
    text = posted(client, "/v1/completions", stream=True, **asked_for, **BOTH).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    ends = [c for event in events for c in event["choices"] if "routed_experts" in c]
    assert [c["finish_reason"] for c in ends] == ["length"]
    assert (decoded(ends[0]["routed_experts"]) == experts).all()


def test_answers_of_generate_have_rows(client, mixtures):
    """Hidden states are lists, and experts are int32."""
    answer = posted(
        client,
        "/generate",
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 5, **BODY},
        **BOTH,
    ).json()
    info = answer["meta_info"]
    assert len(info["hidden_states"][0]) == len(PROMPT)
    states = np.array([*info["hidden_states"][0], *info["hidden_states"][1:]], np.float32)
    experts = np.frombuffer(base64.b64decode(info["routed_experts"]), "<i4").reshape(-1, 3, 2)
    check_rows(mixtures, states, experts, PROMPT + answer["output_ids"])
    late = posted(
        client,
        "/generate",
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 5, **BODY},
        return_routed_experts=True,
        routed_experts_start_len=30,
    ).json()["meta_info"]["routed_experts"]
    assert (np.frombuffer(base64.b64decode(late), "<i4").reshape(-1, 3, 2) == experts[30:]).all()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a"}),
        ("/infill", {"input_prefix": "a"}),
        ("/completion", {"prompt": PROMPT}),
    ],
)
@pytest.mark.parametrize("name", BOTH)
def test_routes_without_a_place_refuse(client, path, body, name):
    answer = client.post(path, json={**body, name: True})
    assert answer.status_code == 400
    assert name in answer.text


def test_a_start_after_the_prompt_is_refused(client):
    answer = posted(
        client,
        "/v1/completions",
        400,
        prompt=PROMPT,
        return_routed_experts=True,
        routed_experts_prompt_start=37,
    )
    assert answer.json()["error"]["param"] == "routed_experts_prompt_start"
