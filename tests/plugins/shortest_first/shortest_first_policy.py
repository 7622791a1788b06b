"""Target of the entry module."""

from toolkit_lm.scheduler import Request


def shortest_first(request: Request) -> tuple[float, ...]:
    return (request.num_prompt_tokens,)
