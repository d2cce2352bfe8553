"""The other kinds of cache: static, sliding, paged, quantized."""
