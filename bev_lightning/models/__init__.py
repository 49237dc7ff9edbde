"""Networks and their parts: batches in, predictions out."""
