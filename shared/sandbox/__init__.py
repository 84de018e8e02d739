"""Runs code that no one trusts: without a network, without files of the host, within limits, and with nothing left over at its end.

Free of other packages, so that services, agents and environments can all use it.
"""
