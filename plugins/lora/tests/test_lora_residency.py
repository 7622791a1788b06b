"""More adapters than a step may have, and adapters that come and go while others are served."""

from __future__ import annotations

import asyncio
import gc
import shutil
from pathlib import Path

import pytest
from lora_adapters import FORMS, PROMPT, Adapters
from lora_served import figures, post, served, tokens
from toolkit_lm import SamplingParams
from toolkit_lm.events import RequestEvent, StepEvent
from toolkit_lm.plugin import hookimpl

NUM_TOKENS = 24


class Steps:
    """Counts the steps from a request's arrival to its first token."""

    name = "steps"

    def __init__(self):
        self.num_steps = 0
        self.begun = {}
        self.waited = {}

    @hookimpl
    def toolkit_event(self, event):
        self.num_steps += isinstance(event, StepEvent)
        if isinstance(event, RequestEvent) and event.kind == "queued":
            self.begun[event.request_id] = self.num_steps
        if isinstance(event, RequestEvent) and event.kind == "first_token":
            self.waited[event.request_id] = self.num_steps - self.begun[event.request_id]


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    forms = {f"a{number}": FORMS["llama"]["all"] for number in range(6)}
    return Adapters(tmp_path_factory.mktemp("six"), "llama", forms)


@pytest.mark.parametrize(
    "options", [{}, {"overlap": True, "max_num_batched_tokens": 40, "max_num_seqs": 24}], ids=str
)
def test_adapters_take_turns(six, options):
    """Six adapters on two slots: no request waits for the end of others, not even one beside a
    flood of requests for another adapter. Each has its adapter's tokens."""
    names = [*["a0"] * 12, *(f"a{number}" for number in range(1, 6)), None]
    steps = Steps()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with six.llm({"max_adapters": 2}, plugins=[steps], **options) as llm:
        llm.generate(
            [{"prompt_token_ids": PROMPT[:1]}] * 6,
            SamplingParams(max_tokens=1),
            lora_request=[six.request(f"a{number}") for number in range(6)],
            use_tqdm=False,
        )
        steps.waited.clear()
        found = llm.generate(
            [{"prompt_token_ids": PROMPT}] * len(names),
            params,
            lora_request=[six.request(name) for name in names],
            use_tqdm=False,
        )
    for name, output in zip(names, found, strict=True):
        assert list(output.outputs[0].token_ids)[:8] == six.expected[name].tokens, name
    assert len(steps.waited) == len(names)
    chunks = len(names) if options else 1
    assert max(steps.waited.values()) <= 8 + 2 * chunks
    assert steps.num_steps > NUM_TOKENS * 3


def resident_kib() -> int:
    [line] = [
        line
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith("VmRSS")
    ]
    return int(line.split()[1])


async def stream(client, adapters, model, done):
    """Requests one after the other. Returns their number."""
    count = 0
    while not done.is_set():
        fields = {} if count % 2 else {"max_tokens": 24}
        found = await tokens(client, model, **fields)
        assert found[:8] == adapters.expected[None if model == "base" else model].tokens
        count += 1
    return count


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("num_loads", "num_streams"), [(20, 6), pytest.param(200, 32, marks=pytest.mark.nightly)]
)
async def test_hot_loads(two_adapters, folder, num_loads, num_streams):
    """No stream loses a token, and nothing stays of an adapter that was unloaded."""
    for number in range(4):
        shutil.copytree(folder / "rslora", folder / f"hot{number}")
        two_adapters.save(folder / f"hot{number}", seed=7 + number, target_modules=["q_proj"])
    own = {"folder": str(folder), "max_adapters": 2}
    async with served(two_adapters, own) as (client, _):
        done = asyncio.Event()
        models = ["base", "all", "rslora"]
        streams = [
            asyncio.create_task(stream(client, two_adapters, models[number % 3], done))
            for number in range(num_streams)
        ]
        before = 0
        for number in range(num_loads):
            name = f"load{number}"
            path = f"hot{number % 4}"
            await post(client, "/v1/load_lora_adapter", 200, lora_name=name, lora_path=path)
            running = asyncio.create_task(tokens(client, name, max_tokens=4))
            await asyncio.sleep(0)
            if number % 2:
                await running
            await post(client, "/v1/unload_lora_adapter", 200, lora_name=name)
            if not number % 2:
                await asyncio.wait([running])
                # It may come before the request, which is a 404 then.
                error = running.exception()
                assert error is None or "model_not_found" in str(error), error
            if number == num_loads // 4:
                gc.collect()
                before = resident_kib()
        done.set()
        counts = await asyncio.gather(*streams)
        assert min(counts) >= 1
        for _ in range(600):
            _, numbers = await figures(client)
            if numbers["resident"] == 2:
                break
            await asyncio.sleep(0.05)
        assert numbers["resident"] == 2 and numbers["loads_total"] >= num_loads
        assert numbers["registered"] == 6
        gc.collect()
        grown = resident_kib() - before
        # An adapter has some 100 KiB: 150 that stay would be 15 MiB. Heaps grow a little.
        assert num_loads < 200 or grown < 15 << 10, f"{grown} KiB"
