"""KV blocks in host memory and on disk, through the whole engine: another engine finds what one has
filled, and the tokens are the same."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ToolkitError
from toolkit_lm_devkit import make_checkpoint, randomize
from toolkit_lm_kv_disk.segments import VERSION, number_of

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
LOUD = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
SMALL: dict[str, Any] = {
    "block_size": 4,
    "max_model_len": 112,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 32,
    "dtype": "float32",
    "num_kv_blocks": 200,
}


def prompts(*lengths: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {"prompt_token_ids": torch.randint(3, 272, (n,), generator=generator).tolist()}
        for n in lengths
    ]


PROMPTS = prompts(70, 66, 60, 71)
WHOLE = [(len(each["prompt_token_ids"]) - 1) // 4 * 4 for each in PROMPTS]
"""Cached tokens of prompts that are cached whole, but for the block with the last token."""


def engine(model: Path, folder: Path | None, own: Any = None, **more: Any) -> LLM:
    given = {"loads": "always"} | (own or {})
    if folder is not None:
        given["dir"] = str(folder)
    option = {"kv_disk": given} if folder is not None or own else {}
    return LLM(str(model), plugin_option=option, **SMALL | more)


def answers(llm: LLM, given: Any = PROMPTS) -> list[Any]:
    """Tokens and log probabilities, bit for bit."""
    outputs = [llm.generate([each], LOUD, use_tqdm=False)[0] for each in given]
    assert not any(output.error for output in outputs)
    texts = [
        [
            (token, sorted((key, value.logprob) for key, value in entry.items()))
            for token, entry in zip(one.token_ids, one.logprobs, strict=True)
        ]
        for output in outputs
        for one in output.outputs
    ]
    return [texts, [output.num_cached_tokens for output in outputs]]


def tier_of(llm: LLM, name: str = "kv_disk") -> Any:
    return llm.engine.client.core.scheduler.tiers.tiers[name]


def segments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.kv") if number_of(path) >= 0)


@pytest.fixture
def llama(make_llama):
    return make_llama("kv_disk", head_dim=32)[0]


@pytest.fixture
def hybrid(tmp_path):
    """A Qwen 3.5 with a recurrent state: the prefix ends at snapshots."""
    sys.path.insert(0, str(ROOT / "contrib_models" / "hybrid" / "tests"))
    families = importlib.import_module("hybrid_families")
    fields = {
        **families.VARIANTS["Qwen3_5ForCausalLM"]["dense"],
        "max_position_embeddings": 4096,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    model = families.make_model("Qwen3_5ForCausalLM", fields).eval()
    randomize(model)
    return make_checkpoint(tmp_path / "hybrid", model)


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {},
    "hybrid": {},
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "overlap": {"overlap": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_cold_is_warm_is_restored_bit_for_bit(request, kind, llama, tmp_path):
    """Without any eviction: blocks are written as soon as they are full."""
    model = llama
    if kind == "window":
        model = request.getfixturevalue("make_windowed")()[0]
    elif kind == "hybrid":
        model = request.getfixturevalue("hybrid")
    more = dict(KINDS[kind])
    if kind in ("tensor", "pipeline"):
        more |= {"plugins": [THREADS], "executor": "threads"}
    with engine(model, tmp_path / "kv", **more) as llm:
        cold, none = answers(llm)
        warm, cached = answers(llm)
        assert kind == "hybrid" or tier_of(llm).counts.loads == {}
    with engine(model, tmp_path / "kv", **more) as llm:
        restored, found = answers(llm)
        assert tier_of(llm).counts.loads == {"loaded": 4}
        assert llm.engine.client.core.scheduler.blocks.num_used == 0
    assert none == [0] * 4
    assert all(cached)
    assert found == cached
    assert warm == restored
    assert [[token for token, _ in each] for each in cold] == [
        [token for token, _ in each] for each in restored
    ]


def test_prefixes_with_pictures(tmp_path):
    """Pictures are told apart by their contents."""
    sys.path.insert(0, str(ROOT / "contrib_models" / "vision" / "tests"))
    checkpoints = importlib.import_module("vision_checkpoints")
    subject = checkpoints.make_subject(tmp_path / "llava", "llava")
    text = f"see {subject.mark} there, and tell me all of what you see"
    given = [
        {"prompt": text, "multi_modal_data": {"image": [picture]}}
        for picture in checkpoints.drawings(3)
    ]
    more = {"max_model_len": 192, "max_num_batched_tokens": 192}
    with engine(tmp_path / "llava", None, **more) as llm:
        expected, none = answers(llm, given)
    with engine(tmp_path / "llava", tmp_path / "kv", **more) as llm:
        answers(llm, given[:2])
        warm, cached = answers(llm, given[:2])
    with engine(tmp_path / "llava", tmp_path / "kv", **more) as llm:
        restored, found = answers(llm, given)
        assert tier_of(llm).counts.loads["loaded"] >= 2
    # The third picture shares what stands before it.
    assert (found[:2], none[0]) == (cached, 0)
    assert found[2] < min(cached)
    assert restored[:2] == warm
    for each, other in zip(restored, expected, strict=True):
        assert [token for token, _ in each] == [token for token, _ in other]


def test_an_engine_in_a_process_of_its_own(llama, tmp_path):
    for expected in ([0] * 4, WHOLE):
        with engine(llama, tmp_path / "kv", engine_process=True) as llm:
            assert answers(llm)[1] == expected


def test_what_is_cold_is_bit_for_bit_what_chunks_of_the_cache_are(llama, tmp_path):
    """With whole chunks, a cold run computes the last one as a restored run does."""
    more = {"block_size": 16, "attention_backend": "cpu", "max_num_batched_tokens": 16}
    given = prompts(65, 49)
    with engine(llama, tmp_path / "kv", **more) as llm:
        cold, _ = answers(llm, given)
    with engine(llama, tmp_path / "kv", **more) as llm:
        restored, cached = answers(llm, given)
    assert cached == [64, 48]
    assert restored == cold


SCRIPT = """
import json, os, signal, sys
from toolkit_lm import LLM, SamplingParams
model, folder, prompts, dies = json.loads(sys.argv[1])
options = json.loads(sys.argv[2])
llm = LLM(model, plugin_option={"kv_disk": {"dir": folder, "loads": "always"}}, **options)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
for prompt in prompts:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids), output.num_cached_tokens]), flush=True)
if dies:
    os.kill(os.getpid(), signal.SIGKILL)
llm.close()
"""


def in_process(model: Path, folder: Path, *, dies: bool = False, wait: float | None = None) -> Any:
    """Tokens and cached tokens of each prompt, from a process of its own, with another seed of
    hashes. `wait`: seconds after which it is killed."""
    words = [json.dumps([str(model), str(folder), PROMPTS, dies]), json.dumps(SMALL)]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONHASHSEED": str(random.randrange(1, 1000))},
        text=True,
    )
    if wait is not None:
        # From its first answer on, it is writing.
        first = process.stdout.readline()
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        # `communicate` would not see what is in the buffer of `readline`.
        rest = process.stdout.read()
        process.communicate()
        return [json.loads(line) for line in (first + rest).splitlines() if line.endswith("]")]
    out, error = process.communicate(timeout=120)
    assert process.returncode == (-signal.SIGKILL if dies else 0), error
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("dies", [False, True], ids=["stopped", "killed"])
def test_a_restarted_process_finds_its_prefix(llama, tmp_path, dies):
    first = in_process(llama, tmp_path / "kv", dies=dies)
    again = in_process(llama, tmp_path / "kv")
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
    assert [cached for _, cached in first] == [0] * 4
    found = [cached for _, cached in again]
    # A killed process may not have written its last request's blocks.
    assert found[:2] == WHOLE[:2] if dies else found == WHOLE


def test_a_process_that_is_killed_while_it_writes(llama, tmp_path):
    """The folder lives on through all of it."""
    with engine(llama, None) as llm:
        expected = [[token for token, _ in each] for each in answers(llm)[0]]
    rng = random.Random(3)
    for _ in range(6):
        for number, (tokens, _) in enumerate(
            in_process(llama, tmp_path / "kv", wait=rng.uniform(0, 0.06))
        ):
            assert tokens == expected[number]
    with engine(llama, tmp_path / "kv") as llm:
        found, _ = answers(llm)
    assert [[token for token, _ in each] for each in found] == expected


def damage(path: Path, rng: random.Random) -> None:
    """Changes a file as a fault of the disk, of another program, or of a crash would."""
    data = bytearray(path.read_bytes())
    how = rng.randrange(6)
    if how == 0:
        data = data[: rng.randrange(len(data))]
    elif how == 1:
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == 2:
        start = rng.randrange(len(data))
        data[start : start + 512] = bytes(len(data[start : start + 512]))
    elif how == 3:
        data[8:12] = (VERSION + 1).to_bytes(4, "little")
    elif how == 4:
        data = bytearray(rng.randbytes(len(data)))
    else:
        half = len(data) // 2
        data = data[half:] + data[:half]
    path.write_bytes(data)


def test_damaged_files_are_misses(llama, tmp_path, caplog):
    """Never a wrong token, and the engine starts."""
    with engine(llama, tmp_path / "kv") as llm:
        expected, _ = answers(llm)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "kv", kept)
    with engine(llama, kept) as llm:
        # A restored run, whose last chunk is other than a cold one's.
        restored, _ = answers(llm)
    rng = random.Random(1)
    for _ in range(8):
        shutil.rmtree(tmp_path / "kv")
        shutil.copytree(kept, tmp_path / "kv")
        for path in segments(tmp_path / "kv"):
            damage(path, rng)
        with engine(llama, tmp_path / "kv") as llm:
            found, _ = answers(llm)
            for number, each in enumerate(found):
                assert [token for token, _ in each] == [t for t, _ in expected[number]]
    assert restored
    assert "is computed again" in caplog.text


def test_other_weights_and_options_are_told_apart(make_llama, tmp_path):
    """The same folder, the same name and the same sizes of files."""
    model = tmp_path / "model"
    shutil.copytree(make_llama("kv_disk", head_dim=32)[0], model)
    other = make_llama("kv_disk_other", head_dim=32, initializer_range=0.4)[0]
    with engine(model, tmp_path / "kv") as llm:
        assert answers(llm)[1] == [0] * 4
    for more in ({"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}, {"block_size": 8}):
        with engine(model, tmp_path / "kv", **more) as llm:
            assert answers(llm, PROMPTS[:1])[1] == [0], more
    for name in ("model.safetensors",):
        # In place, so that the path stays.
        (model / name).write_bytes((other / name).read_bytes())
    with engine(model, tmp_path / "kv") as llm, engine(other, None) as plain:
        assert answers(llm) == answers(plain)


def test_a_second_engine_only_reads(llama, tmp_path, caplog):
    with engine(llama, tmp_path / "kv") as first:
        answers(first, PROMPTS[:2])
        with engine(llama, tmp_path / "kv") as second:
            assert "this one only reads" in caplog.text
            assert answers(second)[1][:2] == WHOLE[:2]
            assert tier_of(second).counts.stored_blocks == 0
    with engine(llama, tmp_path / "kv") as third:
        assert answers(third)[1] == [*WHOLE[:2], 0, 0]


def test_a_folder_keeps_to_its_budget(llama, tmp_path):
    """Old blocks make room for new ones."""
    given = prompts(*[60 + number for number in range(30)])
    own = {"disk": "300kB"}
    for _ in range(3):
        with engine(llama, tmp_path / "kv", own) as llm:
            first, _ = answers(llm, given)
        size = sum(path.stat().st_size for path in segments(tmp_path / "kv"))
        assert 100_000 < size <= 300_000
    with engine(llama, tmp_path / "kv", own) as llm:
        last, cached = answers(llm, given[-1:])
    assert cached[0] > 0
    assert [token for token, _ in last[0]] == [token for token, _ in first[-1]]


def test_what_the_device_gave_up_comes_from_the_host(llama, tmp_path):
    with engine(llama, None, {"host": "4MiB"}, num_kv_blocks=30) as llm:
        first = answers(llm)
        again = answers(llm)
        assert tier_of(llm, "kv_host").counts.loads == {"loaded": 4}
    assert again[1] == WHOLE
    assert [[t for t, _ in each] for each in again[0]] == [
        [t for t, _ in each] for each in first[0]
    ]


def test_host_before_disk(llama, tmp_path):
    with engine(llama, tmp_path / "kv", {"host": "4MiB"}, num_kv_blocks=30) as llm:
        answers(llm)
        assert answers(llm)[1] == WHOLE
        assert tier_of(llm, "kv_host").counts.loads == {"loaded": 4}
        assert tier_of(llm, "kv_disk").counts.loads == {}
    with engine(llama, tmp_path / "kv", {"host": "4MiB"}, num_kv_blocks=30) as llm:
        assert answers(llm)[1] == WHOLE
        assert tier_of(llm, "kv_disk").counts.loads == {"loaded": 4}


@pytest.mark.parametrize("aborts", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_aborts_during_loads_leave_no_block(llama, tmp_path, aborts):
    from concurrent.futures import Future

    with engine(llama, tmp_path / "kv") as llm:
        answers(llm)
    with engine(llama, tmp_path / "kv") as llm:
        core = llm.engine.client.core
        store = core.executor.runner._transfers._stores["kv_disk"]
        store.load = lambda group, key: Future()
        store.fill = lambda blocks: 0
        for number in range(aborts):
            llm.engine.add_request(f"{number}", PROMPTS[number % 4], LOUD)
            while not core.scheduler.roster.loading:
                llm.engine.step()
            llm.engine.abort([f"{number}"])
        del store.load
        assert core.scheduler.blocks.num_used == 0
        assert tier_of(llm).counts.loads == {"cancelled": aborts}
        assert answers(llm)[1] == WHOLE


def test_a_slow_disk_is_left_alone(llama, tmp_path):
    """What is measured decides, and it is asked again later."""
    with engine(llama, tmp_path / "kv") as llm:
        answers(llm)
    with engine(llama, tmp_path / "kv", {"loads": "measured"}) as llm:
        tier = tier_of(llm)
        answers(llm, prompts(9))
        tier.ended(1, 1000.0, "late")
        # The device has what it has just computed.
        assert answers(llm, PROMPTS[:1])[1] == [8]
        assert tier.counts.loads["slower"] >= 1
        tier._measured._delay = 0.0
        tier._measured._rate = 1e12
        assert answers(llm, PROMPTS[1:2])[1] == WHOLE[1:2]


def key_file(folder: Path, number: int) -> str:
    path = folder / f"key{number}"
    path.write_bytes(random.Random(number).randbytes(32))
    path.chmod(0o600)
    return str(path)


def test_an_encrypted_folder_is_of_its_key(llama, tmp_path):
    """Another key finds nothing, and neither does none. No digest and no block is in the files."""
    own = {"key_file": key_file(tmp_path, 1)}
    with engine(llama, tmp_path / "kv", own) as llm:
        cold = answers(llm)
        digests = list(llm.engine.client.core.scheduler.blocks.pools[0]._blocks)
        store = llm.engine.client.core.executor.runner._transfers._stores["kv_disk"]
        [(group, digest), *_] = digests
        block = bytes(store.load(group, digest).result(10))
    held = b"".join(path.read_bytes() for path in segments(tmp_path / "kv"))
    assert len(held) > len(block) > 64
    assert block[:32] not in held
    assert not any(digest in held for _, digest in digests)
    for other in ({"key_file": key_file(tmp_path, 2)}, {}):
        with engine(llama, tmp_path / "kv", other) as llm:
            assert answers(llm, PROMPTS[:1])[1] == [0]
    with engine(llama, tmp_path / "kv", own) as llm:
        again = answers(llm)
        assert tier_of(llm).counts.loads == {"loaded": 4}
    assert again[1] == WHOLE
    assert [[t for t, _ in each] for each in again[0]] == [[t for t, _ in each] for each in cold[0]]


def test_selective_writing_waits_for_the_second_request(llama, tmp_path):
    with engine(llama, tmp_path / "kv", {"write": "selective"}) as llm:
        answers(llm, PROMPTS[:2])
        assert tier_of(llm).counts.stored_blocks == 0
        assert tier_of(llm).counts.withheld_blocks > 0
        assert answers(llm, PROMPTS[:1])[1] == WHOLE[:1]
    with engine(llama, tmp_path / "kv") as llm:
        assert answers(llm, PROMPTS[:2])[1] == [WHOLE[0], 0]


def test_a_reset_lasts(llama, tmp_path):
    with engine(llama, tmp_path / "kv") as llm:
        answers(llm)
        llm.reset_prefix_cache()
    with engine(llama, tmp_path / "kv") as llm:
        assert answers(llm)[1] == [0] * 4


def test_files_are_their_owner_s_alone(llama, tmp_path):
    with engine(llama, tmp_path / "kv") as llm:
        answers(llm)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    ("own", "more", "text"),
    [
        ({"dir": "x", "disk": "much"}, {}, "disk: 'much' is not an amount"),
        ({"dir": "x", "disk": "50%"}, {}, "disk: '50%' is a share"),
        ({"host": "0.5"}, {}, "host: '0.5' is a share"),
        ({"disk": "1GiB"}, {}, "dir names none"),
        ({"dir": "x"}, {"enable_prefix_caching": False}, "enable_prefix_caching is False"),
    ],
)
def test_options_that_cannot_be_met_are_refused(llama, own, more, text):
    with pytest.raises(ToolkitError, match=text):
        LLM(str(llama), plugin_option={"kv_disk": own}, **SMALL | more)


@pytest.mark.parametrize("place", ["file", "file/inside"])
def test_a_folder_that_cannot_be_used_stops_nobody(llama, tmp_path, caplog, place):
    (tmp_path / "file").write_text("")
    with engine(llama, tmp_path / "no") as llm:
        expected = answers(llm)[0]
    with engine(llama, tmp_path / place) as llm:
        assert answers(llm)[0] == expected
    told = [record for record in caplog.records if "no KV blocks are kept" in record.message]
    assert len(told) == 1


def test_models_with_an_encoder_keep_nothing(tmp_path, caplog):
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=272,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
    )
    folder = make_checkpoint(tmp_path / "bart", BartForConditionalGeneration(config).eval())
    prompt = {
        "encoder_prompt": {"prompt_token_ids": [5, 6, 7]},
        "decoder_prompt": {"prompt_token_ids": [2, *range(10, 20)]},
    }
    other = {**prompt, "encoder_prompt": {"prompt_token_ids": [5, 6, 8]}}
    with engine(folder, tmp_path / "kv", max_model_len=32) as llm:
        # On the device, the decoder's prefix is of its encoder's input.
        assert answers(llm, [prompt])[1] == [0]
        assert answers(llm, [prompt])[1] == [8]
        assert answers(llm, [other])[1] == [0]
        assert llm.engine.client.core.scheduler.tiers.tiers == {}
    assert "depend on the encoder's whole input" in caplog.text
    assert not segments(tmp_path / "kv")
