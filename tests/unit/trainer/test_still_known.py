"""Whom the trainer takes for alive after the bus was away, which lets statuses expire that nobody could renew."""

from services.trainer.control_client import still_known
from shared.schema.service_messages import ServiceStatus


def status(instance: str, incarnation: str = "a.1") -> ServiceStatus:
    return ServiceStatus(
        service="rollout", instance=instance, host="h", pid=1, http="", state="ready", version=1, incarnation=incarnation, at=0.0
    )


def test_a_bus_that_is_just_back_has_lost_nobody() -> None:
    known, renewed = [status("one"), status("two")], [status("two", "a.2")]
    assert still_known(known, renewed, 1.0, 10.0) == [status("two", "a.2"), status("one")]


def test_who_has_not_come_back_after_a_ttl_is_gone() -> None:
    assert still_known([status("one"), status("two")], [status("two")], 10.0, 10.0) == [status("two")]
