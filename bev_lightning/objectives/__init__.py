"""What is wanted: matching, losses and the nuScenes metric."""
