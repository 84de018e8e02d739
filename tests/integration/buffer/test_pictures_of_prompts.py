"""What prompts show, in the store: one copy for each attempt, until that one has ended, whatever dies in between."""

from pathlib import Path

import pytest

from shared.schema.messages import Task
from tests.integration.buffer.conftest import NewRun
from tests.integration.buffer.player import Player
from tests.support.run_config import write_jsonl
from tests.support.tiny_vision import png, write_tiny_vision_model
from tests.support.waiting import until


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_tiny_vision_model(path := tmp_path_factory.mktemp("seeing"), "qwen3_vl")
    return path


async def shown(player: Player, task: Task) -> list[bytes]:
    assert task.pictures is not None
    return await player.store.read(task.pictures)


async def test_a_picture_of_two_groups_is_freed_with_each_and_stored_again_after_a_kill(new_run: NewRun, tmp_path: Path) -> None:
    """The buffer is killed as soon as a picture is stored, whether its task is sent or not: its successor's tasks have the same, once."""
    (tmp_path / "a.png").write_bytes(png(61, 40))
    data = {"label_key": "label", "apply_chat_template": True, "multimodal_keys": {"image": "images"}}
    player = await new_run(data=data, trainer={"trainer_backend": "torch"})
    rows = [{"prompt": f"<image>{number}", "images": ["a.png"], "label": "2"} for number in range(4)]
    write_jsonl(tmp_path / "prompts.jsonl", rows)

    async def pictures() -> list[str]:
        return [key for key in await player.blobs() if ":pictures:" in key]

    with player.launch() as first:
        await player.ready(first)
        await player.live(0)
        stored = await until(pictures, "pictures in the store")
        first.kill()
    with player.launch() as second:
        await player.ready(second)
        one, two = await player.all_tasks(2)
        held = await until(pictures, "the pictures of all tasks")
        assert set(stored) <= set(held) and len({key.rsplit(":", 2)[0] for key in held}) == len(held), "each attempt has one"
        assert await shown(player, one.message) == await shown(player, two.message)
        await player.say(await player.generate(one.message))
        await one.ack()
        prefixes = [player.names.payload_prefix(lease.message.group, lease.message.attempt) for lease in (one, two)]

        async def freed() -> bool:
            return not any(key.startswith(prefixes[0]) for key in await pictures())

        await until(freed, "the first group's picture to be freed")
        assert any(key.startswith(prefixes[1]) for key in await pictures())
        [again] = await shown(player, two.message)
        assert again == png(61, 40) or again.startswith(b"\x89PNG")
        second.kill()  # the second group's samples come while nobody is there
        await player.say(await player.generate(two.message))
        await two.ack()
    with player.launch() as third:
        await player.ready(third)
        await player.work_until(2)

        async def all_freed() -> bool:
            return not any(key.startswith(tuple(prefixes)) for key in await pictures())

        await until(all_freed, "the pictures of ended attempts to be freed")
        assert (await player.batch(0, working=True)).step == 0
        third.kill()
