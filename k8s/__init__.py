"""Kubernetes manifests, and their check without a cluster: `python -m k8s.validate`."""
