"""A scheduling policy that serves the shortest prompt first: the mean wait is the shortest, and a
long prompt may wait for ever."""

from toolkit_lm.plugin import SchedulingPolicyRegistry, hookimpl


@hookimpl
def toolkit_register_scheduling_policies(policies: SchedulingPolicyRegistry) -> None:
    policies.add("shortest_first", "shortest_first_policy:shortest_first")
