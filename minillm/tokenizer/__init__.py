"""Text to ids and back; nothing here needs torch."""

from minillm.tokenizer.bpe import BPETokenizer

__all__ = ["BPETokenizer"]
