"""smolagents: a `ToolCallingAgent`'s loop, whose calls are required."""

from __future__ import annotations

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from weather import QUESTION, SKIES


def test_a_loop(long_url, key):
    asked = []

    @tool
    def get_weather(city: str) -> dict:
        """The weather of a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return SKIES.get(city, {"sky": "windy", "degrees": 8})

    model = OpenAIServerModel(
        model_id="tiny-tools", api_base=f"{long_url}/v1", api_key=key, temperature=0, max_tokens=128
    )
    agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=3, verbosity_level=0)
    # Its own is longer than the 512 tokens that the model has learned.
    agent.prompt_templates["system_prompt"] = ""
    answer = agent.run(QUESTION)
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    calls = [call for step in steps for call in step.tool_calls]
    assert {call.name for call in calls} == {"get_weather"}
    assert (calls[0].arguments, asked[0], len(asked)) == ({"city": "Paris"}, "Paris", 3)
    assert steps[0].observations == str(SKIES["Paris"])
    # It has no text but an argument of `final_answer`, which the model has not learned to call:
    # behind the last step smolagents asks for an answer without tools.
    assert isinstance(answer, str) and answer
