"""How families of models write reasoning and tool calls. This entry module only registers the formats."""

from toolkit_lm.plugin import ParserRegistry, hookimpl

_CALLS, _REASONING = ("tool_calls",), ("reasoning",)


@hookimpl
def toolkit_register_parsers(parsers: ParserRegistry) -> None:
    package = __name__
    parsers.add("harmony", f"{package}.harmony:HarmonyFormat", finds=(*_REASONING, *_CALLS), priority=10)
    parsers.add("hermes", f"{package}.tool_call_tags:HermesFormat", finds=_CALLS)
    parsers.add("qwen3_coder", f"{package}.tool_call_tags:QwenCoderFormat", finds=_CALLS)
    parsers.add("mistral", f"{package}.mistral:MistralFormat", finds=_CALLS)
    parsers.add("deepseek", f"{package}.deepseek:DeepSeekFormat", finds=_CALLS)
    parsers.add("gemma", f"{package}.gemma:GemmaFormat", finds=_CALLS)
    parsers.add("pythonic", f"{package}.bare:PythonicFormat", finds=_CALLS)
    parsers.add("llama3_json", f"{package}.bare:LlamaJsonFormat", finds=_CALLS)
    parsers.add("mistral_think", f"{package}.thinking:MistralThinkFormat", finds=_REASONING, priority=5)
    parsers.add("gemma_think", f"{package}.thinking:GemmaThinkFormat", finds=_REASONING)
    parsers.add("seed_think", f"{package}.thinking:SeedThinkFormat", finds=_REASONING)
    parsers.add("think", f"{package}.thinking:ThinkFormat", finds=_REASONING)
