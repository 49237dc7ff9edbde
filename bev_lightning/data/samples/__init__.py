"""Samples as lists of files to read, with transforms and targets."""
