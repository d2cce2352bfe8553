"""Families of real models, each a file."""
