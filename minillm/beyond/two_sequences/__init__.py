"""Encoder and decoder."""
