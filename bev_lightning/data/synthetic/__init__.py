"""Generator of a synthetic data set in nuScenes format."""
