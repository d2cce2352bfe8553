"""A decoding step that leaves Python."""
