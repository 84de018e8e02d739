"""Which sessions may end without a reward."""

import json
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from services.gateway.routes import Api
from shared.formats.request import TurnRefused
from shared.schema.messages import Sampling
from shared.sessions.session import Session, SessionEnded, SessionLog


@pytest.mark.parametrize(("environment", "taken"), [("given", False), ("math", True), ("", True)])
async def test_a_reward_is_left_out_where_something_else_scores_the_session(environment: str, taken: bool) -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    fields: dict[str, Any] = {"group": "g1", "rollout": 0, "attempt": 0, "key_digest": "0" * 64, "deadline": 100.0}
    log, ended = SessionLog(Session(id="s1", sampling=sampling, environment=environment, **fields)), Mock(ended=SessionEnded(at=1.0))
    parts = dict.fromkeys(("turns", "replicas", "metrics"), Mock())
    api = Api(Mock(end=AsyncMock(return_value=ended)), **parts, model="m", names=frozenset(), most=1)
    if taken:
        assert json.loads((await api._end(Mock(), log, b"{}")).body)["reward"] is None
        return
    with pytest.raises(TurnRefused, match="nothing else scores this session") as caught:
        await api._end(Mock(), log, b"{}")
    assert (caught.value.status, caught.value.field) == (400, "reward")
