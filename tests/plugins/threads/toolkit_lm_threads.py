"""The entry module: it registers the executor."""

from toolkit_lm.plugin import ExecutorRegistry, hookimpl


@hookimpl
def toolkit_register_executors(executors: ExecutorRegistry) -> None:
    executors.add("threads", "toolkit_lm_threads_executor:ThreadsExecutor")
