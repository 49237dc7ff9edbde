"""The machine, its processes and how they compute. Knows no model."""
