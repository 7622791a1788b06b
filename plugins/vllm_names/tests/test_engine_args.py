"""EngineArgs: options from keywords and from command lines."""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import closing

import pytest
import toolkit_lm
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm_vllm_names import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    FlexibleArgumentParser,
    LLMEngine,
    SamplingParams,
)
from toolkit_lm_vllm_names.table import TABLE


def parse(*words, parser=argparse.ArgumentParser):
    return EngineArgs.add_cli_args(parser()).parse_args(words)


def test_options_and_their_config():
    args = EngineArgs("tiny", gpu_memory_utilization=0.5, max_num_seqs=4, num_kv_blocks=32)
    assert (args.model, args.max_num_seqs, args.max_model_len) == ("tiny", 4, None)
    args.max_model_len = 64
    config = args.create_engine_config()
    assert (
        config.model.max_model_len,
        config.cache.kv_cache_memory,
        config.cache.num_kv_blocks,
    ) == (64, "0.5", 32)


def test_an_unknown_option_is_refused():
    with pytest.raises(
        ConfigError, match=r"unknown option 'max_seqs'\. Did you mean 'max_num_seqs'"
    ):
        EngineArgs(max_seqs=3)


@pytest.mark.parametrize("parser", [argparse.ArgumentParser, FlexibleArgumentParser])
def test_flags(parser):
    words = [
        "--model",
        "tiny",
        "-tp",
        "1",
        "--max-model-len",
        "64",
        "--no-enable-prefix-caching",
        "--served-model-name",
        "a",
        "b",
    ]
    args = parse(*words, "--seed=7", "--hf-overrides", "{}", parser=parser)
    assert (
        args.tensor_parallel_size,
        args.max_model_len,
        args.enable_prefix_caching,
        args.served_model_name,
    ) == (1, 64, False, ["a", "b"])
    config = EngineArgs.from_cli_args(args).create_engine_config()
    assert (config.model.seed, config.model.max_model_len, config.cache.enable_prefix_caching) == (
        7,
        64,
        False,
    )


def test_every_option_of_the_engine_has_a_flag():
    args = parse()
    assert {*vars(args)} == {row.name for row in TABLE.values() if not row.of_server}
    assert {*vars(args).values()} == {None}


def test_underscores_and_flags_of_the_script():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--chat-template-path", type=str)
    parser.set_defaults(model="tiny", enforce_eager=True)
    args = parser.parse_args(["--max_model_len", "64", "--chat_template_path=a_b"])
    assert (args.max_model_len, args.chat_template_path, args.enforce_eager) == (64, "a_b", True)
    assert EngineArgs.from_cli_args(args).max_model_len == 64


def test_the_environment_gives_what_is_not_given(monkeypatch):
    monkeypatch.setenv("TOOLKIT_LM_MAX_NUM_SEQS", "3")
    assert EngineArgs("tiny").create_engine_config().scheduler.max_num_seqs == 3
    assert EngineArgs("tiny", max_num_seqs=5).create_engine_config().scheduler.max_num_seqs == 5


def test_engines():
    with LLMEngine.from_engine_args(EngineArgs("tiny", max_model_len=64)) as engine:
        assert engine.config.max_model_len == 64
    args = AsyncEngineArgs("tiny", max_model_len=64, engine_process=False)
    with closing(AsyncLLM.from_engine_args(args)) as engine:
        assert engine.config.max_model_len == 64
        engine.shutdown()
        assert engine.health().status == "closed"
    for face in (toolkit_lm.LLM, toolkit_lm.LLMEngine, toolkit_lm.AsyncLLM):
        assert not {"beam_search", "from_engine_args", "shutdown"} & {*dir(face)}


def test_names_of_other_distributions_are_names_of_the_package():
    assert toolkit_lm.EngineArgs is EngineArgs and toolkit_lm.AsyncLLMEngine is AsyncLLM
    assert issubclass(AsyncLLM, toolkit_lm.AsyncLLM) and "EngineArgs" in dir(toolkit_lm)
    assert toolkit_lm.ScoringRequestOutput is toolkit_lm.PoolingRequestOutput
    with pytest.raises(AttributeError, match="nobody_has_it"):
        _ = toolkit_lm.nobody_has_it


def test_options_need_no_torch():
    script = (
        "import sys; from toolkit_lm import BeamSearchParams, EngineArgs, "
        "FlexibleArgumentParser, StructuredOutputsParams; "
        "EngineArgs('tiny', gpu_memory_utilization=0.5).create_engine_config(); print('torch' in "
        "sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", max_model_len=128) as llm:
        yield llm


class TestLLM:
    def test_beam_search(self, llm):
        [output] = llm.beam_search(
            [{"prompt": "Once upon a time"}], BeamSearchParams(beam_width=3, max_tokens=5)
        )
        assert len(output.sequences) == 3
        best = output.sequences[0]
        ids = llm.get_tokenizer().encode("Once upon a time")
        assert best.tokens[: len(ids)] == ids and len(best.tokens) == len(ids) + 5
        assert best.text.startswith("Once upon a time") and best.text == llm.get_tokenizer().decode(
            best.tokens
        )
        assert [one.cum_logprob for one in output.sequences] == sorted(
            (one.cum_logprob for one in output.sequences), reverse=True
        )

    def test_a_beam_of_one_is_greedy(self, llm):
        [output] = llm.beam_search(
            ["Once upon a time"], BeamSearchParams(beam_width=1, max_tokens=5)
        )
        [greedy] = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=5))
        assert output.sequences[0].tokens == [
            *greedy.prompt_token_ids,
            *greedy.outputs[0].token_ids,
        ]

    def test_token_ids_are_a_prompt(self, llm):
        ids = llm.get_tokenizer().encode("Once upon a time")
        greedy = SamplingParams(temperature=0, max_tokens=4)
        expected = llm.generate("Once upon a time", greedy)[0].outputs
        for prompts in (ids, [ids], [{"prompt_token_ids": ids}]):
            assert [one.outputs for one in llm.generate(prompts, greedy)] == [expected]
        assert [len(one.prompt_token_ids) for one in llm.generate([ids, ids[:2]], greedy)] == [4, 2]

    def test_keywords_that_ask_for_nothing(self, llm):
        llm.generate(
            "a",
            SamplingParams(max_tokens=1),
            lora_request=None,
            tokenization_kwargs=None,
            use_tqdm=False,
        )
        conversation = [{"role": "user", "content": "a"}]
        neutral = {
            "tools": None,
            "chat_template": None,
            "lora_request": None,
            "chat_template_content_format": "auto",
        }
        llm.chat(conversation, SamplingParams(max_tokens=1), use_tqdm=False, **neutral)
        with pytest.raises(RequestError, match="this engine has no adapters"):
            llm.generate("a", lora_request="adapter")

    def test_options_of_requests_that_ask_for_nothing(self, llm):
        engine = llm.llm_engine
        engine.add_request(
            "1", "a", SamplingParams(max_tokens=1), lora_request=None, trace_headers=None
        )
        while engine.has_unfinished_requests():
            assert engine.step()[-1].outputs[0].finished()
        with pytest.raises(RequestError, match="this engine has no adapters"):
            engine.add_request("2", "a", lora_request="adapter")
        with pytest.raises(RequestError, match="unknown request option 'lora_requests'"):
            engine.add_request("2", "a", lora_requests="adapter")

    def test_a_request_keeps_its_parameters(self, llm):
        params = SamplingParams(temperature=0, max_tokens=6)
        llm.llm_engine.add_request("1", "Once upon a time", params)
        params.max_tokens = 1
        while llm.llm_engine.has_unfinished_requests():
            outputs = llm.llm_engine.step()
        assert len(outputs[-1].outputs[0].token_ids) == 6

    def test_metrics(self, llm):
        [output] = llm.generate(
            "Once upon a time", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        )
        metrics = output.metrics
        assert metrics.arrival_time < metrics.first_token_ts < metrics.last_token_ts
        assert metrics.num_generation_tokens == 5
