"""Bird's-eye-view 3D object detection on nuScenes: PyTorch Lightning, Hydra, DALI."""

__version__ = "0.1.0"
