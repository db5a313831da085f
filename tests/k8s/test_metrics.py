"""Names of metrics in queries, in the router, and in Ray Serve."""

import pytest

from k8s.checks.metrics import _made_in, known_metrics, metrics_of, ray_serve_metrics, router_metrics


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("up", {"up"}),
        ('sum by (pool, code) (rate(a_total{code!="OK", pool=~"$pool"}[5m])) > 0.02', {"a_total"}),
        ("histogram_quantile(0.99, sum by (le) (rate(a_seconds_bucket[$__rate_interval])))", {"a_seconds_bucket"}),
        ("a / ignoring(code) group_left sum without (code) (b) offset 5m", {"a", "b"}),
        ("a{x='b_total'} and on (pool) (c > bool 1e-3) or absent(d) unless e{}", {"a", "c", "d", "e"}),
        ("count by (app) (count_over_time(a_total[30m])) > 2 * max(max_over_time(t[1h])) + 3", {"a_total", "t"}),
        ('a * on (x) group_right (y) b{z=~"q{2}[a]"}', {"a", "b"}),
    ],
)
def test_what_a_query_reads(query, names):
    assert metrics_of(query) == names


def test_what_a_source_makes():
    source = """
c = metrics.Counter("serve_calls", description="x")
d = Counter(name="serve_failures_total")
h = ray.util.metrics.Histogram(
    "serve_latency_ms", boundaries=[1])
g = Gauge("serve_replicas")
other = Deque("serve_other")
computed = Gauge(f"serve_{kind}")
"""
    assert set(_made_in(source)) == {
        "ray_serve_calls_total",
        "ray_serve_failures_total",
        "ray_serve_latency_ms_bucket",
        "ray_serve_latency_ms_sum",
        "ray_serve_latency_ms_count",
        "ray_serve_replicas",
    }


def test_what_the_installed_serve_exports():
    """Names that Ray's own dashboards ask for."""
    assert {
        "ray_serve_deployment_request_counter_total",
        "ray_serve_deployment_processing_latency_ms_bucket",
        "ray_serve_deployment_replica_healthy",
    } <= set(ray_serve_metrics())


def test_what_the_router_exports():
    found = router_metrics()
    assert {
        "vitfleet_router_calls_total",
        "vitfleet_router_call_seconds_bucket",
        "vitfleet_router_pool_healthy",
    } <= found
    assert all(name.startswith("vitfleet_router_") for name in found)
    assert found < known_metrics()
