"""The training endpoint: the Tinker SDK's protocol over HTTP, its commands in a log."""
