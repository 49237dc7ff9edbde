"""Augmentation: image and BEV transforms, photometric distortion, GridMask, GT sampling."""
