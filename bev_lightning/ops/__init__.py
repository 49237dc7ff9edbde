"""Operators: tensors in, tensors out."""
