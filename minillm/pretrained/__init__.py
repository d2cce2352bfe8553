"""Models from elsewhere: checkpoints in Hugging Face's format, of eight families."""
