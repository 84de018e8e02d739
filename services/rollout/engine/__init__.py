"""The adapter to one SGLang engine: its launch, requests, control and weights. `receiver` is the part inside the engine's processes."""
