"""The engine's own side of a push, inside each of its scheduler processes; `loader` is SGLang's way in.

===================  =======================================================================================
``command_session``  the socket that commands come by, and the queue of those that need the scheduler's thread
``receiver``         what it knows of its weights: joining channels, receiving, checking
``load_plan``        how the bytes of a bucket get into the model's parameters: traced once, replayed from then on
``lora_adapter``     adapters that are laid over the engine's own checkpoint
``peer_transfer``    weights from engine to engine
===================  =======================================================================================
"""
