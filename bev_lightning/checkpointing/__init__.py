"""Reads weights: own checkpoints, published detectors and pretrained backbones."""
