"""The run's evaluation sets as slime's functions find them in ``args.eval_datasets``."""

from types import SimpleNamespace
from typing import Any

from shared.config.eval_views import EvalView, eval_views
from shared.config.run_config import RunConfig


class EvalDatasetConfig(SimpleNamespace):
    """One set, under the names of slime's fields, with what it leaves to the run filled in."""

    def inject_metadata(self, metadata: Any) -> dict[str, Any]:
        """Returns a sample's metadata with what the set puts over it."""
        return {**(metadata if isinstance(metadata, dict) else {}), **self.metadata}


def eval_datasets(config: RunConfig) -> list[EvalDatasetConfig]:
    """Returns the sets in the order in which the run names them."""
    return [_dataset(view) for view in eval_views(config)]


def eval_prompt_data(config: RunConfig) -> list[str] | None:
    """Returns ``args.eval_prompt_data``: name, path, name, path …; None where there is no set."""
    return [word for view in eval_views(config) for word in (view.name, str(view.files[0]))] or None


def _dataset(view: EvalView) -> EvalDatasetConfig:
    rollout, data, files = view.config.rollout, view.config.data, [str(file) for file in view.files]
    left = {
        "path": files[0] if len(files) == 1 else files,
        "n_samples_per_eval_prompt": rollout.n_samples_per_prompt,
        "temperature": rollout.rollout_temperature,
        "top_p": rollout.rollout_top_p,
        "top_k": rollout.rollout_top_k,
        "max_response_len": rollout.rollout_max_response_len,
        "stop": rollout.rollout_stop or None,
        "stop_token_ids": rollout.rollout_stop_token_ids or None,
        "min_new_tokens": view.min_new_tokens or None,
        "custom_rm_path": view.config.reward.custom_rm_path,
        "metadata_overrides": view.own.metadata_overrides or {},
        "metadata": view.metadata,
        "multimodal_keys": None,
    }
    keys = ("input_key", "label_key", "tool_key", "metadata_key", "apply_chat_template", "apply_chat_template_kwargs")
    return EvalDatasetConfig(**{**view.own.model_dump(), **{key: getattr(data, key) for key in keys}, **left})
