"""Attention in tiles, latent attention, stretched rotations."""
