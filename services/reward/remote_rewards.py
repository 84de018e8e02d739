"""slime's ``remote_rm``: a server that takes ``{"prompt", "response", "label"}`` of one sample and answers with its reward."""

import asyncio
from collections.abc import Callable

from services.reward.http_calls import HttpCalls
from services.reward.scorer import Scorer
from shared.config.reward_section import REMOTE, RewardSection
from shared.config.run_config import RunConfig
from shared.environment.environment_url import without_credentials
from shared.environment.protocol import EnvironmentFailed
from shared.hooks import reward_values
from shared.schema.messages import Generated
from shared.schema.sample import Sample, Score

CONNECTIONS = 64
"""The most connections of a reward service to the server, as in slime."""


class RemoteScorer(Scorer):
    """Asks the server at ``rm_url`` for each sample.

    Args:
        prompt_text: gives the prompt of a sample as the server gets it.
    """

    def __init__(self, config: RewardSection, prompt_text: Callable[[Sample], object]) -> None:
        super().__init__(REMOTE, config.environment_concurrency)
        assert config.rm_url is not None  # the run has this environment
        label = f"{REMOTE} at {without_credentials(config.rm_url)}"
        self._calls = HttpCalls(label, config.rm_url, CONNECTIONS, config.rm_timeout, config.rm_tries)
        self._prompt_text = prompt_text

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        return await asyncio.gather(*(self._score(sample, key) for sample in samples))

    async def close(self) -> None:
        """Closes the connections."""
        await self._calls.close()

    async def _score(self, sample: Sample, key: str | None) -> Score:
        value = await self._calls.post({"prompt": self._prompt_text(sample), "response": sample.text, "label": sample.reference.value})
        try:
            return reward_values.read(value, key)
        except ValueError as error:
            raise EnvironmentFailed(self._calls.label, str(error)) from None


def prompt_text(config: RunConfig) -> Callable[[Sample], object]:
    """Returns what gives a sample's prompt as slime has it: as it stands in the file, or as the chat template rendered it.

    Raises ConfigError where that takes the model's tokenizer and there is none.
    """
    if not config.data.apply_chat_template:
        return lambda sample: sample.prompt_text
    from shared.data.tokenizer import Tokenizer  # tokenizers and jinja2 are for runs that need them

    tokenizer = Tokenizer(config.model.hf_checkpoint)
    return lambda sample: tokenizer.decode(sample.prompt, skip_special_tokens=False)
