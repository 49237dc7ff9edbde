"""Benchmarks run by ``python -m bev_lightning.bench bench=NAME``."""
