"""All that the processes of a run import, so that forks of this one have it."""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import aiohttp.web
import nats
import safetensors.torch
import tensorboard.summary
import torch

import myxo.commands.up
import myxo.launch.launcher
import myxo.main
import services.buffer.buffer_service
import services.reward.reward_service
import services.reward.worker
import services.rollout.engine.receiver.command_session
import services.rollout.rollout_service
import services.trainer.__main__
import services.trainer.loop
import services.trainer.rank

torch.set_num_threads(1)

MODULES = (aiohttp.web, nats, safetensors.torch, tensorboard.summary, myxo, services)
"""What is held."""
