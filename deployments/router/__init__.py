"""The router: a thin grpc.aio gateway in front of the pools. It imports neither torch nor ray.

    client → server.py (TLS, tokens) → service.py → forward.py / stream.py / report.py
           → pick.py chooses → attempts.py (and hedge.py) → pools.py → a pool's address

    keeper.py looks after each pool: survey.py asks, probe.py probes, goldens.py and quarantine.py check its vectors;
    roster.py and discovery.py let pools join and leave

Request bytes pass through unparsed but for their options and their number of items (envelope.py).

Many routers side by side need no coordination: clients may reach any of them, and each comes to its decisions alone,
from what the pools themselves say and compute. The quarantine's verdict is a pure function of the pools' golden
vectors and of the settings, so routers with the same settings agree on it, each as soon as it has looked; discovery
orders pools by name for the same reason. What a router counts holds for that process: a token's rate and calls under
way, the retry budget, a stream's items in flight, ejections, measured speeds, remembered poison. N routers therefore
let a token do up to N times its limit, so divide the limits by the number of routers where the total matters; and a
request that kills replicas can cost two replicas at each router. Clients move between routers when their connection
has reached `connection.max_age_s`.
"""
