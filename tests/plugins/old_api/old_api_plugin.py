"""Made for an earlier core. It is never imported."""

raise AssertionError("a plugin for another core must not be imported")
