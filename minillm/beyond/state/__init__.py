"""Layers with a state instead of a cache that grows: Mamba."""
