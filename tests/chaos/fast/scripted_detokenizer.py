"""The scripted engine's detokenizer, in a process of its own."""

from tests.chaos.fast.scripted_engine import detokenize

if __name__ == "__main__":
    detokenize()
