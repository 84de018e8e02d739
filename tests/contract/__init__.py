"""What a stand-in and the real thing have in common, asserted of both."""
