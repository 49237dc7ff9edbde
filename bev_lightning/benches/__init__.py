"""What ``python -m bev_lightning.bench`` measures, one file a bench."""
