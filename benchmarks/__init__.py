"""What the project measures of itself and of its peers: `make bench`, or one of `python -m benchmarks.NAME`."""
