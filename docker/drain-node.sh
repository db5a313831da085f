#!/bin/bash
# drain-node SECONDS: before a pod of Ray's ends, have Serve move its replicas away. Returns when they are gone, or when
# the time is up. Ray's own autoscaler calls `ray drain-node`; it is hidden, so held to the pinned version of Ray.
set -u
seconds=${1:?usage: drain-node SECONDS}
deadline=$((SECONDS + seconds))

raylet=$(pgrep -o -x raylet) || exit 0
node=$(tr '\0' '\n' <"/proc/$raylet/cmdline" | sed -n 's/^--node_id=//p')
address=$(tr '\0' '\n' <"/proc/$raylet/cmdline" | sed -n 's/^--gcs-address=//p')
# With one node there is nowhere to move to, and a head that is gone cannot be asked: the pod ends all the same.
ray drain-node --address "$address" --node-id "$node" --reason DRAIN_NODE_REASON_PREEMPTION \
    --reason-message "the pod ends" --deadline-remaining-seconds "$seconds" || exit 0
while ((SECONDS < deadline)) && pgrep -x raylet >/dev/null && pgrep -f '^ray::ServeReplica' >/dev/null; do
    sleep 1
done
