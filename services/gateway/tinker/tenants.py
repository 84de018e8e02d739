"""The tenants of the training endpoint: their keys and quotas."""

import hmac
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import parse_json
from shared.schema.client_commands import TENANT

KEY_VARIABLE, DEFAULT = "MYXO_TINKER_KEY", "default"
FORM = r"^(tml-|eyJ)[\x21-\x7e]{16,}$"  # the SDK takes no others


class Tenant(BaseModel):
    """One tenant. ``tokens``: that it may train and sample in all. ``models``: that it may hold at once. ``bytes``: of weights that it may
    have saved. None: no bound."""

    model_config = ConfigDict(extra="forbid")

    key: str = Field(pattern=FORM)
    tokens: int | None = Field(default=None, ge=0)
    models: int | None = Field(default=None, ge=0)
    bytes: int | None = Field(default=None, ge=0)


_TENANTS = TypeAdapter(dict[Annotated[str, Field(pattern=rf"^{TENANT}$")], Tenant])


def read_tenants(path: Path | None, environment: Mapping[str, str] = os.environ) -> dict[str, Tenant]:
    """Returns the tenants by name. ``path``: their file; None: one, by the environment's key. Raises ConfigError."""
    if path is None:
        if not re.match(FORM, key := environment.get(KEY_VARIABLE, "")):
            expected = "required without tinker.tinker_tenants: a key that begins with tml-, of 20 characters or more; clients give it as "
            raise ConfigError(KEY_VARIABLE, "*" * len(key), expected + "TINKER_API_KEY")
        return {DEFAULT: Tenant(key=key)}
    try:
        found = _TENANTS.validate_python(parse_json(path.read_bytes()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ConfigError("tinker.tinker_tenants", f"{path}: {'.'.join(map(str, first['loc']))}", first["msg"]) from None
    except (OSError, ValueError) as error:
        raise ConfigError("tinker.tinker_tenants", str(path), f"a readable JSON object, name → key and quotas ({error})") from None
    if not found or len({tenant.key for tenant in found.values()}) < len(found):
        raise ConfigError("tinker.tinker_tenants", str(path), "at least one tenant, each with a key of its own")
    return found


def owner(tenants: Mapping[str, Tenant], key: str) -> str | None:
    """Returns the name of the tenant whose key this is; it takes the same time for every wrong one."""
    matches = [name for name, tenant in tenants.items() if hmac.compare_digest(tenant.key.encode(), key.encode(errors="replace"))]
    return matches[0] if matches else None
