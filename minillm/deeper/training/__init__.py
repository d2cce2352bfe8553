"""Runs that survive, sources of data, processes, other optimizers."""
