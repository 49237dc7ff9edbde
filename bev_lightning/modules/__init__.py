"""LightningModules of the detectors, with their optimizer and test-time augmentation."""
