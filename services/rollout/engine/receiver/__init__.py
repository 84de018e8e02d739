"""The engine's own side of a push, inside each of its scheduler processes; SGLang enters through `loader`.

===================  ======================================================================================
``command_session``  the socket for commands, and the queue of those that need the scheduler's thread
``receiver``         one push, begun beside the engine's work; the held weights, and the channels it has joined
``load_plan``        loads the bytes of a bucket into the model's parameters: traced once, replayed from then on
===================  ======================================================================================
"""
