"""The adapter to one SGLang engine: how it is launched, watched, asked and told.

====================  =============================================================================================
``launch_command``    the argv and environment that launch an engine, from the run's configuration
``cpu_launcher``      the file that the engine runs on a CPU: the stand-ins that PyPI's wheels need there
``engine_process``    ``EngineProcess``: started, waited for, stopped, with no process left behind
``engine_client``     ``EngineClient``: generation and control of one engine
``transport``         JSON over HTTP with a deadline on every call
``capabilities``      what an engine can do: release, vocabulary, longest sequence, weight update sessions
``generation``        what is asked of a generation and what comes back, validated and parsed
``engine_memory``     an engine's memory, given back while somebody else computes on its GPU
``receiver_client``   commands about weights to the engine's processes, and their answers
``receiver``          what runs there: inside the engine, with torch
====================  =============================================================================================
"""
