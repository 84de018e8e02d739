"""The buffer in simulated time: its own decisions (`services.buffer.policy`), driven by a model of how long everything takes."""
