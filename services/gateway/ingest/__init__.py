"""Finished groups made elsewhere: read, checked, and handed into the run in the place of groups that its replicas would generate."""
