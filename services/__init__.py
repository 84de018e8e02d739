"""The services: each imports only `shared` and itself."""
