"""Machine detection, launchers, precision, compilation and memory, independent of any model."""
