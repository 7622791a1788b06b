"""A plugin that harms a worker, as the variable SABOTAGE says: rank, when, and how. The file of
`mark` is there once it has struck."""

import json
import os
import signal
import sys
import time

ORDERS = json.loads(os.environ.get("SABOTAGE", "{}"))


def strike() -> None:
    open(ORDERS["mark"], "w").close()
    if ORDERS["how"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif ORDERS["how"] == "unnamed":
        os.kill(os.getpid(), signal.SIGRTMIN + 3)
    elif ORDERS["how"] == "abort":
        os.abort()
    elif ORDERS["how"] == "hang":
        time.sleep(1000)
    elif ORDERS["how"] == "leave":
        raise SystemExit("the worker had enough")
    raise RuntimeError("no prompt of thirteen tokens")


def strike_first(owner, name: str, is_due=lambda *arguments: True) -> None:
    function = getattr(owner, name)

    def harmed(*arguments):
        if is_due(*arguments):
            strike()
        return function(*arguments)

    setattr(owner, name, harmed)


serve = sys.modules.get("toolkit_lm_executor_mp.serve")
if serve is not None and ORDERS.get("rank") == int(sys.argv[1]):
    if ORDERS["when"] == "import":
        strike()
    elif ORDERS["when"] == "load":
        strike_first(serve.ModelRunner, "load")
    elif ORDERS["when"] == "warm_up":
        strike_first(serve, "warm_up")
    else:
        strike_first(
            serve.ModelRunner,
            "execute",
            lambda runner, plan: any(new.num_prompt_tokens == 13 for new in plan.new),
        )
