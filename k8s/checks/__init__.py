"""The checks behind `python -m k8s.validate`, one file each; none needs a cluster."""
