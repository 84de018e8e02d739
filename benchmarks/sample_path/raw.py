"""The limit: what the same Valkey takes and gives back of the same bytes, with nothing around it."""

import time

import redis

LOT_BYTES = 4 << 20
"""In one pipeline."""


def pace(url: str, blob: bytes, samples_per_blob: float, seconds: float) -> float:
    """Samples per second that are written and read back, each lot of blobs in one pipeline."""
    client = redis.Redis.from_url(url)
    lot = max(1, LOT_BYTES // len(blob))
    blobs, begun = 0, time.monotonic()
    while time.monotonic() - begun < seconds:
        keys = [f"raw:{blobs + number}" for number in range(lot)]
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.set(key, blob)
            pipe.execute()
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.get(key)
            assert all(len(back) == len(blob) for back in pipe.execute())
        client.unlink(*keys)
        blobs += lot
    taken = time.monotonic() - begun
    client.close()
    return blobs * samples_per_blob / taken
