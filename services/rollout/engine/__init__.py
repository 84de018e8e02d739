"""The adapter to one SGLang engine: how it is launched, kept, asked and told.

=================  ================================================================================================
``command``        the argv and environment that launch an engine, from the run's configuration
``cpu_launcher``   the file the engine runs on a CPU: the stand-ins that PyPI's wheels need there
``leash``          the small parent of every engine: when the rollout service dies, the engine dies
``process``        ``EngineProcess``: start, wait until ready, stop, with no process left behind
``generation``     what is asked of a generation and what comes back, validated and parsed; no I/O
``capabilities``   what an engine can do and how much: release, vocabulary, context, weight update sessions
``transport``      JSON over HTTP with a deadline on every call
``channel``        orders about weights to the engine's processes, and their answers
``receiver``       what runs there: inside the engine, with torch
``client``         ``EngineClient``: generation and control of one engine
``errors``         the named errors of all these
=================  ================================================================================================
"""
