"""Model execution: checkpoints, family adapters, the packed runner and attention backends."""
