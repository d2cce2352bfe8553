"""Packed weights, kernels, small copies."""
