"""What the engine counts while it generates a sample: drafted tokens, and tokens whose keys and values it had."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self


@dataclass
class _Counters:
    of_engine: ClassVar[Mapping[str, str]] = {}
    """Field → what the engine's ``meta_info`` calls it."""

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Adds what the engine counted for one answer."""
        for name, key in self.of_engine.items():
            setattr(self, name, getattr(self, name) + (meta_info.get(key) or 0))

    def to_dict(self) -> dict[str, int]:
        """Returns the counts by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the counters of `to_dict`."""
        return cls(**{one.name: data.get(one.name, 0) for one in fields(cls)})


@dataclass
class SpecInfo(_Counters):
    """Speculative decoding: tokens drafted and accepted, verifications, and tokens in all."""

    of_engine = {
        "spec_accept_token_num": "spec_accept_token_num",
        "spec_draft_token_num": "spec_draft_token_num",
        "spec_verify_ct": "spec_verify_ct",
        "completion_token_num": "completion_tokens",
    }

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Returns the share of drafted tokens that were accepted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num > 0 else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Returns the mean number of tokens a verification."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct > 0 else 0.0


@dataclass
class PrefixCacheInfo(_Counters):
    """The prefix cache: input tokens, and those of them that were cached."""

    of_engine = {"cached_tokens": "cached_tokens", "total_prompt_tokens": "prompt_tokens"}

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Returns the share of input tokens that were cached."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens > 0 else 0.0
