"""The GPU hashes a bucket's leaves to what the CPU does."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SPECS = [
    ("whole", "bfloat16", (4096, 2560)),
    ("odd", "bfloat16", (5, 3)),
    ("scalar", "float32", ()),
    ("over", "bfloat16", (70_001,)),
    ("bytes", "uint8", (7,)),
    ("exact", "bfloat16", (32_768,)),
]


def test_leaves_equal_those_of_the_cpu():
    from shared.transfer import digest, digest_kernel
    from shared.transfer.bucket_ring import ManifestHasher
    from shared.transfer.manifest import lay_out

    manifest = lay_out(SPECS, 10**9)
    (bucket,) = manifest.buckets
    flat = torch.randint(0, 256, (bucket.nbytes,), dtype=torch.uint8, device="cuda")
    table = digest.leaf_table(bucket)
    found = digest_kernel.leaves(flat, torch.from_numpy(table).cuda()).cpu().numpy().view(np.uint64)
    assert (found == digest.leaves(flat.cpu().numpy(), table)).all()
    here, there = (ManifestHasher(manifest, place.device) for place in (flat.cpu(), flat))
    here.take(0, flat.cpu())
    there.take(0, flat)
    assert there.digests() == here.digests()
