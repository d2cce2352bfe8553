"""Beams, guesses, streams of text, conversations."""
