"""OpenAI-compatible HTTP server: the command `toolkit serve`, and routes for other FastAPI apps."""

from types import ModuleType

from toolkit_lm.plugin import CommandRegistry, SchedulingPolicyRegistry, hookimpl

from toolkit_lm_server import hookspecs


@hookimpl
def toolkit_register_hookspecs() -> ModuleType:
    return hookspecs


@hookimpl
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add("serve", "toolkit_lm_server.cli:serve", help="Serve a model over HTTP, with OpenAI's API.")


@hookimpl
def toolkit_register_scheduling_policies(policies: SchedulingPolicyRegistry) -> None:
    policies.add("fair", "toolkit_lm_server.fairness:FairPolicy")
