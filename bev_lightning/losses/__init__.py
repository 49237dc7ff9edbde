"""Target assignment and training losses."""
