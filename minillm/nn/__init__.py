"""The parts of a layer: attention, heads, rotary positions, norms and feed-forward blocks."""
