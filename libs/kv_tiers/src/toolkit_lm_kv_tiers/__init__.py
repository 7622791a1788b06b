"""What KV tiers that outlive an engine share. Modules are imported from where they are."""
