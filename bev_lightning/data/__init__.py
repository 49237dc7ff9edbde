"""From files to batches: tables, index, frames, loaders and the DataModule."""
