"""Augmentation and image geometry."""
