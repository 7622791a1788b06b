"""What the entry module names."""

from toolkit_lm.scheduler import Request


def shortest_first(request: Request) -> tuple[float, ...]:
    return (request.num_prompt_tokens,)
