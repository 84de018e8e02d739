"""``args`` as hooks get it: the run's whole config, flat, under the flags' names."""

from typing import Any, NoReturn

from shared.config.run_config import RunConfig, field_sections
from shared.runtime.errors import nearest


class Arguments:
    """Every field of the config (``args.rollout_batch_size``) and SGLang's flags with their prefix (``args.sglang_mem_fraction_static``).

    Args:
        more: what only the caller knows, for example the address of an engine.

    An attribute that is not there raises AttributeError with the nearest that is; none can be set.
    """

    def __init__(self, config: RunConfig, **more: Any) -> None:
        fields = {field: getattr(getattr(config, section), field) for field, section in field_sections().items()}
        engine = {f"sglang_{flag.lstrip('-').replace('-', '_')}": value for flag, value in config.rollout.sglang.items()}
        self.__dict__.update({**config.run.custom_args, **fields, **engine, **more})

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"args has no {name}; {nearest(name, list(self.__dict__))}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"args.{name} cannot be set: the config of a run is the same in every service")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"args.{name} cannot be deleted")
