"""Lightning strategies that split a model over processes."""
