"""The nuScenes detection metric and submission format."""
