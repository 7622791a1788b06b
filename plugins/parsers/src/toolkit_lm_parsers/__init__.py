"""How families of models write reasoning and tool calls. This entry module only registers the
formats, and what ends reasoning."""

from toolkit_lm.plugin import LogitsProcessorRegistry, ParserRegistry, hookimpl

from toolkit_lm_parsers.params import ThinkingParams

_FAMILIES = {
    "apertus": "families:ApertusFormat",
    "cohere": "families:CohereFormat",
    "deepseek_v4": "families:DeepSeekTagsFormat",
    "deepseek_v32": "families:DeepSeekTagsV32Format",
    "function_tag": "families:FunctionTagFormat",
    "functionary": "families:FunctionaryFormat",
    "gigachat": "families:GigaChatFormat",
    "glm": "families:GlmFormat",
    "granite": "families:GraniteFormat",
    "granite_code": "families:GraniteCodeFormat",
    "hunyuan": "families:HunyuanFormat",
    "hunyuan_v3": "families:HunyuanTagsFormat",
    "internlm": "families:InternLmFormat",
    "kimi_k2": "families:KimiFormat",
    "kimi_k3": "families:KimiTagsFormat",
    "lfm2": "python_calls:Lfm2Format",
    "longcat": "families:LongCatFormat",
    "minicpm": "families:MiniCpmFormat",
    "minimax": "families:MiniMaxFormat",
    "minimax_m1": "families:MiniMaxJsonFormat",
    "nemotron": "families:NemotronFormat",
    "olmo3": "python_calls:Olmo3Format",
    "phi4_mini": "families:PhiFormat",
    "seed": "families:SeedFormat",
    "solar": "families:SolarFormat",
    "step3": "families:StepFormat",
}
"""Formats of single families, by name: module and class."""


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
    parsers.add("inkling", f"{package}.inkling:InklingFormat", priority=10)
    parsers.add("minimax_m3", f"{package}.minimax_m3:MiniMaxTagsFormat", priority=5)
    for name, target in _FAMILIES.items():
        parsers.add(name, f"{package}.{target}")
    parsers.add("mistral_think", f"{package}.thinking:MistralThinkFormat", priority=5)
    parsers.add("gemma_think", f"{package}.thinking:GemmaThinkFormat")
    parsers.add("seed_think", f"{package}.thinking:SeedThinkFormat")
    parsers.add("apertus_think", f"{package}.thinking:ApertusThinkFormat")
    parsers.add("cohere_think", f"{package}.thinking:CohereThinkFormat")
    parsers.add("granite_think", f"{package}.thinking:GraniteThinkFormat")
    parsers.add("kimi_think", f"{package}.thinking:KimiThinkFormat")
    parsers.add("minimax_think", f"{package}.thinking:MiniMaxThinkFormat")
    parsers.add("solar_think", f"{package}.thinking:SolarThinkFormat")
    parsers.add("answer_think", f"{package}.thinking:AnswerThinkFormat", priority=2)
    parsers.add("response_think", f"{package}.thinking:ResponseThinkFormat", priority=2)
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
