"""Exact match."""


def exact(response: str, label: str) -> float:
    """Returns 1.0 where the response is the label, white space at both ends aside; else 0.0."""
    return 1.0 if response.strip() == label.strip() else 0.0
