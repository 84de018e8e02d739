"""Pictures, or sounds, of conversations: checked and brought into their one form once, and kept by the session under their names.

What a client sends again with each request is remembered here, and stored beside the session's log when a turn first shows it, from where
other gateways have it, and the replica that makes samples of the session.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.config.data_sections import DataSection
from shared.data.media import MOST_BYTES, BadMedia, MediaReader, Picture
from shared.formats.request import ChatTurn, TurnRefused, pictures_in
from shared.sessions.session import MOST_SHOWN, SessionLog
from shared.sessions.session_store import SessionStore

CACHED_BYTES = 256 << 20  # Of pictures that are remembered, all together: of a conversation all are sent with each request


class TurnPictures:
    """The pictures of one model's turns. ``reader``: None where the model sees none."""

    def __init__(self, sessions: SessionStore, reader: MediaReader | None, data: DataSection) -> None:
        self._sessions, self._reader, self._data = sessions, reader, data
        self._known: OrderedDict[str, Picture] = OrderedDict()
        self._bytes, self._decoding = 0, asyncio.Lock()  # one at a time: a small one may have hundreds of megabytes of pixels
        self._noun: str = "picture" if reader is None else reader.rule.noun
        self._code = f"invalid_{'image' if reader is None else reader.kind}"

    async def of(self, log: SessionLog, names: Sequence[str], given: Mapping[str, bytes], place: str) -> dict[str, Picture]:
        """Returns the pictures of a prompt by name, those that are not among ``given`` as the session has them. Raises TurnRefused.

        Args:
            place: the body's field with the conversation.
        """
        if not names:
            return {}
        try:
            if self._reader is None:
                raise BadMedia("expected text: data.multimodal_keys is not set, or this model is not the run's")
            if len(names) > self._data.max_pictures:
                raise BadMedia(f"expected at most data.max_pictures = {self._data.max_pictures} {self._noun}s, found {len(names)}")
            found = {name: await self._one(self._reader, log, name, given) for name in dict.fromkeys(names)}
            if (size := sum(len(found[name].data) for name in names)) > MOST_BYTES:
                raise BadMedia(f"expected at most {MOST_BYTES} bytes of {self._noun}s as they are stored, found {size}")
        except BadMedia as error:
            raise TurnRefused(400, str(error), field=place, code=self._code) from None
        return found

    async def _one(self, reader: MediaReader, log: SessionLog, name: str, given: Mapping[str, bytes]) -> Picture:
        if (known := self._known.get(name)) is not None:
            self._known.move_to_end(name)
            return known
        if name in given:
            async with self._decoding:
                if (known := self._known.get(name)) is not None:
                    return known
                found = await asyncio.to_thread(reader.prepared, reader.data_of(given[name], Path()))
        else:
            stored = await self._sessions.pictures(log.session.id)
            if name not in stored:
                raise BadMedia(f"{self._noun} {name} is not stored in this session: send it again")
            found = Picture(stored[name], reader.measured(stored[name]))
        if name not in self._known:
            self._known[name] = found
            self._bytes += len(found.data)
        while self._bytes > CACHED_BYTES:
            self._bytes -= len(self._known.popitem(last=False)[1].data)
        return found

    def expanded(self, tokens: NDArray[np.int32], messages: Sequence[Mapping[str, Any]], asked: ChatTurn) -> NDArray[np.int32]:
        """Returns the tokens of messages, int32 [T], as many for each of their pictures as it takes. Raises TurnRefused."""
        if self._reader is None:
            return tokens
        try:
            return self._reader.rule.expanded(tokens, [asked.shown[name].tokens for name in pictures_in(messages)])
        except BadMedia as error:
            raise TurnRefused(400, str(error), field=asked.place, code=self._code) from None

    def check(self, tokens: NDArray[np.int32], names: Sequence[str], shown: Mapping[str, Picture], place: str) -> None:
        """Raises TurnRefused where tokens stand for pictures, and not for those of the turn that they continue."""
        if self._reader is None:
            return
        places, wanted = int(np.count_nonzero(tokens == self._reader.rule.token)), sum(shown[name].tokens for name in names)
        if places != wanted:
            message = f"{places} token ids stand for {self._noun}s, and the turn that they continue shows {wanted}"
            raise TurnRefused(400, message, field=place, code=self._code)

    async def store(self, log: SessionLog, names: Sequence[str], shown: Mapping[str, Picture]) -> None:
        """Stores those pictures of a turn that the session has not yet. Raises SessionUnknown; TurnRefused where it has too many."""
        shows = [*(turn.pictures for turn in log.turns.values()), *(turn.pictures for turn in log.pending.values())]
        known = {name for names in shows for name in names}
        new = [name for name in dict.fromkeys(names) if name not in known]
        if len(known) + len(new) > MOST_SHOWN:
            raise TurnRefused(400, f"the session has shown {MOST_SHOWN} {self._noun}s; it takes no further ones", code=self._code)
        await self._sessions.add_pictures(log.session.id, {name: shown[name].data for name in new})
