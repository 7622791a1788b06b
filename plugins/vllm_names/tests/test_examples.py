"""Scripts as vLLM's users write them, in `examples`: in their imports `toolkit_lm_vllm` stands in
the place of `vllm`, and their models are small ones."""

from __future__ import annotations

import gc
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pytest
import toolkit_lm
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from toolkit_lm_devkit import randomize

FOLDER = Path(__file__).parent / "examples"
IMPORTS = re.compile(r"^(\s*(?:from|import)) vllm\b", re.MULTILINE)
TINY = Path(str(files("toolkit_lm_tiny")))
WORDS = [
    "a",
    "the",
    "cat",
    "on",
    "roof",
    "weather",
    "is",
    "fine",
    "seven",
    "apples",
    "which",
    "animal",
]
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}


def replaced(name: str, folder: Path) -> Path:
    """A script whose imports of vLLM are of ours."""
    text, count = IMPORTS.subn(
        r"\1 toolkit_lm_vllm", (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    )
    assert count, f"{name} imports nothing of vLLM"
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """Runs a script in this process, and returns what it printed."""

    def script(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        capfd.readouterr()
        runpy.run_path(str(replaced(name, tmp_path)), run_name="__main__")
        gc.collect()
        return capfd.readouterr().out

    return script


def write_tokenizer(folder: Path, more: Sequence[str] = ()) -> None:
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS, *more]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A function (number of labels) -> the folder of a random BERT classifier."""

    def make(num_labels: int) -> str:
        folder = tmp_path_factory.mktemp(f"bert{num_labels}")
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(**SHAPE, num_labels=num_labels)
        ).eval()
        randomize(model)
        model.save_pretrained(folder)
        write_tokenizer(folder)
        return str(folder)

    return make


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """The folder of a random reward model of Qwen2's kind."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SHAPE, num_key_value_heads=2, max_position_embeddings=1024)
    weights = {
        f"model.{name}": tensor
        for name, tensor in transformers.Qwen2Model(config).state_dict().items()
    }
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    save_file(
        weights | {f"score.{name}": tensor for name, tensor in head.state_dict().items()},
        folder / "model.safetensors",
    )
    fields = {**config.to_dict(), "architectures": ["Qwen2ForRewardModel"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(fields))
    write_tokenizer(folder)
    return str(folder)


def test_every_script_has_a_test():
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    text = Path(__file__).read_text(encoding="utf-8")
    assert len(scripts) >= 30
    called = set(re.findall(r'"(\w+)"', text))
    assert scripts - called == set()


def test_basic(run):
    texts = re.findall("^Output: (.*)$", run("basic"), re.MULTILINE)
    # They are drawn: one of them may be empty.
    assert len(texts) == 4 and max(map(len, texts)) > 5


def test_generate(run):
    printed = run(
        "generate",
        "--max-model-len",
        "64",
        "--max_tokens",
        "4",
        "--temperature",
        "0",
        "--top-k",
        "3",
    )
    assert printed.count("generated text: ") == 3


def test_chat(run, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    printed = run(
        "chat", "--max-tokens", "12", "--temperature", "0", "--chat-template-path", str(template)
    )
    answers = re.findall("^Generated text: (.+)$", printed, re.MULTILINE)
    assert len(answers) == 21 and "Paris" in answers[0]
    assert len(set(answers[:11])) == 1 and answers[11] != answers[0]


def test_embed(run):
    assert run("embed").count("(size=128)") == 3


def test_classify(run, classifier):
    printed = run("classify", "--model", classifier(3))
    found = [
        json.loads(text)
        for text in re.findall(r"Class Probabilities: (\[.+\]) \(size=3\)", printed)
    ]
    assert [sum(probs) for probs in found] == pytest.approx([1, 1, 1])


def test_score(run, classifier):
    scores = [
        float(text)
        for text in re.findall(
            r"^Score: (\S+)$", run("score", "--model", classifier(1)), re.MULTILINE
        )
    ]
    assert len(scores) == 2 and all(0 < score < 1 for score in scores) and scores[0] != scores[1]


def test_reward(run, reward_model):
    assert re.findall(r"\(size=(\d+)\)", run("reward", "--model", reward_model)) == ["7", "6", "4"]


@pytest.mark.parametrize(
    ("name", "sizes"), [("token_reward", [7, 6, 4]), ("sequence_reward", [1] * 3)]
)
def test_rewards(run, reward_model, classifier, name, sizes):
    model = reward_model if name == "token_reward" else classifier(1)
    printed = run(name, "--model", model, "--max-model-len", "64")
    assert list(map(int, re.findall(r"^Reward: .*\(size=(\d+)\)$", printed, re.MULTILINE))) == sizes


def test_embed_jina_embeddings_v3(run):
    assert run("embed_jina_embeddings_v3").count("(size=128)") == 4


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """The folder of a random Qwen3 with a tied head, and the model."""
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    shape = {**SHAPE, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).eval()
    randomize(model)
    model.save_pretrained(folder)
    write_tokenizer(folder, ["no", "yes"])
    return folder, model


def difference(language_model, text: str, words: list[str]) -> float:
    """A score of transformers: the sigmoid of a word's logit, less that of another."""
    folder, model = language_model
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(words)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1, ids]
    return torch.sigmoid(logits[-1] - (logits[0] if len(words) == 2 else 0)).item()


def test_qwen3_reranker(run, language_model):
    scores = json.loads(
        re.search(r"Relevance scores: (.*)", run("qwen3_reranker", str(language_model[0])))[1]
    )
    texts = [
        f"Does the passage answer the question?\nQuestion: {query}\nPassage: {document}"
        for query, document in (
            ("which animal", "the cat is on the roof"),
            ("is the weather fine", "the weather is fine"),
        )
    ]
    assert scores == pytest.approx(
        [difference(language_model, text, ["no", "yes"]) for text in texts], abs=1e-5
    )


def test_using_template(run, language_model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[1].content }} {{ messages[0].content }}")
    printed = run("using_template", "--model", str(language_model[0]), "--template", str(template))
    texts = [
        f"{document} which animal is on the roof"
        for document in ("the cat is on the roof", "the weather is fine", "seven apples")
    ]
    assert json.loads(printed) == pytest.approx(
        [difference(language_model, text, ["yes"]) for text in texts], abs=1e-5
    )


def test_prefix_caching(run):
    printed = run("prefix_caching")
    assert "Generated answers are the same: True" in printed
    assert int(re.search(r"Cached tokens: (\d+)", printed)[1]) > 100


def test_structured_outputs(run):
    printed = dict(
        line.split(": ", 1) for line in run("structured_outputs").splitlines() if ": " in line
    )
    assert printed["choice"] in ("Good", "Bad")
    assert re.fullmatch(r"\w*(@(\w*(\.com?)?)?)?", printed["regex"])
    # A document may be longer than 50 tokens: then it is a beginning of one.
    assert re.match(r"\s*\{", printed["json"])
    assert printed["grammar"] in [
        f"SELECT {column} FROM {table}"
        for column in ("name", "age")
        for table in ("pets", "people")
    ]


def test_llm_engine_example(run):
    printed = run("llm_engine_example", "--model", "tiny", "--max-num-seqs", "4")
    lines = [line for line in printed.splitlines() if line.startswith("RequestOutput(")]
    assert len(lines) == 3
    assert sum("prompt_logprobs=[None, {" in line for line in lines) == 1
    assert sum(line.count("CompletionOutput(") for line in lines) == 4


def test_async_llm_streaming(run):
    printed = run("async_llm_streaming")
    assert printed.count("Generation complete!") == 3
    assert all(answer for answer in re.findall(r"Response: (.*)", printed))


def test_automatic_prefix_caching(run):
    first, second = map(int, re.findall(r"Cached: (\d+)", run("automatic_prefix_caching")))
    assert first == 0 and second > 50


def test_chat_with_tools(run):
    printed = run("chat_with_tools", "tiny-tools")
    assert '"get_weather"' in printed and "Paris" in printed
    assert re.search("^Answer: .", printed, re.MULTILINE)


def test_embed_matryoshka_fy(run):
    printed = run("embed_matryoshka_fy", "--hf-overrides", '{"is_matryoshka": true}')
    assert printed.count("(size=32)") == 3


def test_multi_vector_retrieval(run):
    printed = run("multi_vector_retrieval")
    assert printed.count("Embedding size: 128") == 2
    assert len(re.findall(r"Multi-vector shape: \(\d+, 128\)", printed)) == 2
    first, second = map(float, re.findall(r"^Score: (\S+)$", printed, re.MULTILINE))
    assert -1 <= first < second <= 1


def test_llm_engine_reset_kv(run):
    printed = run("llm_engine_reset_kv", "--model", "tiny")
    assert "Resetting prefix cache at 10" in printed
    assert printed.count("RequestOutput(") == 1 and "num_generation_tokens=" in printed


def test_metrics(run):
    printed = run("metrics")
    # They are drawn: some end by themselves.
    assert sum(map(int, re.findall(r"vllm:request_success \(counter\) = (\d+)", printed))) == 3
    assert "vllm:kv_cache_usage_perc (gauge) = 0.0" in printed
    assert "vllm:time_to_first_token_seconds (histogram)" in printed and "    +Inf = 3" in printed


@pytest.mark.parametrize("name", ["custom", "custom_req", "custom_req_init"])
def test_logits_processors(run, name):
    found = re.findall(r"^Output: (.*)$", run(name), re.MULTILINE)
    assert found[0] == "[128]" and len(found[1]) > 9 and len(found[3]) > 9
    assert (found[2] == "[67]") == (name != "custom_req_init")


def test_simple_profiling(run, tmp_path):
    run("simple_profiling", str(tmp_path / "traces"))
    [trace] = (tmp_path / "traces").iterdir()
    assert "aten::" in trace.read_text()


@pytest.mark.parametrize("profile", ["prefill", "decode", "none"])
def test_run_one_batch(run, tmp_path, profile):
    traces = tmp_path / "traces"
    printed = run("run_one_batch", "--profile", profile, "--profile-dir", str(traces))
    assert "Generated text: " in printed
    found = [path.read_text() for path in traces.glob("*.json")]
    assert [("aten::" in text) for text in found] == [True] * (profile != "none")


def test_trace_replay(run):
    printed = run("trace_replay")
    known = re.findall(r"token_id=(\d+) logprob=(\S+) rank=(\d+)", printed)
    tokens = json.loads(re.search("Tokens: (.*)", printed)[1])
    assert [int(token) for token, _, _ in known] == tokens + tokens[::-1]
    # Those that the model draws by itself are its likeliest.
    assert {rank for _, _, rank in known[:8]} == {"1"}
    assert max(int(rank) for _, _, rank in known[8:]) > 1


def test_prompt_embed(run):
    printed = run("prompt_embed")
    [single] = re.findall("Single: (.*)", printed)
    embeds, tokens = (re.findall(f"{name}: (.*)", printed) for name in ("Embeddings", "Tokens"))
    assert len(single) > 2 and len(embeds) == len(tokens) == 3


def test_pause_resume(run):
    printed = run("pause_resume")
    assert "Tokens: 30" in printed and "Paused: False" not in printed


def test_reproducibility(run):
    assert run("reproducibility").count("Same: True") == 4


def test_spec_decode(run):
    printed = run("spec_decode", "--num-prompts", "2", "--random-input-len", "64")
    assert int(re.search(r"total_num_output_tokens: (\d+)", printed)[1]) > 0
    assert re.search(r"num_draft_tokens: \d+", printed)
    assert "acceptance at token 1: " in printed


def test_beam_search(run):
    assert run("beam_search").count("Generated text: ") == 6


def test_lora(run):
    """Each adapter is one of `tiny`; the model alone answers otherwise."""
    outputs = re.findall(
        r"^Output: (.*)$",
        run("lora_with_quantization_inference", str(TINY / "adapter_pirate")),
        re.MULTILINE,
    )
    assert len(outputs) == 6
    for plain, first, second in (outputs[:3], outputs[3:]):
        assert first == second != plain


def test_multilora_inference(run):
    printed = run("multilora_inference", str(TINY / "adapter_pirate"))
    answers = dict(re.findall(r"^(\d): (.*)$", printed, re.MULTILINE))
    assert sorted(answers) == ["0", "1", "2", "3"] and answers["2"] == answers["3"]


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    """The folder of a random BART."""
    folder = tmp_path_factory.mktemp("bart")
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=32,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
        )
    ).eval()
    randomize(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def test_encoder_decoder(run, bart):
    printed = run("encoder_decoder", bart)
    assert re.findall(r"^Output (\d): ", printed, re.MULTILINE) == ["1", "2", "3", "4"]
    assert "Encoder prompt: 'the weather is fine'" in printed


def test_ner(run, tmp_path):
    torch.manual_seed(0)
    model = transformers.BertForTokenClassification(
        transformers.BertConfig(**SHAPE, num_labels=3)
    ).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    printed = run("ner", "--model", str(tmp_path))
    found = dict(re.findall(r"^(\w+) +-> (LABEL_\d)$", printed, re.MULTILINE))
    assert {*found} == {"the", "cat", "on", "roof", "seven", "apples"}
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path)(
        "seven apples", return_tensors="pt"
    )
    with torch.no_grad():
        labels = model(**inputs).logits[0].argmax(-1).tolist()
    assert [found["seven"], found["apples"]] == [f"LABEL_{label}" for label in labels[1:3]]


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """The cache of vLLM's assets, with two pictures of our own."""
    from PIL import Image

    folder = tmp_path / "vllm_public_assets"
    folder.mkdir()
    for name, color in (("stop_sign", "red"), ("hato", "blue")):
        Image.new("RGB", (64, 64), color).save(folder / f"{name}.jpg")
    monkeypatch.setenv("VLLM_ASSETS_CACHE", str(tmp_path))


def test_vision_language(run, assets):
    first, second = re.findall(r"Generated: (.+)", run("vision_language"))
    assert first == second


def test_vision_language_multi_image(run, assets):
    assert re.search(r"Generated: '.+'", run("vision_language_multi_image"))


@pytest.mark.nightly
def test_data_parallel(tmp_path):
    """Two processes, each with an engine of its own."""
    found = subprocess.run(
        [sys.executable, str(replaced("data_parallel", tmp_path)), "-dp", "2"],
        capture_output=True,
        text=True,
        check=True,
    )
    for rank in range(2):
        assert f"DP rank {rank} needs to process 8 prompts" in found.stdout
        assert found.stdout.count(f"DP rank {rank}, Generated text: ") == 2


def test_sharded_state(run, tmp_path):
    """A folder of the ranks' own files answers as the checkpoint that it was saved from."""
    folder = tmp_path / "state"
    printed = run(
        "save_sharded_state", "--model", str(TINY / "checkpoint"), "--output", str(folder)
    )
    assert "model-rank-0-part-0.safetensors" in printed and "sharded_state.json" in printed
    expected = toolkit_lm.LLM("tiny").generate(
        "Once upon a time", toolkit_lm.SamplingParams(temperature=0, max_tokens=16)
    )
    printed = run("load_sharded_state", "--model", str(folder))
    assert f"Generated text: {expected[0].outputs[0].text!r}" in printed


def test_context_extension(run):
    printed = run("context_extension")
    assert "max_model_len: 1024" in printed and "Generated text: " in printed
