"""The gateway service: clients that speak an API of a language model meet the engines here, one session a rollout."""
