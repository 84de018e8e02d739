"""The formats that clients speak: bodies are parsed into one kind of turn, and one kind of result is answered in each. Pure, no I/O."""
