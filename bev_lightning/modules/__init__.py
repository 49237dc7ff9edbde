"""LightningModules: one training step for every detector."""
