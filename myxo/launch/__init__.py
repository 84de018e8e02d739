"""Starting a run on this machine and keeping its processes alive."""
