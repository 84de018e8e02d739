"""Models and data sets by their names on the Hugging Face hub.

`names` reads them; `resolve` is what commands and services call: it pins each name to a commit and makes its files lie on this machine,
with `models` and `datasets` for the two kinds and `client` for the hub itself.
"""
