"""Training losses and target assignment."""
