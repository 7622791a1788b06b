"""vLLM's own part of startup_peer.py, run by the peer's Python: an LLM, one token. Prints
time.monotonic() at that moment."""

from __future__ import annotations

import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=sys.argv[1], dtype="bfloat16", max_model_len=2048, seed=0, disable_log_stats=True
    )
    llm.generate(
        [TokensPrompt(prompt_token_ids=[5, 6, 7])],
        SamplingParams(temperature=0, max_tokens=1),
        use_tqdm=False,
    )
    print(f"first token {time.monotonic()}", flush=True)


if __name__ == "__main__":
    main()
