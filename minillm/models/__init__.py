"""Whole models that are no Llama."""
