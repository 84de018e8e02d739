"""The trainer: samples go to ranks (`partition`) in micro-batches (`packing`, `batches`), are trained (`loop`); `role_worker` resumes."""
