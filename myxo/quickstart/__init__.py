"""The quick start of whoever has installed Myxo from a wheel: the arithmetic example and an engine, made in one directory."""
