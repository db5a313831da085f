"""vitfleet on Ray Serve: pools of encoder replicas, the local fleet, and the router in front of them.

Importing this package loads neither ray nor torch; the submodules that need them import them.
"""
