"""What does not go with the replay of routing in training. Pure."""

from collections.abc import Iterator

from shared.config.rollout_section import RolloutSection
from shared.config.trainer_section import TrainerSection

_ROLLOUT = "trainer.use_rollout_routing_replay"


def routing_misfits(trainer: TrainerSection, rollout: RolloutSection, *, agents: bool, ingests: bool) -> Iterator[str]:
    """Yields what contradicts the replay of the engine's experts, as ``section.field: what is wrong``.

    Args:
        agents: they play rollouts. ingests: finished groups come in from outside.
    """
    fused = str({name.lstrip("-").replace("-", "_"): value for name, value in trainer.megatron.items()}.get("moe_router_fusion", ""))
    if fused.lower() == "true":
        for name in ("use_rollout_routing_replay", "use_routing_replay"):
            if getattr(trainer, name):
                yield f"trainer.{name}: true, but trainer.megatron.moe_router_fusion chooses in a kernel that takes no choice; leave it out"
    if not trainer.use_rollout_routing_replay:
        return
    if agents:
        yield f"{_ROLLOUT}: true, but the sessions of agents do not tell the experts; use use_routing_replay"
    if ingests:
        yield f"{_ROLLOUT}: true, but groups from outside do not tell the experts; use use_routing_replay"
    given = {name.lstrip("-").replace("_", "-"): value for name, value in rollout.sglang.items()}
    if given.get("enable-hierarchical-cache"):
        # a prefix that comes back from the host lies in other slots, where the experts of other tokens stand
        yield f"{_ROLLOUT}: true, but prefixes that rollout.sglang.enable-hierarchical-cache brings back have lost their experts"
    if given.get("enable-return-routed-experts") is False:
        yield f"{_ROLLOUT}: true, but rollout.sglang.enable-return-routed-experts is false; leave it out"
