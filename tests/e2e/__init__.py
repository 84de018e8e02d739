"""The whole loop with every real part: launcher, servers, services, SGLang, Megatron-Core."""
