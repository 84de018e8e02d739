"""``slime.utils.misc``: functions by their paths, and classes of which there is one object."""

from functools import cache
from typing import Any

from shared.hooks.layout_names import import_module
from shared.hooks.loading import split_path


@cache
def load_function(path: str) -> Any:
    """Returns what lies at ``package.module.function`` or ``package.module:function``. Raises ImportError or AttributeError."""
    module, name = split_path(path)
    return getattr(import_module(module), name)


class SingletonMeta(type):
    """The class of classes of which a process has one object, made by the first call; later calls return it whatever they are given."""

    _instances: dict[type, Any] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    def clear_instances(cls) -> None:
        """Forgets all of them."""
        SingletonMeta._instances.clear()
