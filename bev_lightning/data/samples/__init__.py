"""What one training sample consists of, before its files are read."""
