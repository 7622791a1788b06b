"""Has the plugin name of good-model. It is never imported."""

raise AssertionError("a plugin with a duplicate name must not be imported")
