"""The command line ``myxo``: launches runs on this machine, watches them, audits them and sums them up."""
