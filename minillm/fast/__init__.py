"""The same model, laid out for quick decoding on a CPU."""
