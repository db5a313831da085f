"""The router: a thin grpc.aio gateway in front of the pools. It imports neither torch nor ray.

    client → server.py → forward.py / stream.py / report.py → pick.py chooses → pools.py → a pool's address

Request bytes pass through unparsed but for their options and their number of items (envelope.py).
"""
