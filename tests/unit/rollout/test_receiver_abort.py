"""An abort that comes before the order which it aborts."""

import pytest
import torch

from services.rollout.engine.receiver.receiver import ReceiveError, Receiver
from shared.process.embedded_servers import free_port
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.weight_channel import TransferDeadline


def test_an_order_whose_lanes_were_called_off_says_so() -> None:
    receiver = Receiver(torch.nn.Linear(1, 1), 0, "cpu")
    channel = WeightChannelAddress(
        kind="group", name="channel", address="127.0.0.1", port=free_port(), secret="00" * 32, backend="gloo", world_size=3
    )
    receiver.join([channel], 1, 30.0)
    receiver.abort()
    with pytest.raises(ReceiveError, match="was called off") as off:
        receiver.receive(1, 1, ["channel"], TransferDeadline(30.0))
    assert not off.value.touched
    with pytest.raises(ReceiveError, match="has joined none"):
        receiver.receive(1, 1, ["another"], TransferDeadline(30.0))
