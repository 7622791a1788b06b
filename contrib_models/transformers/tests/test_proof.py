"""The fallback shows at the start that the engine computes what the model does by itself; what
never comes back is refused."""

import json
import re
import subprocess
import sys
import threading

import pytest
import toolkit_lm_transformers.exact as exactness
import toolkit_lm_transformers.examine as examination
import toolkit_lm_transformers.model as fallback
import torch
from fallback_harness import check_parity, generate, reference_logprobs
from tiny_models import save
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ToolkitError, UnsupportedError
from toolkit_lm_devkit import assert_bf16_error
from toolkit_lm_transformers.deadline import deadline
from toolkit_lm_transformers.exact import Exact

NUMBERS = re.compile(
    r"ForCausalLM as the model by itself does: .* of \d+ made-up tokens differ by (\S+), and "
    r"(\S+) is what \w+ explains"
)


@pytest.fixture
def misplaced(monkeypatch):
    """Positions begin one further than in the model by itself."""
    true = examination.first_position
    monkeypatch.setattr(examination, "first_position", lambda model: true(model) + 1)


def start(folder, *, num_kv_blocks=64, **options):
    size = {"num_kv_blocks": num_kv_blocks, "max_num_seqs": 4}
    return LLM(model=str(folder), model_impl="transformers", renderer="tokens", **size, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 4, "block_size": 2}, {"runner": "pooling", "convert": "embed"}],
)
def test_a_model_that_differs_is_refused_with_the_numbers(misplaced, tmp_path, dtype, options):
    save("gpt_bigcode", tmp_path, dtype=getattr(torch, dtype))
    with pytest.raises(UnsupportedError, match=NUMBERS) as caught:
        start(tmp_path, dtype=dtype, **options)
    differs, allowed = map(float, NUMBERS.search(str(caught.value)).groups())
    assert differs > 5 * allowed
    assert "verify_fallback=False" in str(caught.value)
    start(tmp_path, dtype=dtype, verify_fallback=False, **options)


def test_a_wrong_first_position_of_roberta_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(examination, "first_position", lambda model: 0)
    save("roberta", tmp_path)
    with pytest.raises(UnsupportedError, match=NUMBERS):
        start(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_blocks": 3, "max_model_len": 40}, {"max_model_len": 5}, {"runner": "pooling"}],
)
def test_a_model_that_agrees_is_started(tmp_path, dtype, options):
    save("gpt_bigcode" if "runner" in options else "roberta", tmp_path, dtype=getattr(torch, dtype))
    llm = start(tmp_path, dtype=dtype, **options)
    assert llm.llm_engine.config.max_model_len >= options.get("max_model_len", 5)


def test_positions_that_begin_later_are_reserved(tmp_path):
    model = save("roberta", tmp_path)
    llm = start(tmp_path)
    assert (
        llm.llm_engine.config.max_model_len
        == model.config.max_position_embeddings - model.config.pad_token_id - 1
    )


def test_bf16_with_later_positions_is_as_exact_as_transformers(tmp_path):
    model = save("camembert", tmp_path, dtype=torch.bfloat16)
    ours = generate(tmp_path, model_impl="transformers", num_kv_blocks=200, preempts=False)
    theirs = reference_logprobs(model, ours)
    exact = reference_logprobs(model.float(), ours)
    assert_bf16_error(ours.logprobs, theirs, exact)


def test_exact_is_the_same_as_a_copy_in_float32(tmp_path):
    model = save("mixtral", tmp_path, dtype=torch.bfloat16)
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode(), Exact():
        found = model(ids).logits
    assert found.dtype == torch.float32
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        torch.testing.assert_close(found, model.float()(ids).logits, rtol=0, atol=1e-5)


def test_float32_makes_no_copy_of_all_experts(tmp_path, monkeypatch):
    config = save("mixtral", tmp_path, dtype=torch.bfloat16).config
    raised = []
    true = exactness._raised

    def noted(value):
        found = true(value)
        if isinstance(value, torch.Tensor) and found is not value:
            raised.append(tuple(value.shape))
        return found

    monkeypatch.setattr(exactness, "_raised", noted)
    llm = start(tmp_path, dtype="bfloat16")
    assert raised
    assert not [
        shape for shape in raised if len(shape) == 3 and shape[0] == config.num_local_experts
    ]
    assert llm.llm_engine.client.core.executor.runner.model._mixes_by != "eager"


@pytest.mark.parametrize("exact", [False, True])
def test_where_memory_is_short_the_proof_is_left_out_and_it_is_told(
    tmp_path, monkeypatch, caplog, exact
):
    true = fallback.TransformersForCausalLM.plain

    def plain(self, token_ids, **options):
        if options == ({"exact": True} if exact else {}):
            raise torch.OutOfMemoryError("the device is full")
        return true(self, token_ids, **options)

    monkeypatch.setattr(fallback.TransformersForCausalLM, "plain", plain)
    save("llama", tmp_path)
    start(tmp_path, dtype="bfloat16")
    [message] = [text for text in caplog.messages if "by itself" in text]
    assert message == (
        "it is not shown that the engine computes LlamaForCausalLM as the model by itself "
        "does: the device is full"
    )


def test_it_is_shown_once_and_not_again_while_serving(tmp_path, monkeypatch):
    """A request that fails alone has the runner warmed up again: others go on, whatever the model
    by itself would do now."""
    save("llama", tmp_path)
    llm = start(tmp_path)

    def plain(self, token_ids, **options):
        raise UnsupportedError("it is shown again")

    monkeypatch.setattr(fallback.TransformersForCausalLM, "plain", plain)
    model = llm.llm_engine.client.core.executor.runner.model
    true = model.forward

    def forward(input_ids, *args, **kwargs):
        if 7 in input_ids.tolist():
            raise RuntimeError("poisoned")
        return true(input_ids, *args, **kwargs)

    model.forward = forward
    greedy = SamplingParams(max_tokens=2, temperature=0.0)
    found = llm.generate([{"prompt_token_ids": [3, 7]}, {"prompt_token_ids": [3, 4]}], greedy)
    assert [one.outputs[0].finish_reason for one in found] == ["error", "length"]


HANGS = {
    "make": ("__init__(self, config)", "super().__init__(config)", "make the model"),
    "shapes": ("forward(self, *args, **kwargs)", "pass", "compute logits on shapes alone"),
    "plain": ("forward(self, input_ids=None, **kwargs)", "", "compute 10 tokens"),
}


@pytest.mark.parametrize("where", HANGS)
def test_what_hangs_is_refused_in_bounded_time(where, tmp_path, monkeypatch):
    head, first, what = HANGS[where]
    ends = (
        "        if input_ids is None: return super().forward(input_ids=input_ids, **kwargs)\n"
        if where == "plain"
        else ""
    )
    save("llama", tmp_path)
    (tmp_path / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n    def "
        f"{head}:\n"
        f"        {first or 'pass'}\n{ends}        while True:\n            try:\n               "
        " pass\n            except Exception:\n"
        "                pass\n"
    )
    file = tmp_path / "config.json"
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    file.write_text(
        json.dumps(
            json.loads(file.read_text())
            | {"model_type": "mine", "architectures": ["Mine"], "auto_map": auto_map}
        )
    )
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in (examination, fallback):
        # Whatever else is computed has all the time it needs.
        monkeypatch.setattr(
            module,
            "deadline",
            lambda seconds, doing: deadline(1.0 if doing == what else seconds, doing),
        )
    with pytest.raises(ToolkitError, match=f"transformers does not {what} within 1 s"):
        start(tmp_path, trust_remote_code=True)


def test_a_deadline_ends_this_thread_alone_and_only_in_time():
    others = []
    other = threading.Thread(target=lambda: others.append(sum(range(20_000_000))))
    other.start()
    with (
        pytest.raises(UnsupportedError, match=r"transformers does not turn within 0\.2 s"),
        deadline(0.2, "turn"),
    ):
        while True:
            pass
    other.join()
    assert others == [sum(range(20_000_000))]


def test_a_deadline_that_is_met_strikes_nobody(monkeypatch):
    timers = []

    class Timer(threading.Timer):
        def __init__(self, *given):
            super().__init__(*given)
            timers.append(self)

    monkeypatch.setattr(threading, "Timer", Timer)
    with deadline(600.0, "be quick"):
        pass
    [timer] = timers
    assert timer.finished.is_set()
    # Nor does one whose time was up just as the work was done.
    timer.function()
    timer.join()


AFTERWARDS = """
import sys
from contextlib import suppress
from toolkit_lm.errors import UnsupportedError
from toolkit_lm_transformers.deadline import deadline

def overdue():
    while True:
        pass

def swallowed():
    with suppress(BaseException):
        overdue()

def work():
    pass

with suppress(UnsupportedError), deadline(0.2, "end"):
    {body}()
calls = []
sys.setprofile(lambda frame, event, argument: calls.append(event))
work()
sys.setprofile(None)
print("called", calls.count("call"))
"""


@pytest.mark.parametrize("body", ["overdue", "swallowed"])
def test_after_a_deadline_profilers_and_debuggers_work(body):
    """CPython 3.11 does not call a function under a profiler as long as it is to raise something in
    some thread."""
    done = subprocess.run(
        [sys.executable, "-c", AFTERWARDS.format(body=body)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "called 1\n"), done.stderr


def test_weights_that_are_drawn_until_they_are_within_bounds_are_made(tmp_path):
    check_parity(
        save("modernbert-decoder", tmp_path),
        generate(tmp_path, model_impl="transformers", num_kv_blocks=200, preempts=False),
    )
