"""Engines that move KV blocks between them, and a peer that lies."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import zmq
from ports import free_port
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_devkit import make_checkpoint, randomize
from toolkit_lm_kv_transfer.settings import Address
from toolkit_lm_kv_transfer.share import ARRAY
from toolkit_lm_kv_transfer.wire import (
    ArenaName,
    Ask,
    Get,
    Has,
    State,
    decode_question,
    encode,
    make_socket,
)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
SMALL: dict[str, Any] = {
    "block_size": 4,
    "max_model_len": 112,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "dtype": "float32",
    "num_kv_blocks": 200,
}
LOUD: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 5}
SEEDED: dict[str, Any] = {**LOUD, "temperature": 1.0, "seed": 11}
OFFER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
SECRET = "a secret of sixteen characters or more"


def prompts(*lengths: int, seed: int = 5) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"prompt_token_ids": torch.randint(3, 272, (n,), generator=generator).tolist()}
        for n in lengths
    ]


PROMPTS = prompts(70, 66, 60, 71)


def engine(model: Path, own: dict[str, Any] | None = None, **more: Any) -> LLM:
    option = {} if own is None else {"kv_transfer": own}
    return LLM(str(model), plugin_option=option, **SMALL | more)


def tier_of(llm: LLM) -> Any:
    return llm.engine.client.core.scheduler.tiers.tiers["kv_transfer"]


def stores_of(llm: LLM) -> list[Any]:
    """The stores of all ranks."""
    from toolkit_lm_kv_transfer.store import _STORES

    return [s for s in [*_STORES] if s.options is llm_options(llm)]


def store_of(llm: LLM) -> Any:
    [found] = stores_of(llm)
    return found


def llm_options(llm: LLM) -> Any:
    return llm.engine.client.core.scheduler.planners.by_name["kv_transfer"]._options


def idle(llm: LLM) -> None:
    """Runs the steps that the parts of an engine await."""
    core = llm.engine.client.core
    for _ in range(20):
        if not core.has_unfinished:
            return
        core.step()
    raise AssertionError("the engine never rests")


def prefill(llm: LLM, prompt: Any, **params: Any) -> dict[str, Any]:
    """`kv_transfer_params` that the prefill of a prompt answers."""
    sampling = SamplingParams(
        **{**LOUD, **params, "max_tokens": 1}, extra_args={"kv_transfer_params": OFFER}
    )
    [output] = llm.generate([prompt], sampling, use_tqdm=False)
    assert not output.error, output.error
    idle(llm)
    return json.loads(output.outputs[0].arrays[ARRAY].tobytes())


def decode(llm: LLM, prompt: Any, transfer: Any, **params: Any) -> tuple[Any, int]:
    """Tokens and log probabilities of each sequence, and the number of cached tokens."""
    args = None if transfer is None else {"kv_transfer_params": transfer}
    sampling = SamplingParams(**{**LOUD, **params}, extra_args=args)
    [output] = llm.generate([prompt], sampling, use_tqdm=False)
    assert not output.error, output.error
    found = [
        [
            (token, sorted((key, value.logprob) for key, value in entry.items()))
            for token, entry in zip(one.token_ids, one.logprobs, strict=True)
        ]
        for one in output.outputs
    ]
    return found, output.num_cached_tokens


@contextmanager
def pair(model: Path, host: str = "127.0.0.1", own: Any = None, **more: Any) -> Iterator[Any]:
    """A prefill engine, and a decode engine that knows it."""
    address = f"{host}:{free_port(host, count=2)}"
    with (
        engine(model, {"listen": address, **(own or {})}, **more) as first,
        engine(model, {"peers": [address], **(own or {})}, **more) as second,
    ):
        yield first, second


def alone(model: Path, prompt: Any) -> Any:
    """The answer of one engine that has nothing cached: what a failed transfer must come to."""
    with engine(model) as llm:
        return decode(llm, prompt, None)


def failures(llm: LLM) -> dict[str, int]:
    return store_of(llm).counts().failures


def make_hybrid(folder: Path) -> Path:
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
    return make_checkpoint(folder, model)


class Liar:
    """A peer that holds the secret, and answers what the test says."""

    def __init__(self, blocks: dict[tuple[int, bytes], bytes], secret: str = SECRET) -> None:
        """`blocks`: those that it says it has; it is to `answer`."""
        self.address = Address("127.0.0.1", free_port())
        self.blocks = blocks
        self.answer: Any = None
        self.arena: ArenaName | None = None
        self._context = zmq.Context()
        key = hashlib.sha256(secret.encode()).digest()
        self._socket = make_socket(self._context, zmq.ROUTER, key, 2**20, serves=True)
        self._socket.bind(self.address.endpoint)
        self._ends = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ends:
            if not self._socket.poll(20):
                continue
            client, body = self._socket.recv_multipart()
            question = decode_question(body)
            if isinstance(question, Ask):
                states = [State.HELD] * len(question.keys)
                has = Has(question.number, True, states, self.arena)
                self._socket.send_multipart([client, encode(has)])
            elif isinstance(question, Get) and self.answer is not None:
                for frames in self.answer(question):
                    self._socket.send_multipart([client, *frames])
        self._context.destroy(linger=0)

    def close(self) -> None:
        self._ends = True
        self._thread.join()
