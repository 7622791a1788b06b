"""The main job: `toolkit serve` with the embedded tiny model, asked through the official OpenAI
client, the answers streamed.

usage: python docs/examples/demo.py [QUESTION ...]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI

QUESTIONS = [
    "Hello! Who are you?",
    "What is the capital of France?",
    "What is 7 plus 5?",
    "What is the opposite of hot?",
    "Tell me a story about a dog.",
]


@contextmanager
def server() -> Iterator[str]:
    """A server on a free port of this machine; gives its base URL."""
    toolkit = Path(sys.executable).with_name("toolkit")
    process = subprocess.Popen(
        [toolkit, "serve", "tiny", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="")
            if found := re.search(r"http://\S+", line):
                yield found.group().rstrip(".,")
                break
        else:
            raise SystemExit(f"the server ended with exit code {process.wait()}")
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    with server() as url:
        client = OpenAI(base_url=f"{url.removesuffix('/v1')}/v1", api_key="none")
        for question in sys.argv[1:] or QUESTIONS:
            print(f"\n> {question}")
            messages = [{"role": "user", "content": question}]
            for chunk in client.chat.completions.create(
                model="tiny", messages=messages, stream=True, temperature=0, max_tokens=128
            ):
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            print()


if __name__ == "__main__":
    main()
