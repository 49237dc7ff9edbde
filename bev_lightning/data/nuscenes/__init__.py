"""nuScenes tables, and the index built from them."""
