"""Loaders: from sensor files to batches."""
