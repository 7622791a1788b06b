"""OpenAI-compatible HTTP server: the commands `toolkit serve`, `toolkit render` and `toolkit
run-batch`; routes for other apps."""

from types import ModuleType

from toolkit_lm.plugin import SchedulingPolicyRegistry, hookimpl
from toolkit_lm_commands import CommandRegistry

from toolkit_lm_server import hookspecs


@hookimpl
def toolkit_register_hookspecs() -> ModuleType:
    return hookspecs


# Optional: what else it brings works without the command line, too.
@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "serve", "toolkit_lm_server.cli:serve", help="Serve a model over HTTP, with OpenAI's API."
    )
    commands.add(
        "render",
        "toolkit_lm_server.cli:render",
        help="Serve a model's renderer over HTTP, without an engine.",
    )
    commands.add(
        "run-batch",
        "toolkit_lm_server.batch.command:run_batch",
        help="Answer a file of requests in OpenAI's batch format.",
    )


@hookimpl
def toolkit_register_scheduling_policies(policies: SchedulingPolicyRegistry) -> None:
    policies.add("fair", "toolkit_lm_serving.fairness:FairPolicy")
