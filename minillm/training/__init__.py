"""From text to weights: batches, loss, optimizers, the training loop and what keeps it safe."""
