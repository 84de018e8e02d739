"""All that the processes of a run import, so that forks of this one have it: an import costs each process of each run its time."""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import aiohttp.web
import nats
import numpy.ma
import safetensors.torch
import tensorboard.summary
import torch
import torch.utils.serialization.config
import uvicorn.lifespan.off
import uvicorn.protocols.http.auto

import myxo.commands.up
import myxo.launch.launcher
import myxo.main
import services.buffer.buffer_service
import services.reward.reward_service
import services.reward.worker
import services.rollout.engine.receiver.command_session
import services.rollout.rollout_service
import services.trainer.__main__
import services.trainer.critic
import services.trainer.loop
import services.trainer.rank
import shared.rewards.math_verify
import tests.chaos.disturbed_run
import tests.chaos.fast.fast_variant
import tests.chaos.fast.proxied_servers
import tests.chaos.fast.scripted_engine
import tests.chaos.fast.scripted_scheduler
import tests.chaos.fast.scripted_trainer
import tests.chaos.real.real_variant

torch.set_num_threads(1)
for response in ("18", "x", "Q7e#2", r"\boxed{18}"):  # a parser's tables are made as it reads
    shared.rewards.math_verify.math_verify(response, "18")

MODULES = (aiohttp.web, nats, numpy.ma, safetensors.torch, tensorboard.summary, torch.utils, uvicorn, myxo, services, tests)
"""What is held."""
