"""The engine's own side of a push, inside each of its scheduler processes; SGLang enters through `loader`.

=====================  =======================================================================================
``command_session``    the socket for commands, and the queue of those that need the scheduler's thread
``receiver``           the record of the held weights, and the channels that it has joined
``reception``          one push: begun beside the engine's work, loaded and checked on the scheduler's thread
``computing_streams``  the streams that loading waits for
``scheduler_gate``     gives the interpreter to the thread that begins a push
``load_plan``          loads the bytes of a bucket into the model's parameters: traced once, replayed from then on
``lora_adapter``       adapters that are laid over the engine's own checkpoint
``peer_transfer``      weights from engine to engine
=====================  =======================================================================================
"""
