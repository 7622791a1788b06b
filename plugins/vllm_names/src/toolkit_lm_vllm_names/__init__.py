"""vLLM's names: of options, flags and classes. This entry module only registers them; each is
imported when it is used."""

from toolkit_lm.plugin import OptionNamesRegistry, hookimpl
from toolkit_lm_cli import CommandRegistry, FlagNamesRegistry


@hookimpl
def toolkit_register_option_names(option_names: OptionNamesRegistry) -> None:
    option_names.add("vllm", "toolkit_lm_vllm_names.table:translate")


# Optional: what else it brings works without the command line, too.
@hookimpl(optionalhook=True)
def toolkit_register_flag_names(flag_names: FlagNamesRegistry) -> None:
    flag_names.add("vllm", "toolkit_lm_vllm_names.flags:translate_flags")


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "migrate-vllm",
        "toolkit_lm_vllm_names.migrate:migrate_vllm",
        help="Translate a `vllm serve` line.",
    )
