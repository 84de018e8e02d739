"""The adapter to one SGLang engine: launch, supervision, requests and commands.

====================  =============================================================================================
``launch_command``    the argv and environment that launch an engine, from the run's configuration
``cpu_launcher``      the file that the engine runs on a CPU: the stand-ins that PyPI's wheels need there
``engine_process``    ``EngineProcess``: starts the engine, waits for it, and stops it with no process left behind
``engine_client``     ``EngineClient``: generation and control of one engine
``transport``         JSON over HTTP with a deadline on every call
``capabilities``      an engine's release, vocabulary, longest sequence, weight update sessions
``generation``        requests of a generation, validated, and its answers, parsed
``engine_memory``     an engine's memory, released while a trainer computes on its GPU
``receiver_client``   commands about weights to the engine's processes, and their answers
``receiver``          the code that runs inside the engine's processes, with torch
====================  =============================================================================================
"""
