"""From logits to text: sampling, decoding, and, one shelf further, searching and guessing ahead."""
