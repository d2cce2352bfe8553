"""Keys and values of the past, kept in one of five ways; `minillm.cache.base` is the core."""
