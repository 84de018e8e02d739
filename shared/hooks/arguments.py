"""``args`` as hooks get it: the run's whole config, flat, under the flags' names."""

from argparse import Namespace
from typing import Any, NoReturn

from shared.config.run_config import RunConfig, field_sections
from shared.hooks import slime_attributes
from shared.hooks.slime import model_processors
from shared.runtime.errors import nearest


class Arguments(Namespace):
    """Every field of the config (``args.rollout_batch_size``), slime's other flags with the value that this run has, Megatron's that are
    given, and SGLang's with their prefix (``args.sglang_mem_fraction_static``).

    It may be written: each process has its own, and nothing of the run follows what is set there.

    Args:
        more: what only the caller knows, for example the address of an engine.

    An attribute that is not there raises AttributeError with the nearest that is.
    """

    def __init__(self, config: RunConfig, **more: Any) -> None:
        fields = {field: getattr(getattr(config, section), field) for field, section in field_sections().items()}
        shown = {field: slime_attributes.as_given(field, value) for field, value in fields.items()}
        engine = {f"sglang_{flag.lstrip('-').replace('-', '_')}": value for flag, value in config.rollout.sglang.items()}
        others = slime_attributes.attributes(config)
        unset = {name: others[name] for name, value in shown.items() if value is None and name in others}
        model_processors.RUN["trust_remote_code"] = config.model.trust_remote_code
        super().__init__(**{**config.run.custom_args, **others, **shown, **unset, **config.trainer.megatron, **engine, **more})

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"args has no {name}; {nearest(name, list(self.__dict__))}")
