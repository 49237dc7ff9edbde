"""What watches a run: speed, progress, pictures."""
