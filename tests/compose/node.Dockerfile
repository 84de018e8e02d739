# Node.js as a base image, for engines that cannot pull one.
FROM python:3.11-slim-bookworm
RUN apt-get update -qq && apt-get install -qqy --no-install-recommends nodejs && rm -rf /var/lib/apt/lists/*
