"""Qwen's reader of pictures."""
