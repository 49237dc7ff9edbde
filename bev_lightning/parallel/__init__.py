"""Lightning strategies that shard a model or split it over processes."""
