"""Builds a run from a resolved configuration and forecasts its memory."""
