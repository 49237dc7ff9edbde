"""Composes, validates and resolves the configuration of a command."""
