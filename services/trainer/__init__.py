"""The trainer: a batch's samples are shared out over ranks (`partition`), laid into micro-batches (`packing`, `batches`) and trained (`loop`)
by a role (`actor`, `critic`), which resumes (`role_worker`), pushes its weights (`weights`) and computes by a backend (`megatron`, `fsdp`)."""
