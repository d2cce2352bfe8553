"""What is built on the pages beyond: other architectures, other kinds of training."""
