"""The rollout service: one SGLang engine, its generations, and the weights it takes. Imports no torch."""
