"""How families of models write reasoning and tool calls. This entry module only registers the
formats, and what ends reasoning."""

from toolkit_lm.plugin import LogitsProcessorRegistry, ParserRegistry, hookimpl

from toolkit_lm_parsers.params import ThinkingParams


@hookimpl
def toolkit_register_parsers(parsers: ParserRegistry) -> None:
    package = __name__
    parsers.add("harmony", f"{package}.harmony:HarmonyFormat", priority=10)
    parsers.add("hermes", f"{package}.tool_call_tags:HermesFormat")
    parsers.add("qwen3_coder", f"{package}.tool_call_tags:QwenCoderFormat")
    parsers.add("mistral", f"{package}.mistral:MistralFormat")
    parsers.add("deepseek", f"{package}.deepseek:DeepSeekFormat")
    parsers.add("gemma", f"{package}.gemma:GemmaFormat")
    parsers.add("pythonic", f"{package}.bare:PythonicFormat")
    parsers.add("llama3_json", f"{package}.bare:LlamaJsonFormat")
    parsers.add("mistral_think", f"{package}.thinking:MistralThinkFormat", priority=5)
    parsers.add("gemma_think", f"{package}.thinking:GemmaThinkFormat")
    parsers.add("seed_think", f"{package}.thinking:SeedThinkFormat")
    parsers.add("think", f"{package}.thinking:ThinkFormat")
    parsers.add("deepseek_r1", f"{package}.thinking:BegunThinkFormat")


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    # After structured output: it forces nothing that a grammar rules out.
    processors.add(
        "thinking_budget",
        f"{__name__}.thinking_budget:ThinkingBudget",
        params=ThinkingParams,
        priority=-20_000,
    )
