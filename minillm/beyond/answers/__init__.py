"""Training on conversations and on examples with answers."""
