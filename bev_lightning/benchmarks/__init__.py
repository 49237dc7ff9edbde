"""Benchmarks of ``python -m bev_lightning.bench``, one file each."""
