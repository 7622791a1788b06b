"""The commands of this distribution: `toolkit plugins new` and `toolkit plugins check`."""
