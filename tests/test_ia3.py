"""A third party's kind of adapters: parity with PEFT, and the kit finds what it may do wrong."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from safetensors.torch import save_file
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError, ToolkitError
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import PartConformance
from transformers import LlamaForCausalLM

FOLDER = Path(__file__).parent / "plugins"
for plugin in ("ia3", "threads"):
    sys.path.insert(0, str(FOLDER / plugin))
IA3 = importlib.import_module("toolkit_lm_ia3")
THREADS = importlib.import_module("toolkit_lm_threads")
PROMPT = [(37 * i) % 250 + 16 for i in range(33)]
FORMS = {
    "both": (["k_proj", "v_proj", "down_proj"], ["down_proj"]),
    "outputs": (["q_proj", "up_proj", "o_proj"], []),
    "inputs": (["o_proj", "down_proj"], ["o_proj", "down_proj"]),
}


@torch.no_grad()
def reference(model):
    """Greedy tokens after PROMPT, and the log probabilities [tokens, V] of each."""
    ids = list(PROMPT)
    for _ in range(8):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    logits = model(input_ids=torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1]
    return ids[len(PROMPT) :], logits.log_softmax(-1)


@pytest.fixture(scope="module")
def adapters(make_llama, tmp_path_factory):
    """(checkpoint, folder of adapters, what each gives)."""
    checkpoint, model = make_llama("ia3")
    folder = tmp_path_factory.mktemp("adapters")
    load = lambda: LlamaForCausalLM.from_pretrained(checkpoint, dtype="float64")  # noqa: E731
    expected = {None: reference(load())}
    for seed, (name, (targets, inputs)) in enumerate(FORMS.items()):
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = get_peft_model(
                model, IA3Config(target_modules=targets, feedforward_modules=inputs)
            )
            with torch.no_grad():
                for parameter in made.parameters():
                    if parameter.requires_grad:
                        parameter.uniform_(0.3, 1.7)
            made.save_pretrained(folder / name)
            model = made.unload()
            expected[name] = reference(PeftModel.from_pretrained(load(), folder / name).double())
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == 4
    return str(checkpoint), folder, expected


def options(folder, **others):
    return {
        "plugins": [IA3],
        "plugin_option": {IA3.__name__: {"folder": str(folder)}},
        "num_kv_blocks": 256,
        "block_size": 16,
        "max_model_len": 128,
        "dtype": "float32",
        **others,
    }


def ask(llm, *names):
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=8,
            ignore_eos=True,
            logprobs=3,
            extra_args={} if name is None else {"ia3": name},
        )
        for name in names
    ]
    return llm.generate([{"prompt_token_ids": PROMPT}] * len(names), params, use_tqdm=False)


def given(output):
    [choice] = output.outputs
    return list(choice.token_ids), [
        {token: at.logprob for token, at in step.items()} for step in choice.logprobs
    ]


def assert_is(output, expected, name=""):
    assert not output.error, output.error
    tokens, steps = given(output)
    assert tokens == expected[0], name
    for step, logprobs in zip(steps, expected[1], strict=True):
        assert all(abs(value - float(logprobs[token])) <= 1e-4 for token, value in step.items())


NAMES = (None, *FORMS)


def test_rows_have_adapters_of_their_own(adapters):
    checkpoint, folder, expected = adapters
    with LLM(checkpoint, **options(folder)) as llm:
        for cached in (0, 32):
            alone = {name: ask(llm, name)[0] for name in NAMES}
            for name, found in alone.items():
                assert_is(found, expected[name], name)
                assert found.num_cached_tokens == cached, "it read the prefix of another one"
        llm.reset_prefix_cache()
        for name, found in zip(NAMES, ask(llm, *NAMES), strict=True):
            assert given(found) == given(alone[name])
        with pytest.raises(RequestError, match=r"no adapter 'no'\. There are: \['both', 'inputs'"):
            ask(llm, "no")


def test_inputs_of_a_part_of_a_fused_layer(adapters, tmp_path):
    checkpoint, _, _ = adapters
    (tmp_path / "bad").mkdir()
    key = "base_model.model.model.layers.0.self_attn.v_proj.ia3_l"
    save_file({key: torch.ones(1, 64)}, tmp_path / "bad" / IA3.WEIGHTS)
    with pytest.raises(ToolkitError, match=r"v_proj\.ia3_l .*of inputs of a fused layer's part"):
        LLM(checkpoint, **options(tmp_path))


@pytest.mark.parametrize(
    "parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str
)
def test_ranks_have_a_share_each(adapters, parallel):
    checkpoint, folder, expected = adapters
    own = options(folder, executor="threads", **parallel)
    with LLM(checkpoint, **own | {"plugins": [IA3, THREADS]}) as llm:
        for name, found in zip(NAMES, ask(llm, *NAMES), strict=True):
            assert_is(found, expected[name], name)


def test_it_is_a_small_plugin():
    lines = [
        line
        for path in (FOLDER / "ia3" / "toolkit_lm_ia3").glob("*.py")
        for line in path.read_text().splitlines()
    ]
    assert sum(bool(line.strip()) for line in lines) <= 120


class TestPart(PartConformance):
    part = "ia3"
    plugins = (IA3,)
    shares = ({"ia3": "both"}, {"ia3": "outputs"}, {"ia3": "inputs"})

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, adapters):
        return adapters[0]

    @pytest.fixture(scope="class")
    @classmethod
    def options(cls, adapters):
        return {"plugin_option": options(adapters[1])["plugin_option"]}


def given_of(adapters):
    return adapters[0], {"plugin_option": options(adapters[1])["plugin_option"]}


def test_adapters_that_share_prefixes_are_found(adapters, monkeypatch):
    kind = Plugins.load(extra=[IA3]).parts.load_half("ia3", "request")
    prepare = kind.prepare
    kit = TestPart()
    own = given_of(adapters)
    with kit.llm(*own, enable_prefix_caching=False) as llm:
        alone = [kit.ask(llm, [request])[0] for request in kit.requests()]
    monkeypatch.setattr(kind, "prepare", lambda *all_: (prepare(*all_)[0], []))
    with pytest.raises(AssertionError, match="others than alone"):
        kit.test_tokens_do_not_depend_on_the_company(*own, alone, {})


def test_a_part_that_forgets_nothing_is_found(adapters, monkeypatch):
    kind = Plugins.load(extra=[IA3]).parts.load_half("ia3", "worker")
    monkeypatch.setattr(kind, "remove", lambda part, seq_id: None)
    with pytest.raises(AssertionError, match=r"sequences that have left: _adapter_of from \d+ to"):
        TestPart().test_sequences_that_have_left_are_forgotten(*given_of(adapters), monkeypatch)
