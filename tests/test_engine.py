"""LLM, LLMEngine and AsyncLLM over a small random checkpoint: what users ask for, and what they get
wrong."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from toolkit_lm import LLM, LLMEngine, RequestOutputKind, SamplingParams
from toolkit_lm.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    PluginError,
    RequestError,
    ToolkitError,
    UnsupportedError,
)
from toolkit_lm.plugin import PluginWarning, hookimpl
from toolkit_lm_sdpa.backend import SdpaBackend

SMALL = {"num_kv_blocks": 64, "block_size": 4, "max_model_len": 128, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(make_llama):
    return str(make_llama("engine")[0])


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **SMALL) as llm:
        yield llm


def used_blocks(llm: LLM) -> int:
    return llm.engine.client.core.scheduler.blocks.num_used


class TestGenerate:
    def test_prompt_forms_are_the_same(self, llm):
        ids = [b + 16 for b in _byte_ranks("hi there")]
        forms = [
            "hi there",
            {"prompt": "hi there"},
            {"prompt_token_ids": ids},
            {"prompt_token_ids": ids, "prompt": "hi there"},
        ]
        outputs = llm.generate(forms, GREEDY, use_tqdm=False)
        assert {tuple(o.prompt_token_ids) for o in outputs} == {tuple(ids)}
        assert {tuple(o.outputs[0].token_ids) for o in outputs} == {
            tuple(outputs[0].outputs[0].token_ids)
        }
        assert [o.prompt for o in outputs] == ["hi there", "hi there", None, "hi there"]

    def test_params_for_each_prompt(self, llm):
        params = [GREEDY.replace(max_tokens=n) for n in (1, 5, 3)]
        outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5, 3]
        assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
        with pytest.raises(RequestError, match="a list of 3 of them, one for each prompt"):
            llm.generate(["a", "b", "c"], params[:2], use_tqdm=False)

    def test_n_computes_the_prompt_once(self, llm, monkeypatch):
        tokens = []
        runner = llm.engine.client.core.executor.runner
        execute = runner.execute
        monkeypatch.setattr(
            runner, "execute", lambda plan: (tokens.append(plan.num_tokens), execute(plan))[1]
        )
        params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": list(range(20, 61))}, params, use_tqdm=False)
        # The prompt, its last token again for three forks, and five more tokens each.
        assert sum(tokens) == 41 + 3 + 4 * 5
        assert len({tuple(o.token_ids) for o in output.outputs}) == 4
        assert [o.index for o in output.outputs] == [0, 1, 2, 3]
        assert used_blocks(llm) == 0

    def test_n_greedy_agrees_with_one(self, llm):
        one, four = llm.generate(
            [{"prompt_token_ids": [40] * 9}] * 2, [GREEDY, GREEDY.replace(n=4)], use_tqdm=False
        )
        assert [o.token_ids for o in four.outputs] == [one.outputs[0].token_ids] * 4

    def test_max_model_len_ends_a_sequence(self, llm):
        (output,) = llm.generate(
            {"prompt_token_ids": [40] * 120}, GREEDY.replace(max_tokens=None), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].finish_reason == "length"

    def test_stop_token_ids(self, llm):
        (free,) = llm.generate("abc", GREEDY, use_tqdm=False)
        ids = free.outputs[0].token_ids
        stop = ids[4]
        at = ids.index(stop)
        (output,) = llm.generate("abc", GREEDY.replace(stop_token_ids=[stop]), use_tqdm=False)
        assert output.outputs[0].token_ids == ids[: at + 1]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        assert len(output.outputs[0].text) <= at
        (output,) = llm.generate(
            "abc", GREEDY.replace(stop_token_ids=[stop], min_tokens=at + 3), use_tqdm=False
        )
        assert (
            len(output.outputs[0].token_ids) >= at + 3
            and stop not in output.outputs[0].token_ids[: at + 3]
        )

    def test_stop_text(self, llm):
        (free,) = llm.generate("xyz", GREEDY.replace(max_tokens=40), use_tqdm=False)
        text = free.outputs[0].text
        stop = text[len(text) // 2 : len(text) // 2 + 2]
        at = text.index(stop)
        (output,) = llm.generate(
            "xyz", GREEDY.replace(max_tokens=40, stop=[stop, "never there"]), use_tqdm=False
        )
        assert output.outputs[0].text == text[:at]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        (output,) = llm.generate(
            "xyz",
            GREEDY.replace(max_tokens=40, stop=stop, include_stop_str_in_output=True),
            use_tqdm=False,
        )
        assert output.outputs[0].text == text[: at + len(stop)]
        assert used_blocks(llm) == 0

    def test_streamed_text_only_grows_and_shows_no_stop_text(self, llm):
        (free,) = llm.generate("xyz", GREEDY.replace(max_tokens=40), use_tqdm=False)
        text = free.outputs[0].text
        stop = text[10:14]
        engine = llm.engine
        seen = [""]
        engine.add_request("s", "xyz", GREEDY.replace(max_tokens=40, stop=stop))
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.outputs[0].text.startswith(seen[-1])
                seen.append(output.outputs[0].text)
        assert seen[-1] == text[: text.index(stop)]

    def test_stop_texts_wait_for_min_tokens(self, llm):
        (free,) = llm.generate("xyz", GREEDY.replace(max_tokens=40), use_tqdm=False)
        stop = free.outputs[0].text[0]
        (output,) = llm.generate(
            "xyz", GREEDY.replace(max_tokens=40, min_tokens=10, stop=stop), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) > 10

    def test_an_output_is_the_callers_own(self, llm):
        llm.engine.add_request("own", "abc", GREEDY.replace(max_tokens=5))
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                output.prompt_token_ids += [1, 2, 3]
                output.outputs[0].token_ids += [1, 2, 3]
        assert len(output.outputs[0].token_ids) == 5 + 3

    def test_priority_for_each_prompt(self, folder):
        order = []
        with LLM(folder, **{**SMALL, "max_num_seqs": 1}, scheduling_policy="priority") as llm:
            advance = llm.engine.advance
            llm.engine.advance = lambda: [(order.append(s.request_id), s)[1] for s in advance()]
            llm.generate(["a", "b", "c"], GREEDY, priority=[2, 0, 1], use_tqdm=False)
            with pytest.raises(RequestError, match="priority has 1 entries for 2 prompts"):
                llm.generate(["a", "b"], GREEDY, priority=[1], use_tqdm=False)
        assert list(dict.fromkeys(order)) == ["llm-1", "llm-2", "llm-0"]

    def test_threads_take_turns(self, llm):
        with ThreadPoolExecutor(4) as pool:
            results = list(
                pool.map(
                    lambda p: llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].token_ids,
                    ["abc"] * 8,
                )
            )
        assert all(r == results[0] for r in results)

    def test_requests_added_by_hand_are_not_swallowed(self, llm):
        llm.engine.add_request("mine", "abc", GREEDY)
        with pytest.raises(
            ToolkitError, match=r"requests that engine\.add_request\(\) added are still running"
        ):
            llm.generate("abc", GREEDY, use_tqdm=False)
        assert [o.request_id for o in _drain(llm.engine)] == ["mine"]

    def test_an_interrupted_step_leaves_nothing_behind(self, llm, monkeypatch):
        runner = llm.engine.client.core.executor.runner
        expected = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        places = ((runner, "execute"), (runner, "_forward"), (runner._sampler, "sample"))
        for thing, method in places:
            calls = count()
            original = getattr(thing, method)

            def interrupted(*args, original=original, calls=calls):
                if next(calls) == 2:
                    raise KeyboardInterrupt
                return original(*args)

            monkeypatch.setattr(thing, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["abc", "de"], GREEDY, use_tqdm=False)
            monkeypatch.undo()
            assert used_blocks(llm) == 0
            assert llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected

    def test_an_interrupted_loop_goes_on(self, llm, monkeypatch):
        """With requests added by hand the step is taken again, and the answers are the same."""
        runner = llm.engine.client.core.executor.runner
        expected = [
            o.outputs[0].token_ids for o in llm.generate(["abc", "de"], GREEDY, use_tqdm=False)
        ]
        for name, prompt in (("0", "abc"), ("1", "de")):
            llm.engine.add_request(name, prompt, GREEDY)
        llm.engine.step()
        execute = runner.execute
        calls = count()

        def interrupted(plan):
            if next(calls) == 1:
                raise KeyboardInterrupt
            return execute(plan)

        monkeypatch.setattr(runner, "execute", interrupted)
        llm.engine.step()
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
        assert [
            o.outputs[0].token_ids for o in sorted(_drain(llm.engine), key=lambda o: o.request_id)
        ] == expected

    def test_logprobs(self, llm):
        (output,) = llm.generate("abc", GREEDY.replace(logprobs=3), use_tqdm=False)
        completion = output.outputs[0]
        assert len(completion.logprobs) == len(completion.token_ids)
        for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
            assert entries[token].rank == 1 and len(entries) == 3
        total = sum(
            entries[token].logprob
            for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(total)

    def test_logprobs_do_not_change_draws(self, llm):
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
        plain, asked = (
            llm.generate("abc", p, use_tqdm=False)[0] for p in (params, params.replace(logprobs=5))
        )
        assert plain.outputs[0].token_ids == asked.outputs[0].token_ids

    def test_chat_goes_through_the_template(self, llm):
        messages = [{"role": "user", "content": "hi"}]
        (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
        (same,) = llm.generate("[user]hi[assistant]", GREEDY, use_tqdm=False)
        assert (
            output.prompt_token_ids == same.prompt_token_ids
            and output.outputs[0].text == same.outputs[0].text
        )
        assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2

    def test_progress(self, llm):
        seen = []
        llm.generate(["a", "b"], GREEDY, progress=lambda done, total: seen.append((done, total)))
        assert seen == [(1, 2), (2, 2)]

    def test_progress_bar(self, llm, capsys):
        assert len(llm.generate(["a", "b"], GREEDY)) == 2


def _byte_ranks(text: str) -> list[int]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index("Ġ" if c == " " else c) for c in text]


def _short(value: object) -> str:
    return type(value).__name__ if isinstance(value, int | list) else str(value)[:20]


BAD_PROMPTS = {
    "empty text": ("", "empty"),
    "no tokens": ({"prompt_token_ids": []}, "empty"),
    "too long": (
        {"prompt_token_ids": [40] * 128},
        "128 tokens.*maximum context length is 128 tokens",
    ),
    "too long text": ("a" * 5000, "128"),
    "out of vocabulary": ({"prompt_token_ids": [40, 272]}, "272"),
    "negative id": ({"prompt_token_ids": [-1]}, "token id -1 is not in the vocabulary"),
    "huge id": ({"prompt_token_ids": [2**70, 40]}, f"token id {2**70} is not in the vocabulary"),
    "not integers": ({"prompt_token_ids": ["a"]}, "list of integers"),
    "wrong type": (7, "must be a text"),
    "unknown key": ({"promt": "x"}, "promt"),
    "unknown keys": ({"promt": "x", 1: 2}, "no key"),
    "nothing": ({}, "needs the key"),
}
BAD_PARAMS = {
    "temperature": (-1.0, float("nan"), float("inf"), 1e300, 10**400, "hot", "x" * 10**6),
    "top_p": (0.0, 1.5, float("nan")),
    "top_k": (-2, 10**30, 1.5),
    "min_p": (-0.1, 2.0),
    "n": (0, -1, 2.5, 10**5000, True),
    "seed": (-(2**63) - 1, 10**30),
    "max_tokens": (0, -5),
    "min_tokens": (-1, 17),
    "logprobs": (-1,),
    "truncate_prompt_tokens": (0, -2, 1.5),
    "stop": ([""], ["a"] * 1000, "x" * 5000, 5, [""] * 10**6),
    "stop_token_ids": ([-1], ["a"], 5, [True], [1] * 1000),
    "ignore_eos": ("false", 1),
    "detokenize": ("no",),
}


class TestBadRequests:
    @pytest.mark.parametrize("name", BAD_PROMPTS)
    def test_bad_prompt_fails_alone(self, llm, name):
        prompt, message = BAD_PROMPTS[name]
        engine = llm.engine
        engine.add_request("good", "abc", GREEDY)
        with pytest.raises(RequestError, match=message):
            engine.add_request("bad", prompt, GREEDY)
        (expected,) = [o for o in _drain(engine) if o.request_id == "good"]
        assert len(expected.outputs[0].token_ids) == 12
        assert used_blocks(llm) == 0

    @pytest.mark.parametrize(
        ("name", "value"), [(n, v) for n, values in BAD_PARAMS.items() for v in values], ids=_short
    )
    def test_bad_parameter_is_named(self, name, value):
        with pytest.raises(RequestError, match=name) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name
        assert len(str(caught.value)) < 300

    @pytest.mark.parametrize(
        "arguments", [(None,), (5,), ("a", {"max_tokens": 2}), (["a"], [None])], ids=str
    )
    def test_wrong_arguments_of_generate(self, llm, arguments):
        with pytest.raises(RequestError, match=r"prompts must be|give SamplingParams"):
            llm.generate(*arguments, use_tqdm=False)

    def test_limits_of_the_engine(self, llm):
        with pytest.raises(RequestError, match="max_n"):
            llm.engine.add_request("bad", "abc", SamplingParams(n=129))
        with pytest.raises(RequestError, match="max_num_seqs"):
            llm.engine.add_request("bad", "abc", SamplingParams(n=9))
        with pytest.raises(RequestError, match="max_logprobs"):
            llm.engine.add_request("bad", "abc", SamplingParams(logprobs=21))
        with pytest.raises(RequestError, match="blocks, but there are 64"):
            llm.engine.add_request("bad", "abc", SamplingParams(n=8, max_tokens=None))

    def test_min_tokens_beyond_the_context(self, llm):
        with pytest.raises(RequestError, match=r"min_tokens is 100.*room for 8"):
            llm.engine.add_request(
                "bad",
                {"prompt_token_ids": [40] * 120},
                SamplingParams(max_tokens=None, min_tokens=100),
            )

    @pytest.mark.parametrize(("most", "kept"), [(5, 5), (120, 120), (-1, 116), (None, 120)])
    def test_a_prompt_is_cut_on_its_left(self, llm, most, kept):
        prompt = [40 + i % 50 for i in range(120)]
        params = GREEDY.replace(max_tokens=12 if most == -1 else 4, truncate_prompt_tokens=most)
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        (expected,) = llm.generate(
            {"prompt_token_ids": prompt[-kept:]},
            params.replace(truncate_prompt_tokens=None),
            use_tqdm=False,
        )
        assert output.prompt_token_ids == prompt[-kept:]
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids

    @pytest.mark.parametrize("priority", ["high", float("nan"), 2**70, True])
    def test_bad_priority(self, llm, priority):
        with pytest.raises(RequestError, match="priority"):
            llm.engine.add_request("bad", "abc", GREEDY, priority=priority)

    @pytest.mark.parametrize("method", ["decode_stream", "push", "token_texts"])
    def test_a_renderer_that_fails_on_the_output_ends_one_request(self, llm, monkeypatch, method):
        def broken(*args, **kwargs):
            raise KeyError("no such token")

        engine = llm.engine
        begin = llm.engine.renderer.decode_stream

        def decode_stream(prompt_token_ids, **options):
            if len(prompt_token_ids) == 3:
                return begin(prompt_token_ids, **options)
            return SimpleNamespace(push=broken) if method == "push" else broken()

        engine.add_request("good", "abc", GREEDY)
        engine.add_request("bad", "de", GREEDY.replace(logprobs=1))
        name, replacement = (
            ("token_texts", broken) if method == "token_texts" else ("decode_stream", decode_stream)
        )
        monkeypatch.setattr(engine.renderer, name, replacement)
        finished = {o.request_id: o for o in _drain(engine)}
        assert len(finished["good"].outputs[0].token_ids) == 12 and finished["good"].error is None
        assert (
            finished["bad"].outputs[0].finish_reason == "error"
            and "failed in renderer 'hf': " in finished["bad"].error
        )
        assert used_blocks(llm) == 0 and not engine.has_unfinished_requests()

    def test_an_id_in_use_is_refused(self, llm):
        llm.engine.add_request("same", "abc", GREEDY)
        with pytest.raises(RequestError, match="'same' is in use"):
            llm.engine.add_request("same", "abc", GREEDY)
        assert len(_drain(llm.engine)) == 1

    def test_abort(self, llm):
        for i in range(3):
            llm.engine.add_request(str(i), "abc", GREEDY)
        llm.engine.step()
        (aborted,) = llm.engine.abort(["1", "unknown"])
        assert aborted.finished and aborted.outputs[0].finish_reason == "abort"
        assert sorted(o.request_id for o in _drain(llm.engine)) == ["0", "2"]
        assert used_blocks(llm) == 0

    def test_the_last_output_of_an_abort_is_a_delta_for_those_who_stream(self, llm):
        llm.engine.add_request(
            "0",
            "Once upon",
            SamplingParams(max_tokens=8, output_kind=RequestOutputKind.DELTA, ignore_eos=True),
        )
        told = [
            token
            for _ in range(3)
            for output in llm.engine.step()
            for token in output.outputs[0].token_ids
        ]
        (aborted,) = llm.engine.abort("0")
        assert told and aborted.outputs[0].finish_reason == "abort"
        assert len(told) + len(aborted.outputs[0].token_ids) <= 3

    def test_nan_logits_fail_one_request(self, llm, monkeypatch):
        model = llm.engine.client.core.executor.runner.model
        compute = model.compute_logits

        def poisoned(hidden):
            logits = compute(hidden)
            if len(logits) > 1:
                logits[1] = torch.nan
            return logits

        monkeypatch.setattr(model, "compute_logits", poisoned)
        outputs = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
        monkeypatch.undo()
        assert sorted(o.outputs[0].finish_reason for o in outputs).count("error") >= 1
        assert outputs[0].outputs[0].finish_reason == "length"
        assert "not finite" in outputs[1].error
        assert used_blocks(llm) == 0


def _drain(engine: LLMEngine) -> list:
    finished = []
    while engine.has_unfinished_requests():
        finished += [o for o in engine.step() if o.finished]
    return finished


class PickyBackend(SdpaBackend):
    """Runs the first layer only."""

    @classmethod
    def refuses(cls, spec):
        return None if "layers.0" in spec.layer else "it is not the first layer"


class TestBadStart:
    def test_unknown_option(self, folder):
        with pytest.raises(ConfigError, match=r"'blok_size'.*'block_size'"):
            LLM(folder, blok_size=4)

    def test_no_memory_for_one_sequence(self, folder):
        with pytest.raises(CapacityError, match="one sequence of max_model_len 256"):
            LLM(folder, num_kv_blocks=3)
        with pytest.raises(CapacityError, match="kv_cache_memory"):
            LLM(folder, kv_cache_memory="1KiB")

    @pytest.mark.parametrize(
        "options", [{"num_kv_blocks": 10**11}, {"kv_cache_memory": "100TiB"}], ids=str
    )
    def test_more_memory_than_there_is(self, folder, options):
        with pytest.raises(CapacityError, match="MiB free"):
            LLM(folder, **options)

    def test_a_device_that_is_not_there(self, folder):
        for device in ("cuda:99", "warp", "meta"):
            with pytest.raises(
                ConfigError, match=f"device '{device}' cannot be used.*Available: cpu"
            ):
                LLM(folder, device=device)

    def test_plugins_by_name_or_as_objects(self, folder):
        listed = ["decoder", "loaders", "renderer_hf", "sdpa"]
        with LLM(folder, plugins=listed, **SMALL) as llm:
            assert {info.name for info in llm.engine.plugins.infos if info.status == "ok"} == {
                *listed,
                "core",
            }
        with pytest.raises(PluginError, match="'sdpa' is a text"):
            LLM(folder, plugins=["sdpa", object()])

    def test_backends_that_cannot_be_imported_do_not_block_others(self, folder):
        class Broken:
            name = "broken"

            @hookimpl
            def toolkit_register_attention_backends(self, backends):
                backends.add("flashy", "no_such_module:Backend", priority=9)

        LLM(folder, plugins=[Broken()], attention_backend="sdpa", **SMALL).close()
        with pytest.warns(PluginWarning, match="flashy"):
            LLM(folder, plugins=[Broken()], **SMALL).close()
        with pytest.raises(PluginError, match="flashy"):
            LLM(folder, plugins=[Broken()], attention_backend="flashy", **SMALL)

    def test_layers_of_one_model_may_have_different_backends(self, folder, llm):
        class Picky:
            name = "picky"

            @hookimpl
            def toolkit_register_attention_backends(self, backends):
                backends.add("picky", f"{__name__}:PickyBackend", priority=9)

        expected = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        with LLM(folder, plugins=[Picky()], **SMALL) as other:
            assert [group.backend for group in other.engine.client.core.kv_cache.groups] == [
                "picky",
                "sdpa",
            ]
            assert other.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected

    def test_use_after_shutdown(self, folder):
        llm = LLM(folder, **SMALL)
        llm.close()
        with pytest.raises(EngineDeadError, match="shut down"):
            llm.generate("abc", GREEDY, use_tqdm=False)

    def test_a_hub_id_is_had_from_the_hub(self, folder, monkeypatch):
        asked = {}

        def download(model, revision, allow_patterns):
            asked.update(model=model, revision=revision, patterns=allow_patterns)
            return folder

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        with LLM("someone/some-model", revision="main", **SMALL) as llm:
            assert llm.config.checkpoint.path == folder
        assert (asked["model"], asked["revision"]) == ("someone/some-model", "main")
        assert not any(
            fnmatch(name, p)
            for p in asked["patterns"]
            for name in ("pytorch_model.bin", "modeling_x.py")
        )

    def test_a_hub_that_is_out_of_reach(self, monkeypatch):
        def download(*args, **kwargs):
            raise ConnectionError("no route")

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        with pytest.raises(
            CheckpointError,
            match=r"'someone/some-model' is not a local folder, and cannot be downloaded from "
            r"the hub.*no route",
        ):
            LLM("someone/some-model")

    def test_conflicting_options(self, folder):
        with pytest.raises(ConfigError, match="max_num_batched_tokens"):
            LLM(folder, max_num_batched_tokens=4)
        with pytest.raises(ConfigError, match="but the checkpoint has 256 positions"):
            LLM(folder, max_model_len=300)
        with pytest.raises(
            UnsupportedError,
            match=r"tensor_parallel_size 2 .*Supported: mp, external_launcher, ray\.",
        ):
            LLM(folder, tensor_parallel_size=2, executor="in_process")

    def test_no_such_model(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"Did you mean 'tiny'\?"):
            LLM("tinny")
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            LLM(str(tmp_path))
        with pytest.raises(CheckpointError, match="is a file"):
            LLM(__file__)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"architectures": ["LamaForCausalLM"]},
                "LamaForCausalLM.*Did you mean 'LlamaForCausalLM'",
            ),
            ({"architectures": None, "model_type": "lama"}, "names no model class"),
            ({"hidden_size": 128}, r"shape|size"),
            ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
            ({"intermediate_size": -4}, "intermediate_size must be an integer of at least 1"),
            ({"vocab_size": "272"}, "vocab_size must be an integer of at least 1"),
            ({"head_dim": 0}, "head_dim must be an integer of at least 1"),
            ({"rope_parameters": "linear"}, "'rope_parameters' must be of type dict"),
            (
                {"rope_parameters": {"rope_type": "linear", "factor": "x", "rope_theta": 1e4}},
                "'factor' must be of type float",
            ),
        ],
    )
    def test_a_config_that_does_not_fit(self, folder, tmp_path, change, message):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text()) | change
        (copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            LLM(str(copy), **SMALL)

    def test_quantized_weights_are_refused(self, folder, tmp_path):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text()) | {
            "quantization_config": {"quant_method": "own", "bits": 4}
        }
        (copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedError, match=r"quantized weights \('own'\)"):
            LLM(str(copy), **SMALL)

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
    def test_a_broken_file_is_named(self, folder, tmp_path, name):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        data = (copy / name).read_bytes()
        (copy / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            LLM(str(copy), **SMALL)

    def test_a_missing_weight_file(self, folder, tmp_path):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        (copy / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="safetensors"):
            LLM(str(copy), **SMALL)
